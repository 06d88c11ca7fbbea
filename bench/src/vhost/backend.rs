//! How each back end is started.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::matrix::{Engine, Run, Rw, Vmm};
use crate::vm::{Programs, iothread_settings, iothreads_of_disk, quoted};

/// The command that serves `disks` at `sockets` under the settings of `run`.
pub(super) fn command(
    programs: &Programs,
    run: &Run,
    disks: &[PathBuf],
    sockets: &[PathBuf],
) -> Command {
    match run.vmm {
        Vmm::Pollux => pollux(&programs.pollux, run, disks, sockets),
        Vmm::Qemu => storage_daemon(&programs.qemu, run, disks, sockets),
    }
}

fn text(path: &Path) -> String {
    quoted(&path.display().to_string())
}

fn switch(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

fn settings(run: &Run) -> String {
    iothread_settings(run)
        .into_iter()
        .map(|(name, value)| format!(",{name}={value}"))
        .collect()
}

fn engine(run: &Run) -> &'static str {
    match run.engine {
        Engine::IoUring => "io_uring",
        Engine::Native => "native",
        Engine::Threads => "threads",
    }
}

fn pollux(program: &Path, run: &Run, disks: &[PathBuf], sockets: &[PathBuf]) -> Command {
    let mut command = Command::new(program);
    command.arg("vhost-user-blk");
    for index in 0..run.iothreads {
        command.arg("--iothread");
        command.arg(format!("id=io{index}{}", settings(run)));
    }
    for (index, (disk, socket)) in (0..).zip(disks.iter().zip(sockets)) {
        let names: Vec<String> = iothreads_of_disk(run, index)
            .iter()
            .map(|i| format!("io{i}"))
            .collect();
        let placed = match names.as_slice() {
            [] => String::new(),
            [one] => format!(",iothread={one}"),
            many => format!(",iothreads={}", many.join(":")),
        };
        let fixedbufs = run.fixedbufs.map(switch);
        let fixedbufs = fixedbufs.map_or(String::new(), |word| format!(",fixedbufs={word}"));
        command.arg("--disk").arg(format!(
            "path={},queues={},engine={},direct={}{placed}{fixedbufs}",
            text(disk),
            run.queues,
            engine(run),
            switch(run.is_direct(index))
        ));
        command.arg("--socket").arg(socket);
    }
    command
}

/// It has one iothread for each export: the first of those that the run deals to the disk.
fn storage_daemon(program: &Path, run: &Run, disks: &[PathBuf], sockets: &[PathBuf]) -> Command {
    let mut command = Command::new(program);
    for index in 0..run.iothreads {
        command.arg("--object");
        command.arg(format!("iothread,id=io{index}{}", settings(run)));
    }
    let writes = !matches!(run.rw, Rw::Read | Rw::RandRead);
    for (index, (disk, socket)) in (0..).zip(disks.iter().zip(sockets)) {
        let read_only = switch(!writes);
        command.arg("--blockdev").arg(format!(
            "driver=file,node-name=file{index},filename={},cache.direct={},aio={},read-only={read_only}",
            text(disk),
            switch(run.is_direct(index)),
            engine(run)
        ));
        command.arg("--blockdev").arg(format!(
            "driver=raw,node-name=disk{index},file=file{index},read-only={read_only}"
        ));
        let placed = iothreads_of_disk(run, index)
            .first()
            .map(|i| format!(",iothread=io{i}"))
            .unwrap_or_default();
        command.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export{index},node-name=disk{index},addr.type=unix,\
             addr.path={},writable={},num-queues={}{placed}",
            text(socket),
            switch(writes),
            run.queues
        ));
    }
    command
}
