//! The rule of our own: windows are compared by what they bring and cost, measured.
//!
//! Time is cut into epochs of some milliseconds, each spent with one window of a ladder from 0 to
//! `poll-max-ns`. An epoch gives a [score](Weights::score): what was done in a second against the
//! CPU time it took, at the exchange rate `poll-alpha`. There are two phases.
//!
//! - A **scan** goes through the whole ladder again and again, drops the windows that are worse than
//!   the best beyond doubt, and ends when one is left or the differences do not matter. One follows
//!   the start, new settings, and each change of the load.
//! - Then the winner **holds**. Now and then another window is tried for one epoch and compared with
//!   the epochs before and after; the more often that shows nothing new, the less often it is done.
//!   A window takes over that is better by more than the noise.
//!
//! Long waits are no part of an epoch, so an idle loop learns nothing, and after two of them it does
//! not poll. Everything is a function of the numbers given: a recording replays.

mod hold;
mod scan;
mod score;

pub use score::Weights;

use self::hold::{Hold, Step};
use self::scan::Scan;
use super::{Experiment, Iteration, Policy, Reading};
use crate::settings::PollSettings;

/// Least length of an epoch.
const EPOCH_NS: i64 = 10_000_000;
/// Least work in an epoch: with fewer events, their number says little.
const EPOCH_WORK: u64 = 24;
/// A wait that long is no part of a load; nor is one of many windows.
const LONG_NS: i64 = 20_000_000;
const LONG_WINDOWS: i64 = 4;
/// So many long waits in a row, and the loop does not poll.
const RESTING: u32 = 2;
/// The ladder: 0, this, and its doubles up to `poll-max-ns`, but no window longer than the last.
const FIRST_NS: i64 = 4096;
const LAST_NS: i64 = FIRST_NS << 15;

/// See the module.
#[derive(Debug)]
pub struct Auto {
    weights: Weights,
    ladder: Vec<i64>,
    /// The place on the ladder that is measured now.
    place: usize,
    phase: Phase,
    /// Where the epoch began; None: at the next reading.
    from: Option<Reading>,
    /// Long waits in a row.
    long_waits: u32,
    long_ns: i64,
    back_off: BackOff,
    counts: Counts,
}

#[derive(Debug)]
enum Phase {
    Scan(Scan),
    Hold(Hold),
}

/// How often a load that changes all the time may be scanned.
#[derive(Debug, Clone, Copy, Default)]
struct BackOff {
    /// Epochs to go until the next scan.
    left: u32,
    /// How many they will be after it.
    next: u32,
}

/// Epochs between scans, at first and at last.
const BACK_OFF: u32 = 32;
const BACK_OFF_MAX: u32 = 1024;

#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    epochs: u64,
    scans: u64,
    trials: u64,
    switches: u64,
    score: f64,
    advantage: f64,
}

/// The windows to choose from, in ascending order.
fn ladder(max_ns: i64) -> Vec<i64> {
    let max_ns = max_ns.min(LAST_NS);
    let doubles = std::iter::successors(Some(FIRST_NS), |ns| Some(ns * 2));
    let mut ladder = vec![0];
    ladder.extend(doubles.take_while(|ns| *ns < max_ns));
    if max_ns > 0 {
        ladder.push(max_ns);
    }
    ladder
}

impl Auto {
    /// The rule under `settings`.
    #[must_use]
    pub fn new(settings: &PollSettings) -> Self {
        Self::with_weights(settings, Weights::new(settings))
    }

    /// The rule with a score of its own, for comparisons.
    #[must_use]
    pub fn with_weights(settings: &PollSettings, weights: Weights) -> Self {
        let ladder = ladder(settings.poll_max_ns);
        let place = ladder.len() - 1;
        Auto {
            weights,
            place,
            phase: Phase::Scan(Scan::new(ladder.len(), place)),
            long_ns: LONG_NS.max(settings.poll_max_ns.min(LAST_NS) * LONG_WINDOWS),
            ladder,
            from: None,
            long_waits: 0,
            back_off: BackOff::default(),
            counts: Counts {
                scans: 1,
                ..Counts::default()
            },
        }
    }

    fn incumbent(&self) -> usize {
        match &self.phase {
            Phase::Scan(scan) => scan.incumbent(),
            Phase::Hold(hold) => hold.incumbent(),
        }
    }

    /// One epoch at `place` has ended.
    fn learn(&mut self, from: &Reading, to: &Reading) {
        let Some(epoch) = self.weights.score(from, to) else {
            return;
        };
        self.counts.epochs += 1;
        self.back_off.left = self.back_off.left.saturating_sub(1);
        match &mut self.phase {
            Phase::Scan(scan) => {
                let incumbent = scan.incumbent();
                match scan.add(epoch.score) {
                    Ok(next) => self.place = next,
                    Err(winner) => {
                        let changed = winner != incumbent;
                        self.counts.switches += u64::from(changed);
                        self.back_off = BackOff {
                            left: if changed {
                                BACK_OFF
                            } else {
                                self.back_off.next
                            },
                            next: match changed {
                                true => BACK_OFF,
                                false => (self.back_off.next * 2).clamp(BACK_OFF, BACK_OFF_MAX),
                            },
                        };
                        self.hold(winner);
                    }
                }
            }
            Phase::Hold(hold) => match hold.add(&epoch, self.back_off.left == 0) {
                Step::Stay => {
                    self.place = hold.incumbent();
                    self.counts.score = hold.score();
                }
                Step::Try(place) => {
                    self.counts.trials += 1;
                    self.counts.score = hold.score();
                    self.place = place;
                }
                Step::Compared(advantage) => {
                    self.place = hold.incumbent();
                    self.counts.advantage = advantage;
                }
                Step::Switch(place, advantage) => {
                    self.counts.switches += 1;
                    self.counts.advantage = advantage;
                    self.hold(place);
                }
                Step::Changed => {
                    let incumbent = hold.incumbent();
                    self.counts.scans += 1;
                    let scan = Scan::new(self.ladder.len(), incumbent);
                    self.place = scan.first();
                    self.phase = Phase::Scan(scan);
                }
            },
        }
    }

    fn hold(&mut self, place: usize) {
        self.place = place;
        self.phase = Phase::Hold(Hold::new(self.ladder.len(), place));
    }
}

impl Policy for Auto {
    fn reset(&mut self, settings: &PollSettings) {
        let counts = self.counts;
        let weights = self.weights.with(settings);
        *self = Auto::with_weights(settings, weights);
        self.counts = Counts {
            scans: counts.scans + 1,
            score: 0.0,
            advantage: 0.0,
            ..counts
        };
    }

    fn list(&mut self, _slot: u32) {}

    fn unlist(&mut self, _slot: u32) {}

    fn observe(&mut self, iteration: &Iteration<'_>) {
        if iteration.block_ns <= self.long_ns {
            self.long_waits = 0;
            return;
        }
        self.long_waits = self.long_waits.saturating_add(1);
        self.from = None;
    }

    fn window_ns(&self) -> i64 {
        match self.long_waits < RESTING {
            true => self.ladder[self.place],
            false => 0,
        }
    }

    fn handler_ns(&self, _slot: u32) -> i64 {
        0
    }

    fn wants_reading(&self, now_ns: i64) -> bool {
        self.ladder.len() > 1
            && self
                .from
                .is_none_or(|from| now_ns.saturating_sub(from.now_ns) >= EPOCH_NS)
    }

    fn take(&mut self, reading: &Reading) {
        if self.ladder.len() <= 1 {
            return;
        }
        if let Some(from) = self.from {
            let long_enough = reading.now_ns.saturating_sub(from.now_ns) >= EPOCH_NS;
            if !long_enough || reading.work_since(&from) < EPOCH_WORK {
                return;
            }
            self.learn(&from, reading);
        }
        self.from = Some(*reading);
    }

    fn experiment(&self) -> Option<Experiment> {
        let incumbent = self.incumbent();
        Some(Experiment {
            incumbent_ns: self.ladder[incumbent],
            trial_ns: (self.place != incumbent).then(|| self.ladder[self.place]),
            scanning: matches!(self.phase, Phase::Scan(_)),
            score: self.counts.score,
            advantage: self.counts.advantage,
            epochs: self.counts.epochs,
            scans: self.counts.scans,
            trials: self.counts.trials,
            switches: self.counts.switches,
        })
    }
}

#[cfg(test)]
mod tests;
