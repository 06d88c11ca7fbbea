//! virtio devices and their transports, after VIRTIO 1.2.

pub mod block;
pub mod ccw;
pub mod device;
pub mod mmio;
pub mod pci;
pub mod queue;
pub mod ram;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
pub(crate) mod testing_device;
mod transport;

pub mod features {
    //! Feature bits that belong to no device (VIRTIO 1.2, section 6), as masks.

    use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
    use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

    /// The device follows version 1 of the specification.
    pub const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
    /// `used_event` and `avail_event` are in use.
    pub const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
    /// Descriptors may refer to tables of descriptors.
    pub const INDIRECT_DESC: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
}
