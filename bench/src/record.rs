//! What was measured, as it is kept in a result file and read by every report.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::cpu::Usage;
use crate::matrix::{Run, Tool};
use crate::stats::Summary;

/// Marks a file as a result of this program; the number changes when old files are not understood
/// any more.
const FORMAT: &str = "pollux-bench 1";

/// Latency of requests as the guest saw it, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Latency {
    pub mean_ns: f64,
    pub p50_ns: f64,
    pub p90_ns: f64,
    pub p99_ns: f64,
    pub p999_ns: f64,
    pub max_ns: f64,
}

/// What the guest's own `mpstat` says of all its CPUs, in percent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct GuestCpu {
    pub usr: f64,
    pub sys: f64,
    pub iowait: f64,
    pub irq: f64,
    pub soft: f64,
    pub steal: f64,
    pub idle: f64,
}

/// What one event loop counted within the measured interval.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Polling {
    /// The iothread's id.
    pub name: String,
    /// Times that polling found work.
    pub hits: u64,
    /// Times that polling found none before its window was over.
    pub misses: u64,
    /// Time polled.
    pub polled_ns: u64,
    /// Part of it that found nothing.
    pub vain_ns: u64,
    /// Times that the loop slept in the kernel.
    pub blocks: u64,
    /// Times that another thread had to wake it.
    pub wakeups: u64,
    /// Calls of io_uring_enter.
    pub enters: u64,
    /// Polling windows in effect, by iteration: shortest window of a bucket, in nanoseconds, and
    /// count, rising. Buckets are log-linear, four to each power of two.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub windows: Vec<(u64, u64)>,
}

/// One measurement of one run.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// I/Os a second, reads and writes together.
    pub iops: f64,
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// Errors that the guest saw.
    #[serde(default)]
    pub errors: u64,
    /// As the guest saw it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency: Option<Latency>,
    /// CPU of the VMM within the measured interval.
    pub cpu: Usage,
    /// CPU of the guest as the guest saw it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_cpu: Option<GuestCpu>,
    /// Notifications that the guest's driver sent, for each I/O.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kicks_per_io: Option<f64>,
    /// Interrupts that the guest's driver got, for each I/O.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interrupts_per_io: Option<f64>,
    /// System calls of the VMM for each I/O, where they could be counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub syscalls_per_io: Option<f64>,
    /// Polling statistics of the VMM, where it gives them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub polling: Vec<Polling>,
}

impl Measurement {
    /// I/Os within the interval in which the CPU was measured.
    pub fn ios(&self) -> f64 {
        self.iops * self.cpu.interval_ns as f64 / 1e9
    }

    /// A CPU time of that interval for each I/O, in nanoseconds.
    pub fn per_io(&self, cpu_ns: u64) -> Option<f64> {
        let ios = self.ios();
        (ios > 0.0).then(|| cpu_ns as f64 / ios)
    }

    /// Calls of io_uring_enter of all loops for each I/O, where the VMM counts them.
    pub fn enters_per_io(&self) -> Option<f64> {
        let enters: u64 = self.polling.iter().map(|p| p.enters).sum();
        (!self.polling.is_empty())
            .then(|| self.per_io(enters))
            .flatten()
    }

    /// CPU of the whole VMM in percent of one CPU.
    pub fn cpu_percent(&self) -> f64 {
        self.cpu.percent(self.cpu.total_ns())
    }

    /// CPU of all threads but the vCPUs in percent of one CPU: what serving the disks costs.
    pub fn io_cpu_percent(&self) -> f64 {
        self.cpu.percent(self.cpu.of_ns(crate::cpu::Group::is_io))
    }

    /// CPU of all threads but the vCPUs for each I/O, in nanoseconds.
    pub fn io_cpu_per_io(&self) -> Option<f64> {
        self.per_io(self.cpu.of_ns(crate::cpu::Group::is_io))
    }
}

/// A run with what was measured of it, in the order of rounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunRecord {
    /// The run.
    pub run: Run,
    /// One measurement a round; `None` where the round failed.
    pub rounds: Vec<Option<Measurement>>,
    /// Messages of the rounds that failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<String>,
}

impl RunRecord {
    /// A run not yet measured.
    pub fn new(run: Run) -> RunRecord {
        RunRecord {
            run,
            rounds: Vec::new(),
            failures: Vec::new(),
        }
    }

    /// The measurements that succeeded.
    pub fn measurements(&self) -> impl Iterator<Item = &Measurement> {
        self.rounds.iter().flatten()
    }

    /// Summarises a figure over the rounds; `None` if no round has it.
    pub fn summary(&self, figure: impl Fn(&Measurement) -> Option<f64>) -> Option<Summary> {
        Summary::of(&self.measurements().filter_map(figure).collect::<Vec<_>>())
    }

    /// A figure of each round, for comparison in pairs.
    pub fn series(&self, figure: impl Fn(&Measurement) -> Option<f64>) -> Vec<Option<f64>> {
        self.rounds
            .iter()
            .map(|m| m.as_ref().and_then(&figure))
            .collect()
    }
}

/// Where and with what it was measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Conditions {
    /// Start, in seconds since 1970.
    pub started_unix: u64,
    /// `uname -r` of the host.
    pub kernel: String,
    /// The processor's name.
    pub processor: String,
    /// CPUs that this process may use.
    pub cpus: usize,
    /// Versions of the VMMs, as they say it.
    #[serde(default)]
    pub versions: Vec<String>,
    /// The command line, without the program's path.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// What a reader must know before trusting the figures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub remarks: Vec<String>,
}

/// A result file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Results {
    format: String,
    /// The load.
    pub tool: Tool,
    /// Where and with what.
    pub conditions: Conditions,
    /// Rounds asked for.
    pub rounds: usize,
    /// Whether all rounds were measured; not so after Ctrl-C.
    pub complete: bool,
    /// The runs in the order of the matrix.
    pub runs: Vec<RunRecord>,
}

/// Why a result file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Reading failed.
    #[error("{path}: cannot be read: {error}; give a file written by --json")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It is no result file.
    #[error("{path}: no result of pollux-bench: {why}; give a file written by --json")]
    Form {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// Writing failed.
    #[error("{path}: cannot be written: {error}; choose a path in a directory that can be written")]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

impl Results {
    /// Nothing measured yet.
    pub fn new(tool: Tool, conditions: Conditions, rounds: usize, runs: Vec<Run>) -> Results {
        Results {
            format: FORMAT.into(),
            tool,
            conditions,
            rounds,
            complete: false,
            runs: runs.into_iter().map(RunRecord::new).collect(),
        }
    }

    /// Reads a result file.
    pub fn load(path: &Path) -> Result<Results, Error> {
        let text = fs::read_to_string(path).map_err(|error| Error::Read {
            path: path.into(),
            error,
        })?;
        let form = |why: String| Error::Form {
            path: path.into(),
            why,
        };
        let results: Results = serde_json::from_str(&text).map_err(|e| form(e.to_string()))?;
        if results.format != FORMAT {
            return Err(form(format!(
                "its format is `{}`, not `{FORMAT}`",
                results.format
            )));
        }
        Ok(results)
    }

    /// Writes a result file whole or not at all.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        let mut text = serde_json::to_string_pretty(self).map_err(|e| Error::Write {
            path: path.into(),
            error: e.into(),
        })?;
        text.push('\n');
        write_whole(path, text.as_bytes())
    }
}

/// Writes a file beside `path` and moves it there, so that no reader sees a part.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let failed = |error: io::Error| Error::Write {
        path: path.into(),
        error,
    };
    // A device or a pipe, such as /dev/stdout, is written as it is.
    if path.exists() && !path.is_file() {
        return fs::write(path, bytes).map_err(failed);
    }
    let mut file = tempfile::Builder::new()
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))
        .tempfile_in(directory)
        .map_err(failed)?;
    file.write_all(bytes).map_err(failed)?;
    file.persist(path).map_err(|e| failed(e.error))?;
    Ok(())
}

impl Conditions {
    /// Of this host, now.
    pub fn of_this_host() -> Conditions {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let processor = read("/proc/cpuinfo")
            .lines()
            .find(|line| line.starts_with("model name"))
            .and_then(|line| line.split_once(':'))
            .map(|(_, name)| name.trim().to_string());
        Conditions {
            started_unix: since.map_or(0, |d| d.as_secs()),
            kernel: read("/proc/sys/kernel/osrelease").trim().into(),
            processor: processor.unwrap_or_else(|| std::env::consts::ARCH.into()),
            cpus: std::thread::available_parallelism().map_or(1, usize::from),
            versions: Vec::new(),
            arguments: std::env::args().skip(1).collect(),
            remarks: Vec::new(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::cpu::{Group, GroupUsage};

    /// A measurement with an iothread and a vCPU, for tests of reports.
    pub(crate) fn measurement(iops: f64, iothread_ns: u64) -> Measurement {
        let group = |group, total_ns| GroupUsage {
            group,
            threads: 1,
            total_ns,
            user_ns: total_ns / 4,
            system_ns: total_ns / 4,
            guest_ns: 0,
            sleeps: 10,
            preemptions: 1,
        };
        Measurement {
            iops,
            bytes_per_second: iops * 4096.0,
            cpu: Usage {
                interval_ns: 1_000_000_000,
                groups: vec![
                    group(Group::Iothread("io0".into()), iothread_ns),
                    group(Group::Vcpu(0), 500_000_000),
                ],
                ..Usage::default()
            },
            ..Measurement::default()
        }
    }

    #[test]
    fn a_result_file_is_read_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a.json");
        let runs = crate::matrix::parse(&["bs=4k,8k"], Tool::Guest).expect("a matrix");
        let mut results = Results::new(Tool::Guest, Conditions::of_this_host(), 3, runs);
        results.runs[0].rounds = vec![Some(measurement(1000.0, 5)), None];
        results.runs[0].failures = vec!["no".into()];
        results.save(&path).expect("written");
        assert_eq!(Results::load(&path).expect("read"), results);
        let names: Vec<_> = fs::read_dir(directory.path()).expect("list").collect();
        assert_eq!(names.len(), 1, "nothing else is left behind");
    }

    #[test]
    fn other_files_are_refused_with_the_remedy() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("a.json");
        let missing = Results::load(&path).expect_err("missing").to_string();
        assert!(missing.contains("--json"), "{missing}");
        fs::write(&path, "{}").expect("written");
        let empty = Results::load(&path).expect_err("empty").to_string();
        assert!(empty.contains("no result of pollux-bench"), "{empty}");
        let runs = crate::matrix::parse(&["bs=4k"], Tool::Fio).expect("a matrix");
        let mut results = Results::new(Tool::Fio, Conditions::default(), 1, runs);
        results.format = "pollux-bench 0".into();
        results.save(&path).expect("written");
        let old = Results::load(&path).expect_err("old").to_string();
        assert!(old.contains("`pollux-bench 0`"), "{old}");
    }

    #[test]
    fn cpu_is_told_by_io_and_by_time() {
        let m = measurement(100_000.0, 300_000_000);
        assert_eq!(m.per_io(300_000_000), Some(3000.0));
        assert_eq!((m.cpu_percent(), m.io_cpu_percent()), (80.0, 30.0));
        assert_eq!(measurement(0.0, 5).io_cpu_per_io(), None);
    }
}
