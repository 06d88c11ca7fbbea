//! What other threads hand to a loop: a lock-free stack that the loop takes whole.

use std::ptr;

use crate::sync::{Arc, AtomicBool, AtomicPtr, Ordering};

/// An item that can be queued again and again without an allocation. Queued twice before the loop
/// has taken it, it is taken once.
#[derive(Debug)]
pub struct Item<T> {
    next: AtomicPtr<Item<T>>,
    queued: AtomicBool,
    /// What the loop finds.
    pub value: T,
}

impl<T> Item<T> {
    /// An item that is not queued.
    pub fn new(value: T) -> Arc<Self> {
        Arc::new(Item {
            next: AtomicPtr::new(ptr::null_mut()),
            queued: AtomicBool::new(false),
            value,
        })
    }
}

/// The stack. Any thread pushes, one thread takes.
#[derive(Debug)]
pub struct Inbox<T> {
    head: AtomicPtr<Item<T>>,
}

/// Marks an inbox that takes nothing any more. Never dereferenced.
fn closed<T>() -> *mut Item<T> {
    ptr::without_provenance_mut(align_of::<Item<T>>())
}

/// The inbox is closed; its loop has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Closed;

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Inbox<T> {
    /// An empty inbox.
    #[must_use]
    pub fn new() -> Self {
        Inbox {
            head: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Queues `item` unless it is queued already.
    ///
    /// # Errors
    /// [`Closed`] when the loop has ended; the item is not queued.
    pub fn push(&self, item: &Arc<Item<T>>) -> Result<(), Closed> {
        // AcqRel pairs with the swap in `take`: if the item is queued already, the loop's swap
        // follows ours and so sees what was written before this call.
        if item.queued.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let node = Arc::into_raw(Arc::clone(item)).cast_mut();
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            if head == closed() {
                // SAFETY: `node` came from `into_raw` above and was not queued.
                drop(unsafe { Arc::from_raw(node.cast_const()) });
                item.queued.store(false, Ordering::Release);
                return Err(Closed);
            }
            item.next.store(head, Ordering::Relaxed);
            // Release publishes the item and its `next` to the thread that takes the stack.
            match self
                .head
                .compare_exchange_weak(head, node, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => return Ok(()),
                Err(now) => head = now,
            }
        }
    }

    /// Whether there may be something to take: one plain load.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed).is_null()
    }

    /// Takes everything, oldest first, and hands each item to `each`, which may push again.
    #[inline]
    pub fn take(&self, each: impl FnMut(Arc<Item<T>>)) {
        // Relaxed is enough to skip: whoever pushes notifies afterwards, and the loop looks again
        // after it has taken the notification. Only the loop closes, so that cannot come between.
        let head = self.head.load(Ordering::Relaxed);
        if head.is_null() || head == closed() {
            return;
        }
        // Acquire pairs with the Release of every push in the chain: each is a read-modify-write
        // and so part of the release sequence.
        Self::drain(self.head.swap(ptr::null_mut(), Ordering::AcqRel), each);
    }

    /// Closes the inbox and takes what is left.
    pub fn close(&self, each: impl FnMut(Arc<Item<T>>)) {
        let head = self.head.swap(closed(), Ordering::AcqRel);
        if head != closed() {
            Self::drain(head, each);
        }
    }

    fn drain(mut node: *mut Item<T>, mut each: impl FnMut(Arc<Item<T>>)) {
        // The stack gives the newest first; turn it round.
        let mut oldest: *mut Item<T> = ptr::null_mut();
        while !node.is_null() {
            // SAFETY: the node is on the chain that we alone took; its Arc is held by the chain.
            let item = unsafe { &*node };
            let next = item.next.load(Ordering::Relaxed);
            item.next.store(oldest, Ordering::Relaxed);
            oldest = node;
            node = next;
        }
        while !oldest.is_null() {
            // SAFETY: made by `into_raw` in `push`; each node is visited once.
            let item = unsafe { Arc::from_raw(oldest.cast_const()) };
            oldest = item.next.load(Ordering::Relaxed);
            // From here on it can be queued anew; a push that found it queued comes before this
            // swap, and what its thread wrote is visible to `each`.
            item.queued.swap(false, Ordering::AcqRel);
            each(item);
        }
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        self.close(drop);
    }
}
