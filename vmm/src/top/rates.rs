//! The difference of two samples over the time between them.

use super::sample::{Disk, Experiment, Handler, Loop, Sample};

/// What is drawn.
#[derive(Debug, Clone, Default)]
pub struct Rates {
    /// The VM's state.
    pub status: String,
    /// Time between the samples, in seconds.
    pub seconds: f64,
    /// CPU time of each vCPU, in percent of one CPU.
    pub vcpus: Vec<(u32, Option<f64>)>,
    /// The loops.
    pub loops: Vec<LoopRates>,
    /// The disks.
    pub disks: Vec<DiskRates>,
}

/// A loop's.
#[derive(Debug, Clone, Default)]
pub struct LoopRates {
    pub id: String,
    /// CPU time, in percent of one CPU.
    pub cpu_percent: Option<f64>,
    /// Disk requests finished a second.
    pub iops: f64,
    /// The window at the second sample.
    pub window_ns: u64,
    /// Windows that found work, in percent of all; none if there was no window.
    pub hit_percent: Option<f64>,
    /// Time polled, and polled in vain, in percent of the time.
    pub poll_percent: f64,
    pub vain_percent: f64,
    /// Times a second that it slept, and that it was woken by another thread.
    pub blocks: f64,
    pub wakeups: f64,
    /// What the rule `auto` is about, as at the second sample.
    pub experiment: Option<Experiment>,
    pub handlers: Vec<HandlerRates>,
}

/// A handler's.
#[derive(Debug, Clone, Default)]
pub struct HandlerRates {
    pub name: String,
    pub events: f64,
    pub hit_percent: Option<f64>,
    pub ns: u64,
    pub polled: bool,
}

/// A disk's, a second.
#[derive(Debug, Clone, Default)]
pub struct DiskRates {
    pub id: String,
    pub loops: Vec<String>,
    pub reads: f64,
    pub read_bytes: f64,
    pub writes: f64,
    pub written_bytes: f64,
    pub flushes: f64,
    pub unmaps: f64,
    /// Failed since the VM's start: a count, no rate.
    pub failed: u64,
}

impl DiskRates {
    /// All requests.
    pub fn iops(&self) -> f64 {
        self.reads + self.writes + self.flushes + self.unmaps
    }
}

/// What was added. A counter that went backwards belongs to another loop or disk of the same name.
fn added(before: u64, now: u64) -> f64 {
    now.checked_sub(before).unwrap_or(now) as f64
}

fn percent(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| 100.0 * part / whole)
}

impl Rates {
    /// The rates between two samples. What is new in the second is counted from nothing.
    pub fn between(before: &Sample, now: &Sample) -> Self {
        let nothing = Loop::default();
        let earlier = |id: &str| before.loops.iter().find(|one| one.id == id);
        // The clock of the loops serves for all.
        let seconds = now.loops.iter().find_map(|one| {
            let elapsed_ns = one.time_ns - earlier(&one.id)?.time_ns;
            (elapsed_ns > 0).then_some(elapsed_ns as f64 / 1e9)
        });
        let seconds = seconds.unwrap_or(1.0);
        let no_disk = Disk::default();
        let disks = now.disks.iter().map(|disk| {
            let former = before.disks.iter().find(|one| one.id == disk.id);
            disk_rates(former.unwrap_or(&no_disk), disk, seconds)
        });
        let disks: Vec<DiskRates> = disks.collect();
        let loops = now.loops.iter().map(|one| {
            let former = earlier(&one.id).unwrap_or(&nothing);
            loop_rates(former, one, seconds, &disks)
        });
        let loops = loops.collect();
        let vcpus = now.vcpus.iter().map(|vcpu| {
            let mut former = before.vcpus.iter();
            let former = former.find(|one| one.cpu_index == vcpu.cpu_index);
            let used = vcpu.cpu_ns.zip(former.and_then(|one| one.cpu_ns));
            let share = used.map(|(now, before)| added(before, now) / (seconds * 1e7));
            (vcpu.cpu_index, share)
        });
        Self {
            status: now.status.clone(),
            seconds,
            vcpus: vcpus.collect(),
            loops,
            disks,
        }
    }
}

fn loop_rates(before: &Loop, now: &Loop, seconds: f64, disks: &[DiskRates]) -> LoopRates {
    let hits = added(before.hits, now.hits);
    let misses = added(before.misses, now.misses);
    let rate = |before, now| added(before, now) / seconds;
    let share = |before, now| added(before, now) / (seconds * 1e7);
    // Engines other than io_uring complete past the ring: there the disks that are only here count.
    let own = disks.iter().filter(|disk| disk.loops == [now.id.as_str()]);
    let own: f64 = own.map(DiskRates::iops).sum();
    let handlers = now.handlers.iter().map(|handler| {
        let former = before.handlers.iter().find(|one| one.name == handler.name);
        handler_rates(former.unwrap_or(&Handler::default()), handler, seconds)
    });
    LoopRates {
        id: now.id.clone(),
        cpu_percent: now.cpu_ns.map(|ns| share(before.cpu_ns.unwrap_or(0), ns)),
        iops: rate(before.completions, now.completions).max(own),
        window_ns: now.window_ns,
        experiment: now.experiment,
        hit_percent: percent(hits, hits + misses),
        poll_percent: share(before.poll_ns, now.poll_ns),
        vain_percent: share(before.vain_ns, now.vain_ns),
        blocks: rate(before.blocks, now.blocks),
        wakeups: rate(before.wakeups, now.wakeups),
        handlers: handlers.collect(),
    }
}

fn handler_rates(before: &Handler, now: &Handler, seconds: f64) -> HandlerRates {
    let events = added(before.events, now.events);
    HandlerRates {
        name: now.name.clone(),
        events: events / seconds,
        hit_percent: percent(added(before.hits, now.hits), events),
        ns: now.ns,
        polled: now.polled,
    }
}

fn disk_rates(before: &Disk, now: &Disk, seconds: f64) -> DiskRates {
    let rate = |before, now| added(before, now) / seconds;
    let (old, new) = (&before.stats, &now.stats);
    DiskRates {
        id: now.id.clone(),
        loops: now.loops.clone(),
        reads: rate(old.rd_operations, new.rd_operations),
        read_bytes: rate(old.rd_bytes, new.rd_bytes),
        writes: rate(old.wr_operations, new.wr_operations),
        written_bytes: rate(old.wr_bytes, new.wr_bytes),
        flushes: rate(old.flush_operations, new.flush_operations),
        unmaps: rate(old.unmap_operations, new.unmap_operations),
        failed: new.failed_rd_operations + new.failed_wr_operations,
    }
}

#[cfg(test)]
mod tests {
    use super::super::sample::{DiskStats, Vcpu};
    use super::*;

    fn sample(seconds: i64, factor: u64) -> Sample {
        let disk = |id: &str, loops: &[&str], reads: u64| Disk {
            id: id.to_owned(),
            loops: loops.iter().map(ToString::to_string).collect(),
            stats: DiskStats {
                rd_operations: reads * factor,
                rd_bytes: reads * factor * 4096,
                ..DiskStats::default()
            },
        };
        let io0 = Loop {
            id: "io0".to_owned(),
            time_ns: seconds * 1_000_000_000,
            cpu_ns: Some(1_000_000_000 * factor),
            window_ns: 1234,
            hits: 90 * factor,
            misses: 10 * factor,
            poll_ns: 800_000_000 * factor,
            vain_ns: 100_000_000 * factor,
            blocks: 20 * factor,
            wakeups: 4 * factor,
            completions: 300 * factor,
            experiment: None,
            handlers: vec![Handler {
                name: "q0".to_owned(),
                events: 100 * factor,
                hits: 75 * factor,
                ns: 77,
                polled: true,
            }],
        };
        let io1 = Loop {
            id: "io1".to_owned(),
            completions: 0,
            ..io0.clone()
        };
        Sample {
            status: "running".to_owned(),
            vcpus: vec![Vcpu {
                cpu_index: 0,
                cpu_ns: Some(500_000_000 * factor),
            }],
            loops: vec![io0, io1],
            disks: vec![
                disk("a", &["io0"], 200),
                disk("b", &["io1"], 50),
                disk("c", &["io0", "io1"], 60),
            ],
        }
    }

    #[test]
    fn rates_are_differences_over_the_time_between() {
        let rates = Rates::between(&sample(10, 1), &sample(12, 2));
        assert_eq!(rates.seconds, 2.0);
        assert_eq!(rates.vcpus, [(0, Some(25.0))]);
        let io0 = &rates.loops[0];
        assert_eq!(io0.cpu_percent, Some(50.0));
        assert_eq!((io0.iops, io0.blocks, io0.wakeups), (150.0, 10.0, 2.0));
        assert_eq!(io0.hit_percent, Some(90.0));
        assert_eq!((io0.poll_percent, io0.vain_percent), (40.0, 5.0));
        assert_eq!(io0.handlers[0].hit_percent, Some(75.0));
        // Nothing was completed on this ring: the disk that only it runs counts.
        assert_eq!(rates.loops[1].iops, 25.0);
        assert_eq!(
            (rates.disks[0].reads, rates.disks[0].read_bytes),
            (100.0, 409_600.0)
        );
    }

    #[test]
    fn what_is_new_or_began_anew_counts_from_nothing() {
        let rates = Rates::between(&Sample::default(), &sample(12, 1));
        assert_eq!((rates.seconds, rates.loops[0].iops), (1.0, 300.0));
        let rates = Rates::between(&sample(10, 3), &sample(11, 1));
        assert_eq!(rates.loops[0].iops, 300.0);
        let idle = Rates::between(&sample(10, 1), &sample(11, 1));
        assert_eq!((idle.loops[0].iops, idle.loops[0].hit_percent), (0.0, None));
    }
}
