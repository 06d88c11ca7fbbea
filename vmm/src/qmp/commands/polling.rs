//! `x-query-polling`: what each loop's polling does and costs.

use iothread::policy::Experiment;
use iothread::{HandlerStats, Histogram, PolicyKind, now_ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::error::Error;
use super::super::machine::IoThreadView;
use super::Monitor;
use super::qom::alpha;
use crate::threads::thread_cpu_ns;

#[derive(Debug, Deserialize, JsonSchema)]
struct Which {
    /// One iothread only.
    #[serde(default)]
    id: Option<String>,
}

/// A range of values and how many fell into it.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct Bucket {
    from_ns: u64,
    count: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct HandlerInfo {
    name: String,
    /// Times it was dispatched.
    events: u64,
    /// Of these, times that polling found it.
    hits: u64,
    /// Its interval or window.
    ns: u64,
    /// It is on the poll list.
    polled: bool,
}

impl From<HandlerStats> for HandlerInfo {
    fn from(stats: HandlerStats) -> Self {
        Self {
            name: stats.name,
            events: stats.events,
            hits: stats.poll_hits,
            ns: stats.ns,
            polled: stats.polled,
        }
    }
}

/// What the rule `auto` is about.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct ExperimentInfo {
    /// The window that holds, and the other one that is measured now.
    incumbent_ns: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    trial_ns: Option<i64>,
    /// All windows are compared, the load being new.
    scanning: bool,
    /// Logarithm of requests a nanosecond less poll-alpha times that of CPU nanoseconds a request: of the
    /// window that holds, and by how much the one tried last was better.
    score: f64,
    advantage: f64,
    /// Since the start: epochs measured, comparisons of all windows, trials of one, and times that
    /// another took over.
    epochs: u64,
    scans: u64,
    trials: u64,
    switches: u64,
}

impl From<Experiment> for ExperimentInfo {
    fn from(experiment: Experiment) -> Self {
        Self {
            incumbent_ns: experiment.incumbent_ns,
            trial_ns: experiment.trial_ns,
            scanning: experiment.scanning,
            score: experiment.score,
            advantage: experiment.advantage,
            epochs: experiment.epochs,
            scans: experiment.scans,
            trials: experiment.trials,
            switches: experiment.switches,
        }
    }
}

/// A loop's counters since its start, and its state.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct PollingInfo {
    id: String,
    thread_id: i32,
    poll_policy: &'static str,
    /// Under the rule auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    poll_alpha: Option<f64>,
    /// Under the rule auto, once it has measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    experiment: Option<ExperimentInfo>,
    /// CLOCK_MONOTONIC when this was read: differences of two reports over it are rates.
    time_ns: i64,
    /// CPU time of the thread.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_ns: Option<u64>,
    /// The window now.
    window_ns: u64,
    /// Windows polled: hits and misses.
    windows: u64,
    hits: u64,
    misses: u64,
    /// Time spent polling, and the part of it that found nothing.
    poll_ns: u64,
    vain_ns: u64,
    iterations: u64,
    /// Iterations that slept in the kernel.
    blocks: u64,
    /// Times that another thread had to wake the loop.
    wakeups: u64,
    submissions: u64,
    completions: u64,
    enters: u64,
    bottom_halves: u64,
    timers: u64,
    errors: u64,
    /// Time polled and waited, by iteration, and the window in effect; empty ranges are left out.
    block_histogram: Vec<Bucket>,
    window_histogram: Vec<Bucket>,
    handlers: Vec<HandlerInfo>,
}

impl From<IoThreadView> for PollingInfo {
    fn from(view: IoThreadView) -> Self {
        let stats = view.remote.stats();
        let policy = view.remote.policy();
        Self {
            id: view.id,
            thread_id: view.thread_id,
            poll_policy: policy.name(),
            poll_alpha: (policy == PolicyKind::Auto)
                .then(|| alpha(view.remote.settings().poll_alpha_milli)),
            experiment: stats.experiment.map(ExperimentInfo::from),
            time_ns: now_ns(),
            cpu_ns: thread_cpu_ns(view.thread_id),
            window_ns: stats.window_ns,
            windows: stats.poll_hits + stats.poll_misses,
            hits: stats.poll_hits,
            misses: stats.poll_misses,
            poll_ns: stats.poll_ns,
            vain_ns: stats.poll_vain_ns,
            iterations: stats.iterations,
            blocks: stats.blocks,
            wakeups: stats.wakeups,
            submissions: stats.submissions,
            completions: stats.completions,
            enters: stats.enters,
            bottom_halves: stats.bottom_halves,
            timers: stats.timers,
            errors: stats.errors,
            block_histogram: buckets(&stats.block_histogram),
            window_histogram: buckets(&stats.window_histogram),
            handlers: stats.handlers.into_iter().map(HandlerInfo::from).collect(),
        }
    }
}

fn buckets(histogram: &Histogram) -> Vec<Bucket> {
    let filled = histogram.buckets();
    filled
        .map(|(from_ns, count)| Bucket { from_ns, count })
        .collect()
}

pub(super) fn register(monitor: &mut Monitor) {
    monitor.offer("x-query-polling", x_query_polling);
}

fn x_query_polling(monitor: &Monitor, which: Which) -> Result<Vec<PollingInfo>, Error> {
    let mut views = monitor.machine.iothreads();
    views.extend(monitor.machine.main_loop());
    if let Some(id) = which.id {
        views.retain(|view| view.id == id);
        if views.is_empty() {
            return Err(Error::DeviceNotFound(id));
        }
    }
    Ok(views.into_iter().map(PollingInfo::from).collect())
}
