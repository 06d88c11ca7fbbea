//! Driving a loop from another one, which waits on one descriptor.
//!
//! Nothing is polled this way. `prepare` says how long the outer loop may sleep and makes the
//! descriptor readable when there is something to do; `dispatch` does it and prepares anew.

use std::cell::{Cell, OnceCell};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::{Context, State, setup};
use crate::clock::{now_ns, soonest};
use crate::error::Error;
use crate::ring::TaskRun;

/// What the outer loop watches.
#[derive(Default)]
pub(super) struct Outside {
    /// An epoll set of the monitor's descriptor and the timer's.
    set: OnceCell<OwnedFd>,
    timer: OnceCell<OwnedFd>,
    /// The outer loop may be asleep.
    asleep: Cell<bool>,
}

impl Context {
    /// One descriptor that is readable when [`Self::dispatch`] would do something. From the first
    /// call on the loop is meant to be driven by another one; [`Self::poll`] still works.
    ///
    /// # Errors
    /// With a ring of [`TaskRun::Defer`], whose descriptor tells nothing while nobody enters it
    /// (`EOPNOTSUPP`); or when the system has no more descriptors.
    pub fn pollable_fd(&self) -> Result<RawFd, Error> {
        let state = self.state();
        if state.outside.set.get().is_none() {
            state.open_outside()?;
            self.prepare();
        }
        let set = state.outside.set.get();
        Ok(set.map_or(-1, AsRawFd::as_raw_fd))
    }

    /// Before the outer loop sleeps: submits what waits to be submitted, and tells the longest
    /// time to sleep, in nanoseconds; 0 if there is something to do, −1 for ever.
    pub fn prepare(&self) -> i64 {
        self.state().prepare()
    }

    /// After the outer loop has woken: whether [`Self::dispatch`] has something to do.
    #[must_use]
    pub fn check(&self) -> bool {
        self.state().check()
    }

    /// One iteration without waiting, then [`Self::prepare`]. True if there was progress.
    pub fn dispatch(&self) -> bool {
        let state = self.state();
        state.outside.asleep.set(false);
        let _ = state.shared.notify.sleep_outside(false);
        let progress = self.poll(false);
        if state.outside.set.get().is_some() {
            self.prepare();
        }
        progress
    }
}

impl State {
    fn open_outside(&self) -> Result<(), Error> {
        if !self.must_scan && self.ring().task_run() == TaskRun::Defer {
            let source = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
            return Err(setup("watch a ring with DEFER_TASKRUN")(source));
        }
        let timer = timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )
        .map_err(|errno| setup("timerfd_create")(errno.into()))?;
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)
            .map_err(|errno| setup("epoll_create1")(errno.into()))?;
        let monitor = self.monitor.pollable_fd().map_err(setup("epoll_create1"))?;
        for fd in [monitor, timer.as_raw_fd()] {
            // SAFETY: both are open: the monitor lives as long as we do.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            let data = epoll::EventData::new_u64(0);
            epoll::add(&set, fd, data, epoll::EventFlags::IN)
                .map_err(|errno| setup("epoll_ctl")(errno.into()))?;
        }
        let _ = self.outside.timer.set(timer);
        let _ = self.outside.set.set(set);
        Ok(())
    }

    fn prepare(&self) -> i64 {
        let mut timeout = if self.bottom_halves.any() || !self.shared.inbox.is_empty() {
            0
        } else {
            self.timers.timeout_ns(now_ns())
        };
        if self.bottom_halves.any_idle() {
            timeout = soonest(timeout, 10_000_000);
        }
        if self.leave_poll_mode() {
            timeout = 0;
        }
        self.publish_before_sleep();
        self.outside.asleep.set(true);
        if self.shared.notify.sleep_outside(true) {
            timeout = 0;
        }
        // Submits requests and watches; readiness that is there already shows on the descriptor.
        if !self.must_scan {
            if let Err(error) = self.monitor.wait(0, &mut |_, _| {}) {
                self.monitor_failed(&error);
            }
        } else if let Some(ring) = &self.ring
            && let Err(error) = ring.submit()
        {
            self.monitor_failed(&error);
        }
        if self.ring.as_ref().is_some_and(|ring| ring.pending()) || !self.ready.borrow().is_empty()
        {
            timeout = 0;
        }
        self.set_outside_timer(timeout);
        timeout
    }

    /// Makes the descriptor readable after `timeout` (0: at once, −1: not by itself).
    fn set_outside_timer(&self, timeout: i64) {
        let Some(timer) = self.outside.timer.get() else {
            return;
        };
        // A zero disarms; a nanosecond is as good as now.
        let wait_ns = if timeout < 0 { 0 } else { timeout.max(1) };
        let time = |ns: i64| Timespec {
            tv_sec: ns / 1_000_000_000,
            tv_nsec: ns % 1_000_000_000,
        };
        let value = Itimerspec {
            it_interval: time(0),
            it_value: time(wait_ns),
        };
        // Fails only for values out of range, which `time` does not make.
        let _ = timerfd_settime(timer, TimerfdTimerFlags::empty(), &value);
    }

    fn check(&self) -> bool {
        if self.bottom_halves.any()
            || !self.shared.inbox.is_empty()
            || self.shared.notify.is_notified()
            || self.ring.as_ref().is_some_and(|ring| ring.pending())
            || !self.ready.borrow().is_empty()
            || self.timers.next_ns() <= now_ns()
        {
            return true;
        }
        let Some(set) = self.outside.set.get() else {
            return false;
        };
        let mut fds = [PollFd::new(set, PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut fds, Some(&now)).is_ok_and(|ready| ready != 0)
    }

    /// Code outside an iteration has made work for the loop while the outer one may be asleep.
    #[inline]
    pub(crate) fn kick_outside(&self) {
        if self.outside.asleep.get() && self.depth.get() == 0 {
            self.outside.asleep.set(false);
            self.set_outside_timer(0);
        }
    }
}
