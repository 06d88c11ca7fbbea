//! One iothread in a closed loop, without a VM: how many requests a second, and for how much CPU.
//!
//! `depth` requests circulate. Each takes a service time; the guest submits it again a while after it
//! has completed. The loop handles an event for a while. Asleep, it pays CPU to wake up and sees
//! the event late; a submission that finds it asleep costs the guest a notification. What a rule
//! learns it learns from times, as in the real loop: this is the event loop's own policy code.

mod load;
mod world;

use std::fmt;

use iothread::PollSettings;

pub use self::load::{Load, Pace, Service, UnknownLoad};
pub use self::world::{Totals, World};
use super::Rule;

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

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Requests a second.
    pub iops: f64,
    /// CPU time of the loop a request, in nanoseconds.
    pub cpu_ns: f64,
    /// Mean window over the iterations, in nanoseconds.
    pub window_ns: f64,
    /// Mean time from the guest's submission to the completion, in nanoseconds.
    pub latency_ns: f64,
    /// Notifications of the guest a request.
    pub kicks: f64,
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
    let mut world = World::new(rule.build(base), load, host, seed);
    world.run_until_done(requests / 3);
    let from = world.totals();
    world.run_until_done(requests / 3 + requests);
    let to = world.totals();
    Outcome {
        // As in the model in Python: the time before included.
        window_ns: to.since(&Totals::default()).window_ns,
        ..to.since(&from)
    }
}

#[cfg(test)]
mod tests;
