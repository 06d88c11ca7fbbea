//! What all transports have in common: device status, feature negotiation, queue set-up,
//! activation and reset (VIRTIO 1.2, sections 2.1, 2.2 and 3.1).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_bindings::virtio_config::{
    VIRTIO_CONFIG_S_DRIVER_OK, VIRTIO_CONFIG_S_FEATURES_OK, VIRTIO_CONFIG_S_NEEDS_RESET,
};
use vmm_sys_util::eventfd::EventFd;

use super::device::{Activation, ActiveQueue, Interrupt, VirtioDevice};
use super::features::VERSION_1;
use super::queue::{Layout, Queue};
use crate::GuestMemory;

pub(crate) const FEATURES_OK: u32 = VIRTIO_CONFIG_S_FEATURES_OK;
pub(crate) const DRIVER_OK: u32 = VIRTIO_CONFIG_S_DRIVER_OK;
pub(crate) const NEEDS_RESET: u32 = VIRTIO_CONFIG_S_NEEDS_RESET;
/// The status field is one byte wide.
const STATUS_MASK: u32 = 0xff;

/// The DEVICE_NEEDS_RESET bit: set by the device in its own thread, read by the driver.
#[derive(Clone, Default)]
pub(crate) struct NeedsReset(Arc<AtomicBool>);

impl NeedsReset {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Release);
    }
    fn clear(&self) {
        self.0.store(false, Ordering::Release);
    }
    fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// One queue's registers.
pub(crate) struct QueueRegisters {
    pub(crate) max_size: u16,
    pub(crate) layout: Layout,
    pub(crate) ready: bool,
    pub(crate) notify: Arc<EventFd>,
}

impl QueueRegisters {
    /// The driver's registers may be written only until it says that the queue is ready.
    pub(crate) fn layout_mut(&mut self) -> Option<&mut Layout> {
        (!self.ready).then_some(&mut self.layout)
    }
}

/// The registers of a device, whatever the transport's names for them are.
pub(crate) struct Transport {
    pub(crate) device: Box<dyn VirtioDevice>,
    pub(crate) queues: Vec<QueueRegisters>,
    pub(crate) queue_select: u16,
    pub(crate) device_features_select: u32,
    pub(crate) driver_features_select: u32,
    driver_features: u64,
    status: u32,
    needs_reset: NeedsReset,
    interrupt: Arc<dyn Interrupt>,
    mem: GuestMemory,
}

/// Replaces the low or the high half of an address.
pub(crate) fn set_half(address: &mut u64, high: bool, value: u32) {
    let value = u64::from(value);
    *address = if high {
        (*address & 0xffff_ffff) | (value << 32)
    } else {
        (*address & !0xffff_ffff) | value
    };
}

/// Half `select` of a feature set; the halves beyond the second are empty.
fn feature_half(features: u64, select: u32) -> u32 {
    match select {
        0 => features as u32,
        1 => (features >> 32) as u32,
        _ => 0,
    }
}

impl Transport {
    pub(crate) fn new(
        device: Box<dyn VirtioDevice>,
        mem: GuestMemory,
        interrupt: Arc<dyn Interrupt>,
        needs_reset: NeedsReset,
    ) -> io::Result<Transport> {
        let queues = device
            .queue_max_sizes()
            .into_iter()
            .map(|max_size| {
                Ok(QueueRegisters {
                    max_size,
                    layout: Layout::default(),
                    ready: false,
                    // Blocking: the iothread's ring waits by a read that consumes.
                    notify: Arc::new(EventFd::new(libc::EFD_CLOEXEC)?),
                })
            })
            .collect::<io::Result<_>>()?;
        let mut transport = Transport {
            device,
            queues,
            queue_select: 0,
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: 0,
            status: 0,
            needs_reset,
            interrupt,
            mem,
        };
        transport.clear_registers();
        Ok(transport)
    }

    pub(crate) fn selected(&self) -> Option<&QueueRegisters> {
        self.queues.get(usize::from(self.queue_select))
    }

    /// The selected queue, as long as the driver may still set it up.
    pub(crate) fn selected_mut(&mut self) -> Option<&mut QueueRegisters> {
        if self.is_active() {
            return None;
        }
        self.queues.get_mut(usize::from(self.queue_select))
    }

    pub(crate) fn is_active(&self) -> bool {
        self.status & DRIVER_OK != 0
    }

    pub(crate) fn device_features(&self) -> u32 {
        feature_half(self.device.features(), self.device_features_select)
    }

    pub(crate) fn driver_features(&self) -> u32 {
        feature_half(self.driver_features, self.driver_features_select)
    }

    pub(crate) fn set_driver_features(&mut self, value: u32) {
        // Negotiation ends with FEATURES_OK (section 3.1.1, step 5).
        if self.status & FEATURES_OK != 0 {
            return;
        }
        match self.driver_features_select {
            0 => set_half(&mut self.driver_features, false, value),
            1 => set_half(&mut self.driver_features, true, value),
            // A half that we offer nothing of: any bit in it makes the negotiation fail, as would
            // one of ours that was not offered. The device's reserved top bit stands for it.
            _ if value != 0 => self.driver_features |= 1 << 63,
            _ => {}
        }
    }

    pub(crate) fn status(&self) -> u32 {
        if self.needs_reset.get() {
            self.status | NEEDS_RESET
        } else {
            self.status
        }
    }

    /// The driver writes its status. True if that was a reset.
    pub(crate) fn set_status(&mut self, value: u32) -> bool {
        let value = value & STATUS_MASK;
        if value == 0 {
            self.reset();
            return true;
        }
        // The driver only ever adds bits; NEEDS_RESET is not its to write.
        let mut added = value & !self.status & !NEEDS_RESET;
        if added & FEATURES_OK != 0 {
            let offered = self.device.features();
            if self.driver_features & !offered == 0 && self.driver_features & VERSION_1 != 0 {
                self.device.features_accepted(self.driver_features);
            } else {
                tracing::debug!(
                    device = self.device.name(),
                    accepted = self.driver_features,
                    offered,
                    "driver's features refused"
                );
                added &= !FEATURES_OK;
            }
        }
        self.status |= added;
        if added & DRIVER_OK != 0 {
            self.activate();
        }
        false
    }

    fn activate(&mut self) {
        if let Err(reason) = self.try_activate() {
            tracing::warn!(
                device = self.device.name(),
                reason,
                "virtio device cannot start and waits for a reset by its driver"
            );
            self.interrupt.needs_reset();
        }
    }

    fn try_activate(&mut self) -> Result<(), String> {
        if self.status & FEATURES_OK == 0 {
            return Err("DRIVER_OK without FEATURES_OK".into());
        }
        let features = self.driver_features;
        let mut queues = Vec::new();
        for (index, registers) in (0..).zip(&self.queues) {
            if !registers.ready {
                continue;
            }
            let queue = Queue::new(&self.mem, registers.layout, registers.max_size, features, 0)
                .map_err(|error| format!("queue {index}: {error}"))?;
            queues.push(ActiveQueue {
                index,
                queue,
                notify: registers.notify.clone(),
            });
        }
        self.device
            .activate(Activation {
                features,
                mem: self.mem.clone(),
                queues,
                interrupt: self.interrupt.clone(),
            })
            .map_err(|error| error.to_string())
    }

    fn reset(&mut self) {
        self.device.reset();
        self.clear_registers();
        // After the device stopped: it cannot set the bit any more.
        self.needs_reset.clear();
    }

    fn clear_registers(&mut self) {
        self.status = 0;
        self.driver_features = 0;
        self.queue_select = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        for queue in &mut self.queues {
            queue.ready = false;
            queue.layout = Layout {
                size: queue.max_size,
                ..Layout::default()
            };
            // A kick left over from the last driver makes the next one's queue be looked at once.
        }
    }

    /// A kick that did not come by ioeventfd.
    pub(crate) fn notify(&self, index: u32) {
        let queue = usize::try_from(index).ok().and_then(|i| self.queues.get(i));
        if let Some(Err(error)) = queue.map(|q| q.notify.write(1)) {
            tracing::warn!(device = self.device.name(), %error, "queue notification failed");
        }
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        // The device may be in use by an iothread; guest memory goes away after this.
        self.device.reset();
    }
}
