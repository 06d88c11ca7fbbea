//! Trace points, named and parametrised as QEMU's. Off, each costs one predictable branch.
//! [`codec`] and [`mod@file`] are how they are kept.

pub mod codec;
pub mod file;

use std::os::fd::RawFd;

use crate::policy::Reading;
use crate::settings::PollSettings;

/// One event. `ctx` is a number that tells the loops of a process apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TraceEvent<'a> {
    /// Polling begins, for at most `max_ns`; `timeout` (ns, −1 for ever) is what would be slept.
    RunPollHandlersBegin {
        /// The loop.
        ctx: u64,
        /// Longest time to poll, in nanoseconds.
        max_ns: i64,
        /// Timeout of the iteration, in nanoseconds.
        timeout: i64,
    },
    /// Polling ended; `progress` if it found work.
    RunPollHandlersEnd {
        /// The loop.
        ctx: u64,
        /// Whether there is work.
        progress: bool,
        /// Timeout of the iteration from here on, in nanoseconds.
        timeout: i64,
    },
    /// The window grew.
    PollGrow {
        /// The loop.
        ctx: u64,
        /// Window before, in nanoseconds.
        old: i64,
        /// Window now, in nanoseconds.
        new: i64,
    },
    /// The window shrank.
    PollShrink {
        /// The loop.
        ctx: u64,
        /// Window before, in nanoseconds.
        old: i64,
        /// Window now, in nanoseconds.
        new: i64,
    },
    /// A handler joined the poll list.
    PollAdd {
        /// The loop.
        ctx: u64,
        /// The handler.
        node: u64,
        /// Its descriptor.
        fd: RawFd,
        /// The events that brought it there.
        revents: u32,
    },
    /// A handler left the poll list.
    PollRemove {
        /// The loop.
        ctx: u64,
        /// The handler.
        node: u64,
        /// Its descriptor.
        fd: RawFd,
    },
    /// A listed handler is about to be dispatched. Ours, not QEMU's.
    PollDispatch {
        /// The loop.
        ctx: u64,
        /// The handler.
        node: u64,
        /// Events of its descriptor; 0: polling found the work.
        revents: u32,
    },
    /// What the policy saw of an iteration; enough to replay it. Ours, not QEMU's.
    PollObserve {
        /// The loop.
        ctx: u64,
        /// Time polled and waited, in nanoseconds.
        block_ns: i64,
        /// When events were in hand, CLOCK_MONOTONIC in nanoseconds.
        dispatch_ns: i64,
        /// Slots of the listed handlers that were dispatched.
        active: &'a [u32],
    },
    /// What the policy made of it for one of the active handlers. Ours, not QEMU's.
    PollHandler {
        /// The loop.
        ctx: u64,
        /// The handler.
        node: u64,
        /// Its interval or window from now on, in nanoseconds; 0 where the rule keeps none.
        ns: i64,
    },
    /// What the loop has done and used since its start, every 10 ms in which it did something; with
    /// `poll_observe` enough to replay a rule that measures. Ours, not QEMU's.
    PollReading {
        /// The loop.
        ctx: u64,
        /// The numbers.
        reading: Reading,
    },
    /// The rule `auto` measures another window from now on, or has learned from a trial. Ours, not
    /// QEMU's.
    PollTrial {
        /// The loop.
        ctx: u64,
        /// The window that holds, in nanoseconds.
        incumbent_ns: i64,
        /// The window measured from now on, in nanoseconds.
        window_ns: i64,
        /// All windows are compared, the load being new.
        scanning: bool,
        /// Score of the window that holds, in millionths.
        score_micro: i64,
        /// Advantage of the window tried last, in millionths.
        advantage_micro: i64,
        /// Times that another window took over.
        switches: u64,
    },
}

impl TraceEvent<'_> {
    /// The names of all events.
    pub const NAMES: [&'static str; 11] = [
        "run_poll_handlers_begin",
        "run_poll_handlers_end",
        "poll_grow",
        "poll_shrink",
        "poll_add",
        "poll_remove",
        "poll_dispatch",
        "poll_observe",
        "poll_handler",
        "poll_reading",
        "poll_trial",
    ];

    /// Its place in [`Self::NAMES`].
    #[must_use]
    pub fn index(&self) -> usize {
        match self {
            TraceEvent::RunPollHandlersBegin { .. } => 0,
            TraceEvent::RunPollHandlersEnd { .. } => 1,
            TraceEvent::PollGrow { .. } => 2,
            TraceEvent::PollShrink { .. } => 3,
            TraceEvent::PollAdd { .. } => 4,
            TraceEvent::PollRemove { .. } => 5,
            TraceEvent::PollDispatch { .. } => 6,
            TraceEvent::PollObserve { .. } => 7,
            TraceEvent::PollHandler { .. } => 8,
            TraceEvent::PollReading { .. } => 9,
            TraceEvent::PollTrial { .. } => 10,
        }
    }

    /// The name that selects the event.
    #[must_use]
    pub fn name(&self) -> &'static str {
        Self::NAMES[self.index()]
    }
}

/// Where the events of a loop go. Called in the loop's thread, in the middle of an iteration: it
/// must not block and may not call the loop.
pub trait TraceSink {
    /// Takes one event.
    fn event(&self, event: &TraceEvent<'_>);

    /// From now on `node` in events is the handler called `name`, which watches `fd`. Told of the
    /// handlers there are when the sink is set, and of each that is added later.
    fn handler(&self, node: u64, fd: RawFd, name: &str) {
        let _ = (node, fd, name);
    }

    /// The polling settings in effect from now on, as users gave them. Told when the sink is set,
    /// and at each change; the rule then forgets all intervals.
    fn settings(&self, settings: &PollSettings) {
        let _ = settings;
    }
}

#[cfg(test)]
mod tests;
