//! Whole runs of tiny guests: how each way to end is told, and what becomes of console and signals.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::io::{Read, Write};
use std::process::Stdio;

use common::guest::Program;
use common::{Image, finish, has_kvm, run, wait_for};
use rustix::process::{Pid, Signal, kill_process};

#[test]
fn poweroff_is_a_quiet_success() {
    if !has_kvm("poweroff_is_a_quiet_success") {
        return;
    }
    let image = Image::new(&Program::new().print("hello\n").power_off());
    let end = run(&mut image.command());
    assert_eq!(
        (end.code(), end.stdout.as_str(), end.stderr.as_str()),
        (Some(0), "hello\n", "")
    );
}

#[test]
fn a_string_instruction_prints_every_byte() {
    if !has_kvm("a_string_instruction_prints_every_byte") {
        return;
    }
    for text in ["a", "ab", "abcd", "by one string instruction\n"] {
        let image = Image::new(&Program::new().print_string(text).power_off());
        let end = run(&mut image.command());
        assert_eq!(
            (end.code(), end.stdout.as_str()),
            (Some(0), text),
            "{end:?}"
        );
    }
}

#[test]
fn ends_have_their_own_messages_and_statuses() {
    if !has_kvm("ends_have_their_own_messages_and_statuses") {
        return;
    }
    const COLD: Option<u16> = Some(0);
    const WARM: Option<u16> = Some(0x1234);
    let new = || Program::new().print("x");
    let cases = [
        ("reboot", new().reset(COLD), 0, "the guest rebooted"),
        (
            "reboot without a flag",
            new().reset(None),
            0,
            "the guest rebooted",
        ),
        (
            "reboot by keyboard",
            new().reset_by_keyboard(COLD),
            0,
            "the guest rebooted",
        ),
        (
            "reboot by triple fault",
            new().triple_fault(COLD),
            0,
            "the guest rebooted",
        ),
        ("panic", new().reset(WARM), 1, "kernel panicked"),
        (
            "panic by keyboard",
            new().reset_by_keyboard(WARM),
            1,
            "kernel panicked",
        ),
        (
            "panic by triple fault",
            new().triple_fault(WARM),
            1,
            "kernel panicked",
        ),
        (
            "panic reported, then nothing",
            new().report_panic().hang(),
            1,
            "kernel panicked",
        ),
        (
            "panic reported, then reset",
            new().report_panic().reset(WARM),
            1,
            "kernel panicked",
        ),
        ("triple fault", new().triple_fault(None), 1, "triple fault"),
    ];
    for (name, program, status, message) in cases {
        let image = Image::new(&program);
        let end = run(&mut image.command());
        assert_eq!(end.code(), Some(status), "{name}: {end:?}");
        assert_eq!(end.stdout, "x", "{name}: {end:?}");
        assert!(end.stderr.contains(message), "{name}: {end:?}");
        assert_eq!(end.stderr.lines().count(), 1, "{name}: {end:?}");
    }
}

#[test]
fn what_kvm_cannot_run_is_reported_with_rip_and_bytes() {
    if !has_kvm("what_kvm_cannot_run_is_reported_with_rip_and_bytes") {
        return;
    }
    let image = Image::new(&Program::new().breakpoint());
    let end = run(&mut image.command());
    assert_eq!(end.code(), Some(1), "{end:?}");
    if arch::exit::hardware_virtualization() {
        assert!(end.stderr.contains("triple fault"), "{end:?}");
    } else {
        let line = &end.stderr;
        assert!(
            line.contains("internal error 1") && line.contains("RIP 0x100000"),
            "{line}"
        );
        assert!(line.contains(" cc ") && line.contains("int3"), "{line}");
    }
    assert_eq!(end.stderr.lines().count(), 1, "{end:?}");
}

#[test]
fn input_reaches_the_guest_whole_and_its_end_ends_nothing() {
    if !has_kvm("input_reaches_the_guest_whole_and_its_end_ends_nothing") {
        return;
    }
    let image = Image::new(&Program::new().echo());
    let text = "0123456789".repeat(100) + "q";
    // By a pipe that is closed afterwards, and by a file, which epoll cannot watch.
    let mut child = image.command().stdin(Stdio::piped()).spawn().unwrap();
    child
        .stdin
        .take()
        .unwrap()
        .write_all(text.as_bytes())
        .unwrap();
    let end = finish(child);
    assert_eq!((end.code(), end.stdout.as_str()), (Some(0), text.as_str()));

    let file = image.dir.path().join("input");
    std::fs::write(&file, &text).unwrap();
    let end = run(image.command().stdin(std::fs::File::open(&file).unwrap()));
    assert_eq!((end.code(), end.stdout.as_str()), (Some(0), text.as_str()));
}

#[test]
fn output_goes_to_a_file_or_nowhere() {
    if !has_kvm("output_goes_to_a_file_or_nowhere") {
        return;
    }
    let image = Image::new(&Program::new().print("to a file").power_off());
    let file = image.dir.path().join("console");
    let end = run(image
        .command()
        .arg("--serial")
        .arg(format!("file={}", file.display())));
    assert_eq!((end.code(), end.stdout.as_str()), (Some(0), ""), "{end:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "to a file");
    let end = run(image.command().args(["--serial", "none"]));
    assert_eq!((end.code(), end.stdout.as_str()), (Some(0), ""), "{end:?}");
}

#[test]
fn a_closed_standard_output_does_not_hold_the_guest_up() {
    if !has_kvm("a_closed_standard_output_does_not_hold_the_guest_up") {
        return;
    }
    let image = Image::new(&Program::new().print("nobody reads this").power_off());
    let mut child = image.command().spawn().unwrap();
    drop(child.stdout.take());
    let end = finish(child);
    assert_eq!(end.code(), Some(0), "{end:?}");
}

#[test]
fn signals_end_a_guest_that_spins_or_sleeps() {
    if !has_kvm("signals_end_a_guest_that_spins_or_sleeps") {
        return;
    }
    let programs = [
        Program::new().print("up").spin(),
        Program::new().print("up").hang(),
    ];
    let signals = [
        (Signal::TERM, "SIGTERM"),
        (Signal::INT, "SIGINT"),
        (Signal::HUP, "SIGHUP"),
    ];
    for program in &programs {
        for (signal, name) in signals {
            let image = Image::new(program);
            let mut child = image.command().args(["--cpus", "2"]).spawn().unwrap();
            let mut up = [0; 2];
            child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
            kill_process(Pid::from_child(&child), signal).unwrap();
            let end = finish(child);
            assert_eq!(end.code(), Some(0), "{end:?}");
            assert!(end.stderr.contains(name), "{end:?}");
        }
    }
}

#[test]
fn threads_have_their_names() {
    if !has_kvm("threads_have_their_names") {
        return;
    }
    let image = Image::new(&Program::new().print("up").hang());
    let mut child = image.command().args(["--cpus", "3"]).spawn().unwrap();
    let mut up = [0; 2];
    child.stdout.as_mut().unwrap().read_exact(&mut up).unwrap();
    let names = || -> Vec<String> {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
        tasks
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
            .map(|name| name.trim().to_owned())
            .collect()
    };
    wait_for("the threads' names", || {
        let names = names();
        ["pollux", "vcpu0", "vcpu1", "vcpu2"]
            .iter()
            .all(|name| names.iter().any(|n| n == name))
    });
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(finish(child).code(), Some(0));
}
