//! The weighted rule: an estimated interval for each handler, one window for the context.

use super::{Iteration, Policy};
use crate::policy::PolicyKind;
use crate::settings::PollSettings;

/// One handler's estimate.
///
/// While it is inactive its interval grows by every iteration's `block_ns`. That is not done in
/// each iteration: all inactive handlers age alike, so it is enough to remember how much time the
/// context had waited when the interval was last exact. An iteration costs what its active
/// handlers cost, however many are listed.
#[derive(Debug, Clone, Copy, Default)]
struct Interval {
    ns: i64,
    /// `Weighted::waited_ns` at which `ns` was exact.
    since_ns: u128,
    listed: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Weighted {
    max_ns: i64,
    grow: i64,
    shrink: i64,
    weight: u32,
    window_ns: i64,
    /// Sum of every `block_ns`. 128 bits, so that it never wraps and differences stay exact.
    waited_ns: u128,
    intervals: Vec<Interval>,
}

impl Weighted {
    /// The rule under `settings`, with no handler listed.
    #[must_use]
    pub fn new(settings: &PollSettings) -> Self {
        let mut policy = Weighted {
            max_ns: 0,
            grow: 0,
            shrink: 0,
            weight: 0,
            window_ns: 0,
            waited_ns: 0,
            intervals: Vec::new(),
        };
        policy.reset(settings);
        policy
    }

    fn interval_mut(&mut self, slot: u32) -> &mut Interval {
        let slot = slot as usize;
        if slot >= self.intervals.len() {
            self.intervals.resize(slot + 1, Interval::default());
        }
        &mut self.intervals[slot]
    }

    /// The interval as it is now, ageing included.
    fn aged(&self, interval: &Interval) -> i64 {
        if interval.ns == 0 {
            return 0;
        }
        // A slot named twice as active is already at the new sum.
        let waited = self.waited_ns.saturating_sub(interval.since_ns);
        let ns = i64::try_from(waited.saturating_add(interval.ns.unsigned_abs().into()))
            .unwrap_or(i64::MAX);
        // Once it exceeds the limit it is 0 and stays so; the sum only grows, so looking late
        // finds the same.
        if ns > self.max_ns { 0 } else { ns }
    }

    fn adjust_window(&mut self, longest_ns: i64) {
        if longest_ns > self.window_ns {
            let grown = self.window_ns.saturating_mul(self.grow);
            self.window_ns = longest_ns.max(grown).min(self.max_ns);
        } else if longest_ns < self.window_ns / self.shrink {
            self.window_ns /= self.shrink;
        }
    }
}

impl Policy for Weighted {
    fn reset(&mut self, settings: &PollSettings) {
        let settings = settings.effective(PolicyKind::Weighted);
        self.max_ns = settings.poll_max_ns;
        self.grow = settings.poll_grow;
        self.shrink = settings.poll_shrink;
        self.weight = u32::try_from(settings.poll_weight).unwrap_or(63).min(63);
        self.window_ns = 0;
        for interval in &mut self.intervals {
            interval.ns = 0;
        }
    }

    fn list(&mut self, slot: u32) {
        let since_ns = self.waited_ns;
        let interval = self.interval_mut(slot);
        if !interval.listed {
            *interval = Interval {
                ns: 0,
                since_ns,
                listed: true,
            };
        }
    }

    fn unlist(&mut self, slot: u32) {
        *self.interval_mut(slot) = Interval::default();
    }

    fn observe(&mut self, iteration: &Iteration<'_>) {
        if self.max_ns == 0 {
            return;
        }
        let block_ns = iteration.block_ns.max(0);
        let waited_ns = self
            .waited_ns
            .saturating_add(block_ns.unsigned_abs().into());
        let mut longest_ns = -1;
        for &slot in iteration.active {
            let Some(interval) = self.intervals.get(slot as usize) else {
                continue;
            };
            if !interval.listed {
                continue;
            }
            let ns = self.aged(interval);
            let ns = if ns == 0 {
                block_ns
            } else {
                (ns - (ns >> self.weight)).saturating_add(block_ns >> self.weight)
            };
            let ns = if ns > self.max_ns { 0 } else { ns };
            longest_ns = longest_ns.max(ns);
            let interval = &mut self.intervals[slot as usize];
            interval.ns = ns;
            interval.since_ns = waited_ns;
        }
        self.waited_ns = waited_ns;
        if longest_ns >= 0 {
            self.adjust_window(longest_ns);
        }
    }

    fn window_ns(&self) -> i64 {
        self.window_ns
    }

    fn handler_ns(&self, slot: u32) -> i64 {
        self.intervals
            .get(slot as usize)
            .map_or(0, |interval| self.aged(interval))
    }
}
