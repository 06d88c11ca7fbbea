//! The loop, the guest and the disk, one event after another.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use iothread::policy::{Iteration, Policy, Reading};

use super::load::{Load, Pace, Service};
use super::{Host, Outcome};
use crate::policy::random::Random;

/// Slots of the two handlers.
const QUEUE: u32 = 0;
const COMPLETION: u32 = 1;

/// Handled at once at most.
const BATCH: usize = 64;
/// The loop's work on a request.
const WORK_NS: f64 = 2500.0;
/// A look at the rings that finds something.
const LOOK_NS: f64 = 300.0;
/// How often the loop asks its rule whether it wants a reading.
const ASK_NS: f64 = 1e6;

/// Something that will happen. The earliest is the greatest, for the heap.
#[derive(Debug, PartialEq)]
struct Event {
    at_ns: f64,
    number: u64,
    slot: u32,
    /// When the guest submitted the request.
    since_ns: f64,
    /// Which load the request belongs to: those of a former one are not repeated.
    load: u32,
}

impl Eq for Event {}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> Ordering {
        let by_time = other.at_ns.total_cmp(&self.at_ns);
        by_time.then(other.number.cmp(&self.number))
    }
}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[derive(Default)]
struct Events {
    heap: BinaryHeap<Event>,
    number: u64,
}

impl Events {
    fn push(&mut self, at_ns: f64, slot: u32, since_ns: f64, load: u32) {
        let number = self.number;
        self.number += 1;
        self.heap.push(Event {
            at_ns,
            number,
            slot,
            since_ns,
            load,
        });
    }
}

/// Sums since the start.
#[derive(Debug, Clone, Copy, Default)]
pub struct Totals {
    /// The time, in nanoseconds.
    pub now_ns: f64,
    /// CPU time of the loop, in nanoseconds.
    pub cpu_ns: f64,
    /// Requests completed.
    pub done: u32,
    /// From submission to completion as the guest sees them, summed, in nanoseconds.
    pub latency_ns: f64,
    /// Notifications that found the loop asleep.
    pub kicks: u32,
    /// Windows, summed over the iterations, in nanoseconds.
    windows_ns: f64,
    iterations: f64,
}

impl Totals {
    /// What happened since `from`.
    #[must_use]
    pub fn since(&self, from: &Totals) -> Outcome {
        let done = f64::from(self.done - from.done);
        Outcome {
            iops: done / (self.now_ns - from.now_ns) * 1e9,
            cpu_ns: (self.cpu_ns - from.cpu_ns) / done,
            window_ns: (self.windows_ns - from.windows_ns) / (self.iterations - from.iterations),
            latency_ns: (self.latency_ns - from.latency_ns) / done,
            kicks: f64::from(self.kicks - from.kicks) / done,
        }
    }
}

/// A simulation under way.
pub struct World {
    /// The rule.
    pub policy: Box<dyn Policy>,
    host: Host,
    random: Random,
    events: Events,
    load: Load,
    /// Number of the load among those there were.
    loads: u32,
    totals: Totals,
    reading: Reading,
    asked_ns: f64,
    active: Vec<u32>,
}

impl World {
    /// A loop under `policy` on `host`; `load` begins now.
    #[must_use]
    pub fn new(policy: Box<dyn Policy>, load: &Load, host: &Host, seed: u32) -> Self {
        let mut world = World {
            policy,
            host: host.clone(),
            random: Random::new(seed),
            events: Events::default(),
            load: *load,
            loads: 0,
            totals: Totals::default(),
            reading: Reading::default(),
            asked_ns: 0.0,
            active: Vec::new(),
        };
        world.change(load);
        world
    }

    /// From now on the guest makes this load. Requests of the one before complete.
    pub fn change(&mut self, load: &Load) {
        self.load = *load;
        self.loads += 1;
        let now_ns = self.totals.now_ns;
        let starts = match load.pace {
            Pace::Every(_) => 1,
            _ => load.depth,
        };
        for _ in 0..starts {
            let at_ns = now_ns + self.random.uniform() * 1000.0;
            self.events.push(at_ns, QUEUE, at_ns, self.loads);
        }
    }

    /// No load until that time.
    pub fn rest(&mut self, until_ns: f64) {
        self.loads += 1;
        while self
            .events
            .heap
            .peek()
            .is_some_and(|next| next.at_ns < until_ns)
        {
            self.step();
        }
        self.totals.now_ns = self.totals.now_ns.max(until_ns);
    }

    /// Sums up to now.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// One iteration of the loop. False if nothing will ever happen.
    pub fn step(&mut self) -> bool {
        let start_ns = self.totals.now_ns;
        let window_ns = as_float(self.policy.window_ns());
        let Some(next) = self.events.heap.peek() else {
            return false;
        };
        let (next_ns, next_slot) = (next.at_ns, next.slot);
        let totals = &mut self.totals;
        totals.windows_ns += window_ns;
        totals.iterations += 1.0;
        let mut slept = false;
        if next_ns <= totals.now_ns {
            totals.cpu_ns += LOOK_NS;
            totals.now_ns += LOOK_NS;
        } else if next_ns <= totals.now_ns + window_ns {
            totals.cpu_ns += next_ns - totals.now_ns + LOOK_NS;
            totals.now_ns = next_ns + LOOK_NS;
        } else {
            slept = true;
            totals.cpu_ns += window_ns + self.host.sleep_cpu_ns;
            let mut late_ns = next_ns + self.host.wake_late_ns;
            if next_slot == QUEUE {
                late_ns += self.host.kick_ns;
                totals.kicks += 1;
            }
            totals.now_ns = late_ns.max(totals.now_ns + window_ns + self.host.sleep_cpu_ns);
        }
        let now_ns = totals.now_ns;
        let (block_ns, dispatch_ns) = (as_integer(now_ns - start_ns), as_integer(now_ns));
        self.reading.blocks += u64::from(slept);
        self.reading.kicks += u64::from(slept && next_slot == QUEUE);
        self.dispatch();
        let mut active = std::mem::take(&mut self.active);
        active.sort_unstable();
        active.dedup();
        active.iter().for_each(|slot| self.policy.list(*slot));
        self.reading.events += active.len() as u64;
        self.policy
            .observe(&Iteration::new(block_ns, dispatch_ns, &active));
        active.clear();
        self.active = active;
        if now_ns - self.asked_ns >= ASK_NS {
            self.asked_ns = now_ns;
            if self.policy.wants_reading(dispatch_ns) {
                self.reading.now_ns = as_integer(self.totals.now_ns);
                self.reading.cpu_ns = as_integer(self.totals.cpu_ns);
                self.policy.take(&self.reading);
            }
        }
        true
    }

    /// Handles what has happened.
    fn dispatch(&mut self) {
        let mut batch = Vec::new();
        while batch.len() < BATCH
            && let Some(event) = self.events.heap.peek()
            && event.at_ns <= self.totals.now_ns
        {
            batch.extend(self.events.heap.pop());
        }
        for event in batch {
            self.active.push(event.slot);
            self.totals.now_ns += WORK_NS / 2.0;
            self.totals.cpu_ns += WORK_NS / 2.0;
            let now_ns = self.totals.now_ns;
            if event.slot == QUEUE {
                let end_ns = now_ns + service_ns(&mut self.random, &self.load);
                self.events
                    .push(end_ns, COMPLETION, event.since_ns, event.load);
                if let Pace::Every(period_ns) = self.load.pace
                    && event.load == self.loads
                {
                    let at_ns = event.since_ns + period_ns;
                    self.events.push(at_ns, QUEUE, at_ns, event.load);
                }
            } else {
                self.totals.done += 1;
                self.totals.latency_ns += now_ns - event.since_ns;
                self.reading.completions += 1;
                let next_ns = self.load.next_ns(now_ns);
                if event.load == self.loads && next_ns.is_finite() {
                    self.events.push(next_ns, QUEUE, next_ns, event.load);
                }
            }
        }
    }

    /// Goes on until so many requests have completed since the start.
    pub fn run_until_done(&mut self, requests: u32) {
        while self.totals.done < requests && self.step() {}
    }

    /// Goes on for so long.
    pub fn run_for(&mut self, ns: f64) {
        let until_ns = self.totals.now_ns + ns;
        while self.totals.now_ns < until_ns && self.step() {}
    }
}

fn service_ns(random: &mut Random, load: &Load) -> f64 {
    let mean_ns = load.mean_ns;
    match load.service {
        Service::Exp => random.exponential(mean_ns),
        Service::Gamma => random.gamma(16.0, mean_ns / 16.0),
        Service::Fixed => mean_ns * (0.97 + 0.06 * random.uniform()),
        Service::Bimodal if random.uniform() < 0.9 => mean_ns * 0.5,
        Service::Bimodal => mean_ns * 5.5,
        Service::Slow => random.gamma(4.0, mean_ns / 4.0),
    }
}

/// Times here are far below 2^53 ns.
#[allow(clippy::cast_precision_loss)]
fn as_float(ns: i64) -> f64 {
    ns as f64
}

#[allow(clippy::cast_possible_truncation)] // As above.
fn as_integer(ns: f64) -> i64 {
    ns as i64
}
