//! The picture: plain text, at most 80 columns wide where the names are short.

use std::fmt::Write as _;

use super::rates::{DiskRates, LoopRates, Rates};
use super::sample::Experiment;

/// Draws `rates`; lines are cut at `columns`.
pub fn draw(socket: &str, rates: &Rates, handlers: bool, columns: usize) -> String {
    let mut lines = vec![title(socket, rates)];
    lines.push(format!(
        "{:<14} {:>5} {:>8} {:>9} {:>5} {:>5} {:>5} {:>8} {:>8}",
        "IOTHREAD", "CPU%", "IOPS", "WINDOW us", "HIT%", "POLL%", "VAIN%", "SLEEPS/s", "WAKES/s"
    ));
    for one in &rates.loops {
        lines.push(loop_line(one));
        lines.extend(one.experiment.as_ref().map(experiment_line));
        if handlers {
            lines.extend(one.handlers.iter().map(|handler| {
                format!(
                    "  {:<30} {:>8}/s {:>9} {:>5} {}",
                    handler.name,
                    count(handler.events),
                    micros(handler.ns),
                    share(handler.hit_percent),
                    if handler.polled { "polled" } else { "" }
                )
            }));
        }
    }
    if !rates.disks.is_empty() {
        lines.push(String::new());
        lines.push(format!(
            "{:<14} {:>8} {:>8} {:>9} {:>8} {:>9} {:>7}  {}",
            "DISK", "IOPS", "READ/s", "", "WRITE/s", "", "FLUSH/s", "ON"
        ));
        for disk in &rates.disks {
            lines.push(disk_line(disk));
            if disk.failed > 0 {
                lines.push(format!("  {} requests failed since the start", disk.failed));
            }
        }
    }
    let mut picture = String::new();
    for line in lines {
        let line: String = line.chars().take(columns).collect();
        // Writing to a string does not fail.
        let _ = writeln!(picture, "{}", line.trim_end());
    }
    picture
}

fn title(socket: &str, rates: &Rates) -> String {
    let used: Vec<f64> = rates.vcpus.iter().filter_map(|(_, share)| *share).collect();
    let load = match used.is_empty() {
        true => String::new(),
        false => format!(" {:.0}%", used.iter().sum::<f64>()),
    };
    format!(
        "pollux top  {}  {} vCPU{}{load}  over {:.1} s  {socket}",
        rates.status,
        rates.vcpus.len(),
        if rates.vcpus.len() == 1 { "" } else { "s" },
        rates.seconds,
    )
}

fn loop_line(one: &LoopRates) -> String {
    // A loop that does not poll has nothing to say in the polling columns.
    let polls = one.hit_percent.is_some();
    let polled = |share: f64| {
        if polls {
            format!("{share:.1}")
        } else {
            "-".to_owned()
        }
    };
    format!(
        "{:<14} {:>5} {:>8} {:>9} {:>5} {:>5} {:>5} {:>8} {:>8}",
        one.id,
        share(one.cpu_percent),
        count(one.iops),
        if polls {
            micros(one.window_ns)
        } else {
            "-".to_owned()
        },
        share(one.hit_percent),
        polled(one.poll_percent),
        polled(one.vain_percent),
        count(one.blocks),
        count(one.wakeups),
    )
}

fn experiment_line(one: &Experiment) -> String {
    let doing = match (one.scanning, one.trial_ns) {
        (true, _) => "compares all windows".to_owned(),
        (false, Some(ns)) => format!("tries {} us", micros(ns)),
        (false, None) => "settled".to_owned(),
    };
    format!(
        "  auto: holds {} us, {doing}; score {:.2}; {} trials, {} switches",
        micros(one.incumbent_ns),
        one.score,
        one.trials,
        one.switches
    )
}

fn disk_line(disk: &DiskRates) -> String {
    format!(
        "{:<14} {:>8} {:>8} {:>9} {:>8} {:>9} {:>7}  {}",
        disk.id,
        count(disk.iops()),
        count(disk.reads),
        bytes(disk.read_bytes),
        count(disk.writes),
        bytes(disk.written_bytes),
        count(disk.flushes),
        disk.loops.join(","),
    )
}

/// A percentage, if there is one.
fn share(share: Option<f64>) -> String {
    share.map_or("-".to_owned(), |share| format!("{share:.1}"))
}

/// A number in at most 7 characters.
fn count(number: f64) -> String {
    match number {
        _ if number >= 9_999_999.5 => format!("{:.1}M", number / 1e6),
        _ if number > 0.0 && number < 9.95 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

fn micros(ns: u64) -> String {
    format!("{}.{}", ns / 1000, ns % 1000 / 100)
}

/// Bytes a second in at most 9 characters.
fn bytes(bytes: f64) -> String {
    let mut value = bytes;
    for unit in ["B", "KiB", "MiB"] {
        if value < 1023.95 {
            return match unit {
                "B" => format!("{value:.0} {unit}"),
                _ => format!("{value:.1}{unit}"),
            };
        }
        value /= 1024.0;
    }
    format!("{value:.1}GiB")
}

#[cfg(test)]
mod tests {
    use super::super::rates::HandlerRates;
    use super::*;

    fn rates() -> Rates {
        let polling = LoopRates {
            id: "io0".to_owned(),
            cpu_percent: Some(99.96),
            iops: 1_234_567.8,
            window_ns: 32768,
            hit_percent: Some(100.0),
            poll_percent: 100.0,
            vain_percent: 0.04,
            blocks: 123_456.0,
            wakeups: 0.25,
            experiment: Some(Experiment {
                incumbent_ns: 8192,
                score: -12.3456,
                trials: 123,
                switches: 2,
                ..Experiment::default()
            }),
            handlers: vec![HandlerRates {
                name: "disk0-q0".to_owned(),
                events: 41_234.0,
                hit_percent: Some(98.25),
                ns: 12_345,
                polled: true,
            }],
        };
        let main = LoopRates {
            id: "main".to_owned(),
            cpu_percent: Some(0.0),
            ..LoopRates::default()
        };
        let disk = DiskRates {
            id: "disk0".to_owned(),
            loops: vec!["io0".to_owned(), "io1".to_owned()],
            reads: 41_000.0,
            read_bytes: 335_872_000.0,
            writes: 1.5,
            written_bytes: 6144.0,
            flushes: 0.0,
            unmaps: 0.0,
            failed: 0,
        };
        Rates {
            status: "running".to_owned(),
            seconds: 1.0,
            vcpus: vec![(0, Some(60.0)), (1, Some(50.0))],
            loops: vec![polling, main],
            disks: vec![disk],
        }
    }

    #[test]
    fn the_picture_fits_eighty_columns() {
        let picture = draw("/run/vm.sock", &rates(), true, 80);
        assert_eq!(
            picture,
            "\
pollux top  running  2 vCPUs 110%  over 1.0 s  /run/vm.sock
IOTHREAD        CPU%     IOPS WINDOW us  HIT% POLL% VAIN% SLEEPS/s  WAKES/s
io0            100.0  1234568      32.7 100.0 100.0   0.0   123456      0.2
  auto: holds 8.1 us, settled; score -12.35; 123 trials, 2 switches
  disk0-q0                          41234/s      12.3  98.2 polled
main             0.0        0         -     -     -     -        0        0

DISK               IOPS   READ/s            WRITE/s           FLUSH/s  ON
disk0             41002    41000  320.3MiB      1.5    6.0KiB       0  io0,io1
"
        );
        let long = draw(&"x".repeat(100), &rates(), true, 40);
        assert!(long.lines().all(|line| line.chars().count() <= 40));
    }

    #[test]
    fn failures_are_shown_and_numbers_kept_short() {
        let mut rates = rates();
        rates.disks[0].failed = 3;
        assert!(draw("s", &rates, false, 80).ends_with("\n  3 requests failed since the start\n"));
        for number in [0.0, 9.94, 9.96, 9_999_999.4, 9_999_999.5, 123_456_789.0] {
            assert!(count(number).len() <= 7, "{}", count(number));
        }
        for number in [0.0, 1023.0, 1023.96, 1_048_524.0, 1e10, 1e12] {
            assert!(bytes(number).len() <= 9, "{}", bytes(number));
        }
    }
}
