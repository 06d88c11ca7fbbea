//! What was written is read again: across disks and iothreads, engines, layouts, sizes and restarts.

use std::thread;
use std::time::{Duration, Instant};

use super::disk::{Image, SECTOR_BYTES};
use super::vm::{Running, Vm};
use super::{Bench, Test};

pub const TESTS: &[Test] = &[
    Test::new(
        "data_across_disks_and_iothreads",
        across_disks_and_iothreads,
    ),
    Test::new("data_without_iothread", without_iothread),
    Test::new("data_engine_io_uring", |bench| engine(bench, "io_uring")),
    Test::new("data_registered_buffers", registered_buffers),
    Test::new(
        "data_registered_buffers_by_default",
        registered_buffers_by_default,
    ),
    Test::new(
        "data_registered_buffers_beyond_the_limit",
        registered_buffers_beyond_the_limit,
    ),
    Test::new("data_engine_native", |bench| engine(bench, "native")),
    Test::new("data_engine_threads", |bench| engine(bench, "threads")),
    Test::new("data_monitor_io_uring", |bench| monitor(bench, "io_uring")),
    Test::new("data_monitor_epoll", |bench| monitor(bench, "epoll")),
    Test::new("data_monitor_ppoll", |bench| monitor(bench, "ppoll")),
    Test::new("data_many_segments_at_once", many_segments_at_once),
    Test::new("data_memory_above_4_gib", memory_above_4_gib),
    Test::new("data_on_pci", on_pci_all_at_once).needs_pci(),
    Test::new("data_on_many_disks", on_many_disks),
    Test::new("size_no_multiple_of_512", size_no_multiple_of_512),
    Test::new("size_one_sector", size_one_sector),
    Test::new("size_no_multiple_of_4096", size_no_multiple_of_4096),
    Test::new("size_4_tib", size_4_tib),
    Test::new(
        "discard_frees_and_zeroes_zero",
        discard_frees_and_zeroes_zero,
    ),
    Test::new("serial_number", serial_number),
    Test::new("read_only_disk", read_only_disk),
    Test::new("image_in_use_is_refused", image_in_use_is_refused),
];

const MIB: u64 = 1 << 20;

fn across_disks_and_iothreads(bench: &Bench) {
    let directory = bench.directory();
    let images: Vec<_> = (0..4)
        .map(|i| Image::new(&directory, &format!("disk{i}"), 8 * MIB))
        .collect();
    let vm = |jobs: &str| {
        let vm = Vm::new(bench, jobs)
            .cpus(2)
            .iothread("id=io0")
            .iothread("id=io1,poll-max-ns=0");
        let disks = images.iter().zip([
            "iothread=io0",
            "iothread=io1",
            "iothread=io0",
            "iothread=io1",
        ]);
        disks.fold(vm, |vm, (image, options)| vm.disk(image, options))
    };
    let write = "job=write rw=write bs=64k iodepth=8 verify=gen:1";
    let mut first = vm(&format!(
        "{write} job=read rw=verify bs=16k iodepth=4 verify=gen:1"
    ))
    .start();
    assert_eq!(first.good_job("write")["bytes"], 32 * MIB);
    let read = first.good_job("read");
    assert_eq!(read["verified_sectors"], 32 * MIB / SECTOR_BYTES);
    assert_eq!(
        read["cpus"].as_array().map(Vec::len),
        Some(2),
        "one worker a CPU"
    );
    first.good_end();
    for (disk, image) in (0..).zip(&images) {
        image.expect_written(0..8 * MIB / SECTOR_BYTES, disk, 1);
    }
    let mut second = vm("job=read rw=verify bs=32k iodepth=16 verify=gen:1").start();
    assert_eq!(
        second.good_job("read")["verified_sectors"],
        32 * MIB / SECTOR_BYTES
    );
    second.good_end();
}

/// Reads and writes at random over the whole disk, cut at any byte, then everything checked in ways
/// that differ in what is negotiated.
const RANDOM: &str = "verify=track \
    job=mixed rw=randrw bs=4k iodepth=16 ios=1500 segs=3 cut=odd \
    job=small rw=randrw bs=512 iodepth=32 ios=1500 rwmixread=30 completion=poll \
    job=large rw=randrw bs=128k iodepth=4 ios=100 segs=7 cut=odd fsync=8 \
    job=plain rw=verify bs=4k iodepth=8 \
    job=direct_chain rw=verify bs=8k iodepth=8 indirect=off segs=5 cut=odd \
    job=no_event_idx rw=verify bs=16k iodepth=4 event_idx=off \
    job=bare rw=verify bs=64k iodepth=2 event_idx=off indirect=off completion=poll";

fn random(vm: Vm, image: &Image, options: &str) {
    let mut vm = vm.disk(image, options).start();
    for job in ["mixed", "small", "large"] {
        vm.good_job(job);
    }
    let verified = vm.good_job("plain")["verified_sectors"]
        .as_u64()
        .expect("a number");
    assert!(verified > 1000, "{verified} sectors");
    for job in ["direct_chain", "no_event_idx", "bare"] {
        assert_eq!(
            vm.good_job(job)["verified_sectors"],
            verified,
            "{job}, {options}"
        );
    }
    vm.good_end();
}

fn without_iothread(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", 4 * MIB);
    random(Vm::new(bench, RANDOM), &image, "");
}

fn engine(bench: &Bench, engine: &str) {
    for (direct, cache) in [("off", "writeback"), ("on", "writethrough")] {
        let directory = bench.directory();
        let image = Image::new(&directory, "disk", 4 * MIB);
        let vm = Vm::new(bench, RANDOM).iothread("id=io0");
        let options = format!("iothread=io0,engine={engine},direct={direct},cache={cache}");
        random(vm, &image, &options);
    }
}

/// More disks than the soft limit of descriptors has room for: it is raised.
fn on_many_disks(bench: &Bench) {
    let directory = bench.directory();
    let images: Vec<_> = (0..60)
        .map(|i| Image::new(&directory, &format!("disk{i}"), 64 << 10))
        .collect();
    let jobs = "job=write rw=write bs=16k verify=gen:3 job=read rw=verify bs=16k verify=gen:3";
    let vm = Vm::new(bench, jobs)
        .under(&["prlimit", "--nofile=64:4096"])
        .iothread("id=io0");
    let vm = images
        .iter()
        .fold(vm, |vm, image| vm.disk(image, "iothread=io0"));
    let mut vm = vm.start();
    vm.good_job("write");
    assert_eq!(vm.good_job("read")["verified_sectors"], 60 * 128);
    vm.good_end();
}

/// MiB of the process' memory that are pinned, once there are some: the disks are in use then.
fn pinned_mib(vm: &Running) -> u64 {
    let path = format!("/proc/{}/status", vm.id());
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut before = 0;
    loop {
        let status = std::fs::read_to_string(&path).expect("its status");
        let line = status.lines().find_map(|line| line.strip_prefix("VmPin:"));
        let number = line.and_then(|line| line.split_whitespace().next());
        let kib: u64 = number.and_then(|n| n.parse().ok()).expect("a number");
        if kib != 0 && kib == before {
            return kib >> 10;
        }
        before = kib;
        assert!(Instant::now() < deadline, "no memory is pinned");
        thread::sleep(Duration::from_millis(200));
    }
}

/// Two disks on one iothread, which share its registration, one on another, one that wants none,
/// and everything checked on each. The registered memory is pinned once for each iothread.
fn registered_buffers(bench: &Bench) {
    for memory in ["160M", "160M,prefault=on"] {
        let directory = bench.directory();
        let images: Vec<_> = (0..4)
            .map(|i| Image::new(&directory, &format!("disk{i}"), 4 * MIB))
            .collect();
        let jobs = format!("{RANDOM} job=on rw=randread bs=4k iodepth=4 runtime=600s");
        let mut vm = Vm::new(bench, &jobs)
            .memory(memory)
            .iothread("id=io0")
            .iothread("id=io1,poll-max-ns=0")
            .disk(&images[0], "iothread=io0,fixedbufs=on")
            .disk(&images[1], "iothread=io0,fixedbufs=on,direct=off")
            .disk(&images[2], "iothread=io1,fixedbufs=on")
            .disk(&images[3], "fixedbufs=off")
            .start();
        for job in [
            "mixed",
            "small",
            "large",
            "plain",
            "direct_chain",
            "no_event_idx",
            "bare",
        ] {
            vm.good_job(job);
        }
        assert_eq!(pinned_mib(&vm), 2 * 160, "{memory}");
        vm.signal("TERM");
        vm.end().expect(0, "sigterm");
    }
}

/// Memory that is there anyway is registered for a direct disk, unless the disk says no.
fn registered_buffers_by_default(bench: &Bench) {
    for (memory, options, pinned) in [
        ("160M,prefault=on", "", 320),
        ("160M,prefault=on", ",direct=off", 160),
        ("160M,prefault=on", ",fixedbufs=off", 160),
        ("160M", "", 160),
    ] {
        let directory = bench.directory();
        let images = ["disk", "other"].map(|name| Image::new(&directory, name, 4 * MIB));
        // The other one has them in any case.
        let vm = Vm::new(bench, "job=on rw=randread bs=4k iodepth=4 runtime=600s")
            .memory(memory)
            .iothread("id=io0")
            .iothread("id=io1")
            .disk(&images[0], &format!("iothread=io0{options}"))
            .disk(&images[1], "iothread=io1,fixedbufs=on")
            .start();
        assert_eq!(pinned_mib(&vm), pinned, "{memory} {options}");
        vm.signal("TERM");
        vm.end().expect(0, "sigterm");
    }
}

/// Where the memory may not be locked, one line says so and the disk does without.
fn registered_buffers_beyond_the_limit(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", 4 * MIB);
    // Who has these capabilities has no limit, or may raise it.
    let limited = [
        "prlimit",
        "--memlock=1048576:1048576",
        "setpriv",
        "--bounding-set=-ipc_lock,-sys_resource",
        "--inh-caps=-ipc_lock,-sys_resource",
        "--",
    ];
    let mut vm = Vm::new(bench, &format!("queues=2 {RANDOM}"))
        .under(&limited)
        .cpus(2)
        .iothread("id=io0")
        .disk(&image, "iothread=io0,fixedbufs=on,queues=2")
        .start();
    for job in [
        "mixed",
        "small",
        "large",
        "plain",
        "direct_chain",
        "no_event_idx",
    ] {
        vm.good_job(job);
    }
    vm.good_job("bare");
    let end = vm.end();
    assert!(end.status.success(), "{}", end.messages);
    let lines: Vec<&str> = end.messages.lines().collect();
    assert_eq!(lines.len(), 1, "{}", end.messages);
    for part in [
        "disk0",
        "fixedbufs=on",
        "ulimit -l",
        "160 MiB",
        "fixedbufs=off",
    ] {
        assert!(lines[0].contains(part), "{part}: {}", lines[0]);
    }
}

fn monitor(bench: &Bench, monitor: &str) {
    for policy in ["weighted", "per-handler", "context", "off", "always"] {
        let directory = bench.directory();
        let image = Image::new(&directory, "disk", 4 * MIB);
        let iothread = format!("id=io0,monitor={monitor},poll-policy={policy}");
        let vm = Vm::new(bench, RANDOM).iothread(&iothread);
        random(vm, &image, "iothread=io0");
    }
}

fn many_segments_at_once(bench: &Bench) {
    let directory = bench.directory();
    // 128 requests of 126 segments each.
    let image = Image::new(&directory, "disk", 128 * 126 * SECTOR_BYTES);
    let jobs = "iodepth=128 segs=126 bs=64512 verify=gen:7 \
        job=write rw=write job=read rw=verify job=odd rw=verify cut=odd";
    let mut vm = Vm::new(bench, jobs)
        .iothread("id=io0")
        .disk(&image, "iothread=io0")
        .start();
    assert_eq!(vm.good_job("write")["ios"], 128);
    assert_eq!(vm.good_job("read")["verified_sectors"], 128 * 126);
    assert_eq!(vm.good_job("odd")["verified_sectors"], 128 * 126);
    vm.good_end();
    image.expect_written(0..128 * 126, 0, 7);
}

fn memory_above_4_gib(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", 4 * MIB);
    // Rings and buffers there; then data written from there and read to below.
    let jobs = "verify=gen:2 bs=64k iodepth=8 job=write rw=write mem=high job=high rw=verify mem=high job=low rw=verify";
    let vm = Vm::new(bench, jobs).memory("5G").iothread("id=io0");
    let mut vm = vm.disk(&image, "iothread=io0").start();
    for job in ["write", "high", "low"] {
        vm.good_job(job);
    }
    vm.good_end();
    image.expect_written(0..4 * MIB / SECTOR_BYTES, 0, 2);
}

fn on_pci_all_at_once(bench: &Bench) {
    let directory = bench.directory();
    let images: Vec<_> = (0..3)
        .map(|i| Image::new(&directory, &format!("disk{i}"), 4 * MIB))
        .collect();
    let jobs = format!("queues=2 {RANDOM}");
    let vm = Vm::new(bench, &jobs)
        .cpus(2)
        .iothread("id=io0")
        .iothread("id=io1");
    let vm = images.iter().fold(vm, |vm, image| {
        vm.disk(image, "transport=pci,queues=2,iothreads=io0:io1")
    });
    let mut vm = vm.start();
    let verified = vm.good_job("plain")["verified_sectors"]
        .as_u64()
        .expect("a number");
    for job in ["direct_chain", "no_event_idx", "bare"] {
        assert_eq!(vm.good_job(job)["verified_sectors"], verified, "{job}");
    }
    vm.good_end();
}

/// Writes and reads the whole of an image of `len` bytes by single sectors.
fn sectors(bench: &Bench, image: &Image, len: u64, options: &str) -> String {
    let jobs = "bs=512 iodepth=4 verify=gen:1 job=write rw=write job=read rw=verify \
        job=beyond rw=read bound=off verify=off ios=1";
    let jobs = format!("{jobs} offset={}", len / SECTOR_BYTES * SECTOR_BYTES);
    let mut vm = Vm::new(bench, &jobs)
        .iothread("id=io0")
        .disk(image, options)
        .start();
    let machine = vm.machine();
    assert_eq!(machine["disks"][0]["capacity_sectors"], len / SECTOR_BYTES);
    assert_eq!(
        vm.good_job("write")["bytes"],
        len / SECTOR_BYTES * SECTOR_BYTES
    );
    vm.good_job("read");
    let beyond = vm.job("beyond");
    assert_eq!(
        (&beyond["errors"], &beyond["ios"]),
        (&1.into(), &0.into()),
        "{beyond}"
    );
    vm.wait_for("last line", |line| line["done"] == true);
    image.expect_written(0..len / SECTOR_BYTES, 0, 1);
    vm.end().messages
}

fn size_no_multiple_of_512(bench: &Bench) {
    let directory = bench.directory();
    let len = MIB + 300;
    for direct in ["off", "on"] {
        let image = Image::new(&directory, direct, len);
        let tail: Vec<u8> = (0..300).map(|i| i as u8).collect();
        image.write(MIB, &tail);
        let messages = sectors(bench, &image, len, &format!("iothread=io0,direct={direct}"));
        assert_eq!(image.read(MIB, 300), tail, "the tail is the image's own");
        assert_eq!(image.bytes().len() as u64, len);
        let warnings = messages.lines().filter(|line| line.contains("300")).count();
        assert_eq!(
            warnings, 1,
            "one warning that says how many bytes:\n{messages}"
        );
    }
}

fn size_one_sector(bench: &Bench) {
    let directory = bench.directory();
    for direct in ["off", "on"] {
        let image = Image::new(&directory, direct, SECTOR_BYTES);
        sectors(
            bench,
            &image,
            SECTOR_BYTES,
            &format!("iothread=io0,direct={direct}"),
        );
    }
}

fn size_no_multiple_of_4096(bench: &Bench) {
    let directory = bench.directory();
    let len = MIB + 3 * SECTOR_BYTES;
    let image = Image::new(&directory, "disk", len);
    sectors(bench, &image, len, "iothread=io0,direct=on");
    assert_eq!(image.bytes().len() as u64, len, "the image has not grown");
}

fn size_4_tib(bench: &Bench) {
    let directory = bench.directory();
    let (len, part) = (4 << 40, 64 << 10);
    let image = Image::new(&directory, "disk", len);
    let jobs = format!(
        "offset={} bs=4k iodepth=4 verify=gen:1 job=write rw=write job=read rw=verify",
        len - part
    );
    let mut vm = Vm::new(bench, &jobs)
        .iothread("id=io0")
        .disk(&image, "iothread=io0")
        .start();
    assert_eq!(
        vm.machine()["disks"][0]["capacity_sectors"],
        len / SECTOR_BYTES
    );
    assert_eq!(vm.good_job("write")["bytes"], part);
    vm.good_job("read");
    vm.good_end();
    image.expect_written((len - part) / SECTOR_BYTES..len / SECTOR_BYTES, 0, 1);
}

fn discard_frees_and_zeroes_zero(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", 8 * MIB);
    // Written; then the first quarter discarded, the second zeroed and unmapped, the third zeroed.
    let jobs = "bs=64k iodepth=4 job=write rw=write verify=gen:1 \
        job=discard rw=discard bs=256k size=2m \
        job=unmap rw=writezeroes unmap=on bs=256k offset=2m size=2m \
        job=zero rw=writezeroes bs=256k offset=4m size=2m \
        job=zeroes rw=verify verify=zero size=6m job=rest rw=verify verify=gen:1 offset=6m";
    let vm = Vm::new(bench, jobs).iothread("id=io0");
    let mut vm = vm.disk(&image, "iothread=io0,discard=on").start();
    for job in ["write", "discard", "unmap", "zero"] {
        vm.good_job(job);
    }
    assert_eq!(
        vm.good_job("zeroes")["verified_sectors"],
        6 * MIB / SECTOR_BYTES
    );
    vm.good_job("rest");
    vm.good_end();
    assert!(image.bytes()[..6 << 20].iter().all(|&byte| byte == 0));
    let allocated = image.allocated_bytes();
    assert!(allocated <= 5 * MIB, "{allocated} bytes are allocated");
}

fn serial_number(bench: &Bench) {
    for (serial, expected) in [
        ("short", "short"),
        ("exactly-20-bytes-abc", "exactly-20-bytes-abc"),
    ] {
        let directory = bench.directory();
        let image = Image::new(&directory, "disk", MIB);
        let vm = Vm::new(bench, "job=id rw=getid ios=1").iothread("id=io0");
        let mut vm = vm
            .disk(&image, &format!("iothread=io0,serial={serial}"))
            .start();
        let line = vm.good_job("id");
        let id = line["disks"][0]["id"].as_str().expect("an identifier");
        assert_eq!(id.trim_end_matches('\0'), expected);
        assert_eq!(id.len(), 20, "padded to 20 bytes");
        vm.good_end();
    }
}

fn read_only_disk(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", MIB);
    let mut fill = Vm::new(bench, "job=write rw=write bs=64k verify=gen:1")
        .disk(&image, "")
        .start();
    fill.good_job("write");
    fill.good_end();
    let jobs = "job=write rw=write bs=4k ios=10 verify=gen:2 job=not_acknowledged rw=write bs=4k ios=10 ack_ro=off \
        job=flush rw=flush ios=2 job=id rw=getid ios=1 job=read rw=verify bs=4k verify=gen:1";
    let vm = Vm::new(bench, jobs).iothread("id=io0");
    let mut vm = vm.disk(&image, "iothread=io0,readonly=on").start();
    for job in ["write", "not_acknowledged"] {
        let line = vm.job(job);
        assert_eq!(
            (&line["errors"], &line["ios"]),
            (&10.into(), &0.into()),
            "{line}"
        );
    }
    for job in ["flush", "id", "read"] {
        vm.good_job(job);
    }
    vm.wait_for("last line", |line| line["done"] == true);
    vm.end();
    image.expect_written(0..MIB / SECTOR_BYTES, 0, 1);
}

fn image_in_use_is_refused(bench: &Bench) {
    let directory = bench.directory();
    let image = Image::new(&directory, "disk", MIB);
    let mut first = Vm::new(bench, "job=a rw=sleep runtime=60s")
        .disk(&image, "")
        .start();
    first.machine();
    let second = Vm::new(bench, "job=a rw=none")
        .disk(&image, "")
        .start()
        .end();
    let process = first.id().to_string();
    second.expect(
        second.status.code().filter(|&code| code != 0).unwrap_or(1),
        &process,
    );
    let end = Vm::new(bench, "job=a rw=none")
        .disk(&image, "locking=off")
        .start();
    end.good_end();
    first.signal("TERM");
    first.end().expect(0, "sigterm");
}
