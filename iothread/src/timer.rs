//! Timers on CLOCK_MONOTONIC.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use crate::clock::now_ns;
use crate::context::{Context, State, WeakContext};

struct Inner {
    /// Where it stands in the list; meaningful while armed.
    deadline_ns: Cell<i64>,
    sequence: Cell<u64>,
    armed: Cell<bool>,
    callback: Box<dyn Fn(&Context)>,
}

/// The armed timers of a loop.
#[derive(Default)]
pub(crate) struct Timers {
    /// Sorted, the next one last. Few, and armed less often than looked at.
    armed: RefCell<Vec<Rc<Inner>>>,
    /// Deadline of the next one, `i64::MAX` if there is none.
    next_ns: Cell<i64>,
    sequence: Cell<u64>,
}

impl Timers {
    pub(crate) fn new() -> Self {
        Timers {
            next_ns: Cell::new(i64::MAX),
            ..Timers::default()
        }
    }

    /// When the next one is due, on CLOCK_MONOTONIC; `i64::MAX` if none is armed.
    #[inline]
    pub(crate) fn next_ns(&self) -> i64 {
        self.next_ns.get()
    }

    /// Time to the next one from `now`, 0 if it is due, −1 if there is none.
    pub(crate) fn timeout_ns(&self, now_ns: i64) -> i64 {
        match self.next_ns.get() {
            i64::MAX => -1,
            next_ns => next_ns.saturating_sub(now_ns).max(0),
        }
    }

    fn update(&self, armed: &[Rc<Inner>]) {
        let next = armed.last().map_or(i64::MAX, |t| t.deadline_ns.get());
        self.next_ns.set(next);
    }

    fn insert(&self, timer: &Rc<Inner>, deadline_ns: i64) {
        self.remove(timer);
        // i64::MAX means "none"; a nanosecond before the end of time serves as well.
        timer.deadline_ns.set(deadline_ns.min(i64::MAX - 1));
        timer.sequence.set(self.sequence.get());
        self.sequence.set(self.sequence.get() + 1);
        timer.armed.set(true);
        let mut armed = self.armed.borrow_mut();
        let key = (timer.deadline_ns.get(), timer.sequence.get());
        let place = armed.partition_point(|t| (t.deadline_ns.get(), t.sequence.get()) > key);
        armed.insert(place, Rc::clone(timer));
        self.update(&armed);
    }

    fn remove(&self, timer: &Rc<Inner>) {
        if timer.armed.replace(false) {
            let mut armed = self.armed.borrow_mut();
            armed.retain(|other| !Rc::ptr_eq(other, timer));
            self.update(&armed);
        }
    }

    /// Unlinks the next one if it is due and was armed before `sequence`.
    fn pop_due(&self, now_ns: i64, sequence: u64) -> Option<Rc<Inner>> {
        let mut armed = self.armed.borrow_mut();
        let last = armed.last()?;
        if last.deadline_ns.get() > now_ns || last.sequence.get() >= sequence {
            return None;
        }
        let timer = armed.pop()?;
        timer.armed.set(false);
        self.update(&armed);
        Some(timer)
    }
}

impl State {
    /// Fires the timers that are due at `now`, each unlinked before its callback. Those armed by
    /// the callbacks wait for the next iteration, or one that rearms itself in the past would
    /// never let go.
    pub(crate) fn run_timers(&self, ctx: &Context, now_ns: i64) -> bool {
        if self.timers.next_ns() > now_ns {
            return false;
        }
        let sequence = self.timers.sequence.get();
        let mut fired = 0;
        while let Some(timer) = self.timers.pop_due(now_ns, sequence) {
            fired += 1;
            (timer.callback)(ctx);
        }
        self.shared.counters.timers.add(fired);
        fired != 0
    }
}

/// A timer. Dropping it disarms it.
pub struct Timer {
    inner: Rc<Inner>,
    ctx: WeakContext,
}

impl Timer {
    /// Fires once when CLOCK_MONOTONIC reaches `deadline_ns`; at once if that has passed. An armed
    /// timer is moved.
    pub fn arm_at_ns(&self, deadline_ns: i64) {
        if let Some(ctx) = self.ctx.upgrade() {
            ctx.state().timers.insert(&self.inner, deadline_ns);
            ctx.state().kick_outside();
        }
    }

    /// Fires once, `delay_ns` from now.
    pub fn arm_after_ns(&self, delay_ns: i64) {
        self.arm_at_ns(now_ns().saturating_add(delay_ns.max(0)));
    }

    /// Does not fire any more.
    pub fn disarm(&self) {
        if let Some(ctx) = self.ctx.upgrade() {
            ctx.state().timers.remove(&self.inner);
        }
    }

    /// Whether it will fire.
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.inner.armed.get()
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.disarm();
    }
}

impl fmt::Debug for Timer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timer")
            .field("armed", &self.is_armed())
            .field("deadline_ns", &self.inner.deadline_ns.get())
            .finish_non_exhaustive()
    }
}

impl Context {
    /// A timer that calls `f`, not armed yet.
    pub fn timer(&self, f: impl Fn(&Context) + 'static) -> Timer {
        Timer {
            inner: Rc::new(Inner {
                deadline_ns: Cell::new(0),
                sequence: Cell::new(0),
                armed: Cell::new(false),
                callback: Box::new(f),
            }),
            ctx: self.downgrade(),
        }
    }
}
