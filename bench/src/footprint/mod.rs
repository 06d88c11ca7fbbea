//! What a VM costs that does nothing: its start, its memory, its CPU when idle, its program's size.
//!
//! Each round makes two VMs of each VMM. In the first the guest's first instruction prints a byte
//! and stops: the time from the start of the process to that byte. In the second the embedded guest
//! reads from every disk for a moment and then sleeps: what the VMM's threads use meanwhile, and
//! the memory that is not the guest's.

mod memory;
mod report;
mod stub;

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use crate::cpu::{Process, Usage};
use crate::matrix::{Run, Vmm};
use crate::runner::Stop;
use crate::vm::{Disk, Machine, ProcessError, Programs, Vm};

pub use report::report;

/// Memory of the guest. Nothing else in the process may be as large a mapping.
const MEMORY_BYTES: u64 = 256 << 20;
/// Reading before the sleep, so that every disk has worked and every iothread has polled.
const WORK: Duration = Duration::from_millis(500);
/// After the work the polling windows shrink; what is measured begins then.
const SETTLE: Duration = Duration::from_millis(500);

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The VM.
    #[error(transparent)]
    Vm(#[from] ProcessError),
    /// What /proc tells of it.
    #[error("/proc tells nothing of the VM: {0}")]
    Process(String),
    /// A file of ours.
    #[error("a temporary file: {0}; set TMPDIR")]
    File(#[from] std::io::Error),
}

/// What is measured.
#[derive(Debug)]
pub struct Plan {
    /// The VMMs' programs.
    pub programs: Programs,
    /// The embedded guest as a file.
    pub guest: PathBuf,
    /// The disks.
    pub disks: Vec<PathBuf>,
    /// How many iothreads.
    pub iothreads: u32,
    /// How long it idles.
    pub idle: Duration,
    /// The longest that a step may take.
    pub patience: Duration,
}

/// One round of one VMM.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Process start to the guest's first instruction, in milliseconds.
    pub start_ms: f64,
    /// Resident memory that is not the guest's, in bytes.
    pub memory_bytes: u64,
    /// The part of it that no other process shares.
    pub private_bytes: u64,
    /// CPU of all threads when idle, in percent of one CPU.
    pub idle_percent: f64,
    /// Threads.
    pub threads: usize,
    /// Open descriptors.
    pub descriptors: usize,
}

impl Plan {
    /// Measures `vmm` once.
    ///
    /// # Errors
    /// The VM did not do what it should.
    pub fn sample(&self, vmm: Vmm, stop: &Stop) -> Result<Sample, Error> {
        let start_ms = self.start_ms(vmm, stop)?;
        let run = self.run(vmm);
        let idle = self.idle + SETTLE + Duration::from_secs(5);
        let cmdline = format!(
            "rw=randread bs=4096 iodepth=4 job=work runtime={}ns job=idle rw=sleep runtime={}ns",
            WORK.as_nanos(),
            idle.as_nanos()
        );
        let machine = self.machine(self.guest.clone(), cmdline);
        let mut vm = Vm::start(self.programs.command(&machine, &run), stop)?;
        vm.wait_for("line of the job `work`", self.patience, |line| {
            line.contains(r#""job":"work""#).then_some(())
        })?;
        std::thread::sleep(SETTLE);
        let process = Process::new(vm.pid());
        let told = |e: &dyn std::fmt::Display| Error::Process(e.to_string());
        let begin = process.snapshot().map_err(|e| told(&e))?;
        std::thread::sleep(self.idle);
        let end = process.snapshot().map_err(|e| told(&e))?;
        let usage = Usage::between(&begin, &end);
        let proc = PathBuf::from(format!("/proc/{}", vm.pid()));
        let smaps = std::fs::read_to_string(proc.join("smaps")).map_err(|e| told(&e))?;
        let own = memory::beyond_guest(&smaps, MEMORY_BYTES);
        Ok(Sample {
            start_ms,
            memory_bytes: own.resident_bytes,
            private_bytes: own.private_bytes,
            idle_percent: usage.percent(usage.total_ns()),
            threads: count(&proc.join("task")),
            descriptors: count(&proc.join("fd")),
        })
    }

    fn start_ms(&self, vmm: Vmm, stop: &Stop) -> Result<f64, Error> {
        let stub = tempfile::Builder::new().prefix("pollux-stub-").tempfile()?;
        std::fs::write(stub.path(), stub::elf())?;
        let machine = self.machine(stub.path().to_owned(), String::new());
        let command = self.programs.command(&machine, &self.run(vmm));
        let begin = Instant::now();
        let mut vm = Vm::start(command, stop)?;
        let (at, ()) = vm.wait_for("first byte", self.patience, |line| {
            line.contains(stub::WORD).then_some(())
        })?;
        Ok(at.duration_since(begin).as_secs_f64() * 1e3)
    }

    fn run(&self, vmm: Vmm) -> Run {
        Run {
            vmm,
            disks: u32::try_from(self.disks.len()).unwrap_or(u32::MAX),
            iothreads: self.iothreads,
            ..Run::default()
        }
    }

    fn machine(&self, kernel: PathBuf, cmdline: String) -> Machine {
        let disks = self.disks.iter().enumerate().map(|(index, path)| Disk {
            path: path.clone(),
            serial: format!("pollux-load{index}"),
            readonly: false,
            loaded: true,
            idle: None,
        });
        Machine {
            kernel,
            initrd: None,
            cmdline,
            memory_bytes: MEMORY_BYTES,
            disks: disks.collect(),
            linux: false,
        }
    }
}

fn count(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

/// Size in bytes of `program` without symbols, by strip(1); `None` where there is no strip.
///
/// # Errors
/// The program cannot be read, or there is no temporary file.
pub fn stripped_bytes(program: &Path) -> std::io::Result<Option<u64>> {
    let copy = tempfile::Builder::new()
        .prefix("pollux-strip-")
        .tempfile()?;
    std::fs::copy(program, copy.path())?;
    std::fs::set_permissions(copy.path(), std::fs::Permissions::from_mode(0o600))?;
    match Command::new("strip").arg(copy.path()).status() {
        Ok(status) if status.success() => Ok(Some(copy.path().metadata()?.len())),
        _ => Ok(None),
    }
}
