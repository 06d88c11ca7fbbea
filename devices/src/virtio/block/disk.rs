//! What all queues of a disk share: the image, its size, its mode. Everything here may be read by
//! any thread at any time; nothing on the hot path takes a lock.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use super::buffer::AlignedBuffer;
use super::check::Limits;
use super::config::{CacheMode, DiskConfig, ErrorPolicy, FixedBufs, SECTOR_BYTES, SERIAL_BYTES};
use super::features;
use super::image::Image;
use super::range_lock::RangeLocks;
use super::request::Kind;
use super::stats::QueueCounters;
use crate::sync::Mutex;

/// A failed operation of the host, as the control socket tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockEvent {
    /// The disk's id.
    pub id: String,
    /// It was a read; else a write, flush or discard.
    pub is_read: bool,
    /// What was done about it: `report`, `ignore` or `stop`.
    pub action: ErrorPolicy,
    /// The host has no space left.
    pub no_space: bool,
    /// What the kernel said.
    pub reason: String,
}

/// Receives [`BlockEvent`]s in the iothread where they happen; must not block. On
/// [`ErrorPolicy::Stop`] the VM is to be paused.
pub type EventCallback = Arc<dyn Fn(BlockEvent) + Send + Sync>;

/// Zero bytes to write from, shared by all requests of a disk.
pub(super) struct Zeroes(AlignedBuffer);

// SAFETY: nobody ever writes to the buffer, so any thread may read it.
unsafe impl Sync for Zeroes {}

/// Length of [`Zeroes`].
const ZEROES_BYTES: usize = 64 * 1024;

impl Zeroes {
    /// The buffer as a segment to write from.
    pub(super) fn segment(&self) -> libc::iovec {
        libc::iovec {
            iov_base: self.0.as_ptr().cast(),
            iov_len: self.0.len(),
        }
    }
}

/// See the module.
pub(super) struct Disk {
    pub(super) config: DiskConfig,
    pub(super) image: Image,
    /// GET_ID's answer.
    pub(super) serial: [u8; SERIAL_BYTES],
    capacity_sectors: AtomicU64,
    generation: AtomicU32,
    writeback: AtomicBool,
    /// A queue was broken by its driver: the whole device is quiet until it is reset.
    pub(super) broken: AtomicBool,
    pub(super) counters: Vec<QueueCounters>,
    /// Present where partial blocks are written by reading them first.
    pub(super) locks: Option<RangeLocks>,
    pub(super) zeroes: Zeroes,
    /// The filesystem cannot zero ranges: seen once, not tried again.
    pub(super) no_zero_range: AtomicBool,
    /// It was told that there are no registered buffers.
    no_fixedbufs_told: AtomicBool,
    events: Mutex<Option<EventCallback>>,
}

impl Disk {
    pub(super) fn new(config: DiskConfig, image: Image) -> Disk {
        let mut serial = [0; SERIAL_BYTES];
        for (to, from) in serial.iter_mut().zip(config.serial.bytes()) {
            *to = from;
        }
        let partial_blocks = image.alignment().offset > config.logical_block_size;
        let disk = Disk {
            serial,
            capacity_sectors: AtomicU64::new(image.capacity_sectors()),
            generation: AtomicU32::new(0),
            writeback: AtomicBool::new(true),
            broken: AtomicBool::new(false),
            counters: (0..config.queues)
                .map(|_| QueueCounters::default())
                .collect(),
            locks: partial_blocks.then(RangeLocks::default),
            zeroes: Zeroes(AlignedBuffer::new(ZEROES_BYTES)),
            no_zero_range: AtomicBool::new(false),
            no_fixedbufs_told: AtomicBool::new(false),
            events: Mutex::new(None),
            config,
            image,
        };
        disk.restore_cache_mode();
        disk
    }

    pub(super) fn capacity_sectors(&self) -> u64 {
        self.capacity_sectors.load(Ordering::Acquire)
    }

    /// A new capacity; true if it differs from the old one.
    pub(super) fn set_capacity_sectors(&self, sectors: u64) -> bool {
        let changed = self.capacity_sectors.swap(sectors, Ordering::AcqRel) != sectors;
        if changed {
            self.generation.fetch_add(1, Ordering::AcqRel);
        }
        changed
    }

    pub(super) fn generation(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    pub(super) fn writeback(&self) -> bool {
        self.writeback.load(Ordering::Relaxed)
    }

    pub(super) fn set_writeback(&self, writeback: bool) {
        self.writeback.store(writeback, Ordering::Relaxed);
    }

    /// The mode that the user asked for.
    pub(super) fn restore_cache_mode(&self) {
        self.set_writeback(self.config.cache != CacheMode::Writethrough);
    }

    /// Whether writes must be synced before they are answered.
    pub(super) fn syncs_writes(&self) -> bool {
        !self.writeback() && self.config.cache != CacheMode::Unsafe
    }

    /// What requests are checked against, under the features that the driver accepted.
    #[inline]
    pub(super) fn limits(&self, accepted: u64) -> Limits {
        Limits {
            capacity: self.capacity_sectors(),
            block: u64::from(self.config.logical_block_size) / SECTOR_BYTES,
            readonly: self.config.readonly,
            flush: accepted & features::FLUSH != 0,
            discard: accepted & features::DISCARD != 0,
            write_zeroes: accepted & features::WRITE_ZEROES != 0,
        }
    }

    /// What to do about a failure of `kind` with `errno`: never [`ErrorPolicy::Enospc`].
    pub(super) fn error_policy(&self, kind: Kind, errno: i32) -> ErrorPolicy {
        let policy = if kind == Kind::In {
            self.config.rerror
        } else {
            self.config.werror
        };
        match policy {
            ErrorPolicy::Enospc if errno == libc::ENOSPC => ErrorPolicy::Stop,
            ErrorPolicy::Enospc => ErrorPolicy::Report,
            policy => policy,
        }
    }

    /// Buffers are not registered, which is told once if the user asked for it. Plain operations
    /// serve as well.
    pub(super) fn without_fixedbufs(&self, reason: &str) {
        let id = &self.config.id;
        match self.config.fixedbufs {
            FixedBufs::Off => {}
            FixedBufs::Direct => tracing::debug!("disk {id}: no registered buffers: {reason}"),
            FixedBufs::On => {
                if !self.no_fixedbufs_told.swap(true, Ordering::Relaxed) {
                    tracing::warn!("disk {id}: fixedbufs=on has no effect: {reason}");
                }
            }
        }
    }

    pub(super) fn set_event_callback(&self, callback: EventCallback) {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = Some(callback);
    }

    pub(super) fn report(&self, kind: Kind, errno: i32, action: ErrorPolicy) {
        let callback = self
            .events
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(callback) = callback {
            callback(BlockEvent {
                id: self.config.id.clone(),
                is_read: kind == Kind::In,
                action,
                no_space: errno == libc::ENOSPC,
                reason: std::io::Error::from_raw_os_error(errno).to_string(),
            });
        }
    }
}
