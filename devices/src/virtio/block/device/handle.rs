//! What the user does to a disk: look at it, resize, move, continue, drain.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use iothread::Remote;

use super::super::config::{DiskConfig, SECTOR_BYTES};
use super::super::disk::EventCallback;
use super::super::image::{Image, ImageError};
use super::super::stats::BlockStats;
use super::super::worker;
use super::{BlockError, Inner, Placement, check_engine, check_placement};

/// A disk, as the VMM sees it, for any thread.
#[derive(Clone)]
pub struct BlockHandle(pub(super) Arc<Inner>);

impl BlockHandle {
    /// The disk's id.
    pub fn id(&self) -> &str {
        &self.0.disk.config.id
    }

    /// What the disk was made of.
    pub fn config(&self) -> &DiskConfig {
        &self.0.disk.config
    }

    /// The image behind it.
    pub fn image(&self) -> &Image {
        &self.0.disk.image
    }

    /// Bytes that the guest sees.
    pub fn capacity_bytes(&self) -> u64 {
        self.0.disk.capacity_sectors() * SECTOR_BYTES
    }

    /// Whether writes are cached until the guest flushes, at the moment.
    pub fn writeback(&self) -> bool {
        self.0.disk.writeback()
    }

    /// Whether the guest's driver has broken the device and not reset it yet.
    pub fn is_broken(&self) -> bool {
        self.0.disk.broken.load(Ordering::Acquire)
    }

    /// What the disk has done.
    pub fn stats(&self) -> BlockStats {
        BlockStats::sum(&self.0.disk.counters)
    }

    /// The name of each queue's loop.
    pub fn iothreads(&self) -> Vec<String> {
        self.0.lock().placement.names()
    }

    /// Sets who hears of failed operations.
    pub fn set_event_callback(&self, callback: EventCallback) {
        self.0.disk.set_event_callback(callback);
    }

    /// Changes the disk's size in bytes; the guest is told. A file is lengthened or cut, of a block
    /// device a part may be shown.
    ///
    /// # Errors
    /// A size that cannot be; see [`ImageError`].
    pub fn resize(&self, bytes: u64) -> Result<(), BlockError> {
        let sectors = self.0.disk.image.resize(bytes)?;
        self.set_capacity(sectors);
        Ok(())
    }

    /// Takes over the size that the image has now, if it was changed from outside.
    ///
    /// # Errors
    /// The kernel does not tell, or there is no whole block left.
    pub fn refresh_size(&self) -> Result<(), BlockError> {
        let disk = &self.0.disk;
        let sectors = disk.image.current_capacity_sectors().unwrap_or(0);
        if sectors == 0 {
            return Err(BlockError::Image(ImageError::Empty {
                path: disk.image.path().display().to_string(),
            }));
        }
        self.set_capacity(sectors);
        Ok(())
    }

    fn set_capacity(&self, sectors: u64) {
        if !self.0.disk.set_capacity_sectors(sectors) {
            return;
        }
        let interrupt = self.0.lock().active.as_ref().map(|a| a.interrupt.clone());
        if let Some(interrupt) = interrupt {
            interrupt.config();
        }
    }

    /// Resubmits the requests that the error policy `stop` kept, each in its queue's thread.
    pub fn resume(&self) {
        self.0.each_running(|home, worker| {
            home.run(move |ctx| worker::resume(ctx, worker));
        });
    }

    /// Waits until no I/O is under way; what the error policy keeps stays. With the vCPUs stopped
    /// the disk is quiet afterwards.
    pub fn drain(&self) {
        self.0.each_running(|home, worker| {
            // A thread that has ended has nothing under way.
            let _ = home.call(move |ctx| worker::drain(ctx, worker));
        });
    }

    /// Waits for the I/O that is under way and stops the disk, as its driver's reset does. For the
    /// end of a run, with the vCPUs stopped.
    pub fn shut_down(&self) {
        self.0.reset();
    }

    /// Moves the disk's queues to other threads, with I/O running.
    ///
    /// # Errors
    /// [`BlockError::Busy`], or a thread that cannot take its queue: then the queues that could not
    /// be moved stay where they were.
    pub fn change_placement(&self, placement: Placement) -> Result<(), BlockError> {
        let inner = &*self.0;
        check_placement(&inner.disk.config, &placement)?;
        check_engine(&inner.disk.config, &placement)?;
        let _step = inner.try_step()?;
        let Some(mut active) = inner.lock().active.take() else {
            inner.lock().placement = placement;
            return Ok(());
        };
        let mut result = Ok(());
        let mut homes = inner.lock().placement.homes.clone();
        let mut moved = Vec::with_capacity(active.queues.len());
        for running in std::mem::take(&mut active.queues) {
            let queue = usize::from(running.index);
            let target = &placement.homes[queue];
            let Some(carried) = Inner::stop(&running, false) else {
                result = Err(BlockError::Ended {
                    id: inner.disk.config.id.clone(),
                    iothread: running.home.name().to_owned(),
                });
                continue;
            };
            let start = |home: &Remote, carried| {
                inner.start(
                    home,
                    running.index,
                    active.features,
                    &active.interrupt,
                    &running.notify,
                    carried,
                )
            };
            match start(target, carried) {
                Ok(running) => {
                    homes[queue] = target.clone();
                    moved.push(running);
                }
                Err((error, carried)) => {
                    result = Err(error);
                    if let Some(Ok(running)) = carried.map(|c| start(&running.home, *c)) {
                        moved.push(running);
                    }
                }
            }
        }
        active.queues = moved;
        if result.is_ok() {
            homes = placement.homes;
        }
        let mut life = inner.lock();
        life.placement = Placement { homes };
        life.active = Some(active);
        result
    }
}
