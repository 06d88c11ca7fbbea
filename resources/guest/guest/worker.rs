//! One CPU at work: it keeps its units' queues full until they are done.

use crate::boot::MAX_CPUS;
use crate::cpu;
use crate::histogram::Histogram;
use crate::memory;
use crate::text::Json;
use crate::unit::Unit;
use core::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

/// A think time that is shorter than this is spent awake.
const SHORT_NS: u64 = 20_000;
/// An interrupt that is later than this after its completion is a lost one.
const INTERRUPT_NS: u64 = 2_000_000_000;
/// So often a waiting CPU wakes up without cause, to look at its time-outs.
pub const TICK_NS: u64 = 50_000_000;

pub struct Worker {
    pub job: usize,
    pub units: &'static mut [Unit],
    pub poll: bool,
    pub runtime_ns: u64,
    /// Stop when [`OTHERS_DONE`] says so.
    pub until_others: bool,
    pub timeout_ns: u64,
    /// Some unit pauses between requests.
    pub thinks: bool,
    /// Print a line for each flush; only for the one worker of a step.
    pub report_flushes: bool,
    pub latencies: Histogram,
    pub started: u64,
    pub ended: u64,
    pub waits: u64,
    pub timed_out: bool,
}

/// Set when the jobs of a step that are no I/O have ended.
pub static OTHERS_DONE: AtomicBool = AtomicBool::new(false);

/// By CPU. The first CPU sets a worker up before it gives it to its CPU, and reads it afterwards.
static WORKERS: [AtomicPtr<Worker>; MAX_CPUS] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; MAX_CPUS];

/// The worker of a CPU, for whoever has it now.
pub fn of_cpu(cpu: usize) -> Option<&'static mut Worker> {
    // SAFETY: null or set by `assign`; the rule above.
    unsafe { WORKERS[cpu].load(Ordering::Acquire).as_mut() }
}

/// Gives a CPU its worker, for as long as the allocator's current step lasts.
pub fn assign(cpu: usize, worker: Worker) -> Result<(), &'static str> {
    let size = size_of::<Worker>() as u64;
    let place = memory::alloc(size, 64, false).ok_or("out of memory")? as *mut Worker;
    // SAFETY: allocated for it.
    unsafe { place.write(worker) };
    WORKERS[cpu].store(place, Ordering::Release);
    Ok(())
}

/// Takes all workers away.
pub fn clear() {
    for worker in &WORKERS {
        worker.store(core::ptr::null_mut(), Ordering::Release);
    }
}

/// Runs the worker of CPU `cpu` on it.
pub fn run(cpu: usize) {
    if let Some(worker) = of_cpu(cpu) {
        worker.run();
    }
}

impl Worker {
    fn run(&mut self) {
        if !self.poll {
            cpu::start_tick(TICK_NS);
        }
        let mut now = cpu::tsc();
        self.started = now;
        let stop = match self.runtime_ns {
            0 => u64::MAX,
            ns => now + cpu::ns_to_ticks(ns),
        };
        let timeout = cpu::ns_to_ticks(self.timeout_ns);
        let patience = cpu::ns_to_ticks(INTERRUPT_NS);
        let mut last_progress = now;
        for unit in self.units.iter_mut() {
            while unit.is_notifier() && unit.submitted < unit.target && cpu::tsc() < stop {
                unit.notify(&mut self.latencies);
            }
            if unit.is_notifier() {
                unit.target = unit.submitted;
            }
            if unit.is_strict() {
                unit.rearm(&mut self.latencies);
            }
            unit.submit(now);
        }
        loop {
            let mut progress = false;
            for unit in self.units.iter_mut() {
                if unit.has_work() {
                    now = cpu::tsc();
                    unit.reap(now, &mut self.latencies);
                    if unit.is_strict() {
                        unit.rearm(&mut self.latencies);
                    }
                    unit.submit(now);
                    progress = true;
                }
            }
            if !progress {
                now = cpu::tsc();
            }
            if now >= stop || self.until_others && OTHERS_DONE.load(Ordering::Relaxed) {
                for unit in self.units.iter_mut() {
                    unit.target = unit.target.min(unit.submitted);
                    unit.submit(now);
                }
            }
            if progress {
                last_progress = now;
                if self.report_flushes {
                    self.report();
                }
                if self.units.iter().all(Unit::is_done) {
                    break;
                }
                continue;
            }
            // Nothing came: look at what time alone changes.
            if self.thinks {
                for unit in self
                    .units
                    .iter_mut()
                    .filter(|unit| now >= unit.paused_until)
                {
                    unit.submit(now);
                }
            }
            let in_flight = self.units.iter().any(|unit| unit.in_flight() > 0);
            if !in_flight && self.units.iter().all(Unit::is_done) {
                break;
            }
            if !in_flight {
                last_progress = now;
            } else if now - last_progress > timeout {
                self.timed_out = true;
                break;
            }
            if self.poll {
                core::hint::spin_loop();
            } else {
                self.wait(now);
                if now - last_progress > patience {
                    self.units.iter_mut().for_each(Unit::miss_interrupt);
                }
            }
        }
        self.ended = cpu::tsc();
    }

    /// Halts until an interrupt, unless a completion has come meanwhile.
    fn wait(&mut self, now: u64) {
        let mut used = false;
        for unit in self.units.iter_mut() {
            used |= !unit.is_strict() && unit.arm();
        }
        if used {
            return;
        }
        if self.thinks {
            let resume = self.units.iter().map(|unit| unit.paused_until);
            let next = resume.filter(|&at| at > now).min();
            let ns = next.map_or(TICK_NS, |at| cpu::ticks_to_ns(at - now).min(TICK_NS));
            if ns < SHORT_NS {
                core::hint::spin_loop();
                return;
            }
            cpu::start_timer(ns);
        }
        self.waits += 1;
        cpu::wait();
        for unit in self.units.iter_mut() {
            if unit.count_interrupts() && unit.disk.has_shared_interrupt() {
                unit.disk.acknowledge();
            }
        }
    }

    fn report(&mut self) {
        for unit in self.units.iter_mut() {
            if let Some(submitted) = unit.flushed.take() {
                let mut json = Json::new();
                json.number("flushed", submitted);
                json.number("disk", unit.disk_index as u64);
                json.number("queue", u64::from(unit.queue));
                json.print();
            }
        }
    }
}
