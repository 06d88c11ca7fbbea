//! Processors, clock and file descriptors.

use rustix::process::{Resource, getrlimit};
use rustix::thread::{CpuSet, sched_getaffinity};

use super::host::Host;
use super::{Finding, Verdict};

/// Clocks that a process reads without entering the kernel.
const FAST_CLOCKS: [&str; 4] = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "tod"];
/// File descriptors of a VM with many disks and clients.
const MANY_FILES: u64 = 1024;

pub fn look(host: &Host) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Ok(set) = sched_getaffinity(None) {
        findings.push(processors(set.count()));
    }
    findings.extend(clock(host));
    findings.extend(governor(host));
    findings.push(files(getrlimit(Resource::Nofile).current));
    findings
}

fn processors(usable: u32) -> Finding {
    debug_assert!(usable as usize <= CpuSet::MAX_CPU);
    match usable {
        1 => Finding::new(
            Verdict::Slow,
            "1 CPU to run on: an iothread that polls takes it from the vCPUs; use poll-max-ns=0",
        ),
        _ => Finding::new(
            Verdict::Good,
            format!(
                "{usable} CPUs to run on; a polling iothread wants one beside those of the vCPUs"
            ),
        ),
    }
}

/// Polling reads the clock all the time.
fn clock(host: &Host) -> Option<Finding> {
    let clock = host.read("sys/devices/system/clocksource/clocksource0/current_clocksource")?;
    Some(match FAST_CLOCKS.contains(&clock.as_str()) {
        true => Finding::new(
            Verdict::Good,
            format!("clock source {clock}: read without a system call"),
        ),
        false => Finding::new(
            Verdict::Slow,
            format!(
                "clock source {clock}: each reading is a system call, and polling reads it all the time; see why the kernel does not trust the TSC"
            ),
        ),
    })
}

fn governor(host: &Host) -> Option<Finding> {
    let governor = host.read("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")?;
    Some(match governor.as_str() {
        "powersave" => Finding::new(
            Verdict::Note,
            "CPU frequency governor powersave: measurements will vary; performance is steadier",
        ),
        _ => Finding::new(Verdict::Good, format!("CPU frequency governor {governor}")),
    })
}

fn files(limit: Option<u64>) -> Finding {
    match limit {
        Some(most) if most < MANY_FILES => Finding::new(
            Verdict::Note,
            format!(
                "open files: at most {most} (ulimit -n); many disks need some four each and one a queue"
            ),
        ),
        Some(most) => Finding::new(
            Verdict::Good,
            format!("open files: at most {most} (ulimit -n)"),
        ),
        None => Finding::new(Verdict::Good, "open files: no limit"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::host::Made;
    use super::*;

    #[test]
    fn slow_clocks_and_scarce_processors_are_told() {
        let clock = |name: &str| {
            let path = "sys/devices/system/clocksource/clocksource0/current_clocksource";
            clock(&Made::of(&[(path, name)]).host).unwrap().verdict
        };
        assert_eq!(clock("tsc\n"), Verdict::Good);
        assert_eq!(clock("hpet\n"), Verdict::Slow);
        assert_eq!(processors(1).verdict, Verdict::Slow);
        assert_eq!(processors(2).verdict, Verdict::Good);
        assert_eq!(files(Some(256)).verdict, Verdict::Note);
        assert_eq!(files(Some(1024)).verdict, Verdict::Good);
    }
}
