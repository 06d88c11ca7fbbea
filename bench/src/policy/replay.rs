//! What rules would have made of what a loop recorded.
//!
//! The waits are those that the loop had under its own rule: a replay tells what windows another
//! rule comes to from the same waits, not how the waits would have changed. For that there is
//! [`super::sim`].

use std::fmt::Write as _;

use hdrhistogram::Histogram;
use iothread::PollSettings;
use iothread::policy::{Iteration, Policy, Reading};
use iothread::trace::TraceEvent;
use iothread::trace::codec::Entry;
use serde::Serialize;

use super::Rule;
use crate::report::text::{lines, plain_table};
use crate::trace::read::{Outcome, Traced, Visitor};

/// A rule that follows a thread.
#[derive(Debug)]
struct Follower {
    policy: Box<dyn Policy>,
    iterations: u64,
    changes: u64,
    /// Waits that ended within the window.
    within: u64,
    polled_ns: u64,
    vain_ns: u64,
    windows: Histogram<u64>,
    windows_ns: u128,
    /// Intervals, and windows tried, in the recording that the rule comes to as well, and those it does not.
    same: u64,
    other: u64,
}

/// What a rule made of a thread's recording.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Row {
    /// The thread.
    pub thread: String,
    /// The rule.
    pub rule: String,
    /// Iterations seen.
    pub iterations: u64,
    /// Times that the window changed.
    pub changes: u64,
    /// Mean window over the iterations, in nanoseconds.
    pub window_mean_ns: u64,
    /// Half of them had at most this window.
    pub window_p50_ns: u64,
    /// Nine of ten had at most this window.
    pub window_p90_ns: u64,
    /// Part of the waits that ended within the window.
    pub within: f64,
    /// Time that would have been polled.
    pub polled_ns: u64,
    /// Part of it before a wait that was longer than the window.
    pub vain_ns: u64,
    /// Of the intervals in the recording, the part that the rule comes to as well; None if it has
    /// none.
    pub same: Option<f64>,
}

/// Replays rules over a recording.
pub struct Replay {
    /// None: the rule of the recording.
    rules: Vec<Option<Rule>>,
    threads: Vec<Vec<Follower>>,
}

impl Replay {
    /// The recording's own rule, then `rules`.
    #[must_use]
    pub fn new(rules: &[Rule]) -> Self {
        let own = std::iter::once(None);
        Replay {
            rules: own.chain(rules.iter().cloned().map(Some)).collect(),
            threads: Vec::new(),
        }
    }

    fn followers(&mut self, traced: &Traced) -> &mut Vec<Follower> {
        if self.threads.len() <= traced.number {
            self.threads.resize_with(traced.number + 1, Vec::new);
        }
        let base = traced.settings.unwrap_or_default();
        let followers = &mut self.threads[traced.number];
        if followers.is_empty() {
            let rules = self.rules.iter();
            followers
                .extend(rules.map(|rule| Follower::new(&resolve(rule.as_ref(), traced), &base)));
        }
        followers
    }

    /// A row for each thread that iterated, and each rule.
    #[must_use]
    pub fn rows(&self, outcome: &Outcome) -> Vec<Row> {
        let mut rows = Vec::new();
        for (traced, followers) in outcome.threads.iter().zip(&self.threads) {
            for (rule, follower) in self.rules.iter().zip(followers) {
                if follower.iterations != 0 {
                    let name = match rule {
                        None => format!("{} (recorded)", traced.thread.policy),
                        Some(rule) => rule.to_string(),
                    };
                    rows.push(follower.row(&traced.thread.name, name));
                }
            }
        }
        rows
    }
}

/// The rule to follow; the recording's own if none is given.
fn resolve(rule: Option<&Rule>, traced: &Traced) -> Rule {
    let own = || Rule::plain(traced.thread.policy.parse().unwrap_or_default());
    rule.cloned().unwrap_or_else(own)
}

impl Follower {
    fn new(rule: &Rule, base: &PollSettings) -> Self {
        Follower {
            policy: rule.build(base),
            iterations: 0,
            changes: 0,
            within: 0,
            polled_ns: 0,
            vain_ns: 0,
            windows: Histogram::new(3).expect("three significant digits are valid"),
            windows_ns: 0,
            same: 0,
            other: 0,
        }
    }

    fn observe(&mut self, iteration: &Iteration<'_>) {
        let window_ns = self.policy.window_ns();
        let (block, window) = (iteration.block_ns.max(0), window_ns.max(0));
        self.iterations += 1;
        self.polled_ns += block.min(window).unsigned_abs();
        if block <= window {
            self.within += 1;
        } else {
            self.vain_ns += window.unsigned_abs();
        }
        self.windows_ns += u128::from(window.unsigned_abs());
        // Grows as needed.
        let _ = self.windows.record(window.unsigned_abs());
        // A recording that began in the middle does not tell who is listed.
        iteration
            .active
            .iter()
            .for_each(|slot| self.policy.list(*slot));
        self.policy.observe(iteration);
        self.changes += u64::from(self.policy.window_ns() != window_ns);
    }

    fn take(&mut self, reading: &Reading) {
        let window_ns = self.policy.window_ns();
        self.policy.take(reading);
        self.changes += u64::from(self.policy.window_ns() != window_ns);
    }

    fn count_same(&mut self, same: bool) {
        match same {
            true => self.same += 1,
            false => self.other += 1,
        }
    }

    #[allow(clippy::cast_precision_loss)] // Parts of a whole.
    fn row(&self, thread: &str, rule: String) -> Row {
        let part = |count: u64, all: u64| count as f64 / all as f64;
        let compared = self.same + self.other;
        Row {
            thread: thread.to_owned(),
            rule,
            iterations: self.iterations,
            changes: self.changes,
            window_mean_ns: u64::try_from(self.windows_ns / u128::from(self.iterations))
                .unwrap_or(u64::MAX),
            window_p50_ns: self.windows.value_at_quantile(0.5),
            window_p90_ns: self.windows.value_at_quantile(0.9),
            within: part(self.within, self.iterations),
            polled_ns: self.polled_ns,
            vain_ns: self.vain_ns,
            same: (compared != 0).then(|| part(self.same, compared)),
        }
    }
}

impl Visitor for Replay {
    fn entry(&mut self, traced: &Traced, _time_ns: i64, entry: &Entry<'_>) {
        let rules = self.rules.clone();
        let followers = self.followers(traced);
        match *entry {
            Entry::Settings {
                settings,
                again: false,
            } => {
                for (follower, rule) in followers.iter_mut().zip(&rules) {
                    let rule = resolve(rule.as_ref(), traced);
                    follower.policy.reset(&rule.settings(&settings));
                }
            }
            Entry::Event(event) => followers.iter_mut().for_each(|follower| match event {
                TraceEvent::PollAdd { node, .. } => follower.policy.list(slot(node)),
                TraceEvent::PollRemove { node, .. } => follower.policy.unlist(slot(node)),
                TraceEvent::PollObserve {
                    block_ns,
                    dispatch_ns,
                    active,
                    ..
                } => follower.observe(&Iteration::new(block_ns, dispatch_ns, active)),
                TraceEvent::PollReading { reading, .. } => follower.take(&reading),
                TraceEvent::PollTrial { window_ns, .. } => {
                    if let Some(experiment) = follower.policy.experiment() {
                        let tried_ns = experiment.trial_ns.unwrap_or(experiment.incumbent_ns);
                        follower.count_same(tried_ns == window_ns);
                    }
                }
                TraceEvent::PollHandler { node, ns, .. } => {
                    follower.count_same(follower.policy.handler_ns(slot(node)) == ns);
                }
                _ => {}
            }),
            _ => {}
        }
    }
}

/// Numbers of handlers are slots, which are small.
fn slot(node: u64) -> u32 {
    u32::try_from(node).unwrap_or(u32::MAX)
}

/// The rows as a table.
#[must_use]
pub fn text(rows: &[Row]) -> String {
    let mut header = vec!["thread", "rule", "iterations", "changes", "window mean"];
    header.extend(["p50", "p90", "within", "polled s", "in vain s", "same"]);
    let mut table = plain_table(&header, 2);
    for row in rows {
        let mut cells = vec![row.thread.clone(), row.rule.clone()];
        let counts = [row.iterations, row.changes, row.window_mean_ns];
        let more = [row.window_p50_ns, row.window_p90_ns];
        cells.extend(counts.iter().chain(&more).map(u64::to_string));
        cells.push(format!("{:.1}%", row.within * 100.0));
        #[allow(clippy::cast_precision_loss)] // Three digits are shown.
        cells.extend([row.polled_ns, row.vain_ns].map(|ns| format!("{:.3}", ns as f64 / 1e9)));
        let same = row.same.map(|same| format!("{:.1}%", same * 100.0));
        cells.push(same.unwrap_or_else(|| "-".into()));
        table.add_row(cells);
    }
    let mut text = lines(&table);
    // Writing to a string does not fail.
    let _ = write!(
        text,
        "\nwithin: waits that end within the window; same: recorded intervals that the rule comes to as well.\n\
         The waits are those of the recorded rule; policy sim tells how they change under another.\n"
    );
    text
}
