//! A window holds; others are tried now and then.

use super::scan::SAME;
use super::score::{Epoch, Mean};

/// Epochs between trials: at first, and when many have shown nothing.
const GAP: u32 = 6;
const GAP_MAX: u32 = 128;
/// Epochs between trials of a window that looks better.
const GAP_PROMISING: u32 = 1;
/// Comparisons that a window needs to take over.
const TRIALS: f64 = 4.0;
/// And by how many standard errors it must be better.
const SURE: f64 = 2.5;
/// A window that looks better has so many trials in close succession; then it waits its turn again.
const TRIALS_IN_A_ROW: u32 = 16;
/// Older comparisons count no more than so many.
const MEMORY: f64 = 8.0;
/// So many epochs in a row unlike the ones before are another load.
const UNLIKE: u32 = 3;
/// How many mean deviations, and how much besides, make an epoch unlike.
const DEVIATIONS: f64 = 4.0;
const BESIDES: f64 = 0.1;

/// What is to be done with the next epoch.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Step {
    /// Nothing.
    Stay,
    /// Try this window.
    Try(usize),
    /// A trial is over; the window tried was better by so much in the mean.
    Compared(f64),
    /// This window takes over, being better by so much.
    Switch(usize, f64),
    /// The load is another.
    Changed,
}

/// A number as it usually is.
#[derive(Debug, Clone, Copy, Default)]
struct Usual {
    epochs: f64,
    mean: f64,
    deviation: f64,
}

impl Usual {
    fn add(&mut self, value: f64) {
        self.epochs = (self.epochs + 1.0).min(16.0);
        let distance = value - self.mean;
        self.mean += distance / self.epochs;
        if self.epochs > 1.0 {
            self.deviation += (distance.abs() - self.deviation) / (self.epochs - 1.0);
        }
    }

    /// Which way the value is out of the usual: 0 if it is not.
    fn unlike(&self, value: f64) -> i8 {
        let distance = value - self.mean;
        let usual = self.epochs < 4.0 || distance.abs() <= DEVIATIONS * self.deviation + BESIDES;
        match (usual, distance > 0.0) {
            (true, _) => 0,
            (false, true) => 1,
            (false, false) => -1,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Hold {
    incumbent: usize,
    /// How each window compares with the incumbent.
    others: Vec<Mean>,
    rate: Usual,
    cost: Usual,
    /// Epochs in a row unlike the usual, and which way.
    unlike: (u32, i8, i8),
    /// Score of the last epoch of the incumbent.
    before: f64,
    /// The window that was tried last, with its score until it is compared.
    tried: usize,
    trial: Option<f64>,
    under_trial: bool,
    gap: u32,
    until_trial: u32,
    /// Trials in close succession so far.
    in_a_row: u32,
    turn: usize,
}

impl Hold {
    pub(super) fn new(windows: usize, incumbent: usize) -> Self {
        Hold {
            incumbent,
            others: vec![Mean::default(); windows],
            rate: Usual::default(),
            cost: Usual::default(),
            unlike: (0, 0, 0),
            before: 0.0,
            tried: incumbent,
            trial: None,
            under_trial: false,
            gap: GAP,
            until_trial: GAP,
            in_a_row: 0,
            turn: 0,
        }
    }

    pub(super) fn incumbent(&self) -> usize {
        self.incumbent
    }

    /// Of the last epoch that was no trial.
    pub(super) fn score(&self) -> f64 {
        self.before
    }

    /// An epoch has ended: a trial if the last step said so.
    pub(super) fn add(&mut self, epoch: &Epoch, may_scan: bool) -> Step {
        if self.under_trial {
            self.under_trial = false;
            self.trial = Some(epoch.score);
            return Step::Stay;
        }
        if self.is_unlike(epoch) {
            // What was tried in the middle of a change compares nothing.
            self.trial = None;
            self.before = epoch.score;
            return match self.unlike.0 >= UNLIKE && may_scan {
                true => Step::Changed,
                false => Step::Stay,
            };
        }
        self.rate.add(epoch.rate);
        self.cost.add(epoch.cost);
        let before = std::mem::replace(&mut self.before, epoch.score);
        if let Some(trial) = self.trial.take() {
            return self.compare(trial - f64::midpoint(before, epoch.score));
        }
        self.until_trial = self.until_trial.saturating_sub(1);
        if self.until_trial != 0 || self.others.len() < 2 {
            return Step::Stay;
        }
        self.under_trial = true;
        if self.in_a_row == 0 {
            self.tried = self.next_trial();
        }
        Step::Try(self.tried)
    }

    fn is_unlike(&mut self, epoch: &Epoch) -> bool {
        let ways = (self.rate.unlike(epoch.rate), self.cost.unlike(epoch.cost));
        let (row, rate, cost) = self.unlike;
        if ways == (0, 0) {
            self.unlike = (0, 0, 0);
            return false;
        }
        let same_way = (ways.0 != 0 && ways.0 == rate) || (ways.1 != 0 && ways.1 == cost);
        self.unlike = (if same_way { row + 1 } else { 1 }, ways.0, ways.1);
        true
    }

    /// The window tried was better by `difference` this time.
    fn compare(&mut self, difference: f64) -> Step {
        let mean = &mut self.others[self.tried];
        mean.add(difference);
        mean.fade(MEMORY);
        let better = mean.mean();
        if mean.count() >= TRIALS && better > SAME && better > SURE * mean.error() {
            return Step::Switch(self.tried, better);
        }
        if self.is_promising(self.tried) && self.in_a_row < TRIALS_IN_A_ROW {
            self.in_a_row += 1;
            self.until_trial = GAP_PROMISING;
        } else {
            self.in_a_row = 0;
            self.gap = (self.gap * 3 / 2).min(GAP_MAX);
            self.until_trial = self.gap;
        }
        Step::Compared(better)
    }

    /// Whether it may well be better, so that it is worth finding out soon.
    fn is_promising(&self, place: usize) -> bool {
        let mean = &self.others[place];
        let close = mean.count() < 2.0 || mean.mean() > mean.error();
        place != self.incumbent && mean.count() > 0.0 && mean.mean() > SAME && close
    }

    /// Neighbours in turn, and each third time one that is further away.
    fn next_trial(&mut self) -> usize {
        let windows = self.others.len();
        self.turn += 1;
        let (below, above) = (self.incumbent.checked_sub(1), self.incumbent + 1);
        let above = (above < windows).then_some(above);
        let neighbour = match self.turn % 3 {
            1 => below.or(above),
            2 => above.or(below),
            _ => None,
        };
        neighbour.unwrap_or_else(|| {
            // All others in turn, the further ones too.
            let step = 1 + (self.turn / 3) % (windows - 1);
            (self.incumbent + step) % windows
        })
    }
}
