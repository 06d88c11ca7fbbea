//! Bottom halves: work for the next iteration, schedulable from any thread.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, PoisonError};

use crate::context::{Context, State, WeakContext};
use crate::inbox::Item;
use crate::remote::Shared;

/// Work that another thread hands over.
pub(crate) enum Job {
    /// A closure, run once.
    Call(Mutex<Option<Call>>),
    /// A bottom half of the loop, by its number.
    BottomHalf { index: u32, generation: u32 },
}

pub(crate) type Call = Box<dyn FnOnce(&Context) + Send>;

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Job::Call(_) => "Call",
            Job::BottomHalf { .. } => "BottomHalf",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scheduled {
    No,
    Normal,
    Idle,
}

struct Half {
    scheduled: Cell<Scheduled>,
    /// On the queue, scheduled or cancelled.
    queued: Cell<bool>,
    index: u32,
    item: Arc<Item<Job>>,
    callback: Box<dyn Fn(&Context)>,
}

enum Queued {
    Half(Rc<Half>),
    Once(Box<dyn FnOnce(&Context)>),
}

#[derive(Default)]
struct Entry {
    generation: u32,
    half: Option<Weak<Half>>,
}

/// The bottom halves of a loop.
#[derive(Default)]
pub(crate) struct BottomHalves {
    queue: RefCell<VecDeque<Queued>>,
    /// Of the queue: scheduled to run at once, and when there is nothing else to do.
    normal: Cell<u32>,
    idle: Cell<u32>,
    /// Ever put on and taken off the queue.
    pushed: Cell<u64>,
    popped: Cell<u64>,
    entries: RefCell<Vec<Entry>>,
}

impl BottomHalves {
    /// Whether one is scheduled that is not idle.
    #[inline]
    pub(crate) fn any(&self) -> bool {
        self.normal.get() != 0
    }

    #[inline]
    pub(crate) fn any_idle(&self) -> bool {
        self.idle.get() != 0
    }

    fn counter(&self, scheduled: Scheduled) -> Option<&Cell<u32>> {
        match scheduled {
            Scheduled::No => None,
            Scheduled::Normal => Some(&self.normal),
            Scheduled::Idle => Some(&self.idle),
        }
    }

    fn set(&self, half: &Half, scheduled: Scheduled) {
        if let Some(counter) = self.counter(half.scheduled.replace(scheduled)) {
            counter.set(counter.get() - 1);
        }
        if let Some(counter) = self.counter(scheduled) {
            counter.set(counter.get() + 1);
        }
    }

    fn push(&self, queued: Queued) {
        self.pushed.set(self.pushed.get() + 1);
        self.queue.borrow_mut().push_back(queued);
    }

    fn schedule(&self, half: &Rc<Half>, scheduled: Scheduled) {
        self.set(half, scheduled);
        if !half.queued.replace(true) {
            self.push(Queued::Half(Rc::clone(half)));
        }
    }

    fn once(&self, callback: Box<dyn FnOnce(&Context)>) {
        self.normal.set(self.normal.get() + 1);
        self.push(Queued::Once(callback));
    }

    fn add(&self, callback: Box<dyn Fn(&Context)>) -> Rc<Half> {
        let mut entries = self.entries.borrow_mut();
        let free = entries.iter().position(|entry| entry.half.is_none());
        let index = free.unwrap_or_else(|| {
            entries.push(Entry::default());
            entries.len() - 1
        });
        let entry = &mut entries[index];
        entry.generation = entry.generation.wrapping_add(1);
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        let half = Rc::new(Half {
            scheduled: Cell::new(Scheduled::No),
            queued: Cell::new(false),
            index,
            item: Item::new(Job::BottomHalf {
                index,
                generation: entry.generation,
            }),
            callback,
        });
        entry.half = Some(Rc::downgrade(&half));
        half
    }

    fn find(&self, index: u32, generation: u32) -> Option<Rc<Half>> {
        let entries = self.entries.borrow();
        let entry = entries.get(index as usize)?;
        if entry.generation != generation {
            return None;
        }
        entry.half.as_ref()?.upgrade()
    }
}

impl State {
    /// Puts what other threads have handed over on the queue.
    #[inline]
    pub(crate) fn take_inbox(&self) {
        self.shared.inbox.take(|item| self.accept(&item));
    }

    /// Ends the hand-over: later calls of other threads fail.
    pub(crate) fn close_inbox(&self) {
        self.shared.inbox.close(|item| self.accept(&item));
    }

    fn accept(&self, item: &Item<Job>) {
        match &item.value {
            Job::Call(call) => {
                let call = call.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(call) = call {
                    self.bottom_halves.once(call);
                }
            }
            Job::BottomHalf { index, generation } => {
                if let Some(half) = self.bottom_halves.find(*index, *generation) {
                    self.bottom_halves.schedule(&half, Scheduled::Normal);
                }
            }
        }
    }

    /// Runs those that are on the queue now, oldest first; what they schedule runs in the next
    /// iteration. In a nested loop the queue still holds what the outer one was about to run, so
    /// that is finished too. True if one ran that was not idle.
    pub(crate) fn run_bottom_halves(&self, ctx: &Context) -> bool {
        let halves = &self.bottom_halves;
        let until = halves.pushed.get();
        if halves.popped.get() == until {
            return false;
        }
        let mut progress = false;
        let mut ran = 0;
        while halves.popped.get() < until {
            let Some(queued) = halves.queue.borrow_mut().pop_front() else {
                break;
            };
            halves.popped.set(halves.popped.get() + 1);
            match queued {
                Queued::Half(half) => {
                    half.queued.set(false);
                    let scheduled = half.scheduled.get();
                    halves.set(&half, Scheduled::No);
                    if scheduled != Scheduled::No {
                        progress |= scheduled == Scheduled::Normal;
                        ran += 1;
                        (half.callback)(ctx);
                    }
                }
                Queued::Once(callback) => {
                    halves.normal.set(halves.normal.get() - 1);
                    progress = true;
                    ran += 1;
                    callback(ctx);
                }
            }
        }
        if ran != 0 {
            self.shared.counters.bottom_halves.add(ran);
        }
        progress
    }

    /// Forgets all that is queued.
    pub(crate) fn drop_bottom_halves(&self) {
        loop {
            // Dropped without the borrow held: what a closure owns may schedule another.
            let queued = self.bottom_halves.queue.borrow_mut().pop_front();
            if queued.is_none() {
                return;
            }
        }
    }
}

/// A reusable bottom half. Dropping it cancels it.
pub struct BottomHalf {
    half: Rc<Half>,
    ctx: WeakContext,
}

impl BottomHalf {
    fn with(&self, f: impl FnOnce(&State, &BottomHalves)) {
        if let Some(ctx) = self.ctx.upgrade() {
            f(ctx.state(), &ctx.state().bottom_halves);
        }
    }

    /// It runs in the next iteration; scheduled several times, it runs once.
    pub fn schedule(&self) {
        self.with(|state, halves| {
            halves.schedule(&self.half, Scheduled::Normal);
            state.kick_outside();
        });
    }

    /// It runs when the loop has nothing else to do, within 10 ms. Does nothing if it is
    /// scheduled already.
    pub fn schedule_idle(&self) {
        self.with(|state, halves| {
            if self.half.scheduled.get() == Scheduled::No {
                halves.schedule(&self.half, Scheduled::Idle);
                state.kick_outside();
            }
        });
    }

    /// It does not run until it is scheduled anew by this thread. Another thread's schedule that
    /// the loop has not seen yet still counts.
    pub fn cancel(&self) {
        self.with(|_, halves| halves.set(&self.half, Scheduled::No));
    }

    /// Whether it will run.
    #[must_use]
    pub fn is_scheduled(&self) -> bool {
        self.half.scheduled.get() != Scheduled::No
    }

    /// A handle for other threads.
    #[must_use]
    pub fn remote(&self) -> Option<RemoteBottomHalf> {
        let ctx = self.ctx.upgrade()?;
        Some(RemoteBottomHalf {
            item: Arc::clone(&self.half.item),
            shared: Arc::clone(&ctx.state().shared),
        })
    }
}

impl Drop for BottomHalf {
    fn drop(&mut self) {
        self.with(|_, halves| {
            halves.set(&self.half, Scheduled::No);
            if let Some(entry) = halves
                .entries
                .borrow_mut()
                .get_mut(self.half.index as usize)
            {
                entry.half = None;
            }
        });
    }
}

impl fmt::Debug for BottomHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BottomHalf")
            .field("scheduled", &self.half.scheduled.get())
            .finish_non_exhaustive()
    }
}

/// Schedules a [`BottomHalf`] from any thread, without an allocation.
#[derive(Debug, Clone)]
pub struct RemoteBottomHalf {
    item: Arc<Item<Job>>,
    shared: Arc<Shared>,
}

impl RemoteBottomHalf {
    /// The bottom half runs in the loop's next iteration. Scheduled several times before, it runs
    /// once, and sees what every scheduling thread has written. Nothing happens when the loop has
    /// ended.
    pub fn schedule(&self) {
        if self.shared.inbox.push(&self.item).is_ok() {
            self.shared.notify();
        }
    }
}

impl Context {
    /// A bottom half that calls `f`, not scheduled yet.
    pub fn bottom_half(&self, f: impl Fn(&Context) + 'static) -> BottomHalf {
        BottomHalf {
            half: self.state().bottom_halves.add(Box::new(f)),
            ctx: self.downgrade(),
        }
    }

    /// Calls `f` once, in the next iteration.
    pub fn defer(&self, f: impl FnOnce(&Context) + 'static) {
        self.state().bottom_halves.once(Box::new(f));
        self.state().kick_outside();
    }
}
