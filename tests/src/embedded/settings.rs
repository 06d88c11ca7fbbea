//! Settings changed while I/O runs: every change takes effect, and no request suffers.

use serde_json::json;

use super::disk::Image;
use super::vm::Vm;
use super::{Bench, Test};
use crate::qmp::Qmp;

pub const TESTS: &[Test] = &[
    Test::new("settings_of_polling_change_during_io", polling).needs_qmp(),
    Test::new("disk_moves_between_iothreads_during_io", disk_moves).needs_qmp(),
    Test::new("stop_and_cont_during_io", stop_and_cont).needs_qmp(),
    Test::new(
        "case_25_threads_sleep_after_stop_and_cont",
        threads_sleep_after_stop_and_cont,
    )
    .needs_qmp(),
    Test::new(
        "case_26_threads_are_pinned_only_when_asked",
        pinned_only_when_asked,
    ),
];

const MIB: u64 = 1 << 20;
/// Reads and writes at random, all of it verified, until the VM is told otherwise.
const BUSY: &str = "job=busy rw=randrw bs=4k iodepth=8 verify=track runtime=3s job=check rw=verify bs=64k verify=track";

/// Runs `act` on the monitor of a VM with two busy disks on two iothreads, then sees that all data is
/// right.
fn while_busy(bench: &Bench, act: impl FnOnce(&mut Qmp)) {
    let directory = bench.directory();
    let images: Vec<_> = (0..2)
        .map(|i| Image::new(&directory, &format!("disk{i}"), 4 * MIB))
        .collect();
    let socket = directory.path().join("qmp");
    let vm = Vm::new(bench, BUSY)
        .cpus(2)
        .iothread("id=io0")
        .iothread("id=io1");
    let vm = vm.arguments(&["--qmp", &format!("unix:{}", socket.display())]);
    let vm = images.iter().enumerate().fold(vm, |vm, (i, image)| {
        vm.disk(image, &format!("id=disk{i},iothread=io{i}"))
    });
    let mut vm = vm.start();
    vm.machine();
    act(&mut Qmp::connect(&socket));
    let line = vm.good_job("busy");
    assert_eq!(
        (&line["errors"], &line["timed_out"]),
        (&json!(0), &json!(false)),
        "{line}"
    );
    vm.good_job("check");
    vm.good_end();
}

fn polling(bench: &Bench) {
    while_busy(bench, |qmp| {
        for round in 0..40 {
            for iothread in ["io0", "io1"] {
                let window = [0, 32_768, 1, 1_000_000][round % 4];
                qmp.set(iothread, "poll-max-ns", window);
                assert_eq!(qmp.get(iothread, "poll-max-ns"), window);
                qmp.set(iothread, "poll-grow", [0, 2, 4][round % 3]);
                qmp.set(iothread, "poll-shrink", [0, 2][round % 2]);
                qmp.set(iothread, "poll-weight", [1, 3, 5][round % 3]);
                qmp.set(iothread, "aio-max-batch", [0, 1, 16][round % 3]);
            }
        }
        let arguments = json!({"path": "/objects/io0", "property": "poll-max-ns", "value": -1});
        assert!(
            qmp.try_execute("qom-set", arguments).is_err(),
            "a negative window"
        );
    });
}

fn disk_moves(bench: &Bench) {
    while_busy(bench, |qmp| {
        for round in 0..20 {
            for disk in 0..2 {
                let iothread = format!("io{}", (disk + round) % 2);
                let arguments = json!({"device": format!("disk{disk}"), "iothread": iothread});
                qmp.execute("blockdev-change-iothread", arguments);
            }
        }
    });
}

fn stop_and_cont(bench: &Bench) {
    while_busy(bench, |qmp| {
        for _ in 0..10 {
            qmp.execute("stop", json!({}));
            assert_eq!(qmp.execute("query-status", json!({}))["running"], false);
            qmp.execute("cont", json!({}));
            assert_eq!(qmp.execute("query-status", json!({}))["running"], true);
        }
    });
}

fn threads_sleep_after_stop_and_cont(bench: &Bench) {
    let directory = bench.directory();
    let images: Vec<_> = (0..4)
        .map(|i| Image::new(&directory, &format!("disk{i}"), 4 * MIB))
        .collect();
    let socket = directory.path().join("qmp");
    // I/O first, so that polling is on; then a guest that waits for keys.
    let jobs = "job=busy rw=randrw bs=4k iodepth=8 runtime=300ms job=quiet rw=echo completion=irq";
    let vm = Vm::new(bench, jobs)
        .cpus(2)
        .iothread("id=io0,poll-max-ns=1000000")
        .iothread("id=io1");
    let vm = vm.arguments(&["--qmp", &format!("unix:{}", socket.display())]);
    let vm = images.iter().enumerate().fold(vm, |vm, (i, image)| {
        let engine = ["io_uring", "native", "threads", "io_uring"][i];
        vm.disk(image, &format!("iothread=io{},engine={engine}", i % 2))
    });
    let mut vm = vm.start();
    let mut qmp = Qmp::connect(&socket);
    let mut stop_and_cont = || {
        qmp.execute("stop", json!({}));
        qmp.execute("cont", json!({}));
    };
    // Both with I/O under way and without.
    vm.machine();
    (0..5).for_each(|_| stop_and_cont());
    vm.wait_for("invitation", |line| line["reading"] == true);
    (0..5).for_each(|_| stop_and_cont());
    let before = vm.cpu_ms("");
    std::thread::sleep(std::time::Duration::from_millis(1000));
    let used = vm.cpu_ms("") - before;
    assert!(used < 100, "{used} ms of CPU in an idle second");
    vm.type_text("\n");
    vm.good_end();
}

/// The CPUs that each thread of a process may run on, by the thread's name.
fn allowed(id: u32) -> Vec<(String, String)> {
    let field = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().to_owned())
    };
    let tasks = std::fs::read_dir(format!("/proc/{id}/task")).expect("the VM's threads");
    let threads = tasks.flatten().filter_map(|task| {
        let text = std::fs::read_to_string(task.path().join("status")).ok()?;
        Some((field(&text, "Name:")?, field(&text, "Cpus_allowed_list:")?))
    });
    threads.collect()
}

fn pinned_only_when_asked(bench: &Bench) {
    let ours = allowed(std::process::id())[0].1.clone();
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", 4 * MIB);
    let first = ours.split([',', '-']).next().expect("a CPU").to_owned();
    let mut vm = Vm::new(bench, "job=quiet rw=echo completion=irq")
        .cpus(2)
        .iothread("id=io0")
        .iothread("id=io1")
        .iothread(&format!("id=pinned,cpus={first}"))
        .disk(&image, "iothreads=io0:io1:pinned,queues=4")
        .start();
    vm.wait_for("invitation", |line| line["reading"] == true);
    let threads = allowed(vm.id());
    for name in ["IO io0", "IO io1", "IO pinned", "vcpu0", "vcpu1"] {
        let (_, cpus) = threads
            .iter()
            .find(|(thread, _)| thread == name)
            .unwrap_or_else(|| panic!("no thread {name} among {threads:?}"));
        let expected = if name == "IO pinned" { &first } else { &ours };
        assert_eq!(cpus, expected, "{name}");
    }
    vm.type_text("\n");
    vm.good_end();
}
