//! A record of the chains under way that outlives this process.
//!
//! With vhost-user the front end keeps a piece of shared memory for its back end, in which the back
//! end notes every chain that it has taken and not yet answered. Killed at any moment, its successor
//! finds there what is to be done again (vhost-user specification, "Inflight I/O tracking", the split
//! virtqueue's `QueueRegionSplit`). For each queue the memory holds a header of 16 bytes (features
//! u64, version u16, desc_num u16, last_batch_head u16, used_idx u16) and for each descriptor 16 bytes
//! (inflight u8, 5 bytes unused, next u16, counter u64), in the machine's byte order.
//!
//! The front end can write to this memory too, so what is read from it is checked like a ring.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};

const HEADER_BYTES: usize = 16;
const ENTRY_BYTES: usize = 16;
/// Each queue's part begins at a multiple of this.
const ALIGN_BYTES: usize = 64;

const VERSION: usize = 8;
const DESC_NUM: usize = 10;
const LAST_BATCH_HEAD: usize = 12;
const USED_IDX: usize = 14;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// The one version of the layout that there is.
const CURRENT_VERSION: u16 = 1;

/// Why a record cannot be continued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A layout that is not known.
    #[error("version {0} of the inflight record is not known")]
    Version(u16),
    /// The record is that of another queue.
    #[error("the inflight record is for {recorded} descriptors, the queue has {size}")]
    Size {
        /// What the record says.
        recorded: u16,
        /// What the queue has.
        size: u16,
    },
    /// Its last batch cannot have been.
    #[error("the inflight record's last batch of {0} is broken")]
    Batch(u16),
}

/// The record of one queue.
pub struct Inflight {
    base: *mut u8,
    size: u16,
    /// The next chain's place in the order of taking.
    counter: u64,
    /// Answered, and not yet published.
    batch: Vec<u16>,
    /// Chains that a predecessor left, the next one last.
    again: Vec<u16>,
    _memory: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `base` points into the mapping that `_memory` keeps, which belongs to no thread.
unsafe impl Send for Inflight {}

impl Inflight {
    /// Bytes that the record of a queue of `size` descriptors takes: the distance between two queues'.
    pub const fn bytes(size: u16) -> usize {
        (HEADER_BYTES + ENTRY_BYTES * size as usize).next_multiple_of(ALIGN_BYTES)
    }

    /// The record at `base`, for a queue of `size` descriptors. Nothing is read yet.
    ///
    /// # Safety
    /// `base` is aligned to 8 bytes and points to [`Inflight::bytes`] of memory that can be read and
    /// written as long as `memory` lives, and that this process accesses atomically alone.
    pub unsafe fn new(base: *mut u8, size: u16, memory: Arc<dyn Any + Send + Sync>) -> Inflight {
        Inflight {
            base,
            size,
            counter: 0,
            batch: Vec::with_capacity(size.into()),
            again: Vec::new(),
            _memory: memory,
        }
    }

    /// Takes up the record of a queue whose used ring stands at `used_idx`, and finds the chains that
    /// are to be done again: how many.
    pub(super) fn recover(&mut self, used_idx: u16) -> Result<u16, Error> {
        let version = self.header(VERSION).load(Ordering::Acquire);
        match version {
            0 => {
                self.header(DESC_NUM).store(self.size, Ordering::Relaxed);
                self.header(USED_IDX).store(used_idx, Ordering::Relaxed);
                for head in 0..self.size {
                    self.flag(head).store(0, Ordering::Relaxed);
                }
                self.header(VERSION)
                    .store(CURRENT_VERSION, Ordering::Release);
                return Ok(0);
            }
            CURRENT_VERSION => {}
            _ => return Err(Error::Version(version)),
        }
        let recorded = self.header(DESC_NUM).load(Ordering::Relaxed);
        if recorded != self.size {
            return Err(Error::Size {
                recorded,
                size: self.size,
            });
        }
        self.finish_batch(used_idx)?;
        let mut left: Vec<(u64, u16)> = (0..self.size)
            .filter(|&head| self.flag(head).load(Ordering::Relaxed) != 0)
            .map(|head| (self.count(head).load(Ordering::Relaxed), head))
            .collect();
        left.sort_unstable_by(|a, b| b.cmp(a));
        self.counter = left.first().map_or(0, |&(count, _)| count.wrapping_add(1));
        self.again = left.into_iter().map(|(_, head)| head).collect();
        // At most `size`, which is 16 bits.
        Ok(u16::try_from(self.again.len()).unwrap_or(self.size))
    }

    /// A predecessor may have published a batch and not come to note that: the used ring tells.
    fn finish_batch(&mut self, used_idx: u16) -> Result<(), Error> {
        let noted = self.header(USED_IDX).load(Ordering::Relaxed);
        let count = used_idx.wrapping_sub(noted);
        let mut head = self.header(LAST_BATCH_HEAD).load(Ordering::Relaxed);
        if count > self.size {
            return Err(Error::Batch(count));
        }
        for _ in 0..count {
            if head >= self.size {
                return Err(Error::Batch(count));
            }
            self.flag(head).store(0, Ordering::Relaxed);
            head = self.next(head).load(Ordering::Relaxed);
        }
        self.header(USED_IDX).store(used_idx, Ordering::Release);
        Ok(())
    }

    /// The next chain that a predecessor left, in the order in which it had taken them.
    #[inline]
    pub(super) fn take_again(&mut self) -> Option<u16> {
        self.again.pop()
    }

    /// A chain was taken from the available ring. `head` is within the queue.
    #[inline]
    pub(super) fn taken(&mut self, head: u16) {
        self.count(head).store(self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.flag(head).store(1, Ordering::Release);
    }

    /// A chain's used element was written. `head` is within the queue.
    #[inline]
    pub(super) fn used(&mut self, head: u16) {
        let last = self.header(LAST_BATCH_HEAD);
        self.next(head)
            .store(last.load(Ordering::Relaxed), Ordering::Relaxed);
        last.store(head, Ordering::Release);
        self.batch.push(head);
    }

    /// The used index was published.
    #[inline]
    pub(super) fn published(&mut self, used_idx: u16) {
        let mut batch = std::mem::take(&mut self.batch);
        for &head in &batch {
            self.flag(head).store(0, Ordering::Release);
        }
        self.header(USED_IDX).store(used_idx, Ordering::Release);
        batch.clear();
        self.batch = batch;
    }

    #[inline]
    fn header(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: an even offset within the header; `new` was promised aligned memory that lives as
        // long as `self` and is accessed atomically.
        unsafe { AtomicU16::from_ptr(self.base.add(offset).cast()) }
    }

    #[inline]
    fn entry(&self, head: u16) -> *mut u8 {
        debug_assert!(head < self.size);
        // SAFETY: callers give a head below `size`, whose entry is in the memory promised to `new`.
        unsafe {
            self.base
                .add(HEADER_BYTES + ENTRY_BYTES * usize::from(head))
        }
    }

    #[inline]
    fn flag(&self, head: u16) -> &AtomicU8 {
        // SAFETY: the first byte of an entry, see `header` for the rest.
        unsafe { AtomicU8::from_ptr(self.entry(head)) }
    }

    #[inline]
    fn next(&self, head: u16) -> &AtomicU16 {
        // SAFETY: an even offset within an entry, see `header` for the rest.
        unsafe { AtomicU16::from_ptr(self.entry(head).add(NEXT).cast()) }
    }

    #[inline]
    fn count(&self, head: u16) -> &AtomicU64 {
        // SAFETY: entries are 16 bytes behind a 16-byte header and `base` is aligned to 8, see
        // `header` for the rest.
        unsafe { AtomicU64::from_ptr(self.entry(head).add(COUNTER).cast()) }
    }
}

#[cfg(test)]
mod tests;
