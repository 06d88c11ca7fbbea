//! What the values of a configuration mean together: names, ranges, references, and what is not built yet.

use std::collections::BTreeSet;

use iothread::SettingError;
use tracing_subscriber::filter::LevelFilter;

use super::{
    Config, Disk, Error, ErrorPolicy, IoThread, Metrics, Size, Trace, Transport, placement,
};
use crate::qmp::machine::MAIN_LOOP_ID;
use crate::trace;
use crate::vm::{disks, iothreads};

/// Most vCPUs.
pub const MAX_CPUS: u32 = 64;
/// Least guest memory.
pub const MIN_MEMORY: Size = Size(64 << 20);

/// Longest time between two writings of the metrics, in seconds.
pub const MAX_METRICS_INTERVAL: u32 = 86400;

/// Least size of a trace's file: it holds what the busiest loop has to tell at once.
pub const MIN_TRACE_SIZE: Size = Size(4 << 20);
/// Most files of a trace.
pub const MAX_TRACE_FILES: u32 = 1000;

/// The parts of the program that have a log level of their own.
const LOG_PARTS: [&str; 4] = ["vmm", "devices", "arch", "iothread"];

/// Checks everything that needs no look at the host.
pub fn check(config: &Config) -> Result<(), Error> {
    if config.cpus == 0 || config.cpus > MAX_CPUS {
        let problem = format!("out of range; give 1 to {MAX_CPUS} vCPUs");
        return Err(Error::new(format!("--cpus {}", config.cpus), problem));
    }
    check_memory(config)?;
    if config.cmdline.contains('\0') {
        return Err(Error::new("--cmdline", "contains a NUL byte; remove it"));
    }
    check_log(config)?;
    if let Some(metrics) = &config.metrics {
        check_metrics(metrics)?;
    }
    if let (Some(chroot), None) = (&config.chroot, &config.user) {
        // Root leaves it at will.
        let place = format!("--chroot {}", chroot.display());
        return Err(Error::new(place, "holds nobody who is root; add --user"));
    }
    if let Some(trace) = &config.trace {
        check_trace(trace)?;
    }
    let mut names = BTreeSet::new();
    for iothread in &config.iothread {
        let place = format!("--iothread id={}", iothread.id);
        check_iothread_id(&iothread.id).map_err(|problem| Error::new(&place, problem))?;
        if !names.insert(&iothread.id) {
            return Err(Error::new(
                place,
                "two iothreads have this id; give each its own",
            ));
        }
        check_iothread(iothread).map_err(|problem| Error::new(&place, problem))?;
    }
    let mut names = BTreeSet::new();
    for disk in &config.disk {
        let place = disk_place(disk);
        if let Some(id) = &disk.id {
            check_id(id).map_err(|problem| Error::new(&place, format!("id={id}: {problem}")))?;
            if !names.insert(id) {
                return Err(Error::new(
                    place,
                    "two disks have this id; give each its own",
                ));
            }
        }
        check_disk(disk, config).map_err(|problem| Error::new(&place, problem))?;
        placement::place(disk, queues(disk, config.cpus), &config.iothread)
            .map_err(|error| Error::new(&place, error.to_string()))?;
    }
    Ok(())
}

/// How a disk is called in messages: by its id, or its path if it has none.
pub fn disk_place(disk: &Disk) -> String {
    match &disk.id {
        Some(id) => format!("--disk id={id}"),
        None => format!("--disk path={}", disk.path.display()),
    }
}

/// Names for all disks: those given, and `disk<N>` for the others.
pub fn disk_ids(disks: &[Disk]) -> Vec<String> {
    let mut taken: BTreeSet<String> = disks.iter().filter_map(|disk| disk.id.clone()).collect();
    let mut number = 0;
    let mut fresh = || loop {
        let id = format!("disk{number}");
        number += 1;
        if taken.insert(id.clone()) {
            return id;
        }
    };
    disks
        .iter()
        .map(|disk| disk.id.clone().unwrap_or_else(&mut fresh))
        .collect()
}

/// The transport of a disk.
pub fn transport(disk: &Disk) -> Transport {
    disk.transport.unwrap_or(Transport::Pci)
}

/// The number of request queues of a disk: one a vCPU where each has an interrupt of its own, else one.
pub fn queues(disk: &Disk, cpus: u32) -> u16 {
    disk.queues.unwrap_or_else(|| match transport(disk) {
        Transport::Pci => u16::try_from(cpus).unwrap_or(1),
        Transport::Mmio | Transport::Ccw => 1,
    })
}

fn check_memory(config: &Config) -> Result<(), Error> {
    let size = config.memory.size;
    let place = format!("--memory {size}");
    if size < MIN_MEMORY {
        // A bare number is bytes here, and mebibytes in the reader's mind.
        let remedy = match size.0 {
            64..1_048_576 => format!("did you mean {}?", Size(size.0 << 20)),
            _ => format!("give at least {MIN_MEMORY}"),
        };
        return Err(Error::new(
            place,
            format!("too little, a guest needs {MIN_MEMORY}; {remedy}"),
        ));
    }
    if !size.0.is_multiple_of(1 << 20) {
        return Err(Error::new(place, "no multiple of 1M; round it"));
    }
    Ok(())
}

fn check_log(config: &Config) -> Result<(), Error> {
    let level = &config.log.level;
    for item in level.split(',') {
        let (part, word) = item.split_once('=').unwrap_or(("vmm", item));
        // The filter would take any word for the name of a part.
        let root = part.split("::").next().unwrap_or_default();
        if !LOG_PARTS.contains(&root) || word.parse::<LevelFilter>().is_err() {
            let problem = format!(
                "{item:?} is no level; give off, error, warn, info, debug or trace, or part=level with a part of {}",
                LOG_PARTS.join(", ")
            );
            return Err(Error::new(format!("--log {level}"), problem));
        }
    }
    Ok(())
}

fn check_metrics(metrics: &Metrics) -> Result<(), Error> {
    let file = metrics.file.display();
    if metrics.file.file_name().is_none() {
        return Err(Error::new(
            format!("--metrics file={file}"),
            "not the name of a file; give file=FILE",
        ));
    }
    if !(1..=MAX_METRICS_INTERVAL).contains(&metrics.interval) {
        return Err(Error::new(
            format!("--metrics interval={}", metrics.interval),
            format!("out of range; give 1 to {MAX_METRICS_INTERVAL} seconds"),
        ));
    }
    Ok(())
}

fn check_trace(trace: &Trace) -> Result<(), Error> {
    let refuse =
        |value: String, problem: String| Err(Error::new(format!("--trace {value}"), problem));
    if trace.file.file_name().is_none() {
        let problem = "not the name of a file; give file=FILE".to_owned();
        return refuse(format!("file={}", trace.file.display()), problem);
    }
    for pattern in &trace.events {
        let problem = match trace::select(pattern) {
            Ok(0) => format!(
                "no event is called so; there are {}",
                trace::EVENTS.join(", ")
            ),
            Ok(_) => continue,
            Err(error) => error.to_string(),
        };
        return refuse(format!("events={pattern}"), problem);
    }
    if trace.max_size < MIN_TRACE_SIZE {
        let problem = format!("too small; give at least {MIN_TRACE_SIZE}");
        return refuse(format!("max-size={}", trace.max_size), problem);
    }
    if !(1..=MAX_TRACE_FILES).contains(&trace.files) {
        let problem = format!("out of range; give 1 to {MAX_TRACE_FILES} files");
        return refuse(format!("files={}", trace.files), problem);
    }
    Ok(())
}

/// Checks a name of the user's choice.
pub fn check_id(id: &str) -> Result<(), String> {
    let mut chars = id.chars();
    let good = chars.next().is_some_and(|c| c.is_ascii_alphabetic())
        && chars.all(|c| c.is_ascii_alphanumeric() || "-._".contains(c));
    good.then_some(()).ok_or_else(|| {
        "not a name; begin with a letter, then letters, digits, \"-\", \".\" and \"_\"".to_owned()
    })
}

/// Checks the name of an iothread.
pub fn check_iothread_id(id: &str) -> Result<(), String> {
    if id == MAIN_LOOP_ID {
        return Err(format!(
            "{MAIN_LOOP_ID:?} is what the loop of the main thread is called; give another id"
        ));
    }
    check_id(id)
}

/// Checks the numbers of an iothread.
pub fn check_iothread(iothread: &IoThread) -> Result<(), String> {
    iothreads::settings(iothread)
        .validate()
        .map_err(|error| match &error {
            SettingError::Range { name, value, .. } => format!("{name}={value}: {error}"),
            _ => error.to_string(),
        })
}

fn check_disk(disk: &Disk, config: &Config) -> Result<(), String> {
    if disk.path.as_os_str().is_empty() {
        return Err("path= is empty; name an image or a block device".to_owned());
    }
    if let Some(serial) = &disk.serial
        && !serial.bytes().all(|b| b.is_ascii_graphic() || b == b' ')
    {
        return Err("serial=: not plain ASCII; use letters, digits and punctuation".to_owned());
    }
    let device = disks::disk_config(disk, String::new(), queues(disk, config.cpus));
    device.validate().map_err(|error| error.to_string())?;
    if disk.transport == Some(Transport::Ccw) {
        return Err("transport=ccw: there is none on this processor; use pci or mmio".to_owned());
    }
    for (name, policy) in [("rerror", disk.rerror), ("werror", disk.werror)] {
        let stops = matches!(policy, ErrorPolicy::Stop | ErrorPolicy::Enospc);
        if stops && config.qmp.is_none() {
            return Err(format!(
                "{name}: a VM that stops for an error is continued by its monitor; add --qmp, or use report or ignore"
            ));
        }
    }
    Ok(())
}
