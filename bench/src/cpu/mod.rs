//! The CPU that a process used between two moments, by thread.
//!
//! Take a [`Snapshot`] at each end of the measured interval and subtract: [`Usage::between`].
//! Run time comes from the scheduler in nanoseconds (`schedstat`); `stat` only divides it into
//! user, system and guest time, since it counts in ticks. Threads may come and go meanwhile.

mod group;
mod snapshot;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use group::Group;
use snapshot::ThreadTimes;
pub use snapshot::{Error, HostTimes, Process, Snapshot};

/// CPU time of a group of threads in an interval.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupUsage {
    /// Which threads.
    pub group: Group,
    /// How many of them were seen.
    pub threads: usize,
    /// All CPU time.
    pub total_ns: u64,
    /// The part in user mode, outside a guest.
    pub user_ns: u64,
    /// The part in the kernel; of a vCPU that is entering, leaving and emulating.
    pub system_ns: u64,
    /// The part in the guest, where the kernel tells it apart.
    pub guest_ns: u64,
    /// Times that a thread gave up the CPU by itself: it slept.
    pub sleeps: u64,
    /// Times that a thread was made to give up the CPU.
    pub preemptions: u64,
}

/// CPU time of a process in an interval, by group of threads.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// Length of the interval.
    pub interval_ns: u64,
    /// In the order of [`Group`], without groups that had no thread.
    pub groups: Vec<GroupUsage>,
    /// All CPUs of the host meanwhile.
    pub host: HostUsage,
}

/// What the host's CPUs did in an interval, in percent of all of them, as `mpstat` prints it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostUsage {
    /// How many CPUs it has.
    pub cpus: usize,
    /// User mode, guests included.
    pub user_percent: f64,
    /// Kernel.
    pub system_percent: f64,
    /// Hardware interrupts.
    pub irq_percent: f64,
    /// Soft interrupts.
    pub soft_percent: f64,
    /// Taken by the hypervisor below.
    pub steal_percent: f64,
    /// Idle, waiting for I/O included.
    pub idle_percent: f64,
}

impl Usage {
    /// What was used from `begin` to `end`.
    ///
    /// A thread that began meanwhile counts from its start. One that ended is seen no more; its
    /// time is in the total of the process and is reported as [`Group::Ended`].
    pub fn between(begin: &Snapshot, end: &Snapshot) -> Usage {
        let mut groups: Vec<GroupUsage> = Vec::new();
        let mut seen_ns = 0;
        for now in &end.threads {
            let before = begin
                .threads
                .iter()
                .find(|t| t.tid == now.tid && t.start_ticks == now.start_ticks);
            let used = thread_usage(before, now, end.tick_ns);
            seen_ns += used.total_ns;
            match groups.iter_mut().find(|g| g.group == used.group) {
                Some(group) => add(group, &used),
                None => groups.push(used),
            }
        }
        let process_ns = (end.process_ticks.saturating_sub(begin.process_ticks)) * end.tick_ns;
        let vanished = begin
            .threads
            .iter()
            .filter(|t| {
                !end.threads
                    .iter()
                    .any(|n| n.tid == t.tid && n.start_ticks == t.start_ticks)
            })
            .count();
        // Ticks of both snapshots may be off by one each.
        let ended_ns = process_ns.saturating_sub(seen_ns);
        if vanished > 0 || ended_ns > 3 * end.tick_ns {
            groups.push(GroupUsage {
                group: Group::Ended,
                threads: vanished,
                total_ns: ended_ns,
                user_ns: 0,
                system_ns: 0,
                guest_ns: 0,
                sleeps: 0,
                preemptions: 0,
            });
        }
        groups.sort_by(|a, b| a.group.cmp(&b.group));
        Usage {
            interval_ns: nanoseconds(end.at.saturating_duration_since(begin.at)),
            groups,
            host: HostUsage::between(&begin.host, &end.host),
        }
    }

    /// CPU time of all threads.
    pub fn total_ns(&self) -> u64 {
        self.groups.iter().map(|g| g.total_ns).sum()
    }

    /// CPU time of the threads for which `which` holds.
    pub fn of_ns(&self, which: impl Fn(&Group) -> bool) -> u64 {
        self.groups
            .iter()
            .filter(|g| which(&g.group))
            .map(|g| g.total_ns)
            .sum()
    }

    /// A CPU time of this interval in percent of one CPU.
    pub fn percent(&self, cpu_ns: u64) -> f64 {
        if self.interval_ns == 0 {
            return 0.0;
        }
        100.0 * cpu_ns as f64 / self.interval_ns as f64
    }
}

impl HostUsage {
    fn between(begin: &HostTimes, end: &HostTimes) -> HostUsage {
        let spent = |f: fn(&HostTimes) -> u64| f(end).saturating_sub(f(begin)) as f64;
        let parts = [
            // Guest time is part of user time.
            spent(|t| t.user + t.nice),
            spent(|t| t.system),
            spent(|t| t.irq),
            spent(|t| t.soft),
            spent(|t| t.steal),
            spent(|t| t.idle + t.iowait),
        ];
        let all: f64 = parts.iter().sum();
        let percent = |i: usize| {
            if all > 0.0 {
                100.0 * parts[i] / all
            } else {
                0.0
            }
        };
        HostUsage {
            cpus: end.cpus,
            user_percent: percent(0),
            system_percent: percent(1),
            irq_percent: percent(2),
            soft_percent: percent(3),
            steal_percent: percent(4),
            idle_percent: percent(5),
        }
    }
}

fn thread_usage(before: Option<&ThreadTimes>, now: &ThreadTimes, tick_ns: u64) -> GroupUsage {
    let spent = |f: fn(&ThreadTimes) -> u64| f(now).saturating_sub(before.map_or(0, f));
    let user_all = spent(|t| t.user_ticks);
    let guest = spent(|t| t.guest_ticks).min(user_all);
    let (user, system) = (user_all - guest, spent(|t| t.system_ticks));
    let ticks = user + system + guest;
    let total_ns = match (now.run_ns, before.map(|t| t.run_ns)) {
        (Some(end), None) => end,
        (Some(end), Some(Some(begin))) => end.saturating_sub(begin),
        _ => ticks * tick_ns,
    };
    let part = |n: u64| {
        let share = u128::from(total_ns) * u128::from(n) / u128::from(ticks.max(1));
        u64::try_from(share).unwrap_or(u64::MAX)
    };
    GroupUsage {
        group: Group::of(&now.name, now.is_main),
        threads: 1,
        total_ns,
        user_ns: part(user),
        system_ns: part(system),
        guest_ns: part(guest),
        sleeps: spent(|t| t.sleeps),
        preemptions: spent(|t| t.preemptions),
    }
}

fn add(sum: &mut GroupUsage, used: &GroupUsage) {
    sum.threads += used.threads;
    sum.total_ns += used.total_ns;
    sum.user_ns += used.user_ns;
    sum.system_ns += used.system_ns;
    sum.guest_ns += used.guest_ns;
    sum.sleeps += used.sleeps;
    sum.preemptions += used.preemptions;
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
