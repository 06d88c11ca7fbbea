//! Descriptors: how a request is laid out in memory.

use crate::phys::{self, Addr};

use super::{Op, SECTOR_BYTES, Unit};

/// Descriptor flags.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// A status that no device writes.
pub const NO_STATUS: u8 = 0xff;

pub const HEADER_BYTES: u32 = 16;
pub const ID_BYTES: u32 = 20;
const RANGE_BYTES: u32 = 16;

impl Unit {
    /// Requests without data to move: their header has sector 0, their payload the range.
    pub(super) fn fill_other(&mut self, index: usize, op: Op, sector: u64) {
        let unmap = self.unmap && op == Op::WriteZeroes;
        let sectors = self.block_sectors as u32;
        let slot = self.slot(index);
        phys::write64(slot.header + 8, 0);
        if matches!(op, Op::Discard | Op::WriteZeroes) {
            phys::write64(slot.data, sector);
            phys::write32(slot.data + 8, sectors);
            phys::write32(slot.data + 12, u32::from(unmap));
        }
    }

    /// Writes a slot's descriptors for requests of kind `op`.
    pub(super) fn build(&mut self, index: usize, op: Op) {
        let (data_bytes, device_writes) = match op {
            Op::Read => (self.block_bytes, true),
            Op::Write => (self.block_bytes, false),
            Op::Flush => (0, false),
            Op::GetId => (ID_BYTES, true),
            Op::Discard | Op::WriteZeroes => (RANGE_BYTES, false),
        };
        // Pieces of the request in order: address, length, whether the device writes it.
        let mut pieces = [(0u64, 0u32, false); MAX_PIECES];
        let mut count = 0;
        let mut push = |piece| {
            pieces[count] = piece;
            count += 1;
        };
        let odd = self.odd;
        let segments = self.segments.min(data_bytes as usize).min(MAX_PIECES - 4);
        let mut cuts = self.next_random();
        let slot = self.slot(index);
        slot.op = op;
        slot.written = 1 + if device_writes { data_bytes } else { 0 };
        if odd {
            push((slot.header, 7, false));
            push((slot.header + 7, HEADER_BYTES - 7, false));
        } else {
            push((slot.header, HEADER_BYTES, false));
        }
        let mut at = 0;
        for segment in 0..segments {
            let left = (segments - segment) as u32;
            let even = (data_bytes - at) / left;
            let len = if left == 1 {
                data_bytes - at
            } else if odd {
                // Anywhere, if each later segment gets a byte.
                cuts = cuts
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                (1 + (cuts >> 33) as u32 % (2 * even).max(1)).min(data_bytes - at - (left - 1))
            } else {
                (even & !(SECTOR_BYTES as u32 - 1)).max(1)
            };
            push((slot.data + u64::from(at), len, device_writes));
            at += len;
        }
        slot.status = slot.header + u64::from(HEADER_BYTES);
        if odd && device_writes && data_bytes > 0 {
            // The status is the last byte of the last data segment.
            slot.status = slot.data + u64::from(data_bytes);
            pieces[count - 1].1 += 1;
        } else {
            push((slot.status, 1, true));
        }
        phys::write8(slot.status, NO_STATUS);
        phys::write32(slot.header, op as u32);
        phys::write32(slot.header + 4, 0);
        let (table, head) = (slot.table, slot.head);
        let first = if self.indirect { 0 } else { head };
        for (i, &(addr, len, writes)) in pieces[..count].iter().enumerate() {
            let next = if i + 1 < count { NEXT } else { 0 };
            let flags = next | if writes { WRITE } else { 0 };
            let number = first + i as u16;
            write_descriptor(table, number, addr, len, flags, number + 1);
        }
        if self.indirect {
            write_descriptor(self.desc, head, table, 16 * count as u32, INDIRECT, 0);
        }
    }
}

/// Most pieces that a request is cut into.
const MAX_PIECES: usize = 260;

/// Writes descriptor `number` of a table.
pub fn write_descriptor(table: Addr, number: u16, addr: Addr, len: u32, flags: u16, next: u16) {
    let at = table + 16 * u64::from(number);
    phys::write64(at, addr);
    phys::write32(at + 8, len);
    phys::write16(at + 12, flags);
    phys::write16(at + 14, next);
}
