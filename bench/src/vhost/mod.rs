//! A closed loop of requests over vhost-user: no guest, no KVM, the same driver for each back end.
//!
//! Each turn is a back end of its own, Pollux or QEMU's storage daemon, on the same files. The load
//! ([`load`]) connects, runs up, is measured, and goes on for a moment in which the back end's system
//! calls are counted ([`syscalls`]): counting them slows them down, so it is no part of the measurement.

mod backend;
mod load;
mod syscalls;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::cpu::{Process, Usage};
use crate::matrix::{Run, Vmm};
use crate::record::{Latency, Measurement};
use crate::runner::{Bed, Failure, Stop, scratch, sleep_until};
use crate::vm::{Programs, Qmp, Vm};

use load::{Load, Phase, Shape, Totals};

/// How long system calls are counted.
const COUNTED: Duration = Duration::from_millis(300);

/// Back ends and the files that bear the load.
#[derive(Debug)]
pub struct VhostBed {
    /// The back ends; `qemu` is `qemu-storage-daemon`.
    pub programs: Programs,
    /// Files or devices under load, at least as many as a run has disks.
    pub disks: Vec<PathBuf>,
    /// Load before anything is measured.
    pub ramp: Duration,
    /// The measured interval.
    pub runtime: Duration,
    /// How long any step may take beyond that.
    pub patience: Duration,
}

impl Bed for VhostBed {
    fn turn(
        &mut self,
        runs: &[&Run],
        stop: &Stop,
        each: &mut dyn FnMut(Measurement),
    ) -> Result<(), Failure> {
        for run in runs {
            each(self.measure(run, stop)?);
        }
        Ok(())
    }
}

impl VhostBed {
    fn measure(&self, run: &Run, stop: &Stop) -> Result<Measurement, Failure> {
        let scratch = scratch()?;
        let disks = &self.disks[..run.disks as usize];
        let sockets: Vec<PathBuf> = (0..disks.len())
            .map(|index| scratch.path().join(format!("disk{index}")))
            .collect();
        let mut command = backend::command(&self.programs, run, disks, &sockets);
        let counters = self
            .programs
            .offer_counters(&mut command, run, scratch.path());
        let mut vm = Vm::start(command, stop)?;
        let shape = Shape::of(run);
        let load = match Load::start(&sockets, &shape, self.patience) {
            Ok(load) => load,
            Err(why) => return Err(self.told_by(&mut vm, &why)),
        };
        let process = Process::new(vm.pid());
        let gone = |e: crate::cpu::Error| Failure::Run(e.to_string());
        sleep_until(Instant::now() + self.ramp, stop)?;
        let mut qmp = counters.map(|path| Qmp::connect(&path)).transpose()?;
        let counters = qmp.as_mut().map(Qmp::counters).transpose()?;
        let begin = process.snapshot().map_err(gone)?;
        load.enter(Phase::Measured);
        let lasted = sleep_until(Instant::now() + self.runtime, stop);
        load.enter(Phase::Counted);
        let cpu = Usage::between(&begin, &process.snapshot().map_err(gone)?);
        let polling = match (qmp, counters) {
            (Some(mut qmp), Some(counters)) => counters.until(&qmp.counters()?),
            _ => Vec::new(),
        };
        lasted?;
        let calls = syscalls::Counter::of(vm.pid());
        let before = load.done();
        sleep_until(Instant::now() + COUNTED, stop)?;
        let (calls, ios) = (calls.and_then(|c| c.read()), load.done() - before);
        let totals = match load.finish(self.patience) {
            Ok(totals) => totals,
            Err(why) => return Err(self.told_by(&mut vm, &why)),
        };
        // SAFETY: kill has no preconditions; the child is ours and not yet waited for.
        unsafe { libc::kill(vm.pid(), libc::SIGTERM) };
        let (status, messages) = vm.wait_end(self.patience)?;
        if !status.success() {
            let text = format!("the back end ended with {status}: {}", messages.trim());
            return Err(Failure::Run(text));
        }
        Ok(Measurement {
            polling,
            syscalls_per_io: calls
                .filter(|_| ios > 0)
                .map(|calls| calls as f64 / ios as f64),
            ..measurement(&totals, shape.bytes, cpu)
        })
    }

    /// Why the load failed, and what the back end says of it, if it has ended.
    fn told_by(&self, vm: &mut Vm, why: &str) -> Failure {
        match vm.wait_end(Duration::from_millis(200)) {
            Ok((status, messages)) => Failure::Run(format!(
                "{why}; the back end: {status}: {}",
                messages.trim()
            )),
            Err(_) => Failure::Run(why.into()),
        }
    }
}

fn measurement(totals: &Totals, bytes: u64, cpu: Usage) -> Measurement {
    let latency = &totals.latency_ns;
    let at = |percentile| latency.value_at_percentile(percentile) as f64;
    let per_io = |n: u64| (totals.ios > 0).then(|| n as f64 / totals.ios as f64);
    Measurement {
        iops: totals.iops,
        bytes_per_second: totals.iops * bytes as f64,
        errors: totals.errors,
        latency: (!latency.is_empty()).then(|| Latency {
            mean_ns: latency.mean(),
            p50_ns: at(50.0),
            p90_ns: at(90.0),
            p99_ns: at(99.0),
            p999_ns: at(99.9),
            max_ns: latency.max() as f64,
        }),
        cpu,
        kicks_per_io: per_io(totals.kicks),
        interrupts_per_io: per_io(totals.interrupts),
        ..Measurement::default()
    }
}

/// What is said where the peer is missing.
pub fn missing(programs: &Programs) -> Option<String> {
    let error = programs.version(Vmm::Qemu).err()?;
    Some(format!(
        "{error}; it is in Debian's package qemu-utils, or name it with --storage-daemon"
    ))
}
