//! The hostile mode: a driver that breaks one rule at a time, and reports what the device did.
//!
//! Each case begins with a device that works, misbehaves, notes the answers, the device's status and
//! its interrupts, looks whether a device that asks for a reset is quiet, resets it, and sees whether
//! it works again. What the right outcome is, the reader of the report decides.

mod cases;
mod raw;

use core::sync::atomic::Ordering;

use crate::options::Job;
use crate::text::Json;
use crate::virtio::{self, Disk, F_RO, NEEDS_RESET};
use crate::{cpu, memory};
use raw::{Raw, SECTOR};

/// How long the device has to answer or to ask for a reset.
const PATIENCE_NS: u64 = 1_000_000_000;
/// How long a broken device is watched for signs of life.
const QUIET_NS: u64 = 30_000_000;

/// So often the device is looked at.
const WATCH_TICK_NS: u64 = 2_000_000;

/// What a case needs or does besides breaking its rule.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sort {
    /// Works on any disk, and is answered by one used element or by NEEDS_RESET.
    Request,
    /// As [`Sort::Request`], but nothing may come of it: watched for a short while only.
    Silent,
    /// Needs a read-only disk.
    ReadOnly,
}

/// Runs the cases that `job` names. Returns whether each could be run and the device works again.
pub fn run(job: &Job) -> bool {
    if job.hostile == b"list" {
        return list(job);
    }
    let Some(disk) = virtio::disks()
        .enumerate()
        .find(|(index, _)| job.disks.contains(*index))
    else {
        return refuse(job, job.hostile, "no such disk");
    };
    let disk = disk.1;
    let is_read_only = disk.features & F_RO != 0;
    let mut ok = true;
    if job.hostile == b"all" {
        for case in cases::ALL
            .iter()
            .filter(|case| is_read_only || case.sort != Sort::ReadOnly)
        {
            ok &= run_case(job, case, disk);
        }
        return ok;
    }
    for name in job.hostile.split(|&b| b == b',') {
        ok &= match cases::ALL.iter().find(|case| case.name.as_bytes() == name) {
            None => refuse(job, name, "no such case"),
            Some(case) if case.sort == Sort::ReadOnly && !is_read_only => {
                refuse(job, name, "the case needs a read-only disk")
            }
            Some(case) => run_case(job, case, disk),
        };
    }
    ok
}

fn run_case(job: &Job, case: &cases::Case, disk: Disk) -> bool {
    let mark = memory::mark();
    let ok = match Raw::new(disk) {
        Ok(raw) => attack(job, case, raw),
        Err(reason) => refuse(job, case.name.as_bytes(), reason),
    };
    memory::release(mark);
    ok
}

fn refuse(job: &Job, name: &[u8], reason: &str) -> bool {
    let mut json = Json::new();
    json.string("job", job.name);
    json.string("hostile", name);
    json.string("error", reason.as_bytes());
    json.print();
    false
}

fn list(job: &Job) -> bool {
    let mut json = Json::new();
    json.string("job", job.name);
    json.flag("ok", true);
    json.array("hostile", |json| {
        cases::ALL
            .iter()
            .for_each(|case| json.string("", case.name.as_bytes()))
    });
    json.print();
    true
}

fn attack(job: &Job, case: &cases::Case, mut raw: Raw) -> bool {
    cpu::start_tick(WATCH_TICK_NS);
    let worked_before = raw.start() && raw.works();
    raw.acknowledge();
    let config_before = raw.config_interrupts;
    let queue_before = raw.queue_interrupts;
    raw.answers.clear();
    let begin = cpu::tsc();
    (case.attack)(&mut raw);
    let patience = match case.sort {
        Sort::Silent => QUIET_NS,
        _ => PATIENCE_NS,
    };
    raw.wait(patience, |raw| {
        raw.answers.count() >= raw.wanted_answers || raw.needs_reset()
    });
    // An interrupt may follow what it reports.
    raw.wait(5_000_000, |_| false);
    let elapsed_ns = cpu::ticks_to_ns(cpu::tsc() - begin);
    let status = raw.disk.status();
    let broken = status & NEEDS_RESET != 0;
    let answers = raw.answers.clone();
    let config_interrupts = raw.config_interrupts - config_before;
    let queue_interrupts = raw.queue_interrupts - queue_before;
    let quiet = !broken || {
        raw.put_read(0, SECTOR);
        raw.kick();
        raw.wait(QUIET_NS, |_| false);
        raw.answers.count() == answers.count()
    };
    if job.runtime_ns > 0 {
        hold(job, case);
    }
    let was_reset = raw.disk.reset();
    // What was in flight must not be written after the reset.
    raw.guard();
    raw.wait(2_000_000, |_| false);
    let untouched = raw.is_guarded();
    let canary = raw.canary_is_whole();
    let works_after_reset = was_reset && raw.start() && raw.works();
    raw.disk.reset();
    let mut json = Json::new();
    json.string("job", job.name);
    json.string("hostile", case.name.as_bytes());
    json.flag("ok", worked_before && works_after_reset);
    json.flag("worked_before", worked_before);
    json.number("answered", answers.count() as u64);
    json.array("answers", |json| {
        for answer in answers.first() {
            json.object("", |json| {
                json.number("status", u64::from(answer.status));
                json.number("len", u64::from(answer.len));
            });
        }
    });
    json.hex("device_status", u64::from(status));
    json.flag("needs_reset", broken);
    json.number("config_interrupts", config_interrupts);
    json.number("queue_interrupts", queue_interrupts);
    json.flag("quiet", quiet);
    json.flag("canary", canary);
    json.flag("untouched_after_reset", untouched);
    json.flag("reset", was_reset);
    json.flag("works_after_reset", works_after_reset);
    json.number("elapsed_ns", elapsed_ns);
    json.print();
    worked_before && works_after_reset
}

/// Leaves the device as it is and does nothing, so that its host can be looked at.
fn hold(job: &Job, case: &cases::Case) {
    let mut json = Json::new();
    json.string("job", job.name);
    json.string("holding", case.name.as_bytes());
    json.print();
    cpu::start_tick(50_000_000);
    let end = cpu::tsc() + cpu::ns_to_ticks(job.runtime_ns);
    while cpu::tsc() < end {
        cpu::wait();
    }
    cpu::start_tick(WATCH_TICK_NS);
}

/// Interrupts that a vector has had.
fn interrupts(vector: u8) -> u64 {
    cpu::INTERRUPTS[usize::from(vector)].load(Ordering::Relaxed)
}
