//! The driver's side of a split virtqueue, for tests: it can do everything right and everything
//! wrong.

use vm_memory::{Bytes, GuestAddress};

use super::queue::Layout;
use crate::GuestMemory;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// RAM of `size` bytes from address 0 on.
pub(crate) fn ram(size: usize) -> GuestMemory {
    GuestMemory::from_ranges(&[(GuestAddress(0), size)]).unwrap()
}

/// One queue as a driver has it.
pub(crate) struct DriverQueue {
    pub(crate) mem: GuestMemory,
    pub(crate) layout: Layout,
    pub(crate) avail_idx: u16,
    pub(crate) used_idx: u16,
}

impl DriverQueue {
    /// A queue whose rings begin at `base` (a multiple of 16) and need less than 32 bytes an entry.
    pub(crate) fn new(mem: &GuestMemory, base: u64, size: u16) -> DriverQueue {
        let entries = u64::from(size);
        let avail = base + 16 * entries;
        let used = (avail + 6 + 2 * entries).next_multiple_of(4);
        let layout = Layout {
            size,
            desc: base,
            avail,
            used,
        };
        mem.write_slice(
            &vec![0; (used + 6 + 8 * entries - base) as usize],
            GuestAddress(base),
        )
        .unwrap();
        DriverQueue {
            mem: mem.clone(),
            layout,
            avail_idx: 0,
            used_idx: 0,
        }
    }

    fn get16(&self, addr: u64) -> u16 {
        u16::from_le(
            self.mem
                .load(GuestAddress(addr), std::sync::atomic::Ordering::SeqCst)
                .unwrap(),
        )
    }

    fn set16(&self, addr: u64, value: u16) {
        self.mem
            .store(
                value.to_le(),
                GuestAddress(addr),
                std::sync::atomic::Ordering::SeqCst,
            )
            .unwrap();
    }

    /// Writes a descriptor into the table at guest address `table`.
    pub(crate) fn desc_at(
        &self,
        table: u64,
        index: u16,
        addr: u64,
        len: u32,
        flags: u16,
        next: u16,
    ) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        self.mem
            .write_slice(&bytes, GuestAddress(table + 16 * u64::from(index)))
            .unwrap();
    }

    pub(crate) fn desc(&self, index: u16, addr: u64, len: u32, flags: u16, next: u16) {
        self.desc_at(self.layout.desc, index, addr, len, flags, next);
    }

    /// Writes a chain of buffers (address, length, writable) into consecutive descriptors from
    /// `head` on.
    pub(crate) fn chain(&self, head: u16, buffers: &[(u64, u32, bool)]) {
        self.chain_at(self.layout.desc, head, buffers);
    }

    pub(crate) fn chain_at(&self, table: u64, head: u16, buffers: &[(u64, u32, bool)]) {
        for (i, &(addr, len, writable)) in (0u16..).zip(buffers) {
            let last = usize::from(i) + 1 == buffers.len();
            let flags = if writable { WRITE } else { 0 } | if last { 0 } else { NEXT };
            self.desc_at(table, head + i, addr, len, flags, head + i + 1);
        }
    }

    /// Makes `head` available.
    pub(crate) fn offer(&mut self, head: u16) {
        let slot = u64::from(self.avail_idx % self.layout.size);
        self.set16(self.layout.avail + 4 + 2 * slot, head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
        self.set_avail_idx(self.avail_idx);
    }

    pub(crate) fn set_avail_idx(&self, idx: u16) {
        self.set16(self.layout.avail + 2, idx);
    }

    pub(crate) fn set_avail_flags(&self, flags: u16) {
        self.set16(self.layout.avail, flags);
    }

    pub(crate) fn used_flags(&self) -> u16 {
        self.get16(self.layout.used)
    }

    pub(crate) fn device_used_idx(&self) -> u16 {
        self.get16(self.layout.used + 2)
    }

    pub(crate) fn set_used_event(&self, event: u16) {
        self.set16(
            self.layout.avail + 4 + 2 * u64::from(self.layout.size),
            event,
        );
    }

    pub(crate) fn avail_event(&self) -> u16 {
        self.get16(self.layout.used + 4 + 8 * u64::from(self.layout.size))
    }

    /// The next used element, if there is one.
    pub(crate) fn take_used(&mut self) -> Option<(u32, u32)> {
        if self.device_used_idx() == self.used_idx {
            return None;
        }
        let slot = u64::from(self.used_idx % self.layout.size);
        let entry = GuestAddress(self.layout.used + 4 + 8 * slot);
        let raw: u64 = u64::from_le(self.mem.read_obj(entry).unwrap());
        self.used_idx = self.used_idx.wrapping_add(1);
        Some((raw as u32, (raw >> 32) as u32))
    }
}
