//! Settings changed while I/O runs: every change takes effect, and no request suffers.

use serde_json::json;

use super::disk::Image;
use super::qmp::Qmp;
use super::vm::Vm;
use super::{Bench, Test};

pub const TESTS: &[Test] = &[
    Test::new("settings_of_polling_change_during_io", polling).needs_qmp(),
    Test::new("disk_moves_between_iothreads_during_io", disk_moves).needs_qmp(),
    Test::new("stop_and_cont_during_io", stop_and_cont).needs_qmp(),
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
