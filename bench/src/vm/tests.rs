use std::time::Duration;

use super::*;
use crate::matrix::{self, Tool};
use crate::runner::Stop;

const LONG: Duration = Duration::from_secs(60);

fn programs() -> Programs {
    Programs {
        pollux: "pollux".into(),
        qemu: "qemu-system-x86_64".into(),
        qemu_accel: "kvm".into(),
        qemu_firmware: None,
        pollux_has_qmp: false,
    }
}

fn machine(disks: u32) -> Machine {
    let mut list = vec![Disk {
        path: "root,1.img".into(),
        serial: "root".into(),
        readonly: true,
        loaded: false,
        idle: None,
    }];
    list.extend((0..disks).map(|i| Disk {
        path: format!("d{i}.img").into(),
        serial: format!("bench{i}"),
        readonly: false,
        loaded: true,
        idle: None,
    }));
    Machine {
        kernel: "k".into(),
        initrd: None,
        cmdline: "console=ttyS0".into(),
        memory_bytes: 256 << 20,
        disks: list,
        linux: true,
    }
}

fn words(matrix: &str) -> Vec<String> {
    let run = matrix::parse(&[matrix], Tool::Fio)
        .expect("a matrix")
        .remove(0);
    let command = programs().command(&machine(run.disks), &run);
    command
        .get_args()
        .map(|a| a.to_string_lossy().into_owned())
        .collect()
}

fn after<'a>(words: &'a [String], option: &str) -> Vec<&'a str> {
    words
        .windows(2)
        .filter(|w| w[0] == option)
        .map(|w| w[1].as_str())
        .collect()
}

#[test]
fn pollux_is_told_settings_and_placement() {
    let words = words(
        "disks=3 iothreads=2 poll-policy=weighted poll-weight=2 poll-max-ns=1000 direct=on vcpus=2",
    );
    assert_eq!(
        after(&words, "--iothread"),
        [
            "id=io0,poll-policy=weighted,poll-weight=2,poll-max-ns=1000",
            "id=io1,poll-policy=weighted,poll-weight=2,poll-max-ns=1000"
        ]
    );
    assert_eq!(
        after(&words, "--disk"),
        [
            "path=root,,1.img,serial=root,readonly=on,direct=off",
            "path=d0.img,serial=bench0,readonly=off,iothread=io0,queues=1,engine=io_uring,direct=on",
            "path=d1.img,serial=bench1,readonly=off,iothread=io1,queues=1,engine=io_uring,direct=on",
            "path=d2.img,serial=bench2,readonly=off,iothread=io0,queues=1,engine=io_uring,direct=on",
        ]
    );
    assert_eq!(after(&words, "--cpus"), ["2"]);
}

#[test]
fn queues_are_spread_where_iothreads_are_left() {
    let words = words("disks=1 iothreads=4 queues=4");
    assert!(after(&words, "--disk")[1].contains("iothreads=io0:io1:io2:io3,queues=4"));
    let run = |disks, iothreads, queues| Run {
        disks,
        iothreads,
        queues,
        ..Run::default()
    };
    assert_eq!(iothreads_of_disk(&run(2, 4, 2), 1), [1, 3]);
    assert_eq!(iothreads_of_disk(&run(2, 4, 1), 1), [1]);
    assert_eq!(iothreads_of_disk(&run(4, 2, 8), 3), [1]);
    assert!(iothreads_of_disk(&run(1, 0, 1), 0).is_empty());
}

#[test]
fn qemu_is_told_the_same() {
    let words = words("vmm=qemu disks=1 iothreads=2 queues=2 poll-max-ns=1000 engine=native");
    let objects = after(&words, "-object");
    let object: serde_json::Value = serde_json::from_str(objects[1]).expect("JSON");
    assert_eq!(
        object,
        serde_json::json!({ "qom-type": "iothread", "id": "io1", "poll-max-ns": 1000 })
    );
    let device: serde_json::Value =
        serde_json::from_str(after(&words, "-device")[1]).expect("JSON");
    assert_eq!(device["iothread-vq-mapping"][1]["iothread"], "io1");
    assert_eq!(device["num-queues"], 2);
    let node: serde_json::Value =
        serde_json::from_str(after(&words, "-blockdev")[1]).expect("JSON");
    assert_eq!(
        (&node["aio"], &node["cache"]["direct"]),
        (&"native".into(), &false.into())
    );
}

fn shell(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-c", script]);
    command
}

#[test]
fn console_lines_are_found_and_the_end_is_seen() {
    let stop = Stop::default();
    let mut vm = Vm::start(shell("echo a; echo mark 7; echo oops >&2; exit 3"), &stop).expect("sh");
    let number = vm.wait_for("mark", LONG, |line| {
        line.strip_prefix("mark ")?.parse::<u32>().ok()
    });
    assert_eq!(number.expect("the mark").1, 7);
    assert_eq!(vm.console(), ["a", "mark 7"]);
    let (status, messages) = vm.wait_end(LONG).expect("the end");
    assert_eq!((status.code(), messages.as_str()), (Some(3), "oops\n"));
}

#[test]
fn an_early_end_is_told_with_its_messages() {
    let mut vm = Vm::start(shell("echo no kernel >&2; exit 1"), &Stop::default()).expect("sh");
    let error = vm
        .wait_for("boot", LONG, |_| None::<()>)
        .expect_err("ended")
        .to_string();
    assert_eq!(
        error,
        "the VM ended (status 1) before its boot; its messages:\n  | no kernel"
    );
    let mut vm = Vm::start(shell("echo panic; kill -9 $$"), &Stop::default()).expect("sh");
    let error = vm
        .wait_for("boot", LONG, |_| None::<()>)
        .expect_err("ended")
        .to_string();
    assert!(
        error.contains("signal 9") && error.contains("  | panic"),
        "{error}"
    );
}

#[test]
fn a_vm_that_says_nothing_is_given_up_with_its_console_and_killed() {
    let mut vm = Vm::start(shell("echo here; exec sleep 1000"), &Stop::default()).expect("sh");
    vm.wait_for("here", LONG, |line| (line == "here").then_some(()))
        .expect("here");
    let pid = vm.pid();
    let short = Duration::from_millis(60);
    let error = vm
        .wait_for("there", short, |_| None::<()>)
        .expect_err("late")
        .to_string();
    assert!(
        error.contains("no there within") && error.contains("  | here"),
        "{error}"
    );
    drop(vm);
    // SAFETY: signal 0 only asks whether the process exists.
    let alive = unsafe { libc::kill(pid, 0) };
    assert_eq!(alive, -1, "it was killed and waited for");
}

#[test]
fn a_stop_ends_the_waiting() {
    let stop = Stop::default();
    let mut vm = Vm::start(shell("exec sleep 1000"), &stop).expect("sh");
    stop.set();
    assert!(matches!(
        vm.wait_for("x", LONG, |_| None::<()>),
        Err(ProcessError::Interrupted)
    ));
}

#[test]
fn a_missing_program_is_named_with_the_option() {
    let programs = Programs {
        pollux: "/nowhere/pollux".into(),
        ..programs()
    };
    let run = Run::default();
    let error = Vm::start(programs.command(&machine(1), &run), &Stop::default());
    let error = error.err().expect("missing").to_string();
    assert!(
        error.contains("/nowhere/pollux") && error.contains("--pollux"),
        "{error}"
    );
    assert!(programs.version(Vmm::Pollux).is_err());
}

/// A program that says `message` on standard error and fails.
fn refusing(place: &tempfile::TempDir, message: &str) -> Programs {
    let path = place.path().join("pollux");
    std::fs::write(&path, format!("#!/bin/sh\necho '{message}' >&2\nexit 2\n")).expect("a script");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&path, mode).expect("executable");
    Programs {
        pollux: path,
        ..programs()
    }
}

#[test]
fn counters_are_asked_for_where_there_are_any() {
    let place = tempfile::tempdir().expect("a directory");
    let offered = |message: &str, run: &Run| {
        let mut programs = refusing(&place, message);
        programs.find_qmp().expect("an answer");
        let mut command = programs.command(&machine(1), run);
        let socket = programs.offer_counters(&mut command, run, place.path());
        let asked = command.get_args().any(|word| word == "--qmp");
        assert_eq!(asked, socket.is_some());
        asked
    };
    let (ours, peer) = (
        Run::default(),
        Run {
            vmm: Vmm::Qemu,
            ..Run::default()
        },
    );
    assert!(!offered(
        "pollux: --qmp: not available in this version; leave it out",
        &ours
    ));
    assert!(offered("pollux: --kernel /dev/null: not a kernel", &ours));
    assert!(!offered("pollux: --kernel /dev/null: not a kernel", &peer));
}
