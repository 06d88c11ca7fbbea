//! virtio-blk (VIRTIO 1.2, section 5.2) on raw images.
//!
//! The path of a request reads downward: [`worker`] takes a chain from the queue, [`request`] makes
//! it a typed request, [`check`] decides whether it may, [`engine`] hands it to the host, and the
//! worker answers. [`device`] is what the transport and the VMM see of all that.

mod buffer;
mod check;
mod config;
mod device;
mod disk;
mod engine;
pub mod image;
mod iov;
pub mod mapping;
mod range_lock;
mod request;
mod stats;
mod worker;

pub use config::{
    CacheMode, ConfigError, DiskConfig, EngineKind, ErrorPolicy, FixedBufs, MAX_QUEUES,
    SECTOR_BYTES, SERIAL_BYTES,
};
pub use device::{Block, BlockError, BlockHandle, Placement};
pub use disk::{BlockEvent, EventCallback};
pub use engine::on_worker_start;
pub use stats::BlockStats;

pub(crate) mod features {
    //! Feature bits of the block device, as masks.

    use virtio_bindings::virtio_blk as bits;

    pub(crate) const SEG_MAX: u64 = 1 << bits::VIRTIO_BLK_F_SEG_MAX;
    pub(crate) const RO: u64 = 1 << bits::VIRTIO_BLK_F_RO;
    pub(crate) const BLK_SIZE: u64 = 1 << bits::VIRTIO_BLK_F_BLK_SIZE;
    pub(crate) const FLUSH: u64 = 1 << bits::VIRTIO_BLK_F_FLUSH;
    pub(crate) const TOPOLOGY: u64 = 1 << bits::VIRTIO_BLK_F_TOPOLOGY;
    pub(crate) const CONFIG_WCE: u64 = 1 << bits::VIRTIO_BLK_F_CONFIG_WCE;
    pub(crate) const MQ: u64 = 1 << bits::VIRTIO_BLK_F_MQ;
    pub(crate) const DISCARD: u64 = 1 << bits::VIRTIO_BLK_F_DISCARD;
    pub(crate) const WRITE_ZEROES: u64 = 1 << bits::VIRTIO_BLK_F_WRITE_ZEROES;
}

#[cfg(test)]
mod tests;
