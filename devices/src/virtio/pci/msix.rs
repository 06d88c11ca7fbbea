//! MSI-X: the table of messages, the pending bits, and an irqfd for every vector.
//!
//! Raising an interrupt takes no lock: the device looks at one flag of the vector and writes its
//! irqfd. The guest's writes to the table are rare and serialised by the caller.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_sys_util::eventfd::EventFd;

use super::{MsiMessage, PciHost};

/// Bytes of a table entry: address (8), data (4), vector control (4).
pub(super) const ENTRY_BYTES: u64 = 16;
/// The driver wants no interrupts of this kind (VIRTIO_MSI_NO_VECTOR).
pub(super) const NO_VECTOR: u16 = 0xffff;

/// Message control: MSI-X is on.
const ENABLE: u16 = 1 << 15;
/// Message control: all vectors are masked.
const FUNCTION_MASK: u16 = 1 << 14;

/// One vector as the device's threads see it.
struct Vector {
    irqfd: EventFd,
    masked: AtomicBool,
    pending: AtomicBool,
}

/// The vectors of a function, for raising interrupts.
pub(super) struct Vectors(Vec<Vector>);

impl Vectors {
    /// Raises vector `index`; with [`NO_VECTOR`] nothing happens.
    #[inline]
    pub(super) fn raise(&self, index: u16) {
        let Some(vector) = self.0.get(usize::from(index)) else {
            return;
        };
        if vector.masked.load(Ordering::Acquire) {
            vector.pending.store(true, Ordering::SeqCst);
            // Unmasked in between: the guest's thread may have looked before the bit was there.
            if vector.masked.load(Ordering::SeqCst) || !vector.pending.swap(false, Ordering::SeqCst)
            {
                return;
            }
        }
        if let Err(error) = vector.irqfd.write(1) {
            tracing::warn!(%error, "MSI-X interrupt failed");
        }
    }

    fn is_pending(&self, index: usize) -> bool {
        let vector = self.0.get(index);
        vector.is_some_and(|v| v.pending.load(Ordering::SeqCst))
    }
}

#[derive(Clone, Copy, Default)]
struct Entry {
    message: MsiMessage,
    masked: bool,
    // What the hypervisor was told last.
    routed: Option<MsiMessage>,
}

/// The table, for the guest's accesses.
pub(super) struct Table {
    entries: Vec<Entry>,
    control: u16,
    vectors: Arc<Vectors>,
    host: Arc<dyn PciHost>,
}

impl Table {
    pub(super) fn new(irqfds: Vec<EventFd>, host: Arc<dyn PciHost>) -> Table {
        let entry = Entry {
            masked: true,
            ..Entry::default()
        };
        let entries = vec![entry; irqfds.len()];
        let vectors = irqfds
            .into_iter()
            .map(|irqfd| Vector {
                irqfd,
                masked: AtomicBool::new(true),
                pending: AtomicBool::new(false),
            })
            .collect();
        Table {
            entries,
            control: 0,
            vectors: Arc::new(Vectors(vectors)),
            host,
        }
    }

    pub(super) fn vectors(&self) -> Arc<Vectors> {
        self.vectors.clone()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn is_enabled(&self) -> bool {
        self.control & ENABLE != 0
    }

    /// The guest's new message control.
    pub(super) fn set_control(&mut self, control: u16) {
        self.control = control;
        for index in 0..self.entries.len() {
            self.update(index);
        }
    }

    /// Tells device and hypervisor what has become of a vector.
    fn update(&mut self, index: usize) {
        let on = self.is_enabled() && self.control & FUNCTION_MASK == 0;
        let (Some(entry), Some(vector)) = (self.entries.get_mut(index), self.vectors.0.get(index))
        else {
            return;
        };
        if entry.masked || !on {
            vector.masked.store(true, Ordering::SeqCst);
            return;
        }
        // The route is right before the first interrupt takes it.
        if entry.routed != Some(entry.message) {
            let routed: io::Result<()> = self.host.route(index as u16, entry.message);
            match routed {
                Ok(()) => entry.routed = Some(entry.message),
                Err(error) => tracing::warn!(%error, vector = index, "MSI-X route refused"),
            }
        }
        vector.masked.store(false, Ordering::SeqCst);
        if vector.pending.swap(false, Ordering::SeqCst)
            && let Err(error) = vector.irqfd.write(1)
        {
            tracing::warn!(%error, "MSI-X interrupt failed");
        }
    }

    fn dword(&self, offset: u64) -> u32 {
        let entry = usize::try_from(offset / ENTRY_BYTES)
            .ok()
            .and_then(|index| self.entries.get(index));
        let Some(entry) = entry else { return 0 };
        match offset % ENTRY_BYTES {
            0 => entry.message.address as u32,
            4 => (entry.message.address >> 32) as u32,
            8 => entry.message.data,
            _ => u32::from(entry.masked),
        }
    }

    /// Reads the table; accesses are aligned and 4 or 8 bytes wide, others read zero.
    pub(super) fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if !offset.is_multiple_of(4) {
            return;
        }
        for (at, bytes) in (offset..).step_by(4).zip(data.chunks_mut(4)) {
            let value = self.dword(at).to_le_bytes();
            bytes.copy_from_slice(&value[..bytes.len()]);
        }
    }

    /// Writes the table; accesses are aligned and 4 or 8 bytes wide, others do nothing.
    pub(super) fn write(&mut self, offset: u64, data: &[u8]) {
        if !offset.is_multiple_of(4) || !data.len().is_multiple_of(4) {
            return;
        }
        for (at, bytes) in (offset..).step_by(4).zip(data.chunks_exact(4)) {
            let value = u32::from_le_bytes(std::array::from_fn(|i| bytes[i]));
            let Ok(index) = usize::try_from(at / ENTRY_BYTES) else {
                return;
            };
            let Some(entry) = self.entries.get_mut(index) else {
                return;
            };
            let message = &mut entry.message;
            match at % ENTRY_BYTES {
                0 => message.address = (message.address & !0xffff_ffff) | u64::from(value & !3),
                4 => message.address = (message.address & 0xffff_ffff) | (u64::from(value) << 32),
                8 => message.data = value,
                _ => entry.masked = value & 1 != 0,
            }
            self.update(index);
        }
    }

    /// Reads the pending bits.
    pub(super) fn read_pending(&self, offset: u64, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            let first = usize::try_from(at).unwrap_or(usize::MAX).saturating_mul(8);
            *byte = (0..8).fold(0, |bits, bit| {
                let pending = self.vectors.is_pending(first.saturating_add(bit));
                bits | u8::from(pending) << bit
            });
        }
    }
}
