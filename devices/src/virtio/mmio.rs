//! virtio over MMIO, version 2 (VIRTIO 1.2, section 4.2).
//!
//! One range of [`MmioTransport::LEN`] bytes and one interrupt a device. The interrupt is
//! edge-triggered: an irqfd written for every event, whether or not the status register still shows
//! an earlier one, so that no completion between the driver's read and its acknowledgement is lost.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard, PoisonError};

use virtio_bindings::virtio_mmio as reg;
use vmm_sys_util::eventfd::EventFd;

use super::device::{Interrupt, VirtioDevice};
use super::transport::{NeedsReset, Transport, set_half};
use crate::GuestMemory;
use crate::bus::BusDevice;
use crate::sync::Mutex;

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// "PLUX": no registry gives vendor IDs to MMIO devices.
const VENDOR: u32 = 0x5855_4c50;
/// Length of a shared memory region that is not there (section 4.2.2).
const NO_SHM: u32 = u32::MAX;

/// The interrupt status register and the irqfd behind it.
struct MmioInterrupt {
    status: AtomicU32,
    irqfd: EventFd,
    needs_reset: NeedsReset,
}

impl MmioInterrupt {
    fn raise(&self, bit: u32) {
        // Release: what the bit tells of is visible to the vCPU that reads it.
        self.status.fetch_or(bit, Ordering::AcqRel);
        if let Err(error) = self.irqfd.write(1) {
            tracing::warn!(%error, "virtio-mmio interrupt failed");
        }
    }
}

impl Interrupt for MmioInterrupt {
    fn queue(&self, _index: u16) {
        self.raise(reg::VIRTIO_MMIO_INT_VRING);
    }
    fn config(&self) {
        self.raise(reg::VIRTIO_MMIO_INT_CONFIG);
    }
    fn needs_reset(&self) {
        self.needs_reset.set();
        self.raise(reg::VIRTIO_MMIO_INT_CONFIG);
    }
}

/// A queue's kick, to be registered as a KVM ioeventfd.
pub struct QueueEventFd {
    /// Address to match, relative to the device's range: QueueNotify.
    pub offset: u64,
    /// The value to match, 32 bits wide: the queue's index.
    pub datamatch: u32,
    /// What to write to.
    pub eventfd: Arc<EventFd>,
}

/// A device behind virtio-mmio registers.
pub struct MmioTransport {
    transport: Mutex<Transport>,
    interrupt: Arc<MmioInterrupt>,
}

impl MmioTransport {
    /// Length of the register range in bytes.
    pub const LEN: u64 = 0x1000;

    /// Puts `device` behind registers; `irqfd` is what raises its (edge-triggered) interrupt.
    ///
    /// # Errors
    /// No eventfd could be made.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        mem: GuestMemory,
        irqfd: EventFd,
    ) -> io::Result<MmioTransport> {
        let needs_reset = NeedsReset::default();
        let interrupt = Arc::new(MmioInterrupt {
            status: AtomicU32::new(0),
            irqfd,
            needs_reset: needs_reset.clone(),
        });
        let transport = Transport::new(device, mem, interrupt.clone(), needs_reset)?;
        Ok(MmioTransport {
            transport: Mutex::new(transport),
            interrupt,
        })
    }

    /// The queues' kicks. Without an ioeventfd they arrive by [`BusDevice::write`] and work too.
    pub fn queue_eventfds(&self) -> Vec<QueueEventFd> {
        (0..)
            .zip(&self.lock().queues)
            .map(|(datamatch, queue)| QueueEventFd {
                offset: u64::from(reg::VIRTIO_MMIO_QUEUE_NOTIFY),
                datamatch,
                eventfd: queue.notify.clone(),
            })
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Transport> {
        self.transport
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn read_register(&self, offset: u32) -> u32 {
        let transport = self.lock();
        match offset {
            reg::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            reg::VIRTIO_MMIO_VERSION => VERSION,
            reg::VIRTIO_MMIO_DEVICE_ID => transport.device.device_type(),
            reg::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            reg::VIRTIO_MMIO_DEVICE_FEATURES => transport.device_features(),
            reg::VIRTIO_MMIO_QUEUE_NUM_MAX => {
                transport.selected().map_or(0, |q| u32::from(q.max_size))
            }
            reg::VIRTIO_MMIO_QUEUE_READY => transport.selected().map_or(0, |q| u32::from(q.ready)),
            reg::VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt.status.load(Ordering::Acquire),
            reg::VIRTIO_MMIO_STATUS => transport.status(),
            reg::VIRTIO_MMIO_SHM_LEN_LOW
            | reg::VIRTIO_MMIO_SHM_LEN_HIGH
            | reg::VIRTIO_MMIO_SHM_BASE_LOW
            | reg::VIRTIO_MMIO_SHM_BASE_HIGH => NO_SHM,
            reg::VIRTIO_MMIO_CONFIG_GENERATION => transport.device.config_generation(),
            // Write-only registers, and those that are not there.
            _ => 0,
        }
    }

    fn write_register(&self, offset: u32, value: u32) {
        let mut transport = self.lock();
        match offset {
            reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL => transport.device_features_select = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL => transport.driver_features_select = value,
            reg::VIRTIO_MMIO_DRIVER_FEATURES => transport.set_driver_features(value),
            // An index past 16 bits selects no queue.
            reg::VIRTIO_MMIO_QUEUE_SEL => {
                transport.queue_select = u16::try_from(value).unwrap_or(u16::MAX);
            }
            reg::VIRTIO_MMIO_QUEUE_NOTIFY => transport.notify(value),
            reg::VIRTIO_MMIO_INTERRUPT_ACK => {
                self.interrupt.status.fetch_and(!value, Ordering::AcqRel);
            }
            reg::VIRTIO_MMIO_STATUS => {
                if transport.set_status(value) {
                    self.interrupt.status.store(0, Ordering::Release);
                }
            }
            _ => write_queue_register(&mut transport, offset, value),
        }
    }
}

fn write_queue_register(transport: &mut Transport, offset: u32, value: u32) {
    let Some(queue) = transport.selected_mut() else {
        return;
    };
    if offset == reg::VIRTIO_MMIO_QUEUE_READY {
        queue.ready = value & 1 != 0;
        return;
    }
    let Some(layout) = queue.layout_mut() else {
        return;
    };
    match offset {
        // A size that does not fit is kept as one that cannot be right, to be refused later.
        reg::VIRTIO_MMIO_QUEUE_NUM => layout.size = u16::try_from(value).unwrap_or(u16::MAX),
        reg::VIRTIO_MMIO_QUEUE_DESC_LOW => set_half(&mut layout.desc, false, value),
        reg::VIRTIO_MMIO_QUEUE_DESC_HIGH => set_half(&mut layout.desc, true, value),
        reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_half(&mut layout.avail, false, value),
        reg::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_half(&mut layout.avail, true, value),
        reg::VIRTIO_MMIO_QUEUE_USED_LOW => set_half(&mut layout.used, false, value),
        reg::VIRTIO_MMIO_QUEUE_USED_HIGH => set_half(&mut layout.used, true, value),
        _ => {}
    }
}

impl BusDevice for MmioTransport {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let config = u64::from(reg::VIRTIO_MMIO_CONFIG);
        if let Some(offset) = offset.checked_sub(config) {
            self.lock().device.read_config(offset, data);
            return;
        }
        // Registers are 32 bits wide and take no other access (section 4.2.2.2).
        let value = match (u32::try_from(offset), data.len()) {
            (Ok(offset), 4) if offset % 4 == 0 => self.read_register(offset).to_le_bytes(),
            _ => [0; 4],
        };
        for (byte, value) in data
            .iter_mut()
            .zip(value.iter().chain(std::iter::repeat(&0)))
        {
            *byte = *value;
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let config = u64::from(reg::VIRTIO_MMIO_CONFIG);
        if let Some(offset) = offset.checked_sub(config) {
            self.lock().device.write_config(offset, data);
            return;
        }
        if let (Ok(offset), Ok(bytes)) = (u32::try_from(offset), <[u8; 4]>::try_from(data))
            && offset % 4 == 0
        {
            self.write_register(offset, u32::from_le_bytes(bytes));
        }
    }
}

#[cfg(test)]
mod tests;
