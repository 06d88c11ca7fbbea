//! Numbers that change together, with one writer and readers that never make it wait.
//!
//! The numbers themselves are relaxed atomics. A sequence number, odd while they change, tells a
//! reader whether what it has read belongs together; if not, it reads again.

use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, spin_loop};

/// A number with one writer, which adds by a load and a store: no read-modify-write.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`; only the one writer may.
    #[inline]
    pub fn add(&self, n: u64) {
        #[cfg(not(iothread_no_stats))]
        self.0.store(
            self.0.load(Ordering::Relaxed).wrapping_add(n),
            Ordering::Relaxed,
        );
        #[cfg(iothread_no_stats)]
        let _ = n;
    }

    /// Only the one writer may.
    #[inline]
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Any thread.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// See the module. Even numbers: nothing is changing.
#[derive(Debug, Default)]
pub struct Sequence(AtomicU32);

impl Sequence {
    /// The writer: `stores` writes the numbers, all relaxed.
    pub fn change(&self, stores: impl FnOnce()) {
        let sequence = self.0.load(Ordering::Relaxed);
        self.0.store(sequence.wrapping_add(1), Ordering::Relaxed);
        // Release: a reader that has seen one of the stores below sees the odd number after its
        // Acquire fence.
        fence(Ordering::Release);
        stores();
        // Release: the even number comes with all the stores.
        self.0.store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// Any thread: what `loads` reads of the numbers, all of one change.
    pub fn read<R>(&self, loads: impl Fn() -> R) -> R {
        loop {
            // Acquire pairs with the last store of `change`.
            let before = self.0.load(Ordering::Acquire);
            if before & 1 == 0 {
                let read = loads();
                // Acquire: if a load above saw a later change, the load below sees its number.
                fence(Ordering::Acquire);
                if self.0.load(Ordering::Relaxed) == before {
                    return read;
                }
            }
            spin_loop();
        }
    }
}
