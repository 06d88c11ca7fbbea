//! The standard library's mutex; in tests each thread's lockings are counted, so that a test can say
//! of a path that it takes none.

use std::sync::{LockResult, MutexGuard};

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

#[cfg(test)]
thread_local! {
    /// Lockings by this thread.
    pub(crate) static LOCKINGS: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Mutex<T> {
        Mutex(std::sync::Mutex::new(value))
    }

    #[inline]
    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        #[cfg(test)]
        LOCKINGS.set(LOCKINGS.get() + 1);
        self.0.lock()
    }
}
