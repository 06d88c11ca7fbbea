//! fio in a Linux guest.

pub mod job_file;
mod output;
mod overlay;
mod script;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;

use crate::cpu::{Process, Usage};
use crate::matrix::Run;
use crate::record::Measurement;
use crate::runner::{Bed, Failure, Stop, scratch};
use crate::vm::{Disk, Machine, Programs, Qmp, Vm};

use job_file::JobFile;
pub use script::Times;
use script::{Job, Mark};

/// How long the kernel's powering off may take after the last job.
const POWER_OFF: Duration = Duration::from_secs(120);

/// A Linux guest with fio, and the disks that bear its load.
#[derive(Debug)]
pub struct FioBed {
    /// The VMMs.
    pub programs: Programs,
    /// Kernel.
    pub kernel: PathBuf,
    /// Initial RAM disk; it has to hand `/lab/script` on to the userland and run it.
    pub initrd: PathBuf,
    /// Root disk, with fio and mpstat; it is never written.
    pub root: PathBuf,
    /// More for the kernel's command line.
    pub cmdline: String,
    /// Guest memory.
    pub memory_bytes: u64,
    /// Files or devices under load, at least as many as a run has disks.
    pub disks: Vec<PathBuf>,
    /// Duration of a job.
    pub times: Times,
    /// How long any step may take beyond that.
    pub patience: Duration,
    /// Runs that may share a VM.
    pub runs_a_turn: usize,
    /// The user's job file in place of the matrix's load.
    pub job_file: Option<JobFile>,
}

impl Bed for FioBed {
    fn turn(
        &mut self,
        runs: &[&Run],
        stop: &Stop,
        each: &mut dyn FnMut(Measurement),
    ) -> Result<(), Failure> {
        let Some(first) = runs.first() else {
            return Ok(());
        };
        let scratch = scratch()?;
        let jobs: Vec<Job> = runs
            .iter()
            .map(|run| match &self.job_file {
                Some(file) => Job::File(file.text.clone()),
                None => Job::Matrix(Box::new((*run).clone())),
            })
            .collect();
        let (machine, results) = self.machine(first, &jobs, &scratch)?;
        let mut command = self.programs.command(&machine, first);
        let socket = self
            .programs
            .offer_counters(&mut command, first, scratch.path());
        let mut vm = Vm::start(command, stop)?;
        for number in 0..jobs.len() {
            each(self.measure(&mut vm, number, &results, socket.as_deref())?);
        }
        // Ended by itself, or its figures would not count as those of a VMM that works.
        let (status, messages) = vm.wait_end(POWER_OFF.max(self.patience))?;
        if !status.success() {
            let text = format!(
                "the VMM ended with {status} after its jobs: {}",
                messages.trim()
            );
            return Err(Failure::Run(text));
        }
        Ok(())
    }

    fn runs_a_turn(&self) -> usize {
        self.runs_a_turn
    }
}

impl FioBed {
    /// The machine for `jobs`, and its results disk.
    fn machine(
        &self,
        run: &Run,
        jobs: &[Job],
        scratch: &TempDir,
    ) -> Result<(Machine, File), Failure> {
        let fatal = |what: &str, error: io::Error| Failure::Fatal(format!("{what}: {error}"));
        let initrd = scratch.path().join("initrd");
        let files = script::files(jobs, run.disks, self.times);
        overlay::append(&self.initrd, &files, &initrd)
            .map_err(|e| fatal(&format!("--initrd {}", self.initrd.display()), e))?;
        let results_path = scratch.path().join("results");
        let results = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&results_path)
            .and_then(|file| {
                file.set_len(script::SLOT_BYTES * jobs.len() as u64)?;
                Ok(file)
            })
            .map_err(|e| fatal("the results disk cannot be made", e))?;
        let mut disks = vec![Disk {
            path: self.root.clone(),
            serial: "pollux-root".into(),
            readonly: true,
            loaded: false,
            idle: None,
        }];
        disks.push(Disk {
            path: results_path,
            serial: script::RESULTS_SERIAL.into(),
            readonly: false,
            loaded: false,
            idle: None,
        });
        disks.extend((0..run.disks).zip(&self.disks).map(|(index, path)| Disk {
            path: path.clone(),
            serial: script::serial(index),
            readonly: false,
            loaded: true,
            idle: None,
        }));
        let machine = Machine {
            kernel: self.kernel.clone(),
            initrd: Some(initrd),
            cmdline: format!(
                "console=ttyS0 root=/dev/vda ro quiet loglevel=3 panic=-1 reboot=t {}",
                self.cmdline
            )
            .trim_end()
            .to_string(),
            memory_bytes: self.memory_bytes,
            disks,
            linux: true,
        };
        Ok((machine, results))
    }

    /// Follows job `number` through its marks.
    fn measure(
        &self,
        vm: &mut Vm,
        number: usize,
        results: &File,
        socket: Option<&Path>,
    ) -> Result<Measurement, Failure> {
        let job_s = match &self.job_file {
            Some(file) => file.ramp_s + file.runtime_s,
            None => self.times.ramp_s + self.times.runtime_s,
        };
        let within = self.patience + Duration::from_secs(job_s);
        let process = Process::new(vm.pid());
        let gone = |e: crate::cpu::Error| Failure::Run(e.to_string());
        let mut wait = |what: &str, wanted: &dyn Fn(&Mark) -> bool| -> Result<Mark, Failure> {
            let (_, mark) = vm.wait_for(what, within, |line| {
                script::mark(line).filter(|m| wanted(m) || matches!(m, Mark::Failed(_)))
            })?;
            match mark {
                Mark::Failed(why) => Err(Failure::Run(format!("in the guest: {why}"))),
                other => Ok(other),
            }
        };
        let done = |m: &Mark| matches!(m, Mark::Done(n, _) if *n == number);
        // A job that fails at once is done before its interval begins.
        let mark = wait("fio to begin", &|m| done(m) || *m == Mark::Begin(number))?;
        let mut cpu = Usage::default();
        let mut polling = Vec::new();
        let status = if let Mark::Done(_, status) = mark {
            status
        } else {
            let mut qmp = socket.map(Qmp::connect).transpose()?;
            let counters = qmp.as_mut().map(Qmp::counters).transpose()?;
            let begin = process.snapshot().map_err(gone)?;
            wait("end of the job", &|m| *m == Mark::End(number))?;
            cpu = Usage::between(&begin, &process.snapshot().map_err(gone)?);
            if let (Some(mut qmp), Some(counters)) = (qmp, counters) {
                polling = counters.until(&qmp.counters()?);
            }
            match wait("results of the job", &done)? {
                Mark::Done(_, status) => status,
                _ => 0,
            }
        };
        let slot = read_slot(results, number)
            .map_err(|e| Failure::Run(format!("the results disk cannot be read: {e}")))?;
        Ok(Measurement {
            polling,
            ..measurement(&slot, status, cpu)?
        })
    }
}

type Files = Vec<(String, Vec<u8>)>;

fn read_slot(results: &File, number: usize) -> io::Result<Files> {
    let mut bytes = vec![0; usize::try_from(script::SLOT_BYTES).unwrap_or(0)];
    results.read_exact_at(&mut bytes, script::SLOT_BYTES * number as u64)?;
    Ok(script::unframe(&bytes))
}

/// Puts together what the guest brought and what the host counted.
fn measurement(files: &Files, status: i32, cpu: Usage) -> Result<Measurement, Failure> {
    let text = |name: &str| {
        files
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, bytes)| String::from_utf8_lossy(bytes).into_owned())
    };
    let complaint = || text("fio.err").unwrap_or_default().trim().to_string();
    let json = text("fio.json").ok_or_else(|| {
        Failure::Run(format!(
            "fio ended with status {status} and no output; {}",
            complaint()
        ))
    })?;
    let fio = output::fio(&json).map_err(|e| {
        Failure::Run(
            format!("{e}; {}", complaint())
                .trim_end_matches("; ")
                .into(),
        )
    })?;
    if status != 0 {
        return Err(Failure::Run(format!(
            "fio ended with status {status}: {}",
            complaint()
        )));
    }
    let ios = fio.iops * cpu.interval_ns as f64 / 1e9;
    let interrupts = text("interrupts.begin")
        .zip(text("interrupts.end"))
        .map(|(begin, end)| {
            output::virtio_interrupts(&end).saturating_sub(output::virtio_interrupts(&begin)) as f64
        });
    Ok(Measurement {
        iops: fio.iops,
        bytes_per_second: fio.bytes_per_second,
        errors: 0,
        latency: fio.latency,
        cpu,
        guest_cpu: text("mpstat.json").and_then(|t| output::mpstat(&t).ok()),
        kicks_per_io: None,
        interrupts_per_io: interrupts.filter(|_| ios > 0.0).map(|n| n / ios),
        syscalls_per_io: None,
        polling: Vec::new(),
    })
}
