//! A virtio device as a PCI function.

use std::io;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};

use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vmm_sys_util::eventfd::EventFd;

use super::PciHost;
use super::bus::PciFunction;
use super::config::{ConfigSpace, Identity};
use super::msix::{ENTRY_BYTES, NO_VECTOR, Table, Vectors};
use crate::GuestMemory;
use crate::sync::Mutex;
use crate::virtio::device::{Interrupt, VirtioDevice};
use crate::virtio::transport::{NeedsReset, Transport, set_half};

// The BAR: everything in one.
const COMMON: u64 = 0x0000;
const COMMON_LEN: u64 = 0x38;
const ISR: u64 = 0x1000;
const DEVICE: u64 = 0x2000;
const DEVICE_LEN: u64 = 0x1000;
const MSIX_TABLE: u64 = 0x4000;
const MSIX_TABLE_LEN: u64 = 0x2000;
const MSIX_PENDING: u64 = 0x6000;
const MSIX_PENDING_LEN: u64 = 0x1000;
const NOTIFY: u64 = 0x8000;
const NOTIFY_LEN: u64 = 0x1000;
const BAR_LEN: u64 = 0x1_0000;
/// Bytes from one queue's notification address to the next: one address a queue.
const NOTIFY_STRIDE: u32 = 4;

const CAPABILITY_VENDOR: u8 = 0x09;
const CAPABILITY_MSIX: u8 = 0x11;
/// `cfg_type` of the capabilities (section 4.1.4).
const TYPE_COMMON: u8 = 1;
const TYPE_NOTIFY: u8 = 2;
const TYPE_ISR: u8 = 3;
const TYPE_DEVICE: u8 = 4;
const TYPE_PCI: u8 = 5;

/// Red Hat: the vendor of virtio devices.
const VENDOR: u16 = 0x1af4;
/// A modern device's id is its virtio id plus this.
const MODERN: u16 = 0x1040;

const ISR_QUEUE: u8 = 1;
const ISR_CONFIG: u8 = 2;

/// Raises interrupts; no lock.
struct PciInterrupt {
    vectors: Arc<Vectors>,
    config_vector: AtomicU16,
    queue_vectors: Vec<AtomicU16>,
    // Seen by drivers that poll it; with MSI-X nobody does.
    isr: AtomicU8,
    needs_reset: NeedsReset,
}

impl Interrupt for PciInterrupt {
    #[inline]
    fn queue(&self, index: u16) {
        if let Some(vector) = self.queue_vectors.get(usize::from(index)) {
            let vector = vector.load(Ordering::Relaxed);
            if vector == NO_VECTOR {
                self.isr.fetch_or(ISR_QUEUE, Ordering::AcqRel);
            }
            self.vectors.raise(vector);
        }
    }

    fn config(&self) {
        let vector = self.config_vector.load(Ordering::Relaxed);
        if vector == NO_VECTOR {
            self.isr.fetch_or(ISR_CONFIG, Ordering::AcqRel);
        }
        self.vectors.raise(vector);
    }

    fn needs_reset(&self) {
        self.needs_reset.set();
        self.config();
    }
}

impl PciInterrupt {
    fn clear_vectors(&self) {
        self.config_vector.store(NO_VECTOR, Ordering::Relaxed);
        for vector in &self.queue_vectors {
            vector.store(NO_VECTOR, Ordering::Relaxed);
        }
        self.isr.store(0, Ordering::Release);
    }
}

struct State {
    config: ConfigSpace,
    table: Table,
    transport: Transport,
    // Where the kicks are registered.
    kicks_at: Option<u64>,
}

/// Offsets in configuration space of what the guest writes there.
struct Offsets {
    msix: usize,
    pci: usize,
}

/// See the module.
pub struct VirtioPci {
    state: Mutex<State>,
    interrupt: Arc<PciInterrupt>,
    host: Arc<dyn PciHost>,
    offsets: Offsets,
    // The BAR's address plus one while it is on, for lookups without the lock.
    bar: AtomicU64,
}

fn capability(kind: u8, offset: u64, len: u64, extra: &[u8]) -> Vec<u8> {
    let total = 16 + extra.len();
    let mut body = vec![total as u8, kind, 0, 0, 0, 0];
    body.extend((offset as u32).to_le_bytes());
    body.extend((len as u32).to_le_bytes());
    body.extend(extra);
    body
}

impl VirtioPci {
    /// Vectors that a device needs: one a queue and one for its configuration.
    pub fn vectors_of(device: &dyn VirtioDevice) -> usize {
        device.queue_max_sizes().len() + 1
    }

    /// Puts `device` behind PCI registers. `irqfds` are its MSI-X vectors, which `host` routes.
    ///
    /// # Errors
    /// No eventfd could be made, or there are more vectors or queues than the BAR has room for.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        mem: GuestMemory,
        irqfds: Vec<EventFd>,
        host: Arc<dyn PciHost>,
    ) -> io::Result<VirtioPci> {
        let queues = device.queue_max_sizes().len() as u64;
        let vectors = irqfds.len() as u64;
        if vectors == 0
            || vectors > MSIX_TABLE_LEN / ENTRY_BYTES
            || queues > NOTIFY_LEN / u64::from(NOTIFY_STRIDE)
        {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("a PCI function cannot have {queues} queues and {vectors} vectors"),
            ));
        }
        let identity = Identity {
            vendor: VENDOR,
            device: MODERN + device.device_type() as u16,
            revision: 1,
            class: if device.device_type() == VIRTIO_ID_BLOCK {
                // Mass storage, other.
                [0x01, 0x80, 0x00]
            } else {
                [0xff, 0x00, 0x00]
            },
            subsystem_vendor: VENDOR,
            subsystem: MODERN + device.device_type() as u16,
        };
        let mut config = ConfigSpace::new(identity);
        config.add_bar(BAR_LEN);
        let mut msix = ((vectors - 1) as u16).to_le_bytes().to_vec();
        msix.extend((MSIX_TABLE as u32).to_le_bytes());
        msix.extend((MSIX_PENDING as u32).to_le_bytes());
        let msix = config.add_capability(CAPABILITY_MSIX, &msix);
        // Enable and function mask.
        config.allow(msix + 3, &[0xc0]);
        let mut vendor = |kind, offset, len, extra: &[u8]| {
            config.add_capability(CAPABILITY_VENDOR, &capability(kind, offset, len, extra))
        };
        vendor(TYPE_COMMON, COMMON, COMMON_LEN, &[]);
        vendor(TYPE_ISR, ISR, 1, &[]);
        vendor(TYPE_DEVICE, DEVICE, DEVICE_LEN, &[]);
        let multiplier = NOTIFY_STRIDE.to_le_bytes();
        let notify_len = queues * u64::from(NOTIFY_STRIDE);
        vendor(TYPE_NOTIFY, NOTIFY, notify_len, &multiplier);
        let pci = vendor(TYPE_PCI, 0, 0, &[0; 4]);
        // BAR, offset, length and data.
        config.allow(pci + 4, &[0xff]);
        config.allow(pci + 8, &[0xff; 12]);

        let table = Table::new(irqfds, host.clone());
        let needs_reset = NeedsReset::default();
        let interrupt = Arc::new(PciInterrupt {
            vectors: table.vectors(),
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            isr: AtomicU8::new(0),
            needs_reset: needs_reset.clone(),
        });
        let transport = Transport::new(device, mem, interrupt.clone(), needs_reset)?;
        Ok(VirtioPci {
            state: Mutex::new(State {
                config,
                table,
                transport,
                kicks_at: None,
            }),
            interrupt,
            host,
            offsets: Offsets { msix, pci },
            bar: AtomicU64::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The BAR may have moved, or been switched on or off: the kicks follow.
    fn follow_bar(&self, state: &mut State) {
        let bar = state.config.bar();
        self.bar
            .store(bar.map_or(0, |base| base + 1), Ordering::Release);
        if bar == state.kicks_at {
            return;
        }
        let each = |base: u64, f: &dyn Fn(u64, &EventFd) -> io::Result<()>| {
            for (index, queue) in (0u64..).zip(&state.transport.queues) {
                let address = base + NOTIFY + index * u64::from(NOTIFY_STRIDE);
                if let Err(error) = f(address, &queue.notify) {
                    tracing::warn!(%error, "PCI queue notification address {address:#x} failed");
                }
            }
        };
        if let Some(old) = state.kicks_at {
            each(old, &|address, fd| self.host.remove_kick(address, fd));
        }
        if let Some(new) = bar {
            each(new, &|address, fd| self.host.add_kick(address, fd));
        }
        state.kicks_at = bar;
    }

    /// The window into the BAR that configuration space has (section 4.1.4.9).
    fn window(&self, state: &State) -> Option<(u64, usize)> {
        let at = self.offsets.pci;
        let offset = u64::from(state.config.get_u32(at + 8));
        let len = state.config.get_u32(at + 12);
        let valid = matches!(len, 1 | 2 | 4)
            && state.config.get(at + 4) == 0
            && offset.is_multiple_of(u64::from(len))
            && offset + u64::from(len) <= BAR_LEN;
        valid.then_some((offset, len as usize))
    }

    fn window_data(&self) -> usize {
        self.offsets.pci + 16
    }

    fn read_state(&self, state: &mut State, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match offset {
            COMMON..ISR => self.read_common(&mut state.transport, offset, data),
            ISR => data[0] = self.interrupt.isr.swap(0, Ordering::AcqRel),
            DEVICE..MSIX_TABLE => state.transport.device.read_config(offset - DEVICE, data),
            MSIX_TABLE..MSIX_PENDING => state.table.read(offset - MSIX_TABLE, data),
            MSIX_PENDING..NOTIFY if offset - MSIX_PENDING < MSIX_PENDING_LEN => {
                state.table.read_pending(offset - MSIX_PENDING, data);
            }
            _ => {}
        }
    }

    fn write_state(&self, state: &mut State, offset: u64, data: &[u8]) {
        match offset {
            COMMON..ISR => self.write_common(state, offset, data),
            DEVICE..MSIX_TABLE => state.transport.device.write_config(offset - DEVICE, data),
            MSIX_TABLE..MSIX_PENDING => state.table.write(offset - MSIX_TABLE, data),
            NOTIFY.. => {
                let index = (offset - NOTIFY) / u64::from(NOTIFY_STRIDE);
                state
                    .transport
                    .notify(u32::try_from(index).unwrap_or(u32::MAX));
            }
            _ => {}
        }
    }

    fn queue_vector(&self, transport: &Transport) -> Option<&AtomicU16> {
        self.interrupt
            .queue_vectors
            .get(usize::from(transport.queue_select))
    }

    /// `struct virtio_pci_common_cfg` (section 4.1.4.3). Fields are read whole, 64-bit ones also
    /// by halves.
    fn read_common(&self, t: &mut Transport, offset: u64, data: &mut [u8]) {
        let layout = t.selected().map(|q| q.layout).unwrap_or_default();
        let vector =
            |v: Option<&AtomicU16>| u64::from(v.map_or(NO_VECTOR, |v| v.load(Ordering::Relaxed)));
        let value: u64 = match offset {
            0x00 => t.device_features_select.into(),
            0x04 => t.device_features().into(),
            0x08 => t.driver_features_select.into(),
            0x0c => t.driver_features().into(),
            0x10 => vector(Some(&self.interrupt.config_vector)),
            0x12 => t.queues.len() as u64,
            0x14 => t.status().into(),
            0x15 => (t.device.config_generation() & 0xff).into(),
            0x16 => t.queue_select.into(),
            // An absent queue has size 0.
            0x18 => layout.size.into(),
            0x1a => vector(self.queue_vector(t)),
            0x1c => t.selected().is_some_and(|q| q.ready).into(),
            0x1e => t.queue_select.into(),
            0x20 => layout.desc,
            0x24 => layout.desc >> 32,
            0x28 => layout.avail,
            0x2c => layout.avail >> 32,
            0x30 => layout.used,
            0x34 => layout.used >> 32,
            _ => 0,
        };
        for (byte, value) in data.iter_mut().zip(value.to_le_bytes()) {
            *byte = value;
        }
    }

    fn write_common(&self, state: &mut State, offset: u64, data: &[u8]) {
        let mut bytes = [0; 8];
        let width = data.len().min(8);
        bytes[..width].copy_from_slice(&data[..width]);
        let wide = u64::from_le_bytes(bytes);
        let (value, half) = (wide as u32, wide as u16);
        let vectors = state.table.len();
        // What names no vector of ours reads back as none.
        let vector = if usize::from(half) < vectors {
            half
        } else {
            NO_VECTOR
        };
        let t = &mut state.transport;
        match offset {
            0x00 => t.device_features_select = value,
            0x08 => t.driver_features_select = value,
            0x0c => t.set_driver_features(value),
            0x10 => self
                .interrupt
                .config_vector
                .store(vector, Ordering::Relaxed),
            0x14 => {
                if t.set_status(value & 0xff) {
                    self.interrupt.clear_vectors();
                }
            }
            0x16 => t.queue_select = half,
            0x1a => {
                if let Some(slot) = self.queue_vector(t) {
                    slot.store(vector, Ordering::Relaxed);
                }
            }
            0x1c => {
                if let Some(queue) = t.selected_mut() {
                    // A driver only ever enables (section 4.1.4.3.2).
                    queue.ready |= half == 1;
                }
            }
            _ => {
                let layout = t.selected_mut().and_then(|q| q.layout_mut());
                let Some(layout) = layout else { return };
                let address = match offset {
                    0x18 => return layout.size = half,
                    0x20 | 0x24 => &mut layout.desc,
                    0x28 | 0x2c => &mut layout.avail,
                    0x30 | 0x34 => &mut layout.used,
                    _ => return,
                };
                if width == 8 {
                    *address = wide;
                } else {
                    set_half(address, offset & 4 != 0, value);
                }
            }
        }
    }
}

impl PciFunction for VirtioPci {
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let mut state = self.lock();
        if offset == self.window_data()
            && let Some((at, len)) = self.window(&state)
        {
            data.fill(0);
            let len = len.min(data.len());
            self.read_state(&mut state, at, &mut data[..len]);
            return;
        }
        state.config.read(offset, data);
    }

    fn write_config(&self, offset: usize, data: &[u8]) {
        let mut state = self.lock();
        if offset == self.window_data()
            && let Some((at, len)) = self.window(&state)
        {
            let len = len.min(data.len());
            self.write_state(&mut state, at, &data[..len]);
            return;
        }
        state.config.write(offset, data);
        let control = self.offsets.msix + 2;
        if offset < control + 2 && offset + data.len() > control {
            let control = state.config.get_u16(control);
            state.table.set_control(control);
        }
        self.follow_bar(&mut state);
    }

    fn bar_len(&self) -> u64 {
        BAR_LEN
    }

    fn set_bar(&self, base: u64) {
        let mut state = self.lock();
        state.config.set_bar(base);
        self.follow_bar(&mut state);
    }

    fn bar(&self) -> Option<u64> {
        self.bar.load(Ordering::Acquire).checked_sub(1)
    }

    fn read_bar(&self, offset: u64, data: &mut [u8]) {
        if !data.is_empty() {
            self.read_state(&mut self.lock(), offset, data);
        }
    }

    fn write_bar(&self, offset: u64, data: &[u8]) {
        self.write_state(&mut self.lock(), offset, data);
    }

    fn set_multifunction(&self) {
        self.lock().config.set_multifunction();
    }
}

impl Drop for VirtioPci {
    fn drop(&mut self) {
        let mut state = self.lock();
        // As if the guest had switched the BAR off.
        state.config.write(0x04, &[0]);
        self.follow_bar(&mut state);
    }
}

#[cfg(test)]
mod tests;
