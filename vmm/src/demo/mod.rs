//! `pollux demo`: what polling brings and costs on this machine, in under a minute.
//!
//! The embedded guest, four disks on two iothreads, the polling rules one after the other: a table of
//! IOPS against CPU. Each rule has a VM of its own, run by this same program in a child process, as a
//! user would run it.

mod run;
mod table;

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use crate::guest::{self, Form};
use crate::vm::kvm;

use run::Vm;
use table::Row;

/// The options of `demo`.
#[derive(Debug, Clone, Args)]
pub struct Options {
    /// Where to put the disks (128 MiB, removed at the end); a disk's filesystem, as one in memory
    /// measures something else
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Seconds that each of the 16 measurements lasts
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    runtime: Duration,
}

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No KVM: nothing can be shown.
    #[error(
        "demo: {0}. In a container, pass the device on (docker run --device /dev/kvm). `pollux check` tells more"
    )]
    Kvm(#[from] kvm::Error),
    /// No guest for this processor.
    #[error(transparent)]
    Guest(#[from] guest::Error),
    /// The disks.
    #[error("demo: disk in {}: {source}; give another directory as --directory", directory.display())]
    Disk {
        /// Where it should be.
        directory: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The VM.
    #[error("demo: {0}")]
    Vm(String),
}

/// Four disks, half of them on each iothread.
const DISKS: usize = 4;
const DISK_BYTES: u64 = 32 << 20;
const IOTHREADS: usize = 2;
/// The rules, the first being what the others are compared with.
const POLICIES: [&str; 4] = ["off", "weighted", "per-handler", "always"];
const LOADS: [(&str, u32); 4] = [
    ("randread", 1),
    ("randread", 8),
    ("randwrite", 1),
    ("randwrite", 8),
];
const BLOCK: &str = "8k";
/// Load before each measurement.
const RAMP: Duration = Duration::from_millis(250);

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("give seconds, from 0.05 to 3600".to_owned()),
    }
}

/// Measures and prints.
///
/// # Errors
/// See [`Error`].
pub fn run(options: &Options) -> Result<(), Error> {
    kvm::open()?;
    let directory = options.directory.clone().unwrap_or_else(default_directory);
    let at = |source| Error::Disk {
        directory: directory.clone(),
        source,
    };
    // Files without a name: nothing is left behind, however this ends.
    let kernel = tempfile::tempfile_in(&directory).map_err(at)?;
    kernel
        .write_all_at(&guest::image(Form::Pvh)?, 0)
        .map_err(at)?;
    let disks = (0..DISKS)
        .map(|_| make_disk(&directory))
        .collect::<Result<Vec<_>, _>>()
        .map_err(at)?;
    let host_cpus = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    // Two, if that leaves a CPU for each iothread.
    let cpus = host_cpus.saturating_sub(IOTHREADS).clamp(1, 2);
    say(&format!(
        "{DISKS} disks of {} MiB in {}, on {IOTHREADS} iothreads; vCPUs: {cpus}; {BLOCK} requests, page cache warm.\n{}",
        DISK_BYTES >> 20,
        directory.display(),
        crowded(host_cpus, cpus)
    ));
    let progress = Progress::new(options.runtime);
    let mut rows = Vec::new();
    for policy in POLICIES {
        let mut vm = Vm::start(&kernel, &disks, policy, cpus, &jobs(options.runtime))?;
        for (rw, depth) in LOADS {
            progress.show(policy, rw, depth, rows.len());
            rows.push(Row {
                rw,
                depth,
                policy,
                measured: vm.measure(&name(rw, depth), options.runtime + RAMP)?,
            });
        }
        vm.end()?;
    }
    progress.clear();
    say(&table::render(&rows, POLICIES[0], options.runtime));
    say(&next_steps());
    Ok(())
}

/// What to know of a host with fewer CPUs than there are threads that may be busy.
fn crowded(host_cpus: usize, cpus: usize) -> String {
    match IOTHREADS + cpus {
        busy if busy > host_cpus => format!(
            "This host has {host_cpus} CPUs for {busy} busy threads: polling takes time from the guest here, and brings less\n\
             than with a CPU for each.\n"
        ),
        _ => String::new(),
    }
}

fn name(rw: &str, depth: u32) -> String {
    format!("{rw}-{depth}")
}

/// The guest's jobs: each load twice, the first time to get going.
fn jobs(runtime: Duration) -> String {
    let jobs = LOADS.map(|(rw, depth)| {
        let load = format!("rw={rw} iodepth={depth}");
        let (name, ramp, runtime) = (name(rw, depth), RAMP.as_nanos(), runtime.as_nanos());
        format!("job=ramp-{name} {load} runtime={ramp}ns job={name} {load} runtime={runtime}ns")
    });
    format!("bs={BLOCK} {}", jobs.join(" "))
}

/// The directory for temporary files, unless it is in memory: then the current one.
fn default_directory() -> PathBuf {
    const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;
    let directory = std::env::temp_dir();
    match rustix::fs::statfs(&directory) {
        Ok(fs) if fs.f_type == TMPFS_MAGIC => PathBuf::from("."),
        _ => directory,
    }
}

/// A disk with data on it: reading a hole would be cheaper than any disk is.
fn make_disk(directory: &Path) -> io::Result<File> {
    const CHUNK: usize = 1 << 20;
    let file = tempfile::tempfile_in(directory)?;
    let chunk: Vec<u8> = (0..CHUNK).map(|i| (i >> 9) as u8 | 1).collect();
    for offset in (0..DISK_BYTES).step_by(CHUNK) {
        file.write_all_at(&chunk, offset)?;
    }
    Ok(file)
}

/// A line on a terminal that says what is going on.
struct Progress {
    each: Duration,
    is_terminal: bool,
}

impl Progress {
    fn new(runtime: Duration) -> Progress {
        Progress {
            each: runtime + RAMP + Duration::from_millis(100),
            is_terminal: io::stderr().is_terminal(),
        }
    }

    fn show(&self, policy: &str, rw: &str, depth: u32, done: usize) {
        if self.is_terminal {
            let left = self.each * (POLICIES.len() * LOADS.len() - done) as u32;
            eprint!(
                "\r\x1b[K{policy}: {rw}, depth {depth} ({} s left)",
                left.as_secs()
            );
        }
    }

    fn clear(&self) {
        if self.is_terminal {
            eprint!("\r\x1b[K");
        }
    }
}

fn next_steps() -> String {
    "Try next:
  pollux demo --runtime 10          the same with less noise
  pollux guest options              what the embedded guest can do
  pollux guest export guest.elf     and then, with a disk of yours:
  pollux --kernel guest.elf --cpus 2 --iothread id=io0,poll-max-ns=32768 \\
         --disk path=DISK,iothread=io0,readonly=on --stats \\
         --cmdline \"job=a rw=randread bs=4k iodepth=32 runtime=5\"
  pollux --kernel vmlinuz --initrd initrd --disk path=root.img --cmdline \"console=ttyS0 root=/dev/vda\"
  pollux-bench --help               matrices of such runs, against QEMU too
"
    .to_owned()
}

/// To standard output. A reader that went away wants no more.
fn say(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}
