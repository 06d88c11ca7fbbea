//! What a virtio device is to its transport, and a transport to its device.
//!
//! A device knows queues, kicks and an [`Interrupt`]; whether these come over MMIO, PCI or channel
//! I/O it cannot tell. A transport knows registers and the device status; what the queues carry it
//! cannot tell.

use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::GuestMemory;
use crate::virtio::queue::Queue;

/// How a device reaches its driver. Called by any thread.
pub trait Interrupt: Send + Sync {
    /// Used elements of queue `index` were published, and the driver wants to know.
    fn queue(&self, index: u16);

    /// The configuration space changed.
    fn config(&self);

    /// The driver broke the rules and the device stops: sets DEVICE_NEEDS_RESET and raises a
    /// configuration interrupt (section 2.1.2).
    fn needs_reset(&self);
}

/// A queue that the driver has set up, on its way to the device.
pub struct ActiveQueue {
    /// Which of the device's queues it is.
    pub index: u16,
    /// The queue, validated.
    pub queue: Queue,
    /// Written to when the driver kicks. Blocking: whoever reads it waits for the next kick.
    pub notify: Arc<EventFd>,
}

/// All that a device gets when its driver is ready (DRIVER_OK).
pub struct Activation {
    /// The features that the driver accepted, a subset of those offered.
    pub features: u64,
    /// Guest RAM.
    pub mem: GuestMemory,
    /// The queues that are ready; others do not exist until the next reset.
    pub queues: Vec<ActiveQueue>,
    /// The way back to the driver.
    pub interrupt: Arc<dyn Interrupt>,
}

/// Why a device could not start. The transport answers with DEVICE_NEEDS_RESET.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ActivateError(pub String);

/// A device as its transport sees it. Calls come one at a time, from any thread.
pub trait VirtioDevice: Send {
    /// The device ID (section 5).
    fn device_type(&self) -> u32;

    /// What messages call the device.
    fn name(&self) -> String;

    /// All features offered, VERSION_1 among them.
    fn features(&self) -> u64;

    /// The largest size of each queue; as many as there are queues. None is above
    /// [`MAX_SIZE`](crate::virtio::queue::MAX_SIZE).
    fn queue_max_sizes(&self) -> Vec<u16>;

    /// Changes whenever the configuration space does, so that a driver notices a torn read.
    fn config_generation(&self) -> u32;

    /// Reads the device's configuration space; bytes beyond it are zero.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the device's configuration space; what is not writable stays.
    fn write_config(&mut self, offset: u64, data: &[u8]);

    /// The driver has accepted `features` (FEATURES_OK), before it activates the device.
    fn features_accepted(&mut self, _features: u64) {}

    /// The driver is ready. Kicks that came before are repeated by the device itself: it looks
    /// into every queue once.
    ///
    /// # Errors
    /// The device cannot start; it stays inactive.
    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError>;

    /// Stops, whether active or not. When this returns nothing touches guest memory or the
    /// interrupt any more.
    fn reset(&mut self);
}
