//! Jobs: which CPU drives which queues, and the report of each job.

use crate::boot::MAX_CPUS;
use crate::cpu;
use crate::histogram::Histogram;
use crate::memory;
use crate::options::{Job, Kind, MAX_DISKS, Verify};
use crate::phys::Addr;
use crate::text::{self, Json};
use crate::tracker;
use crate::unit::{Counters, Region, SECTOR_BYTES, Unit};
use crate::virtio::{self, Disk};
use crate::worker::{self, TICK_NS, Worker};
use crate::{hostile, options};
use core::sync::atomic::Ordering;

/// Runs all jobs, `cpus` CPUs being there. Returns how many failed.
pub fn run_all(jobs: &[Job], cpus: usize) -> usize {
    let mut failed = 0;
    let mut first = 0;
    while first < jobs.len() {
        let len = jobs[first..]
            .iter()
            .take_while(|job| job.step == jobs[first].step)
            .count();
        failed += run_step(&jobs[first..first + len], first, cpus);
        first += len;
    }
    failed
}

/// Runs the jobs of one step side by side. `number` is the first one's index.
fn run_step(jobs: &[Job], number: usize, cpus: usize) -> usize {
    // What tracks writes outlives the step, so it comes before the mark.
    let prepared = prepare_trackers(jobs);
    let mark = memory::mark();
    let mut vectors = cpu::DEVICE_VECTORS.cycle();
    let mut failed = 0;
    let mut used_disks = [false; MAX_DISKS];
    // The first CPU runs what is no I/O; if all is I/O it works like the others.
    let mut next_cpu = usize::from(jobs.iter().any(|job| !job.kind.is_io()));
    worker::clear();
    for (i, job) in jobs.iter().enumerate().filter(|(_, job)| job.kind.is_io()) {
        let set_up = prepared.and_then(|()| {
            let alone = jobs.len() == 1;
            set_up(
                job,
                number + i,
                cpus,
                alone,
                &mut next_cpu,
                &mut vectors,
                &mut used_disks,
            )
        });
        if let Err(reason) = set_up {
            report_failure(job, reason);
            failed += 1;
        }
    }
    worker::OTHERS_DONE.store(false, Ordering::Relaxed);
    // All others first, then this CPU's own.
    for slot in 1..cpus {
        if worker::of_cpu(slot).is_some() {
            cpu::give_work(slot, slot);
        }
    }
    worker::run(0);
    for job in jobs.iter().filter(|job| !job.kind.is_io()) {
        failed += usize::from(!run_other(job));
    }
    worker::OTHERS_DONE.store(true, Ordering::Relaxed);
    cpu::start_tick(TICK_NS);
    for slot in 1..cpus {
        while cpu::is_working(slot) {
            cpu::wait();
        }
    }
    // The devices must not write to memory that the next step uses for something else.
    for (index, _) in used_disks.iter().enumerate().filter(|(_, used)| **used) {
        if let Some(disk) = virtio::disk(index) {
            disk.reset();
        }
    }
    for (i, job) in jobs.iter().enumerate().filter(|(_, job)| job.kind.is_io()) {
        failed += usize::from(!report(job, number + i));
    }
    memory::release(mark);
    failed
}

fn prepare_trackers(jobs: &[Job]) -> Result<(), &'static str> {
    for job in jobs.iter().filter(|job| job.verify == Verify::Track) {
        for (index, disk) in virtio::disks().enumerate() {
            if job.disks.contains(index) {
                tracker::prepare(index, disk.capacity_sectors)?;
            }
        }
    }
    Ok(())
}

/// The features that a job accepts of those that a disk offers.
pub fn accepted(job: &Job, disk: &Disk) -> u64 {
    let mut features = disk.features & virtio::KNOWN_FEATURES;
    for (wanted, bit) in [
        (job.event_idx, virtio::F_EVENT_IDX),
        (job.indirect, virtio::F_INDIRECT),
        (job.ack_read_only, virtio::F_RO),
    ] {
        if !wanted {
            features &= !bit;
        }
    }
    features
}

/// Units of all queues of a job's disks, spread over its workers.
fn set_up(
    job: &Job,
    number: usize,
    cpus: usize,
    alone: bool,
    next_cpu: &mut usize,
    vectors: &mut impl Iterator<Item = u8>,
    used_disks: &mut [bool; MAX_DISKS],
) -> Result<(), &'static str> {
    let disks = || {
        virtio::disks()
            .enumerate()
            .filter(|(index, _)| job.disks.contains(*index))
    };
    let count = disks().count();
    if count == 0 {
        return Err("no such disk");
    }
    if disks().any(|(index, _)| used_disks[index]) {
        return Err("a disk is in use by another job of the same step");
    }
    if disks().any(|(_, disk)| job.queues > usize::from(disk.queues)) {
        return Err("more queues than the disk has");
    }
    let first_cpu = job.cpu.unwrap_or(*next_cpu);
    // A disk with one interrupt for all its queues belongs to one worker.
    let is_shared = disks().any(|(_, disk)| disk.has_shared_interrupt());
    let shares = if is_shared { count } else { count * job.queues };
    let free_cpus = cpus.saturating_sub(first_cpu);
    let workers = match job.workers {
        0 if !alone => 1,
        0 => free_cpus.min(shares),
        n => n.min(shares),
    };
    if workers == 0
        || workers > free_cpus
        || (0..workers).any(|w| worker::of_cpu(first_cpu + w).is_some())
    {
        return Err("not enough CPUs");
    }
    if job.report_flushes && (workers > 1 || !alone) {
        return Err("report=flush needs one worker and no job beside it");
    }
    *next_cpu = (*next_cpu).max(first_cpu + workers);
    let units = count * job.queues;
    let ios = match (job.ios, job.runtime_ns) {
        (0, 0) if !job.until_others => None,
        (0, _) => Some(u64::MAX),
        (ios, _) => Some(ios.div_ceil(units as u64)),
    };
    // The units lie worker by worker in one allocation.
    let share_of = |position: usize, queue: usize| {
        let share = if is_shared {
            position
        } else {
            position * job.queues + queue
        };
        share % workers
    };
    for (_, disk) in disks() {
        if !disk.negotiate(accepted(job, &disk)) {
            return Err("the device refuses the features");
        }
    }
    for index in 0..workers {
        let area =
            memory::alloc((size_of::<Unit>() * units) as u64, 64, false).ok_or("out of memory")?;
        let mut len = 0;
        for (position, (disk_index, disk)) in disks().enumerate() {
            for queue in (0..job.queues).filter(|&queue| share_of(position, queue) == index) {
                let vector = vectors.next().unwrap_or(u8::MAX);
                let mut unit =
                    set_up_unit(job, disk, disk_index, queue, vector, first_cpu + index)?;
                unit.target = ios.unwrap_or(unit.region_blocks());
                // SAFETY: within `area`, which has room for all units.
                unsafe { (area as *mut Unit).add(len).write(unit) };
                len += 1;
            }
        }
        let worker = Worker {
            job: number,
            // SAFETY: `len` units were written there; nobody else refers to them.
            units: unsafe { core::slice::from_raw_parts_mut(area as *mut Unit, len) },
            poll: job.poll,
            runtime_ns: job.runtime_ns,
            until_others: job.until_others,
            timeout_ns: job.timeout_ns,
            thinks: job.think_ns > 0,
            report_flushes: job.report_flushes,
            latencies: Histogram::EMPTY,
            started: 0,
            ended: 0,
            waits: 0,
            timed_out: false,
        };
        worker::assign(first_cpu + index, worker)?;
    }
    for (index, disk) in disks() {
        used_disks[index] = true;
        if let (Some(on), true) = (job.write_cache, disk.features & virtio::F_CONFIG_WCE != 0) {
            disk.set_config8(virtio::CONFIG_WCE, u8::from(on));
        }
        disk.driver_ok();
    }
    Ok(())
}

fn set_up_unit(
    job: &Job,
    disk: Disk,
    disk_index: usize,
    queue: usize,
    vector: u8,
    cpu: usize,
) -> Result<Unit, &'static str> {
    let region = region(job, &disk, queue)?;
    // On MMIO the first queue's vector is that of all.
    if queue == 0 {
        disk.route_config(vector, cpu);
    }
    if !disk.route_queue(queue as u16, vector, cpu) {
        return Err("the device has no interrupt vector for the queue");
    }
    let features = accepted(job, &disk);
    let (unit, rings) = Unit::new(
        job,
        disk,
        disk_index,
        queue as u16,
        features,
        region,
        vector,
    )?;
    disk.set_up_queue(queue as u16, &rings);
    Ok(unit)
}

/// The part of the disk that queue `queue` works on: all of it for plain random I/O, else the queues
/// share it out.
fn region(job: &Job, disk: &Disk, queue: usize) -> Result<Region, &'static str> {
    let block_bytes = u64::from(job.block_bytes).max(SECTOR_BYTES);
    let capacity_bytes = disk.capacity_sectors * SECTOR_BYTES;
    let end = match job.offset.saturating_add(job.size) {
        end if job.bound => end.min(capacity_bytes),
        end => end,
    };
    let (first, last) = (job.offset / block_bytes, end / block_bytes);
    let blocks = last.saturating_sub(first);
    let apart = !job.kind.is_random() || job.verify != Verify::Off;
    let (first_block, blocks) = match apart {
        true => {
            let each = blocks / job.queues as u64;
            (first + each * queue as u64, each)
        }
        false => (first, blocks),
    };
    if blocks == 0 && job.kind != Kind::GetId && job.kind != Kind::Flush {
        return Err("the region has no whole block");
    }
    Ok(Region {
        first_block,
        blocks: blocks.max(1),
    })
}

fn report_failure(job: &Job, reason: &str) {
    let mut json = Json::new();
    json.string("job", job.name);
    json.string("error", reason.as_bytes());
    json.print();
}

/// Prints a job's line. Returns whether all went well.
fn report(job: &Job, number: usize) -> bool {
    let workers = || (0..MAX_CPUS).filter_map(|cpu| worker::of_cpu(cpu).map(|w| (cpu, &*w)));
    let workers = || workers().filter(|(_, worker)| worker.job == number);
    let Some(started) = workers().map(|(_, worker)| worker.started).min() else {
        return false;
    };
    let ended = workers()
        .map(|(_, worker)| worker.ended)
        .max()
        .unwrap_or(started);
    let elapsed_ns = cpu::ticks_to_ns(ended - started);
    let mut latencies = Histogram::EMPTY;
    let mut sum = Counters::default();
    let mut waits = 0;
    let mut timed_out = false;
    let mut fault = None;
    for (_, worker) in workers() {
        latencies.add(&worker.latencies);
        waits += worker.waits;
        timed_out |= worker.timed_out;
        for unit in worker.units.iter() {
            sum.add(&unit.counters);
            fault = fault.or(unit.fault);
        }
    }
    let ios = sum.ios();
    let per_second =
        |n: u64| (u128::from(n) * 1_000_000_000 / u128::from(elapsed_ns.max(1))) as u64;
    let ok = !timed_out && sum.errors == 0 && sum.unsupported == 0 && sum.faults == 0;
    let mut json = Json::new();
    json.string("job", job.name);
    json.string("rw", job.kind.name());
    json.number("bs", u64::from(job.block_bytes));
    json.number("iodepth", job.depth as u64);
    json.number("queues", job.queues as u64);
    json.string(
        "completion",
        match (job.poll, job.strict) {
            (true, _) => b"poll",
            (_, true) => b"strict",
            _ => b"irq",
        },
    );
    json.array("cpus", |json| {
        workers().for_each(|(cpu, _)| json.number("", cpu as u64))
    });
    json.flag("ok", ok);
    json.number("ios", ios);
    json.number("iops", per_second(ios));
    json.number("bytes", sum.bytes);
    json.number("bytes_per_s", per_second(sum.bytes));
    json.number("reads", sum.reads);
    json.number("writes", sum.writes);
    json.number("others", sum.others);
    json.number("errors", sum.errors);
    json.number("unsupported", sum.unsupported);
    json.flag("timed_out", timed_out);
    json.number("elapsed_ns", elapsed_ns);
    let ns = cpu::ticks_to_ns;
    json.object("lat_ns", |json| {
        json.number("min", ns(if ios == 0 { 0 } else { latencies.min }));
        json.number("mean", ns(latencies.mean()));
        for (name, per_mille) in [("p50", 500), ("p90", 900), ("p99", 990), ("p99.9", 999)] {
            json.number(name, ns(latencies.percentile(per_mille)));
        }
        json.number("max", ns(latencies.max));
    });
    json.number("kicks", sum.kicks);
    json.number("interrupts", sum.interrupts);
    json.number("waits", waits);
    json.number("used_batches", sum.used_batches);
    json.number("verified_sectors", sum.verified_sectors);
    json.number("faults", sum.faults);
    if let Some(fault) = fault {
        json.object("first_fault", |json| {
            json.string("what", fault.what.as_bytes());
            json.number("disk", u64::from(fault.disk));
            json.number("sector", fault.sector);
            json.hex("expected", fault.expected);
            json.hex("found", fault.found);
        });
    }
    json.array("disks", |json| {
        for unit in workers().flat_map(|(_, worker)| worker.units.iter()) {
            json.object("", |json| {
                json.number("disk", unit.disk_index as u64);
                json.number("queue", u64::from(unit.queue));
                json.number("ios", unit.counters.ios());
                json.number("errors", unit.counters.errors + unit.counters.unsupported);
                json.number("kicks", unit.counters.kicks);
                json.number("interrupts", unit.counters.interrupts);
                if job.kind == Kind::GetId {
                    json.string("id", &unit.id);
                }
            });
        }
    });
    json.print();
    ok
}

/// Jobs of other kinds, on the first CPU.
fn run_other(job: &Job) -> bool {
    match job.kind {
        Kind::Echo => echo(job),
        Kind::Hostile => return hostile::run(job),
        Kind::Sleep => {
            cpu::start_tick(TICK_NS);
            let end = cpu::tsc() + cpu::ns_to_ticks(job.runtime_ns);
            while cpu::tsc() < end {
                cpu::wait();
            }
            let mut json = Json::new();
            json.string("job", job.name);
            json.flag("ok", true);
            json.print();
        }
        _ => {
            let mut json = Json::new();
            json.string("job", job.name);
            json.flag("ok", true);
            json.print();
        }
    }
    true
}

/// Reads a line from the console and prints it. By interrupts, or by looking at the port.
fn echo(job: &Job) {
    const SERIAL_IRQ: u32 = 4;
    let vector = usize::from(cpu::SERIAL);
    let before = cpu::INTERRUPTS[vector].load(Ordering::Relaxed);
    if !job.poll {
        virtio::route_ioapic(SERIAL_IRQ, cpu::SERIAL, 0);
        text::receive_interrupt(true);
    }
    cpu::start_tick(TICK_NS);
    let mut ready = Json::new();
    ready.string("job", job.name);
    ready.flag("reading", true);
    ready.print();
    let mut line = [0; 256];
    let mut len = 0;
    let end = cpu::tsc() + cpu::ns_to_ticks(job.timeout_ns);
    // By interrupt means that nothing is looked for before the first one.
    let interrupted = || cpu::INTERRUPTS[vector].load(Ordering::Relaxed) != before;
    while !job.poll && !interrupted() && cpu::tsc() < end {
        cpu::wait();
    }
    while len < line.len() && cpu::tsc() < end {
        match text::receive() {
            Some(b'\n' | b'\r') => break,
            Some(byte) => {
                line[len] = byte;
                len += 1;
            }
            None => cpu::wait(),
        }
    }
    text::receive_interrupt(false);
    let mut json = Json::new();
    json.string("job", job.name);
    json.flag("ok", true);
    json.string("line", &line[..len]);
    json.number(
        "interrupts",
        cpu::INTERRUPTS[vector].load(Ordering::Relaxed) - before,
    );
    json.print();
}

/// The line that says what guest this is and what it found.
pub fn report_machine(boot: &memory::BootInfo, tsc_source: &str, cpus: usize, ecam: Addr) {
    let mut json = Json::new();
    json.string("guest", b"pollux");
    json.string("protocol", memory::protocol_name(boot.protocol));
    json.number("cpus", cpus as u64);
    json.array("ram", |json| {
        for &(start, end) in boot.ram {
            json.array("", |json| {
                json.number("", start);
                json.number("", end);
            });
        }
    });
    json.number("tsc_hz", cpu::tsc_hz());
    json.string("tsc_source", tsc_source.as_bytes());
    json.hex("rsdp", boot.rsdp);
    json.hex("ecam", ecam);
    json.array("disks", |json| {
        for disk in virtio::disks() {
            json.object("", |json| report_disk(json, &disk));
        }
    });
    json.print();
}

fn report_disk(json: &mut Json, disk: &Disk) {
    match disk.transport {
        virtio::Transport::Mmio { base, irq } => {
            json.string("transport", b"mmio");
            json.hex("address", base);
            json.number("irq", u64::from(irq));
        }
        virtio::Transport::Pci {
            function, msix_len, ..
        } => {
            json.string("transport", b"pci");
            json.number("function", u64::from(function));
            json.number("msix", u64::from(msix_len));
        }
    }
    json.hex("features", disk.features);
    json.number("capacity_sectors", disk.capacity_sectors);
    json.number("queues", u64::from(disk.queues));
    json.number("queue_size", u64::from(disk.queue_size));
    if disk.features & virtio::F_SEG_MAX != 0 {
        json.number("seg_max", u64::from(disk.config32(virtio::CONFIG_SEG_MAX)));
    }
    if disk.features & virtio::F_BLK_SIZE != 0 {
        json.number(
            "blk_size",
            u64::from(disk.config32(virtio::CONFIG_BLK_SIZE)),
        );
    }
    if disk.features & virtio::F_CONFIG_WCE != 0 {
        json.number("wce", u64::from(disk.config8(virtio::CONFIG_WCE)));
    }
    if disk.features & virtio::F_DISCARD != 0 {
        let max = disk.config32(virtio::CONFIG_MAX_DISCARD_SECTORS);
        json.number("max_discard_sectors", u64::from(max));
    }
    if disk.features & virtio::F_WRITE_ZEROES != 0 {
        let max = disk.config32(virtio::CONFIG_MAX_WRITE_ZEROES_SECTORS);
        json.number("max_write_zeroes_sectors", u64::from(max));
    }
}

/// The line for a command line that is not understood.
pub fn report_bad_option(error: &options::Error) {
    let mut json = Json::new();
    json.string("error", error.reason.as_bytes());
    json.string("option", error.token);
    json.print();
}
