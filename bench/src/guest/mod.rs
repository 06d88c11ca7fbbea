//! The embedded bare-metal guest as a load.
//!
//! Each turn is a VM of its own with two jobs of the same kind: a ramp, whose line of JSON on the
//! console begins the measured interval, and the job that is measured, whose line ends it. The guest
//! then idles a moment, in which its VMM's threads are counted.

mod line;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cpu::{Process, Usage};
use crate::matrix::{Run, Vmm, axis};
use crate::record::{Latency, Measurement};
use crate::runner::{Bed, Failure, Stop, scratch};
use crate::vm::{Disk, Machine, Programs, Qmp, Vm};

use line::{JobLine, Line};

/// Memory of the guest: the kernel needs none, rings and buffers of 64 disks fit.
const MEMORY_BYTES: u64 = 128 << 20;
/// The job before the measured one.
const RAMP: &str = "ramp";
/// The measured job.
const MEASURED: &str = "measured";
/// An idle job after it, or the VM would end, and its threads with it, while they are counted.
const AFTER: &str = "job=after rw=sleep runtime=500ms";

/// The embedded guest and the disks that bear its load.
#[derive(Debug)]
pub struct GuestBed {
    /// The VMMs.
    pub programs: Programs,
    /// The guest as a file.
    pub image: PathBuf,
    /// Files or devices under load, at least as many as a run has disks.
    pub disks: Vec<PathBuf>,
    /// Load before anything is measured.
    pub ramp: Duration,
    /// The measured interval.
    pub runtime: Duration,
    /// How long any step may take beyond that.
    pub patience: Duration,
}

impl Bed for GuestBed {
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

impl GuestBed {
    fn measure(&self, run: &Run, stop: &Stop) -> Result<Measurement, Failure> {
        let scratch = scratch()?;
        let mut machine = self.machine(run);
        add_idle_disks(&mut machine, run, scratch.path())?;
        let mut command = match run.idle_disks {
            0 => self.programs.command(&machine, run),
            // One for the driver of those, which halts.
            _ => {
                let vcpus = run.vcpus + 1;
                let run = Run {
                    vcpus,
                    ..run.clone()
                };
                self.programs.command(&machine, &run)
            }
        };
        let socket = self
            .programs
            .offer_counters(&mut command, run, scratch.path());
        let mut vm = Vm::start(command, stop)?;
        let process = Process::new(vm.pid());
        let gone = |e: crate::cpu::Error| Failure::Run(e.to_string());
        self.job_line(&mut vm, RAMP, self.ramp)?;
        let mut qmp = socket.map(|path| Qmp::connect(&path)).transpose()?;
        let counters = qmp.as_mut().map(Qmp::counters).transpose()?;
        let begin = process.snapshot().map_err(gone)?;
        let job = self.job_line(&mut vm, MEASURED, self.runtime)?;
        let cpu = Usage::between(&begin, &process.snapshot().map_err(gone)?);
        let polling = match (qmp, counters) {
            (Some(mut qmp), Some(counters)) => counters.until(&qmp.counters()?),
            _ => Vec::new(),
        };
        let (status, messages) = vm.wait_end(self.patience)?;
        if !status.success() {
            let text = format!(
                "the VMM ended with {status} after its job: {}",
                messages.trim()
            );
            return Err(Failure::Run(text));
        }
        Ok(Measurement {
            polling,
            ..measurement(&job, cpu)
        })
    }

    fn machine(&self, run: &Run) -> Machine {
        let disks = (0..run.disks).zip(&self.disks).map(|(index, path)| Disk {
            path: path.clone(),
            serial: format!("pollux-load{index}"),
            readonly: false,
            loaded: true,
            idle: None,
        });
        Machine {
            kernel: self.image.clone(),
            initrd: None,
            cmdline: self.cmdline(run),
            memory_bytes: MEMORY_BYTES,
            disks: disks.collect(),
            linux: false,
        }
    }

    /// The guest's jobs in its own words, which are fio's where fio has one.
    fn cmdline(&self, run: &Run) -> String {
        let word = |name: &str| axis(name).and_then(|a| (a.get)(run)).unwrap_or_default();
        let mut text = format!(
            "rw={} bs={} iodepth={} queues={}",
            word("rw"),
            run.bs_bytes,
            run.iodepth,
            run.queues
        );
        match run.completion.as_deref() {
            Some("poll") => text += " completion=poll",
            Some(_) => text += " completion=irq",
            None => {}
        }
        if let Some(think_ns) = run.think_ns {
            text += &format!(" thinktime={think_ns}ns");
            if let Some(think_ios) = run.think_ios {
                text += &format!(" thinktime_blocks={think_ios}");
            }
        }
        let [ramp, runtime] = [self.ramp, self.runtime].map(|time| time.as_nanos());
        if run.idle_disks == 0 {
            return text
                + &format!(
                    " job={RAMP} runtime={ramp}ns job={MEASURED} runtime={runtime}ns {AFTER}"
                );
        }
        // The guest finds those on MMIO first. Each has had its driver and a request.
        let (loaded, last) = (run.idle_disks.saturating_sub(PCI_ROOM), run.idle_disks);
        let idle = match loaded {
            0 => format!("1-{last}"),
            first => format!("0-{},{}-{last}", first - 1, first + 1),
        };
        let beside = format!("disk={idle} rw=randread ios={last} iodepth=1");
        text + &format!(
            " job={RAMP} disk={loaded} runtime={ramp}ns and=idle0 {beside} \
             job={MEASURED} disk={loaded} runtime={runtime}ns and=idle1 {beside} {AFTER}"
        )
    }

    /// Waits for the line of the job `name`.
    fn job_line(&self, vm: &mut Vm, name: &str, lasts: Duration) -> Result<JobLine, Failure> {
        let what = format!("line of the job `{name}`");
        let (_, line) = vm.wait_for(&what, self.patience + lasts, |text| {
            match Line::read(text)? {
                Line::Job(job) if job.job == name => Some(Ok(*job)),
                Line::Job(_) => None,
                Line::Trouble(why) => Some(Err(why)),
            }
        })?;
        let job = line.map_err(|why| Failure::Run(format!("in the guest: {why}")))?;
        if job.ok {
            return Ok(job);
        }
        Err(Failure::Run(format!(
            "in the guest: the job `{name}` failed: {} errors, {} unsupported{}",
            job.errors,
            job.unsupported,
            if job.timed_out {
                ", a request was never completed"
            } else {
                ""
            }
        )))
    }
}

/// Idle disks that fit on the PCI bus beside a loaded one.
const PCI_ROOM: u32 = 247;

/// Adds the run's idle disks, all on one image.
fn add_idle_disks(machine: &mut Machine, run: &Run, scratch: &Path) -> Result<(), Failure> {
    if run.idle_disks == 0 {
        return Ok(());
    }
    if run.disks != 1 || run.iothreads == 0 || run.vmm != Vmm::Pollux {
        let text = "idle-disks takes vmm=pollux, disks=1 and an iothread";
        return Err(Failure::Run(text.into()));
    }
    let path = scratch.join("idle");
    std::fs::File::create(&path)
        .and_then(|file| file.set_len(1 << 20))
        .map_err(|error| Failure::Run(format!("{}: {error}", path.display())))?;
    let transport = |index| if index < PCI_ROOM { "pci" } else { "mmio" };
    machine.disks.extend((0..run.idle_disks).map(|index| Disk {
        path: path.clone(),
        serial: format!("pollux-idle{index}"),
        readonly: true,
        loaded: false,
        idle: Some(transport(index)),
    }));
    Ok(())
}

fn measurement(job: &JobLine, cpu: Usage) -> Measurement {
    let per_io = |n: u64| (job.ios > 0).then(|| n as f64 / job.ios as f64);
    // The guest's clock: `iops` on its line is rounded down.
    let per_second = |n: u64| n as f64 * 1e9 / job.elapsed_ns.max(1) as f64;
    Measurement {
        iops: per_second(job.ios),
        bytes_per_second: per_second(job.bytes),
        errors: job.errors,
        latency: Some(Latency {
            mean_ns: job.lat_ns.mean as f64,
            p50_ns: job.lat_ns.p50 as f64,
            p90_ns: job.lat_ns.p90 as f64,
            p99_ns: job.lat_ns.p99 as f64,
            p999_ns: job.lat_ns.p999 as f64,
            max_ns: job.lat_ns.max as f64,
        }),
        cpu,
        guest_cpu: None,
        kicks_per_io: per_io(job.kicks),
        interrupts_per_io: per_io(job.interrupts),
        syscalls_per_io: None,
        polling: Vec::new(),
    }
}
