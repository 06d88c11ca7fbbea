//! The VM's numbers in Prometheus' text format (version 0.0.4), for `--metrics` and `x-query-metrics`.

use std::fmt::{Display, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use devices::virtio::block::BlockStats;
use iothread::Stats;
use iothread::policy::Experiment;

use crate::qmp::machine::{DiskView, IoThreadView, Machine, RunState};
use crate::threads::thread_cpu_ns;

/// Everything there is to tell of `machine` at this moment.
pub fn render(machine: &dyn Machine) -> String {
    let mut text = Text::default();
    text.family("pollux_info", "gauge", "Version of the program.")
        .sample(&[("version", env!("CARGO_PKG_VERSION"))], 1);
    let running = machine.run_state() == RunState::Running;
    text.family("pollux_running", "gauge", "Whether the guest runs.")
        .sample(&[], u8::from(running));
    vcpus(&mut text, machine);
    let mut loops = machine.iothreads();
    loops.extend(machine.main_loop());
    iothreads(&mut text, &loops);
    disks(&mut text, &machine.disks());
    text.0
}

/// The format: families of samples, each family with its help and type.
#[derive(Default)]
struct Text(String);

struct Family<'a> {
    text: &'a mut String,
    name: &'a str,
}

impl Text {
    fn family<'a>(&'a mut self, name: &'a str, kind: &str, help: &str) -> Family<'a> {
        // Writing to a string does not fail, here and below. Our help texts have nothing to escape.
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        Family {
            text: &mut self.0,
            name,
        }
    }
}

impl Family<'_> {
    fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.text.push_str(self.name);
        let mut before = '{';
        for (name, value) in labels {
            let _ = write!(self.text, "{before}{name}=\"{}\"", escape(value));
            before = ',';
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }
}

fn escape(label: &str) -> String {
    let label = label.replace('\\', "\\\\").replace('"', "\\\"");
    label.replace('\n', "\\n")
}

/// Nanoseconds as seconds, exactly.
struct Seconds(u64);

impl Display for Seconds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{}.{:09}",
            self.0 / 1_000_000_000,
            self.0 % 1_000_000_000
        )
    }
}

fn vcpus(text: &mut Text, machine: &dyn Machine) {
    let mut family = text.family(
        "pollux_vcpu_cpu_seconds_total",
        "counter",
        "CPU time of a vCPU's thread, guest and exits together.",
    );
    for vcpu in machine.vcpus() {
        if let Some(ns) = thread_cpu_ns(vcpu.thread_id) {
            family.sample(&[("vcpu", &vcpu.index.to_string())], Seconds(ns));
        }
    }
}

/// Numbers of loops: name, type, help, and how to get it.
type LoopFamily = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Stats) -> Box<dyn Display>,
);

const LOOPS: [LoopFamily; 11] = [
    (
        "pollux_iothread_window_seconds",
        "gauge",
        "Longest time that the loop polls at the moment before it sleeps.",
        |stats| Box::new(Seconds(stats.window_ns)),
    ),
    (
        "pollux_iothread_poll_seconds_total",
        "counter",
        "Time spent polling.",
        |stats| Box::new(Seconds(stats.poll_ns)),
    ),
    (
        "pollux_iothread_poll_vain_seconds_total",
        "counter",
        "Time spent polling that found nothing.",
        |stats| Box::new(Seconds(stats.poll_vain_ns)),
    ),
    (
        "pollux_iothread_iterations_total",
        "counter",
        "Iterations of the loop.",
        |stats| Box::new(stats.iterations),
    ),
    (
        "pollux_iothread_blocks_total",
        "counter",
        "Iterations that slept in the kernel.",
        |stats| Box::new(stats.blocks),
    ),
    (
        "pollux_iothread_wakeups_total",
        "counter",
        "Times that another thread had to wake the loop.",
        |stats| Box::new(stats.wakeups),
    ),
    (
        "pollux_iothread_submissions_total",
        "counter",
        "Requests put on the ring.",
        |stats| Box::new(stats.submissions),
    ),
    (
        "pollux_iothread_completions_total",
        "counter",
        "Requests of the ring that were completed.",
        |stats| Box::new(stats.completions),
    ),
    (
        "pollux_iothread_enters_total",
        "counter",
        "Calls of io_uring_enter.",
        |stats| Box::new(stats.enters),
    ),
    (
        "pollux_iothread_bottom_halves_total",
        "counter",
        "Bottom halves run.",
        |stats| Box::new(stats.bottom_halves),
    ),
    (
        "pollux_iothread_errors_total",
        "counter",
        "Watches of file descriptors and calls of the loop that failed.",
        |stats| Box::new(stats.errors),
    ),
];

fn iothreads(text: &mut Text, loops: &[IoThreadView]) {
    let stats: Vec<(&str, Stats)> = loops
        .iter()
        .map(|one| (one.id.as_str(), one.remote.stats()))
        .collect();
    let mut family = text.family(
        "pollux_iothread_cpu_seconds_total",
        "counter",
        "CPU time of a loop's thread.",
    );
    for one in loops {
        if let Some(ns) = thread_cpu_ns(one.thread_id) {
            family.sample(&[("iothread", &one.id)], Seconds(ns));
        }
    }
    let mut family = text.family(
        "pollux_iothread_polls_total",
        "counter",
        "Times that the loop polled, by whether it found work.",
    );
    for (id, stats) in &stats {
        family.sample(&[("iothread", id), ("result", "hit")], stats.poll_hits);
        family.sample(&[("iothread", id), ("result", "miss")], stats.poll_misses);
    }
    for (name, kind, help, value) in LOOPS {
        let mut family = text.family(name, kind, help);
        for (id, stats) in &stats {
            family.sample(&[("iothread", id)], value(stats));
        }
    }
    let mut family = text.family(
        "pollux_iothread_setting",
        "gauge",
        "Settings in effect, named as the options of --iothread.",
    );
    for one in loops {
        let settings = one.remote.settings();
        for (name, value) in [
            ("poll-max-ns", settings.poll_max_ns),
            ("poll-grow", settings.poll_grow),
            ("poll-shrink", settings.poll_shrink),
            ("poll-weight", settings.poll_weight),
            ("aio-max-batch", settings.aio_max_batch),
        ] {
            family.sample(&[("iothread", &one.id), ("setting", name)], value);
        }
        let alpha = iothread::alpha_text(settings.poll_alpha_milli);
        family.sample(&[("iothread", &one.id), ("setting", "poll-alpha")], alpha);
    }
    experiments(text, &stats);
}

/// Numbers of the rule `auto`: name, kind, help, and how to get one.
type ExperimentFamily = (
    &'static str,
    &'static str,
    &'static str,
    fn(&Experiment) -> Box<dyn Display>,
);

const EXPERIMENTS: [ExperimentFamily; 6] = [
    (
        "pollux_iothread_auto_incumbent_seconds",
        "gauge",
        "The window that holds under poll-policy=auto.",
        |one| Box::new(Seconds(one.incumbent_ns.unsigned_abs())),
    ),
    (
        "pollux_iothread_auto_score",
        "gauge",
        "Score of that window in its last epoch.",
        |one| Box::new(one.score),
    ),
    (
        "pollux_iothread_auto_epochs_total",
        "counter",
        "Epochs measured.",
        |one| Box::new(one.epochs),
    ),
    (
        "pollux_iothread_auto_scans_total",
        "counter",
        "Comparisons of all windows.",
        |one| Box::new(one.scans),
    ),
    (
        "pollux_iothread_auto_trials_total",
        "counter",
        "Trials of one window.",
        |one| Box::new(one.trials),
    ),
    (
        "pollux_iothread_auto_switches_total",
        "counter",
        "Times that another window took over.",
        |one| Box::new(one.switches),
    ),
];

fn experiments(text: &mut Text, stats: &[(&str, Stats)]) {
    let there = || {
        stats
            .iter()
            .filter_map(|(id, stats)| Some((id, stats.experiment?)))
    };
    if there().next().is_none() {
        return;
    }
    for (name, kind, help, value) in EXPERIMENTS {
        let mut family = text.family(name, kind, help);
        for (id, experiment) in there() {
            family.sample(&[("iothread", id)], value(&experiment));
        }
    }
}

/// Numbers of disks by operation: name, help, and operations with how to get theirs.
type DiskFamily = (
    &'static str,
    &'static str,
    &'static [(&'static str, fn(&BlockStats) -> u64)],
);

const DISK_OPERATIONS: [DiskFamily; 3] = [
    (
        "pollux_disk_operations_total",
        "Requests that succeeded.",
        &[
            ("read", |stats| stats.rd_operations),
            ("write", |stats| stats.wr_operations),
            ("write_zeroes", |stats| stats.zeroes_operations),
            ("flush", |stats| stats.flush_operations),
            ("discard", |stats| stats.unmap_operations),
        ],
    ),
    (
        "pollux_disk_bytes_total",
        "Bytes that these requests covered.",
        &[
            ("read", |stats| stats.rd_bytes),
            ("write", |stats| stats.wr_bytes),
            ("write_zeroes", |stats| stats.zeroes_bytes),
            ("discard", |stats| stats.unmap_bytes),
        ],
    ),
    (
        "pollux_disk_failed_operations_total",
        "Requests that failed on the host; writes of zeroes are among the discards.",
        &[
            ("read", |stats| stats.failed_rd_operations),
            ("write", |stats| stats.failed_wr_operations),
            ("flush", |stats| stats.failed_flush_operations),
            ("discard", |stats| stats.failed_unmap_operations),
        ],
    ),
];

/// Other counters of disks: name, help, and how to get it.
type DiskCounter = (&'static str, &'static str, fn(&BlockStats) -> u64);

const DISKS: [DiskCounter; 6] = [
    (
        "pollux_disk_invalid_operations_total",
        "Requests refused before anything was done.",
        |stats| stats.invalid_operations,
    ),
    ("pollux_disk_syncs_total", "Calls of fdatasync.", |stats| {
        stats.syncs
    }),
    (
        "pollux_disk_kicks_total",
        "Notifications by the guest that woke a queue.",
        |stats| stats.kicks,
    ),
    (
        "pollux_disk_interrupts_total",
        "Interrupts raised.",
        |stats| stats.interrupts,
    ),
    (
        "pollux_disk_bounced_total",
        "Parts of requests that went through a bounce buffer.",
        |stats| stats.bounced,
    ),
    (
        "pollux_disk_retries_total",
        "Operations done again after an interruption or a short transfer.",
        |stats| stats.retries,
    ),
];

fn disks(text: &mut Text, disks: &[DiskView]) {
    let mut family = text.family("pollux_disk_size_bytes", "gauge", "Capacity of the disk.");
    for disk in disks {
        family.sample(&[("disk", &disk.id)], disk.size_bytes);
    }
    for (name, help, operations) in DISK_OPERATIONS {
        let mut family = text.family(name, "counter", help);
        for disk in disks {
            for (operation, value) in operations {
                let labels = [("disk", disk.id.as_str()), ("operation", operation)];
                family.sample(&labels, value(&disk.stats));
            }
        }
    }
    for (name, help, value) in DISKS {
        let mut family = text.family(name, "counter", help);
        for disk in disks {
            family.sample(&[("disk", &disk.id)], value(&disk.stats));
        }
    }
}

/// Writes the numbers to a file again and again, and a last time when it is dropped.
#[derive(Debug)]
pub struct Writer {
    /// Dropped to end the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Begins to write `machine`'s numbers to `path` every `interval`, in a thread named `metrics`.
    ///
    /// # Errors
    /// The file cannot be written, which is tried at once, or there is no thread.
    pub fn start(
        path: PathBuf,
        interval: Duration,
        machine: Arc<dyn Machine>,
    ) -> std::io::Result<Self> {
        write(&path, &*machine)?;
        let (stop, stopped) = mpsc::channel::<()>();
        let body = move || {
            loop {
                let ended = stopped.recv_timeout(interval) != Err(RecvTimeoutError::Timeout);
                if let Err(error) = write(&path, &*machine) {
                    tracing::warn!("--metrics file={}: {error}", path.display());
                }
                if ended {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("metrics".to_owned());
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread.spawn(body)?),
        })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // If it has panicked, the panic hook has told so.
            let _ = thread.join();
        }
    }
}

/// Puts a new file in the place of the old, so that a reader never sees half of one.
fn write(path: &Path, machine: &dyn Machine) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    std::fs::write(&new, render(machine))?;
    std::fs::rename(&new, path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qmp::testing::TestMachine;

    #[test]
    fn families_have_help_type_and_samples() {
        let text = render(&TestMachine::new(Default::default()));
        for part in [
            "# HELP pollux_running Whether the guest runs.\n# TYPE pollux_running gauge\npollux_running 1\n",
            "pollux_iothread_polls_total{iothread=\"io0\",result=\"hit\"} ",
            "pollux_iothread_setting{iothread=\"io1\",setting=\"poll-max-ns\"} 32768\n",
            "pollux_iothread_cpu_seconds_total{iothread=\"main\"} 0.",
            "pollux_disk_operations_total{disk=\"disk0\",operation=\"read\"} 3\n",
            "pollux_disk_size_bytes{disk=\"disk1\"} 10485760\n",
        ] {
            assert!(text.contains(part), "{part}");
        }
    }

    #[test]
    fn labels_are_escaped_and_times_exact() {
        let mut text = Text::default();
        text.family("a", "gauge", "b")
            .sample(&[("c", "d\\e\"f\ng"), ("h", "")], Seconds(12_000_000_034));
        let sample = "a{c=\"d\\\\e\\\"f\\ng\",h=\"\"} 12.000000034\n";
        assert_eq!(text.0, format!("# HELP a b\n# TYPE a gauge\n{sample}"));
    }

    #[test]
    fn the_file_is_replaced_and_written_a_last_time_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.prom");
        let machine = Arc::new(TestMachine::new(Default::default()));
        let hour = Duration::from_secs(3600);
        let writer = Writer::start(path.clone(), hour, machine.clone()).unwrap();
        let read = || std::fs::read_to_string(&path).unwrap();
        assert!(read().contains("pollux_running 1\n"));
        machine.stop().unwrap();
        drop(writer);
        assert!(read().contains("pollux_running 0\n"));
        let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
        assert_eq!(names.len(), 1);

        let nowhere = dir.path().join("no/such/file");
        assert!(Writer::start(nowhere, hour, machine).is_err());
    }

    #[test]
    fn the_file_is_written_again_and_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.prom");
        let machine = Arc::new(TestMachine::new(Default::default()));
        let _writer = Writer::start(path.clone(), Duration::from_millis(5), machine).unwrap();
        for _ in 0..3 {
            std::fs::remove_file(&path).unwrap();
            let patience = std::time::Instant::now() + Duration::from_secs(20);
            while !path.exists() {
                assert!(std::time::Instant::now() < patience, "not written again");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}
