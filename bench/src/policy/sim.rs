//! One iothread in a closed loop, without a VM: how many requests a second, and for how much CPU.
//!
//! `depth` requests circulate. Each takes a service time; the guest submits it again a while after it
//! has completed. The loop handles an event for a while. Asleep, it pays CPU to wake up and sees
//! the event late; a submission that finds it asleep costs the guest a notification. What a rule
//! learns it learns from times, as in the real loop: this is the event loop's own policy code.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::fmt;
use std::str::FromStr;

use iothread::PollSettings;
use iothread::policy::Iteration;

use super::Rule;
use super::random::Random;

/// What sleeping costs on a host, in nanoseconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Host {
    /// A name for tables.
    pub name: String,
    /// CPU time to go to sleep and to wake up.
    pub sleep_cpu_ns: f64,
    /// From an event to the loop that sleeps running.
    pub wake_late_ns: f64,
    /// What a notification costs the guest, if the loop sleeps.
    pub kick_ns: f64,
}

impl Host {
    /// A host with cheap wake-ups, and a virtual one with dear ones.
    #[must_use]
    pub fn usual() -> [Host; 2] {
        let host = |name: &str, sleep_cpu_ns, wake_late_ns, kick_ns| Host {
            name: name.to_owned(),
            sleep_cpu_ns,
            wake_late_ns,
            kick_ns,
        };
        [
            host("metal", 3000.0, 5000.0, 2500.0),
            host("virt", 18_000.0, 25_000.0, 25_000.0),
        ]
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: {:.1} us of CPU a sleep, {:.1} us late, {:.1} us a kick",
            self.name,
            self.sleep_cpu_ns / 1e3,
            self.wake_late_ns / 1e3,
            self.kick_ns / 1e3
        )
    }
}

/// How service times are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Exponential: a long tail.
    Exp,
    /// Gamma of shape 16: a fast device.
    Gamma,
    /// Within 3 % of the mean.
    Fixed,
    /// Nine of ten take half the mean, the others 5.5 times it.
    Bimodal,
    /// Gamma of shape 4: a slow device.
    Slow,
}

const SERVICES: [(&str, Service); 5] = [
    ("exp", Service::Exp),
    ("gamma", Service::Gamma),
    ("fixed", Service::Fixed),
    ("bimodal", Service::Bimodal),
    ("slow", Service::Slow),
];

/// A load: `gamma:75us:4`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// How service times are spread.
    pub service: Service,
    /// Their scale in nanoseconds.
    pub mean_ns: f64,
    /// Requests that circulate.
    pub depth: u32,
}

impl Load {
    /// The loads of the design's table.
    #[must_use]
    pub fn usual() -> Vec<Load> {
        let load = |service, us: u32, depth| Load {
            service,
            mean_ns: f64::from(us) * 1e3,
            depth,
        };
        vec![
            load(Service::Gamma, 75, 1),
            load(Service::Gamma, 75, 4),
            load(Service::Gamma, 75, 16),
            load(Service::Exp, 80, 8),
            load(Service::Bimodal, 60, 8),
            load(Service::Fixed, 12, 1),
            load(Service::Fixed, 20, 1),
            load(Service::Gamma, 10, 4),
            load(Service::Exp, 80, 32),
            load(Service::Slow, 2000, 4),
        ]
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = SERVICES
            .iter()
            .find(|(_, service)| *service == self.service);
        let name = found.map_or("", |(name, _)| name);
        write!(f, "{name}:{}us:{}", self.mean_ns / 1e3, self.depth)
    }
}

/// A text that is no load.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is no load; write SPREAD:MEAN:DEPTH such as gamma:75us:4, with a spread of exp, gamma, fixed, bimodal or slow"
)]
pub struct UnknownLoad(String);

impl FromStr for Load {
    type Err = UnknownLoad;

    fn from_str(text: &str) -> Result<Self, UnknownLoad> {
        let parts: Vec<&str> = text.split(':').collect();
        let load = || {
            let [service, mean, depth] = parts[..] else {
                return None;
            };
            let service = SERVICES.iter().find(|(name, _)| *name == service)?.1;
            let mean_us: f64 = mean.strip_suffix("us").unwrap_or(mean).parse().ok()?;
            let depth: u32 = depth.parse().ok()?;
            let good = mean_us > 0.0 && mean_us <= 1e7 && (1..=65536).contains(&depth);
            good.then_some(Load {
                service,
                mean_ns: mean_us * 1e3,
                depth,
            })
        };
        load().ok_or_else(|| UnknownLoad(text.to_owned()))
    }
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Requests a second.
    pub iops: f64,
    /// CPU time of the loop a request, in nanoseconds.
    pub cpu_ns: f64,
    /// Mean window over the iterations, in nanoseconds.
    pub window_ns: f64,
}

/// Slots of the two handlers.
const QUEUE: u32 = 0;
const COMPLETION: u32 = 1;

/// Handled at once at most.
const BATCH: usize = 64;
/// From the end of a request to the guest's next, and the loop's work on a request.
const GUEST_NS: f64 = 4000.0;
const WORK_NS: f64 = 2500.0;
/// A look at the rings that finds something.
const LOOK_NS: f64 = 300.0;

/// Something that will happen. The earliest is the greatest, for the heap.
#[derive(Debug, PartialEq)]
struct Event {
    at_ns: f64,
    number: u64,
    slot: u32,
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

struct Events {
    heap: BinaryHeap<Event>,
    number: u64,
}

impl Events {
    fn push(&mut self, at_ns: f64, slot: u32) {
        let number = self.number;
        self.number += 1;
        self.heap.push(Event {
            at_ns,
            number,
            slot,
        });
    }
}

/// Runs `load` on `host` under `rule` for `requests` requests, after a third as many that do not
/// count. `base` has the settings that the rule does not give.
#[must_use]
pub fn run(
    rule: &Rule,
    base: &PollSettings,
    load: &Load,
    host: &Host,
    requests: u32,
    seed: u32,
) -> Outcome {
    let mut policy = rule.build(base);
    let mut random = Random::new(seed);
    let mut events = Events {
        heap: BinaryHeap::new(),
        number: 0,
    };
    for _ in 0..load.depth {
        events.push(random.uniform() * 1000.0, QUEUE);
    }
    let (mut now_ns, mut cpu_ns) = (0.0_f64, 0.0_f64);
    let warm_up = requests / 3;
    let mut done = 0;
    let (mut from_ns, mut from_cpu_ns) = (0.0, 0.0);
    let (mut windows_ns, mut iterations) = (0.0, 0.0);
    let mut active = Vec::new();
    while done < requests + warm_up {
        if done >= warm_up && from_ns == 0.0 {
            (from_ns, from_cpu_ns) = (now_ns, cpu_ns);
        }
        let start_ns = now_ns;
        let window_ns = as_float(policy.window_ns());
        windows_ns += window_ns;
        iterations += 1.0;
        let Some(next) = events.heap.peek() else {
            break;
        };
        if next.at_ns <= now_ns {
            cpu_ns += LOOK_NS;
            now_ns += LOOK_NS;
        } else if next.at_ns <= now_ns + window_ns {
            cpu_ns += next.at_ns - now_ns + LOOK_NS;
            now_ns = next.at_ns + LOOK_NS;
        } else {
            cpu_ns += window_ns + host.sleep_cpu_ns;
            let mut late_ns = next.at_ns + host.wake_late_ns;
            if next.slot == QUEUE {
                late_ns += host.kick_ns;
            }
            now_ns = late_ns.max(now_ns + window_ns + host.sleep_cpu_ns);
        }
        let (block_ns, dispatch_ns) = (as_integer(now_ns - start_ns), as_integer(now_ns));
        let mut batch = Vec::new();
        while batch.len() < BATCH
            && let Some(event) = events.heap.peek()
            && event.at_ns <= now_ns
        {
            batch.push(event.slot);
            events.heap.pop();
        }
        active.clear();
        active.extend(
            [QUEUE, COMPLETION]
                .iter()
                .filter(|slot| batch.contains(slot)),
        );
        for slot in batch {
            now_ns += WORK_NS / 2.0;
            cpu_ns += WORK_NS / 2.0;
            if slot == QUEUE {
                events.push(now_ns + service_ns(&mut random, load), COMPLETION);
            } else {
                done += 1;
                events.push(now_ns + GUEST_NS, QUEUE);
            }
        }
        active.iter().for_each(|slot| policy.list(*slot));
        policy.observe(&Iteration::new(block_ns, dispatch_ns, &active));
    }
    let requests = f64::from(requests);
    Outcome {
        iops: requests / (now_ns - from_ns) * 1e9,
        cpu_ns: (cpu_ns - from_cpu_ns) / requests,
        window_ns: windows_ns / iterations,
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
