//! Wrong input: each gets one line that names option, value and remedy, exit status 2, and leaves nothing behind.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use common::guest::{Program, elf};
use common::{has_kvm, pollux, run};

/// A directory with files to name on the command line.
fn workshop() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    let good = elf(&Program::new().power_off());
    let header = |class: u8, machine: u8| {
        let mut bytes = good.clone();
        (bytes[4], bytes[18]) = (class, machine);
        bytes
    };
    file("good.elf", &good);
    file(
        "text",
        b"#!/bin/sh\necho not a kernel, but long enough to have been one\n",
    );
    file("empty", b"");
    file("elf32", &header(1, 3));
    file("arm", &header(2, 183));
    file("truncated", &good[..100]);
    file("initrd", &vec![0; 1 << 20]);
    std::fs::File::create(dir.path().join("huge"))
        .unwrap()
        .set_len(1 << 30)
        .unwrap();
    // A kernel that wants to lie at 128 MiB.
    let mut high = good.clone();
    for at in [64 + 16, 64 + 24] {
        high[at..at + 8].copy_from_slice(&u64::to_le_bytes(128 << 20));
    }
    let entry = 64 + 2 * 56 + 16;
    high[entry..entry + 4].copy_from_slice(&u32::to_le_bytes(128 << 20));
    file("high", &high);
    std::fs::create_dir(dir.path().join("directory")).unwrap();
    dir
}

/// Names, sizes, modification times and contents of a directory's files.
fn contents(dir: &Path) -> BTreeMap<String, (u64, std::time::SystemTime, Vec<u8>)> {
    let entries = std::fs::read_dir(dir).unwrap();
    entries
        .map(|entry| {
            let entry = entry.unwrap();
            let data = entry.metadata().unwrap();
            let small = data.is_file() && data.len() <= 2 << 20;
            let bytes = if small {
                std::fs::read(entry.path()).unwrap()
            } else {
                Vec::new()
            };
            let name = entry.file_name().into_string().unwrap();
            (name, (data.len(), data.modified().unwrap(), bytes))
        })
        .collect()
}

/// Runs in `dir` and expects the refusal, with each of `parts` in its line.
fn refused(dir: &Path, command: &mut Command, parts: &[&str]) {
    let before = contents(dir);
    let end = run(command.current_dir(dir));
    assert_eq!(end.code(), Some(2), "{command:?}: {end:?}");
    assert_eq!(end.stdout, "", "{command:?}");
    assert_eq!(end.stderr.lines().count(), 1, "{command:?}: {end:?}");
    for part in parts {
        assert!(
            end.stderr.contains(part),
            "{command:?}: {:?} does not say {part:?}",
            end.stderr
        );
    }
    assert!(contents(dir) == before, "{command:?} changed the directory");
}

/// With a console file, which must not be made when the rest is wrong.
fn with(options: &[&str]) -> Command {
    let mut command = pollux();
    command.args(["--serial", "file=console"]).args(options);
    command
}

#[test]
fn configuration() {
    let dir = workshop();
    let kernel = ["--kernel", "good.elf"];
    let cases: &[(&[&str], &[&str])] = &[
        (&["--cpus", "0"], &["--cpus 0", "1 to 64"]),
        (&["--cpus", "65"], &["--cpus 65", "1 to 64"]),
        (&["--memory", "0"], &["--memory 0", "at least 64M"]),
        (&["--memory", "32M"], &["--memory 32M", "at least 64M"]),
        (
            &["--iothread", "io0,poll-weight=64"],
            &["io0", "poll-weight value must be in range [0, 63]"],
        ),
        (
            &["--iothread", "io0,poll-max-ns=-5"],
            &["io0", "poll-max-ns=-5", "[0, "],
        ),
        (
            &["--iothread", "io0", "--iothread", "io0"],
            &["--iothread id=io0", "each its own"],
        ),
        (
            &["--disk", "initrd,iothread=io7"],
            &["iothread=io7", "--iothread id=io7"],
        ),
        (
            &["--disk", "initrd,id=a", "--disk", "good.elf,id=a"],
            &["--disk id=a", "each its own"],
        ),
        (&["--config", "text"], &["--config text", "JSON"]),
        (
            &["--cpu", "host,-nonsense"],
            &["--cpu host,-nonsense", "unknown"],
        ),
    ];
    for (options, parts) in cases {
        refused(dir.path(), with(&kernel).args(*options), parts);
    }
}

#[test]
fn disks() {
    if !has_kvm("disks") {
        return;
    }
    let dir = workshop();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    let mut qcow2 = vec![0; 65536];
    qcow2[..4].copy_from_slice(b"QFI\xfb");
    write("qcow2", &qcow2);
    write("short", &[0; 511]);
    write("blank", &[0; 1 << 16]);
    let cases: &[(&str, &[&str])] = &[
        ("missing", &["path=missing", "no such file", "truncate -s"]),
        ("directory", &["path=directory", "is a directory"]),
        ("/dev/null", &["path=/dev/null", "is a character device"]),
        ("empty", &["path=empty", "is empty", "truncate -s"]),
        ("short", &["path=short", "511 bytes", "one block of 512"]),
        (
            "qcow2",
            &["is a qcow2 image", "qemu-img convert -f qcow2 -O raw qcow2"],
        ),
        (
            "blank,serial=123456789012345678901",
            &["serial=123456789012345678901", "21 bytes"],
        ),
    ];
    for (disk, parts) in cases {
        let options = ["--kernel", "good.elf", "--disk", disk];
        refused(dir.path(), &mut with(&options), parts);
        refused(dir.path(), &mut with(&options), &["--disk"]);
    }
    // One image for two disks.
    let twice = [
        "--kernel",
        "good.elf",
        "--disk",
        "blank",
        "--disk",
        "blank,id=b",
    ];
    let end = run(with(&twice).current_dir(dir.path()));
    assert_eq!(
        (end.code(), end.stderr.lines().count()),
        (Some(2), 1),
        "{end:?}"
    );
    for part in ["path=blank", "given twice", "locking=off"] {
        assert!(end.stderr.contains(part), "{end:?}");
    }
}

/// `script` in a mount namespace of its own, with the program as `$0`; None, with a word, where that
/// is not allowed.
fn in_namespace(test: &str, script: &str) -> Option<Command> {
    let allowed = Command::new("unshare")
        .args(["--mount", "true"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !allowed {
        eprintln!("skipped: {test} needs the right to mount");
        return None;
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", script]);
    command.arg(env!("CARGO_BIN_EXE_pollux"));
    command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    Some(command)
}

#[test]
fn a_disk_that_may_not_be_written() {
    let test = "a_disk_that_may_not_be_written";
    let script = "mount --bind . . && cd . && mount -o remount,bind,ro \"$PWD\" && cd \"$PWD\" && \
                  exec \"$0\" --kernel good.elf --serial none --disk initrd";
    let (true, Some(mut command)) = (has_kvm(test), in_namespace(test, script)) else {
        return;
    };
    let dir = workshop();
    refused(
        dir.path(),
        &mut command,
        &["path=initrd", "cannot be opened for writing", "readonly=on"],
    );
}

#[test]
fn a_filesystem_without_direct_io() {
    let test = "a_filesystem_without_direct_io";
    let script = |options: &str| {
        format!(
            "mount -t ramfs none directory && truncate -s 1M directory/disk && \
             exec \"$0\" --kernel good.elf --serial none --disk directory/disk{options}"
        )
    };
    let commands = ["", ",direct=off", ",direct=on"].map(|o| in_namespace(test, &script(o)));
    let (true, [Some(mut default), Some(mut off), Some(mut on)]) = (has_kvm(test), commands) else {
        return;
    };
    let dir = workshop();
    // It falls back and says so in one line, unless it was asked for.
    let end = run(default.current_dir(dir.path()));
    assert_eq!(end.code(), Some(0), "{end:?}");
    assert_eq!(end.stderr.lines().count(), 1, "{end:?}");
    for part in ["directory/disk", "does not allow O_DIRECT", "direct=off"] {
        assert!(end.stderr.contains(part), "{end:?}");
    }
    let end = run(off.current_dir(dir.path()));
    assert_eq!((end.code(), end.stderr.as_str()), (Some(0), ""));
    let parts = ["direct=on", "does not allow O_DIRECT", "direct=off"];
    refused(dir.path(), &mut on, &parts);
}

#[test]
fn no_kernel_named() {
    let dir = workshop();
    if has_kvm("no_kernel_named") {
        refused(dir.path(), &mut with(&[]), &["--kernel", "name the kernel"]);
    }
}

#[test]
fn kernels_and_initrds() {
    if !has_kvm("kernels_and_initrds") {
        return;
    }
    let dir = workshop();
    let kernels: &[(&str, &[&str])] = &[
        ("missing", &["missing", "no such file"]),
        ("directory", &["directory"]),
        ("empty", &["empty"]),
        ("text", &["not a kernel"]),
        ("elf32", &["32-bit"]),
        ("arm", &["Arm", "x86_64"]),
        ("truncated", &["--kernel"]),
    ];
    for (kernel, parts) in kernels {
        refused(dir.path(), &mut with(&["--kernel", kernel]), parts);
        refused(
            dir.path(),
            &mut with(&["--kernel", kernel]),
            &["--kernel", kernel],
        );
    }
    let kernel = ["--kernel", "good.elf", "--memory", "128M"];
    let initrds: &[(&str, &[&str])] = &[
        ("missing", &["missing", "no such file"]),
        ("directory", &["directory"]),
        ("empty", &["empty"]),
        ("huge", &["1073741824", "--memory"]),
    ];
    for (initrd, parts) in initrds {
        refused(dir.path(), with(&kernel).args(["--initrd", initrd]), parts);
        refused(
            dir.path(),
            with(&kernel).args(["--initrd", initrd]),
            &["--initrd"],
        );
    }
    let high = ["--kernel", "high", "--memory", "128M"];
    refused(dir.path(), &mut with(&high), &["--memory", "129M"]);
    let long = "x".repeat(4096);
    refused(
        dir.path(),
        with(&kernel).args(["--cmdline", &long]),
        &["--cmdline", "4123", "shorten"],
    );
}

#[test]
fn memory_beyond_the_host() {
    if !has_kvm("memory_beyond_the_host") {
        return;
    }
    let dir = workshop();
    let command = &mut with(&["--kernel", "good.elf", "--memory", "64T"]);
    refused(dir.path(), command, &["--memory 64T", "give less"]);
}

#[test]
fn consoles_that_cannot_be() {
    if !has_kvm("consoles_that_cannot_be") {
        return;
    }
    let dir = workshop();
    let console = |console: &str| {
        let mut command = pollux();
        command.args(["--kernel", "good.elf", "--serial", console]);
        command
    };
    refused(dir.path(), &mut console("tty"), &["--serial tty", "stdio"]);
    refused(
        dir.path(),
        &mut console("file=directory"),
        &["--serial file=directory", "written"],
    );
    refused(
        dir.path(),
        &mut console("file=none/there"),
        &["--serial file=none/there"],
    );
    let log = with(&["--kernel", "good.elf", "--log", "info,file=none/there"]);
    refused(
        dir.path(),
        &mut { log },
        &["--log file=none/there", "written"],
    );
}

#[test]
fn no_kvm() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: no_kvm needs root to take /dev/kvm away");
        return;
    }
    let dir = workshop();
    // An empty /dev in a mount namespace of its own.
    let mut hidden = Command::new("unshare");
    hidden.args([
        "--mount",
        "sh",
        "-c",
        "mount -t tmpfs none /dev && exec \"$0\" --kernel good.elf --serial none",
    ]);
    hidden
        .arg(env!("CARGO_BIN_EXE_pollux"))
        .stdout(std::process::Stdio::piped());
    hidden.stderr(std::process::Stdio::piped());
    refused(
        dir.path(),
        &mut hidden,
        &["/dev/kvm is missing", "modprobe"],
    );
}

#[test]
fn kvm_without_permission() {
    let test = "kvm_without_permission";
    if !has_kvm(test) {
        return;
    }
    let mode = std::fs::metadata("/dev/kvm").unwrap().permissions().mode();
    if !rustix::process::geteuid().is_root() || mode & 0o6 != 0 {
        eprintln!("skipped: {test} needs root and a /dev/kvm that is not open to all");
        return;
    }
    let dir = workshop();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    // A copy where nobody may run it, whoever owns the directories above the build.
    let binary = dir.path().join("pollux");
    std::fs::copy(env!("CARGO_BIN_EXE_pollux"), &binary).unwrap();
    let mut command = Command::new(binary);
    command
        .args(["--kernel", "good.elf", "--serial", "none"])
        .uid(65534)
        .gid(65534);
    command
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    refused(
        dir.path(),
        &mut command,
        &["/dev/kvm: permission denied", "usermod"],
    );
}
