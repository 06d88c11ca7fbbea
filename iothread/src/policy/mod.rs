//! Polling policies: from how long the loop waited, how long shall it poll next?
//!
//! A policy sees numbers only, never descriptors or clocks. A recorded sequence of
//! [`Iteration`]s therefore replays through it and gives the same windows.

mod auto;
mod context;
mod fixed;
mod per_handler;
mod weighted;

pub use auto::{Auto, Weights};
pub use context::ContextWide;
pub use fixed::{Always, Off};
pub use per_handler::PerHandler;
pub use weighted::Weighted;

use std::fmt;
use std::str::FromStr;

use crate::settings::PollSettings;

/// What the loop tells its policy after an iteration.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Iteration<'a> {
    /// Time polled and waited, callbacks excluded, in nanoseconds; never negative.
    pub block_ns: i64,
    /// CLOCK_MONOTONIC when events were in hand, in nanoseconds.
    pub dispatch_ns: i64,
    /// Slots of the listed handlers that were dispatched in this iteration.
    pub active: &'a [u32],
}

impl<'a> Iteration<'a> {
    /// An iteration that waited `block_ns`, began to dispatch at `dispatch_ns` and dispatched the
    /// handlers `active`.
    #[must_use]
    pub fn new(block_ns: i64, dispatch_ns: i64, active: &'a [u32]) -> Self {
        Iteration {
            block_ns,
            dispatch_ns,
            active,
        }
    }
}

/// What the loop has done and used since its start, read now and then for rules that measure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Reading {
    /// CLOCK_MONOTONIC, in nanoseconds.
    pub now_ns: i64,
    /// CLOCK_THREAD_CPUTIME_ID of the loop's thread, in nanoseconds.
    pub cpu_ns: i64,
    /// Completions of requests on the loop's ring.
    pub completions: u64,
    /// Dispatches of handlers that can be polled.
    pub events: u64,
    /// Of these, those that their descriptor told of: somebody had to notify.
    pub kicks: u64,
    /// Iterations that slept in the kernel.
    pub blocks: u64,
}

impl Reading {
    /// What was done since `from`: requests; events where none is a request of the ring.
    #[must_use]
    pub fn work_since(&self, from: &Reading) -> u64 {
        match self.completions.saturating_sub(from.completions) {
            0 => self.events.saturating_sub(from.events),
            completions => completions,
        }
    }
}

/// What a rule that compares windows is about.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct Experiment {
    /// The window that holds, in nanoseconds.
    pub incumbent_ns: i64,
    /// The other one that is measured now, in nanoseconds.
    pub trial_ns: Option<i64>,
    /// All windows are compared, the load being new.
    pub scanning: bool,
    /// Score of the window that holds, in its last epoch.
    pub score: f64,
    /// By how much the window tried last scored better, in the mean of its trials.
    pub advantage: f64,
    /// Epochs measured.
    pub epochs: u64,
    /// Comparisons of all windows.
    pub scans: u64,
    /// Trials of one window.
    pub trials: u64,
    /// Times that another window took over.
    pub switches: u64,
}

/// A rule that sets the time to poll before sleeping.
///
/// Handlers are known by small slot numbers. One that is not listed has an interval of 0.
pub trait Policy: fmt::Debug {
    /// Takes new settings (as users gave them, zeros included) and forgets every interval and the
    /// window. Which handlers are listed stays.
    fn reset(&mut self, settings: &PollSettings);
    /// The handler in `slot` is polled from now on. It starts at 0; if it is listed already,
    /// nothing changes.
    fn list(&mut self, slot: u32);
    /// The handler in `slot` is no longer polled.
    fn unlist(&mut self, slot: u32);
    /// Learns from one iteration.
    fn observe(&mut self, iteration: &Iteration<'_>);
    /// How long to poll before sleeping, in nanoseconds.
    fn window_ns(&self) -> i64;
    /// The interval or window of one handler, in nanoseconds; 0 where the rule keeps none.
    fn handler_ns(&self, slot: u32) -> i64;
    /// Whether [`Self::take`] shall be called at `now_ns`. The loop asks once a millisecond.
    fn wants_reading(&self, now_ns: i64) -> bool {
        let _ = now_ns;
        false
    }
    /// Learns from what the loop has read of itself. More readings than were asked for do no harm.
    fn take(&mut self, reading: &Reading) {
        let _ = reading;
    }
    /// What is compared now; None where nothing is.
    fn experiment(&self) -> Option<Experiment> {
        None
    }
}

/// The rules there are; values of `poll-policy=`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PolicyKind {
    /// Weighted intervals of handlers, one window a context (QEMU, 2026).
    #[default]
    Weighted,
    /// A window a handler; the longest counts (QEMU 10.0).
    PerHandler,
    /// One window for the context, adjusted in every iteration (QEMU 9.x).
    Context,
    /// Never poll.
    Off,
    /// Always poll for `poll-max-ns`.
    Always,
    /// The window with the best score, found by experiment.
    Auto,
}

impl PolicyKind {
    /// All rules, in the order of the documentation.
    pub const ALL: [PolicyKind; 6] = [
        PolicyKind::Weighted,
        PolicyKind::PerHandler,
        PolicyKind::Context,
        PolicyKind::Off,
        PolicyKind::Always,
        PolicyKind::Auto,
    ];

    /// The name users write.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Weighted => "weighted",
            PolicyKind::PerHandler => "per-handler",
            PolicyKind::Context => "context",
            PolicyKind::Off => "off",
            PolicyKind::Always => "always",
            PolicyKind::Auto => "auto",
        }
    }

    /// A policy of this kind under `settings`.
    #[must_use]
    pub fn build(self, settings: &PollSettings) -> Box<dyn Policy> {
        match self {
            PolicyKind::Weighted => Box::new(Weighted::new(settings)),
            PolicyKind::PerHandler => Box::new(PerHandler::new(settings)),
            PolicyKind::Context => Box::new(ContextWide::new(settings)),
            PolicyKind::Off => Box::new(Off),
            PolicyKind::Always => Box::new(Always::new(settings)),
            PolicyKind::Auto => Box::new(Auto::new(settings)),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A `poll-policy=` that names no rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("poll-policy={0} is unknown; use weighted, per-handler, context, off, always or auto")]
pub struct UnknownPolicy(pub String);

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL
            .into_iter()
            .find(|kind| kind.name() == name)
            .ok_or_else(|| UnknownPolicy(name.into()))
    }
}

/// The table that the two older rules share: the next value of `ns` after a wait of `block_ns`.
/// `shrink` 0 drops to 0, `grow` 0 doubles.
fn adjust_by_table(ns: i64, block_ns: i64, settings: &PollSettings) -> i64 {
    /// First window of a handler that had none.
    const FIRST_NS: i64 = 4000;
    let max = settings.poll_max_ns;
    if block_ns <= ns {
        ns
    } else if block_ns > max {
        ns.checked_div(settings.poll_shrink).unwrap_or(0)
    } else if ns < max && block_ns < max {
        let grow = if settings.poll_grow == 0 {
            2
        } else {
            settings.poll_grow
        };
        let grown = if ns == 0 {
            FIRST_NS
        } else {
            ns.saturating_mul(grow)
        };
        grown.min(max)
    } else {
        ns
    }
}

#[cfg(test)]
mod tests;
