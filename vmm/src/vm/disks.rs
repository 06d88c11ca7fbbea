//! The disks: opened as the configuration says, each queue on its loop.

use devices::virtio::block::{Block, BlockError, BlockHandle, DiskConfig, FixedBufs, Placement};
use iothread::{IoThread, Remote};

use crate::config::{self, Config, check, placement};

/// Why there is a disk less than wanted.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {source}")]
pub struct Error {
    /// How the user knows the disk.
    place: String,
    /// What is wrong.
    source: BlockError,
}

impl Error {
    /// Whether the user asked for a disk that cannot be.
    pub fn is_usage(&self) -> bool {
        matches!(
            self.source,
            BlockError::Config(_) | BlockError::Image(_) | BlockError::Engine(_)
        )
    }
}

/// Opens all disks of `config`. Nothing of the guest is touched yet.
pub fn open(config: &Config, main: &Remote, iothreads: &[IoThread]) -> Result<Vec<Block>, Error> {
    let ids = check::disk_ids(&config.disk);
    let disks = config.disk.iter().zip(ids);
    disks
        .map(|(disk, id)| {
            let queues = check::queues(disk, config.cpus);
            let homes = placement::place(disk, queues, &config.iothread).unwrap_or_default();
            let homes = homes
                .into_iter()
                .map(|home| home.map(|at| iothreads[at].remote().clone()));
            let mut device = disk_config(disk, id, queues);
            if disk.fixedbufs.is_none() && config.memory.prefault {
                device.fixedbufs = FixedBufs::Direct;
            }
            Block::new(device, Placement::new(main, homes)).map_err(|source| Error {
                place: check::disk_place(disk),
                source,
            })
        })
        .collect()
}

/// The disk's options as the device takes them.
pub fn disk_config(disk: &config::Disk, id: String, queues: u16) -> DiskConfig {
    let mut device = DiskConfig::new(id, &disk.path);
    device.readonly = disk.readonly;
    device.direct = disk.direct;
    device.engine = disk.engine.map(Into::into);
    device.fixedbufs = match disk.fixedbufs {
        Some(true) => FixedBufs::On,
        _ => FixedBufs::Off,
    };
    device.cache = disk.cache.into();
    device.serial = disk.serial.clone().unwrap_or_default();
    device.queues = queues;
    device.queue_size = disk.queue_size;
    device.logical_block_size = disk.logical_block_size.unwrap_or(device.logical_block_size);
    device.physical_block_size = disk.physical_block_size;
    device.discard = disk.discard;
    device.rerror = disk.rerror.into();
    device.werror = disk.werror.into();
    device.locking = disk.locking;
    device
}

/// The disks in the machine.
pub struct Disks {
    handles: Vec<BlockHandle>,
}

impl Disks {
    /// The disks that `blocks` are.
    pub fn of(blocks: &[Block]) -> Self {
        Self {
            handles: blocks.iter().map(Block::handle).collect(),
        }
    }

    /// The disks, in the order of the configuration.
    pub fn handles(&self) -> &[BlockHandle] {
        &self.handles
    }

    /// Finishes the requests that are under way and stops the disks. The vCPUs have stopped.
    pub fn shut_down(&self) {
        for handle in &self.handles {
            handle.shut_down();
        }
    }
}
