//! What an epoch was worth.

use crate::policy::Reading;
use crate::settings::PollSettings;

/// What counts how much in a score.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weights {
    /// How much the CPU time of an event counts against events in a second: `poll-alpha`.
    pub alpha: f64,
    /// CPU time that a notification costs the guest, in nanoseconds; it is added to the loop's own.
    pub kick_ns: f64,
    /// How late a sleep makes an event, in nanoseconds; so much is added to the time of the epoch for
    /// each sleep. It stands for the latency that a load of fixed rate does not show.
    pub late_ns: f64,
}

/// An epoch in numbers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Epoch {
    pub(super) score: f64,
    /// Logarithms of events a second and of CPU time an event: by these a change of load shows.
    pub(super) rate: f64,
    pub(super) cost: f64,
}

impl Weights {
    /// Those of the rule under `settings`.
    #[must_use]
    pub fn new(settings: &PollSettings) -> Self {
        Weights {
            alpha: alpha(settings),
            kick_ns: 0.0,
            late_ns: 0.0,
        }
    }

    /// The same with the `poll-alpha` of `settings`.
    #[must_use]
    pub fn with(self, settings: &PollSettings) -> Self {
        Weights {
            alpha: alpha(settings),
            ..self
        }
    }

    /// None if nothing was done between the readings.
    #[allow(clippy::cast_precision_loss)] // Differences over an epoch are far below 2^53.
    pub(super) fn score(&self, from: &Reading, to: &Reading) -> Option<Epoch> {
        let since = |to: u64, from: u64| to.saturating_sub(from) as f64;
        let work = to.work_since(from);
        if work == 0 {
            return None;
        }
        let work = work as f64;
        let elapsed_ns = to.now_ns.saturating_sub(from.now_ns).max(1) as f64;
        let late_ns = self.late_ns * since(to.blocks, from.blocks);
        let own_ns = to.cpu_ns.saturating_sub(from.cpu_ns).max(1) as f64;
        let cpu_ns = own_ns + self.kick_ns * since(to.kicks, from.kicks);
        let rate = (work / elapsed_ns).ln();
        let cost = (cpu_ns / work).ln();
        Some(Epoch {
            score: (work / (elapsed_ns + late_ns)).ln() - self.alpha * cost,
            rate,
            cost,
        })
    }
}

#[allow(clippy::cast_precision_loss)] // At most 10000.
fn alpha(settings: &PollSettings) -> f64 {
    settings.poll_alpha_milli as f64 / 1000.0
}

/// Mean and standard error of some differences.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Mean {
    count: f64,
    mean: f64,
    /// Sum of the squared distances from the mean.
    squares: f64,
}

impl Mean {
    pub(super) fn add(&mut self, value: f64) {
        self.count += 1.0;
        let distance = value - self.mean;
        self.mean += distance / self.count;
        self.squares += distance * (value - self.mean);
    }

    /// Lets what was seen count less.
    pub(super) fn fade(&mut self, most: f64) {
        if self.count > most {
            self.squares *= most / self.count;
            self.count = most;
        }
    }

    pub(super) fn count(&self) -> f64 {
        self.count
    }

    pub(super) fn mean(&self) -> f64 {
        self.mean
    }

    /// Standard error of the mean. With few values the spread may be small by chance: one of
    /// `LEAST` is taken to have been seen besides.
    pub(super) fn error(&self) -> f64 {
        /// Spread of the score from one epoch to the next on a machine that does nothing else.
        const LEAST: f64 = 0.01;
        if self.count < 2.0 {
            return f64::INFINITY;
        }
        let variance = (self.squares + LEAST * LEAST) / (self.count - 1.0);
        (variance / self.count).sqrt()
    }
}
