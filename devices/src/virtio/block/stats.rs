//! What a queue has done, counted by its home thread and read by any.

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter with one writer: adding costs a load and a store, no locked instruction.
#[derive(Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    #[inline]
    pub(super) fn add(&self, count: u64) {
        let value = self.0.load(Ordering::Relaxed).wrapping_add(count);
        self.0.store(value, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn raise_to(&self, value: u64) {
        if value > self.0.load(Ordering::Relaxed) {
            self.0.store(value, Ordering::Relaxed);
        }
    }

    fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        /// Counters of one queue, in cache lines of their own.
        #[derive(Default)]
        #[repr(align(128))]
        pub(super) struct QueueCounters {
            $(pub(super) $name: Counter,)+
        }

        /// What a disk has done since it was made: sums over its queues. Names are QEMU's where
        /// `query-blockstats` has one.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
        pub struct BlockStats {
            $($(#[$doc])* pub $name: u64,)+
        }

        impl BlockStats {
            pub(super) fn sum(queues: &[QueueCounters]) -> BlockStats {
                let mut sum = BlockStats::default();
                for queue in queues {
                    $(sum.$name += queue.$name.get();)+
                }
                // The one that is no sum.
                sum.wr_highest_offset = queues
                    .iter()
                    .map(|queue| queue.wr_highest_offset.get())
                    .max()
                    .unwrap_or(0);
                sum
            }
        }
    };
}

counters! {
    /// Bytes read by the guest.
    rd_bytes,
    /// Bytes written by the guest.
    wr_bytes,
    /// Bytes discarded by the guest.
    unmap_bytes,
    /// Bytes that the guest had zeroed by WRITE_ZEROES.
    zeroes_bytes,
    /// Reads that succeeded.
    rd_operations,
    /// Writes that succeeded.
    wr_operations,
    /// Flushes that succeeded.
    flush_operations,
    /// Discards that succeeded.
    unmap_operations,
    /// WRITE_ZEROES requests that succeeded.
    zeroes_operations,
    /// Reads that failed.
    failed_rd_operations,
    /// Writes that failed.
    failed_wr_operations,
    /// Flushes that failed.
    failed_flush_operations,
    /// Discards and WRITE_ZEROES requests that failed.
    failed_unmap_operations,
    /// Requests that were refused before anything was done.
    invalid_operations,
    /// First byte behind the last one ever written.
    wr_highest_offset,
    /// fdatasync calls for flushes and for writes in writethrough mode.
    syncs,
    /// Kicks by the guest that woke the queue.
    kicks,
    /// Interrupts raised.
    interrupts,
    /// Parts of requests that went through a bounce buffer.
    bounced,
    /// Operations done again after EINTR, EAGAIN or a short transfer.
    retries,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_over_queues_but_for_the_highest_offset() {
        let queues = [QueueCounters::default(), QueueCounters::default()];
        queues[0].rd_bytes.add(512);
        queues[1].rd_bytes.add(1024);
        queues[0].wr_highest_offset.raise_to(4096);
        queues[1].wr_highest_offset.raise_to(1024);
        queues[1].wr_highest_offset.raise_to(512);
        let sum = BlockStats::sum(&queues);
        assert_eq!((sum.rd_bytes, sum.wr_highest_offset), (1536, 4096));
    }
}
