//! What a recording amounts to: counts by thread and handler, and windows.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use hdrhistogram::Histogram;
use iothread::PolicyKind;
use iothread::trace::TraceEvent;
use iothread::trace::codec::Entry;
use serde::Serialize;

use super::read::{Outcome, Traced, Visitor};
use crate::report::text::{lines, plain_table};

/// Numbers of nanoseconds: how many, and where they lie. Percentiles to three digits.
#[derive(Debug)]
struct Spread {
    histogram: Histogram<u64>,
    sum_ns: u128,
}

impl Default for Spread {
    fn default() -> Self {
        Spread {
            histogram: Histogram::new(3).expect("three significant digits are valid"),
            sum_ns: 0,
        }
    }
}

impl Spread {
    fn add(&mut self, ns: i64) {
        let ns = u64::try_from(ns).unwrap_or(0);
        self.sum_ns += u128::from(ns);
        // Grows as needed; times are far below what it can hold.
        let _ = self.histogram.record(ns);
    }

    fn read(&self) -> Option<Window> {
        let samples = self.histogram.len();
        (samples != 0).then(|| Window {
            samples,
            mean_ns: u64::try_from(self.sum_ns / u128::from(samples)).unwrap_or(u64::MAX),
            p50_ns: self.histogram.value_at_quantile(0.5),
            p90_ns: self.histogram.value_at_quantile(0.9),
        })
    }
}

/// Where the numbers lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Window {
    /// How many there are.
    pub samples: u64,
    /// Their mean.
    pub mean_ns: u64,
    /// Half of them are at most this.
    pub p50_ns: u64,
    /// Nine of ten are at most this.
    pub p90_ns: u64,
}

/// What a thread did.
#[derive(Debug, Serialize)]
pub struct ThreadRow {
    /// Its name.
    pub thread: String,
    /// Its polling rule.
    pub policy: String,
    /// Time between its first and last entry.
    pub duration_ns: u64,
    /// Entries.
    pub events: u64,
    /// Iterations that the rule observed.
    pub iterations: u64,
    /// Times that it polled.
    pub polls: u64,
    /// Those that found work.
    pub hits: u64,
    /// Those that did not.
    pub misses: u64,
    /// Times that its window grew.
    pub grows: u64,
    /// Times that it shrank.
    pub shrinks: u64,
    /// The window that was in effect in each iteration, as far as it is known.
    pub window: Option<Window>,
    /// Entries that are missing.
    pub lost: u64,
}

/// What a handler of a thread did.
#[derive(Debug, Serialize)]
pub struct HandlerRow {
    /// The thread.
    pub thread: String,
    /// The handler.
    pub handler: String,
    /// Times that it was dispatched while it was on the poll list.
    pub events: u64,
    /// Times that the loop polled while it was on the list.
    pub polls: u64,
    /// Those that found work of it.
    pub hits: u64,
    /// Those that did not.
    pub misses: u64,
}

/// The intervals, or windows, of a handler under one weight.
#[derive(Debug, Serialize)]
pub struct WindowRow {
    /// The thread.
    pub thread: String,
    /// The handler.
    pub handler: String,
    /// poll-weight in effect; None where the rule has none.
    pub weight: Option<i64>,
    /// After each iteration in which it was active.
    #[serde(flatten)]
    pub window: Window,
}

/// All of it.
#[derive(Debug, Serialize)]
pub struct Summary {
    /// By thread.
    pub threads: Vec<ThreadRow>,
    /// By thread and handler.
    pub handlers: Vec<HandlerRow>,
    /// By thread, handler and weight.
    pub windows: Vec<WindowRow>,
    /// What a reader of the numbers should know.
    pub notes: Vec<String>,
}

#[derive(Debug, Default)]
struct HandlerCount {
    listed: bool,
    events: u64,
    polls: u64,
    hits: u64,
}

#[derive(Debug, Default)]
struct ThreadCount {
    times: Option<(i64, i64)>,
    events: u64,
    iterations: u64,
    polls: u64,
    hits: u64,
    misses: u64,
    grows: u64,
    shrinks: u64,
    lost: u64,
    window_ns: Option<i64>,
    windows: Spread,
    /// By name: a handler's number is used again.
    handlers: BTreeMap<String, HandlerCount>,
    intervals: BTreeMap<(String, Option<i64>), Spread>,
}

/// Counts a recording.
#[derive(Debug, Default)]
pub struct Counter {
    threads: Vec<ThreadCount>,
}

impl Visitor for Counter {
    fn entry(&mut self, traced: &Traced, time_ns: i64, entry: &Entry<'_>) {
        if self.threads.len() <= traced.number {
            self.threads
                .resize_with(traced.number + 1, ThreadCount::default);
        }
        let count = &mut self.threads[traced.number];
        let event = match entry {
            Entry::Event(event) => event,
            Entry::Lost(lost) => {
                count.lost += lost;
                return;
            }
            Entry::Settings { .. } | Entry::Handler { .. } => return,
        };
        count.events += 1;
        let first_ns = count.times.map_or(time_ns, |(first_ns, _)| first_ns);
        count.times = Some((first_ns, time_ns));
        match *event {
            TraceEvent::RunPollHandlersBegin { .. } => {
                count.polls += 1;
                let handlers = count.handlers.values_mut();
                handlers
                    .filter(|handler| handler.listed)
                    .for_each(|handler| handler.polls += 1);
            }
            TraceEvent::RunPollHandlersEnd { progress: true, .. } => count.hits += 1,
            TraceEvent::RunPollHandlersEnd { .. } => count.misses += 1,
            TraceEvent::PollGrow { new, .. } => {
                count.grows += 1;
                count.window_ns = Some(new);
            }
            TraceEvent::PollShrink { new, .. } => {
                count.shrinks += 1;
                count.window_ns = Some(new);
            }
            TraceEvent::PollAdd { node, .. } => count.handler(traced, node).listed = true,
            TraceEvent::PollRemove { node, .. } => count.handler(traced, node).listed = false,
            TraceEvent::PollDispatch { node, revents, .. } => {
                let handler = count.handler(traced, node);
                handler.listed = true;
                handler.events += 1;
                handler.hits += u64::from(revents == 0);
            }
            TraceEvent::PollObserve { .. } => {
                // The window before: its change, if there is one, comes after this.
                if let Some(window_ns) = count.window_ns {
                    count.windows.add(window_ns);
                }
                count.iterations += 1;
            }
            TraceEvent::PollHandler { node, ns, .. } => {
                let key = (traced.handler(node), weight(traced));
                count.intervals.entry(key).or_default().add(ns);
            }
            _ => {}
        }
    }
}

/// poll-weight in effect, for the rule that has it.
fn weight(traced: &Traced) -> Option<i64> {
    let policy = traced.thread.policy.parse().ok()?;
    let settings = traced.settings?.effective(policy);
    (policy == PolicyKind::Weighted).then_some(settings.poll_weight)
}

impl ThreadCount {
    fn handler(&mut self, traced: &Traced, node: u64) -> &mut HandlerCount {
        self.handlers.entry(traced.handler(node)).or_default()
    }
}

impl Counter {
    /// What was counted.
    pub fn summary(&self, outcome: &Outcome) -> Summary {
        let mut summary = Summary {
            threads: Vec::new(),
            handlers: Vec::new(),
            windows: Vec::new(),
            notes: outcome.notes.clone(),
        };
        for (traced, count) in outcome.threads.iter().zip(&self.threads) {
            let thread = &traced.thread.name;
            let (first_ns, last_ns) = count.times.unwrap_or_default();
            let lost = count.lost.max(traced.lost);
            summary.threads.push(ThreadRow {
                thread: thread.clone(),
                policy: traced.thread.policy.clone(),
                duration_ns: last_ns.abs_diff(first_ns),
                events: count.events,
                iterations: count.iterations,
                polls: count.polls,
                hits: count.hits,
                misses: count.misses,
                grows: count.grows,
                shrinks: count.shrinks,
                window: count.windows.read(),
                lost,
            });
            let busy = count.handlers.iter();
            summary
                .handlers
                .extend(busy.map(|(name, handler)| HandlerRow {
                    thread: thread.clone(),
                    handler: name.clone(),
                    events: handler.events,
                    polls: handler.polls,
                    hits: handler.hits,
                    misses: handler.polls.saturating_sub(handler.hits),
                }));
            for ((handler, weight), spread) in &count.intervals {
                if let Some(window) = spread.read() {
                    summary.windows.push(WindowRow {
                        thread: thread.clone(),
                        handler: handler.clone(),
                        weight: *weight,
                        window,
                    });
                }
            }
            if lost != 0 {
                summary.notes.push(format!(
                    "{lost} of {thread}'s entries were lost for want of time to write them; select fewer events"
                ));
            }
        }
        summary
    }
}

impl Summary {
    /// The tables.
    pub fn text(&self) -> String {
        let mut header = vec!["thread", "policy", "seconds", "events", "iterations"];
        header.extend(["polls", "hits", "misses", "grows", "shrinks"]);
        header.extend(["window mean", "p50", "p90", "lost"]);
        let mut table = plain_table(&header, 2);
        for row in &self.threads {
            let mut cells = vec![row.thread.clone(), row.policy.clone()];
            // Seconds with three digits: the loss of precision is not seen.
            #[allow(clippy::cast_precision_loss)]
            cells.push(format!("{:.3}", row.duration_ns as f64 / 1e9));
            let counts = [row.events, row.iterations, row.polls, row.hits];
            let more = [row.misses, row.grows, row.shrinks];
            cells.extend(counts.iter().chain(&more).map(u64::to_string));
            cells.extend(window_cells(row.window));
            cells.push(row.lost.to_string());
            table.add_row(cells);
        }
        let mut text = lines(&table);
        if self.threads.is_empty() {
            text = "no loop was recorded\n".to_owned();
        }
        if !self.handlers.is_empty() {
            let header = ["thread", "handler", "events", "polls", "hits", "misses"];
            let mut table = plain_table(&header, 2);
            for row in &self.handlers {
                let mut cells = vec![row.thread.clone(), row.handler.clone()];
                let counts = [row.events, row.polls, row.hits, row.misses];
                cells.extend(counts.iter().map(u64::to_string));
                table.add_row(cells);
            }
            text = format!("{text}\n{}", lines(&table));
        }
        if !self.windows.is_empty() {
            let header = [
                "thread", "handler", "weight", "samples", "mean", "p50", "p90",
            ];
            let mut table = plain_table(&header, 2);
            for row in &self.windows {
                let mut cells = vec![row.thread.clone(), row.handler.clone()];
                cells.push(row.weight.map_or("-".into(), |weight| weight.to_string()));
                cells.push(row.window.samples.to_string());
                cells.extend(window_cells(Some(row.window)));
                table.add_row(cells);
            }
            text = format!("{text}\npoll windows in nanoseconds\n{}", lines(&table));
        }
        for note in &self.notes {
            // Writing to a string does not fail.
            let _ = write!(text, "\nnote: {note}\n");
        }
        text
    }
}

fn window_cells(window: Option<Window>) -> Vec<String> {
    match window {
        Some(window) => [window.mean_ns, window.p50_ns, window.p90_ns]
            .iter()
            .map(u64::to_string)
            .collect(),
        None => vec!["-".into(); 3],
    }
}
