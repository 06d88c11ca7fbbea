//! Waking a loop: who must write the eventfd, and who need not.
//!
//! A thread that has published work (a bottom half, a setting) calls [`Notify::notify`]; it must
//! kick the loop's eventfd only if the loop sleeps or is about to. The loop announces that it is
//! about to sleep, then looks once more for a notification. Both sides write their own flag and
//! then read the other's, with a full fence between: at least one of them sees the other.

use crate::sync::{AtomicBool, AtomicU32, Ordering, fence};

/// The two flags, each in a cache line of its own: one is written by other threads, the other by
/// the loop.
#[derive(Debug)]
pub struct Notify {
    notified: Line<AtomicBool>,
    notify_me: Line<AtomicU32>,
}

#[derive(Debug)]
#[repr(align(128))]
struct Line<T>(T);

impl Default for Notify {
    fn default() -> Self {
        Self::new()
    }
}

impl Notify {
    /// Nobody sleeps, nobody has notified.
    #[must_use]
    pub fn new() -> Self {
        Notify {
            notified: Line(AtomicBool::new(false)),
            notify_me: Line(AtomicU32::new(0)),
        }
    }

    /// Any thread: the loop shall look for work. True if the caller must write the eventfd.
    #[must_use]
    pub fn notify(&self) -> bool {
        // A swap, not a store: Release publishes the work written before, and as a read-modify-
        // write it continues the release sequence of an earlier notifier, so that one `take` of
        // the last one acquires the work of all.
        self.notified.0.swap(true, Ordering::AcqRel);
        // Pairs with the fence in `about_to_sleep`: either we see notify_me, or the loop sees
        // notified.
        fence(Ordering::SeqCst);
        self.notify_me.0.load(Ordering::Relaxed) != 0
    }

    /// The loop: it will sleep unless this returns true, which says that somebody has notified.
    /// Nested loops count. Each call is undone by one [`Self::awake`].
    #[must_use]
    pub fn about_to_sleep(&self) -> bool {
        // Only the loop writes notify_me: a load and a store, no read-modify-write.
        let depth = self.notify_me.0.load(Ordering::Relaxed);
        self.notify_me.0.store(depth + 2, Ordering::Relaxed);
        // Pairs with the fence in `notify`.
        fence(Ordering::SeqCst);
        self.notified.0.load(Ordering::Relaxed)
    }

    /// The loop: it no longer sleeps.
    pub fn awake(&self) {
        let depth = self.notify_me.0.load(Ordering::Relaxed);
        self.notify_me.0.store(depth - 2, Ordering::Relaxed);
    }

    /// The loop is driven by another one, which sleeps for it: notifiers must kick from now on.
    /// True if somebody has notified already.
    #[must_use]
    pub fn sleep_outside(&self, outside: bool) -> bool {
        let depth = self.notify_me.0.load(Ordering::Relaxed);
        let depth = (depth & !1) | u32::from(outside);
        self.notify_me.0.store(depth, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        self.notified.0.load(Ordering::Relaxed)
    }

    /// Whether a notification is there: one plain load, for the polling pass.
    #[inline]
    #[must_use]
    pub fn is_notified(&self) -> bool {
        self.notified.0.load(Ordering::Relaxed)
    }

    /// The loop: takes the notification, before it looks for work. Without one this is a load.
    #[inline]
    pub fn take(&self) -> bool {
        if !self.is_notified() {
            return false;
        }
        // Acquire: what the notifiers published is visible from here on. A notifier that comes
        // after this swap sets the flag anew, so its work is found in the next iteration.
        self.notified.0.swap(false, Ordering::AcqRel)
    }
}
