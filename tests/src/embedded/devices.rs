//! Interrupts by each route, notifications, and what the configuration space tells.

use serde_json::Value;

use super::disk::Image;
use super::vm::Vm;
use super::{Bench, Test};

pub const TESTS: &[Test] = &[
    Test::new("interrupts_of_mmio", interrupts_of_mmio),
    Test::new("interrupts_of_msix", interrupts_of_msix).needs_pci(),
    Test::new("interrupts_go_to_each_cpu", interrupts_go_to_each_cpu),
    Test::new(
        "interrupts_across_the_indexes_wrap",
        interrupts_across_the_indexes_wrap,
    ),
    Test::new(
        "polling_takes_no_notifications",
        polling_takes_no_notifications,
    ),
    Test::new("as_many_disks_as_interrupts", as_many_disks_as_interrupts),
    Test::new("configuration_space", configuration_space),
];

const MIB: u64 = 1 << 20;

fn number(line: &Value, key: &str) -> u64 {
    line[key]
        .as_u64()
        .unwrap_or_else(|| panic!("no {key} in {line}"))
}

/// Every job looks at the used ring only after an interrupt, and calls it a fault when none comes: with
/// and without EVENT_IDX, one request at a time and many.
const ROUTES: &str = "rw=randread completion=strict bs=4k ios=300 job=one job=many iodepth=16 \
    job=one_bare event_idx=off job=many_bare event_idx=off iodepth=16 job=think thinktime=300us ios=50";

fn interrupts(vm: Vm) {
    let mut vm = vm.start();
    for job in ["one", "many", "one_bare", "many_bare", "think"] {
        let line = vm.good_job(job);
        assert!(number(&line, "interrupts") > 0, "{line}");
        assert!(
            number(&line, "interrupts") <= number(&line, "ios") + 1,
            "at most one a request: {line}"
        );
    }
    vm.good_end();
}

fn interrupts_of_mmio(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", MIB);
    let vm = Vm::new(bench, ROUTES).iothread("id=io0,poll-max-ns=0");
    interrupts(vm.disk(&image, "iothread=io0,transport=mmio"));
}

fn interrupts_of_msix(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", MIB);
    let jobs = format!("queues=2 {ROUTES}");
    let vm = Vm::new(bench, &jobs)
        .cpus(2)
        .iothread("id=io0,poll-max-ns=0");
    interrupts(vm.disk(&image, "iothread=io0,transport=pci,queues=2"));
}

fn interrupts_go_to_each_cpu(bench: &Bench) {
    let directory = bench.directory();
    let images: Vec<_> = (0..4)
        .map(|i| Image::new(&directory, &format!("disk{i}"), MIB))
        .collect();
    let jobs = "bs=4k completion=strict job=reads rw=randread ios=400 iodepth=2";
    let vm = Vm::new(bench, jobs)
        .cpus(4)
        .iothread("id=io0,poll-max-ns=0")
        .iothread("id=io1,poll-max-ns=0");
    let vm = images.iter().enumerate().fold(vm, |vm, (i, image)| {
        vm.disk(image, &format!("iothread=io{},transport=mmio", i % 2))
    });
    let mut vm = vm.start();
    let line = vm.good_job("reads");
    assert_eq!(line["cpus"], serde_json::json!([0, 1, 2, 3]));
    let disks = line["disks"].as_array().expect("disks");
    assert_eq!(disks.len(), 4);
    for disk in disks {
        assert_eq!(disk["ios"], 100, "{line}");
        assert!(number(disk, "interrupts") > 0, "{line}");
    }
    vm.good_end();
}

/// Ring indexes have 16 bits; used_event and avail_event are compared with them across their wrap.
fn interrupts_across_the_indexes_wrap(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", MIB);
    let jobs = "job=reads rw=randread bs=512 iodepth=24 ios=140000 completion=strict";
    let vm = Vm::new(bench, jobs).iothread("id=io0");
    let mut vm = vm.disk(&image, "iothread=io0").start();
    let line = vm.good_job("reads");
    assert!(number(&line, "interrupts") > 0, "{line}");
    vm.good_end();
}

fn polling_takes_no_notifications(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", MIB);
    let jobs = "rw=randread bs=4k ios=2000 completion=poll job=event_idx job=flags event_idx=off";
    // It polls for a second before it blocks: in practice always.
    let vm = Vm::new(bench, jobs).iothread("id=io0,poll-policy=always,poll-max-ns=1000000000");
    let mut vm = vm.disk(&image, "iothread=io0").start();
    for job in ["event_idx", "flags"] {
        let line = vm.good_job(job);
        let kicks = number(&line, "kicks");
        assert!(
            kicks < 200,
            "{kicks} notifications for 2000 requests of a disk that is polled: {line}"
        );
    }
    vm.good_end();
}

fn as_many_disks_as_interrupts(bench: &Bench) {
    let directory = bench.directory();
    let images: Vec<_> = (0..16)
        .map(|i| Image::new(&directory, &format!("disk{i}"), MIB))
        .collect();
    let jobs = "bs=64k verify=gen:1 iodepth=2 job=write rw=write job=read rw=verify";
    let vm = Vm::new(bench, jobs).cpus(2).iothread("id=io0");
    let mut vm = images
        .iter()
        .fold(vm, |vm, image| vm.disk(image, "iothread=io0"))
        .start();
    assert_eq!(vm.machine()["disks"].as_array().map(Vec::len), Some(16));
    vm.good_job("write");
    let line = vm.good_job("read");
    let disks = line["disks"].as_array().expect("disks");
    assert!(disks.iter().all(|disk| disk["ios"] == 16), "{line}");
    vm.good_end();
    for (disk, image) in (0..).zip(&images) {
        image.expect_written(0..2048, disk, 1);
    }
}

fn configuration_space(bench: &Bench) {
    const F_RO: u64 = 1 << 5;
    const F_FLUSH: u64 = 1 << 9;
    const F_CONFIG_WCE: u64 = 1 << 11;
    const F_DISCARD: u64 = 1 << 13;
    const F_WRITE_ZEROES: u64 = 1 << 14;
    const F_VERSION_1: u64 = 1 << 32;
    const F_EVENT_IDX: u64 = 1 << 29;
    const F_INDIRECT: u64 = 1 << 28;
    let directory = bench.directory();
    let plain = Image::new(&directory, "plain", 5 * MIB);
    let read_only = Image::new(&directory, "read_only", MIB);
    let vm = Vm::new(bench, "job=a rw=none").iothread("id=io0");
    let vm = vm.disk(
        &plain,
        "iothread=io0,queue-size=128,discard=on,cache=writeback",
    );
    let mut vm = vm.disk(&read_only, "readonly=on").start();
    let machine = vm.machine();
    let disks = &machine["disks"];
    let features = |disk: &Value| {
        let text = disk["features"]
            .as_str()
            .and_then(|text| text.strip_prefix("0x"));
        u64::from_str_radix(text.expect("features"), 16).expect("a number")
    };
    let always = F_VERSION_1 | F_EVENT_IDX | F_INDIRECT;
    let wanted = always | F_FLUSH | F_CONFIG_WCE | F_DISCARD | F_WRITE_ZEROES;
    assert_eq!(features(&disks[0]) & (wanted | F_RO), wanted, "{machine}");
    assert_eq!(
        features(&disks[1]) & (always | F_RO),
        always | F_RO,
        "{machine}"
    );
    assert_eq!(disks[0]["capacity_sectors"], 5 * MIB / 512);
    assert_eq!(disks[0]["queue_size"], 128);
    assert_eq!(disks[0]["seg_max"], 126);
    assert_eq!(disks[0]["blk_size"], 512);
    assert_eq!(disks[0]["wce"], 1);
    for limit in ["max_discard_sectors", "max_write_zeroes_sectors"] {
        assert!(number(&disks[0], limit) > 0, "{machine}");
    }
    vm.good_end();
}
