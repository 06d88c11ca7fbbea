//! Boot protocols, console, every way to end, several CPUs.

use serde_json::json;

use super::vm::{Form, Vm};
use super::{Bench, Test};
use crate::qmp::Qmp;

pub const TESTS: &[Test] = &[
    Test::new("boot_pvh", |bench| boots(bench, Form::Pvh, "pvh")),
    Test::new("boot_linux64_elf", |bench| {
        boots(bench, Form::Linux64, "linux64")
    }),
    Test::new("boot_linux64_bzimage", |bench| {
        boots(bench, Form::BzImage, "linux64")
    }),
    Test::new("boot_much_memory", boot_much_memory),
    Test::new("console_output_is_whole", console_output_is_whole),
    Test::new("console_input_by_interrupt", |bench| {
        console_input(bench, "irq")
    }),
    Test::new("console_input_polled", |bench| console_input(bench, "poll")),
    Test::new("exit_power_off", |bench| exit(bench, "", 0, "")),
    Test::new("exit_reset", |bench| exit(bench, "exit=reset", 0, "reboot")),
    Test::new("exit_triple_fault", |bench| {
        exit(bench, "exit=triple", 1, "triple fault")
    }),
    Test::new("exit_panic", |bench| exit(bench, "exit=panic", 1, "panic")),
    Test::new("exit_is_told_by_the_monitor", exit_is_told_by_the_monitor).needs_qmp(),
    Test::new("exit_exception_is_reported", exit_exception_is_reported),
    Test::new("unknown_option_is_refused", unknown_option_is_refused),
    Test::new(
        "halted_guest_is_idle_and_stops",
        halted_guest_is_idle_and_stops,
    ),
    Test::new("smp_start", smp_start),
];

fn boots(bench: &Bench, form: Form, protocol: &str) {
    let mut vm = Vm::new(bench, "job=a rw=none").form(form).start();
    let machine = vm.machine();
    assert_eq!(machine["protocol"], protocol);
    vm.good_job("a");
    vm.good_end();
}

fn boot_much_memory(bench: &Bench) {
    let mut vm = Vm::new(bench, "job=a rw=none").memory("6G").start();
    let machine = vm.machine();
    let ram = machine["ram"].as_array().expect("RAM");
    let above = ram
        .iter()
        .find(|part| part[0] == 1_u64 << 32)
        .expect("RAM above 4 GiB");
    let below = ram
        .last()
        .map(|_| ram.iter().map(|part| part[1].as_u64().unwrap_or(0)));
    let below = below
        .expect("RAM")
        .filter(|&end| end <= 1 << 32)
        .max()
        .expect("RAM below 4 GiB");
    let above = above[1].as_u64().expect("an address") - (1 << 32);
    assert_eq!(below + above, 6 << 30, "{ram:?}");
    vm.good_end();
}

fn console_output_is_whole(bench: &Bench) {
    // A few hundred lines; each is checked to be JSON.
    let jobs: Vec<_> = (0..60).map(|i| format!("job=j{i} hostile=list")).collect();
    let mut vm = Vm::new(bench, &jobs.join(" ")).form(Form::BzImage).start();
    let first = vm.good_job("j0");
    for i in 1..60 {
        let line = vm.good_job(&format!("j{i}"));
        assert_eq!(line["hostile"], first["hostile"], "job {i}");
    }
    vm.good_end();
}

fn console_input(bench: &Bench, completion: &str) {
    let jobs = format!(
        "job=first rw=echo completion={completion} job=second rw=echo completion={completion}"
    );
    let mut vm = Vm::new(bench, &jobs).start();
    for (name, text) in [
        ("first", "hello"),
        ("second", "a line longer than the receive FIFO of the port"),
    ] {
        vm.wait_for("invitation", |line| {
            line["job"] == name && line["reading"] == true
        });
        vm.type_text(&format!("{text}\n"));
        let line = vm.good_job(name);
        assert_eq!(line["line"], text);
        let interrupts = line["interrupts"].as_u64().expect("a number");
        assert_eq!(interrupts > 0, completion == "irq", "{line}");
    }
    vm.good_end();
}

fn exit(bench: &Bench, exit: &str, status: i32, words: &str) {
    let mut vm = Vm::new(bench, &format!("{exit} job=a rw=none")).start();
    vm.wait_for("last line", |line| line["done"] == true);
    vm.end().expect(status, words);
}

/// A guest that is reset ends the run: clients are told both.
fn exit_is_told_by_the_monitor(bench: &Bench) {
    let shutdown = |reason: &str| ("SHUTDOWN", json!({"guest": true, "reason": reason}));
    let reset = ("RESET", json!({"guest": true, "reason": "guest-reset"}));
    let panicked = ("GUEST_PANICKED", json!({"action": "poweroff"}));
    for (exit, expected) in [
        ("", vec![shutdown("guest-shutdown")]),
        ("exit=reset", vec![reset.clone(), shutdown("guest-reset")]),
        ("exit=triple", vec![reset, shutdown("guest-reset")]),
        ("exit=panic", vec![panicked, shutdown("guest-panic")]),
    ] {
        let directory = bench.directory();
        let socket = directory.path().join("qmp");
        let mut vm = Vm::new(bench, &format!("{exit} job=a rw=echo"))
            .arguments(&["--qmp", &format!("unix:{}", socket.display())])
            .start();
        let monitor = Qmp::connect(&socket);
        vm.wait_for("invitation", |line| line["reading"] == true);
        vm.type_text("go on\n");
        let told = monitor.last_events();
        vm.end();
        let told: Vec<_> = told
            .iter()
            .map(|event| (event["event"].as_str().unwrap_or(""), event["data"].clone()))
            // Of the start; who connects later does not hear of it.
            .filter(|event| event.0 != "RESUME")
            .collect();
        assert_eq!(told, expected, "{exit}");
    }
}

fn exit_exception_is_reported(bench: &Bench) {
    let end = Vm::new(bench, "exit=fault job=a rw=none").start().end();
    end.expect(1, "triple fault");
    let line = end.console.last().map_or("", String::as_str);
    let report: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
    assert_eq!(
        (&report["exception"], &report["cr2"]),
        (&14.into(), &"0x7ffffffff000".into()),
        "{line}"
    );
}

fn unknown_option_is_refused(bench: &Bench) {
    let end = Vm::new(bench, "job=a rw=none iodepht=3").start().end();
    end.expect(0, "");
    let line = end.console.last().map_or("", String::as_str);
    assert!(
        line.contains("unknown option") && line.contains("iodepht=3"),
        "{line}"
    );
}

fn halted_guest_is_idle_and_stops(bench: &Bench) {
    let mut vm = Vm::new(bench, "exit=halt job=a rw=none").cpus(2).start();
    vm.wait_for("last line", |line| line["done"] == true);
    let before = vm.cpu_ms("");
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let used = vm.cpu_ms("") - before;
    assert!(
        used < 300,
        "a halted guest used {used} ms of CPU in 1500 ms"
    );
    vm.signal("TERM");
    vm.end().expect(0, "sigterm");
}

fn smp_start(bench: &Bench) {
    for cpus in [2, 4, 7] {
        let mut vm = Vm::new(bench, "job=a rw=none").cpus(cpus).start();
        assert_eq!(vm.machine()["cpus"], cpus);
        vm.good_end();
    }
}
