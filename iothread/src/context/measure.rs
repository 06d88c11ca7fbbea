//! What the loop reads of itself, for rules that compare windows by measurement.

use super::State;
use crate::clock::thread_cpu_ns;
use crate::policy::{Experiment, Reading};
use crate::trace::TraceEvent;

/// How often a trace gets a reading although the rule wants none: other rules may be replayed.
const TRACE_NS: i64 = 10_000_000;

impl State {
    /// Reads what the policy wants to know, if it does. Called once a millisecond: rules that do not
    /// measure cost nothing.
    #[cold]
    pub(super) fn measure(&self, now_ns: i64) {
        let traced = self.tracing.get() && now_ns - self.read_ns.get() >= TRACE_NS;
        if !self.policy.borrow().wants_reading(now_ns) && !traced {
            return;
        }
        self.read_ns.set(now_ns);
        let reading = self.reading(now_ns);
        self.trace(|ctx| TraceEvent::PollReading { ctx, reading });
        let (before, after, window_ns) = {
            let mut policy = self.policy.borrow_mut();
            let before = policy.experiment();
            policy.take(&reading);
            (before, policy.experiment(), policy.window_ns())
        };
        if let Some(experiment) = after {
            self.shared.counters.experiment.show(&experiment);
            if before.is_none_or(|before| before != experiment) {
                self.trace(|ctx| trial(ctx, &experiment));
            }
        }
        self.set_window(window_ns);
    }

    /// The only call of the thread's CPU clock.
    fn reading(&self, now_ns: i64) -> Reading {
        let counters = &self.shared.counters;
        let (mut events, mut kicks) = (0, 0);
        let nodes = self.nodes.borrow();
        for node in nodes.iter().flatten().filter(|node| node.polled) {
            let counters = node.stats.get();
            kicks += counters.fd_events.get();
            events += counters.hits.get();
        }
        Reading {
            now_ns,
            cpu_ns: thread_cpu_ns(),
            completions: counters.completions.get(),
            events: events + kicks,
            kicks,
            blocks: counters.blocks.get(),
        }
    }
}

fn trial(ctx: u64, experiment: &Experiment) -> TraceEvent<'static> {
    #[allow(clippy::cast_possible_truncation)] // Scores are small; a wild one saturates.
    let micro = |value: f64| (value * 1e6) as i64;
    TraceEvent::PollTrial {
        ctx,
        incumbent_ns: experiment.incumbent_ns,
        window_ns: experiment.trial_ns.unwrap_or(experiment.incumbent_ns),
        scanning: experiment.scanning,
        score_micro: micro(experiment.score),
        advantage_micro: micro(experiment.advantage),
        switches: experiment.switches,
    }
}
