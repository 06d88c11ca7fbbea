//! Ranges of a disk that are being written, where that matters.
//!
//! On a host whose blocks are larger than the guest's, a write that covers only part of a block
//! reads the block, changes it and writes it back. Two such writes to one block at the same time
//! would undo one another, also from different queues. So on such hosts, and only there, a write
//! waits until no overlapping one is under way.

use std::sync::{Arc, MutexGuard, PoisonError};

use crate::sync::Mutex;
use iothread::Remote;

/// A request that waits: which worker's, which one, and where to tell it.
pub(super) struct Waiter {
    /// The worker's id.
    pub(super) worker: u64,
    /// The request's token.
    pub(super) token: u32,
    /// The worker's home.
    pub(super) home: Remote,
}

struct Held {
    worker: u64,
    token: u32,
    start: u64,
    end: u64,
}

struct Waiting {
    start: u64,
    end: u64,
    waiter: Waiter,
}

#[derive(Default)]
struct State {
    held: Vec<Held>,
    // In the order of arrival; one that has to wait makes later ones that overlap it wait too.
    waiting: Vec<Waiting>,
}

impl State {
    fn is_free(&self, start: u64, end: u64, before: usize) -> bool {
        let overlaps = |s: u64, e: u64| s < end && start < e;
        !self.held.iter().any(|h| overlaps(h.start, h.end))
            && !self.waiting[..before]
                .iter()
                .any(|w| overlaps(w.start, w.end))
    }
}

/// The written ranges of one disk.
#[derive(Clone, Default)]
pub(super) struct RangeLocks(Arc<Mutex<State>>);

impl RangeLocks {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `start..end` for a request, or queues it. Whether it may go on.
    pub(super) fn acquire(&self, start: u64, end: u64, waiter: Waiter) -> bool {
        let mut state = self.lock();
        if state.is_free(start, end, state.waiting.len()) {
            state.held.push(Held {
                worker: waiter.worker,
                token: waiter.token,
                start,
                end,
            });
            return true;
        }
        state.waiting.push(Waiting { start, end, waiter });
        false
    }

    /// Gives up what a request holds. Those that may go on now hold their ranges already.
    pub(super) fn release(&self, worker: u64, token: u32) -> Vec<Waiter> {
        let mut state = self.lock();
        state
            .held
            .retain(|h| h.worker != worker || h.token != token);
        let mut ready = Vec::new();
        let mut index = 0;
        while let Some(waiting) = state.waiting.get(index) {
            if !state.is_free(waiting.start, waiting.end, index) {
                index += 1;
                continue;
            }
            let Waiting { start, end, waiter } = state.waiting.remove(index);
            state.held.push(Held {
                worker: waiter.worker,
                token: waiter.token,
                start,
                end,
            });
            ready.push(waiter);
        }
        ready
    }
}
