//! What a disk can do besides reading and writing, as Linux uses it: another size while it runs, the
//! write cache switched on and off, discard and zeroing, geometry and serial number.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::json;

use super::{Environment, Outcome, two_iothreads};
use crate::machine::{Disk, Machine, Running, Vmm};
use crate::qmp::Qmp;

const MIB: u64 = 1 << 20;
/// As long as one can be.
const SERIAL: &str = "serial-of-20-letters";

/// Each step waits for a line from the console, does one thing and says so.
const SCRIPT: &str = r#"
size=$(disk size) cache=$(disk cache) hole=$(disk hole) keep=$(disk keep)
next() { read -r line; [ "$line" = "$1" ] || fail "expected $1, got $line"; }

report ready
for sectors in 32768 8192; do
    next resized
    waited=0
    until [ "$(cat /sys/block/${size#/dev/}/size)" = $sectors ] || [ $waited -ge 600 ]; do
        sleep 0.1
        waited=$((waited + 1))
    done
    # The last sector.
    seq -f "%0511.f" $sectors $sectors |
        dd of=$size bs=512 seek=$((sectors - 1)) oflag=direct status=none || fail "the end of $size"
    report size.$sectors "$(blockdev --getsz $size)"
done
dmesg | grep -F "[${size#/dev/}] new size: " | while read -r line; do report message "$line"; done

for mode in "write back" "write through" "write back"; do
    next cache
    echo "$mode" >/sys/block/${cache#/dev/}/cache_type || fail "cache_type: $mode"
    [ "$(cat /sys/block/${cache#/dev/}/queue/write_cache)" = "$mode" ] || fail "cache is not $mode"
    report cache.set "$mode"
    next write
    dd if=/dev/urandom of=$cache bs=4k count=16 oflag=direct status=none || fail "dd, $mode"
    report cache.written "$mode"
done

next discard; blkdiscard -o 0 -l 4M $hole || fail blkdiscard; report done.discard
next zeroes; blkdiscard -z -o 4M -l 4M $hole || fail "blkdiscard -z"; report done.zeroes
next punch; fallocate -p -o 8M -l 4M $hole || fail "fallocate -p"; report done.punch
blockdev --flushbufs $hole
report hole.zero "$(dd if=$hole bs=1M count=12 iflag=direct status=none | tr -d '\000' | wc -c)"
report hole.rest "$(dd if=$hole bs=1M skip=12 iflag=direct status=none | tr -d 'Z' | wc -c)"
blkdiscard $keep 2>/dev/null && fail "a disk with discard=off takes discards"

for serial in hole keep wide serial-of-20-letters; do
    device=$(disk $serial)
    cd /sys/block/${device#/dev/}
    report limits.$serial $(cat queue/logical_block_size queue/physical_block_size \
        queue/minimum_io_size queue/optimal_io_size queue/discard_granularity \
        queue/discard_max_bytes queue/write_zeroes_max_bytes alignment_offset)
done
"#;

pub fn features(environment: &Environment) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("needs Pollux's monitor and options".to_owned());
    }
    let mut machine = Machine::new(SCRIPT);
    machine.monitor = true;
    machine.iothreads = two_iothreads();
    machine.disks = vec![
        environment.disk("size", 8 * MIB).on("io0"),
        environment.disk("cache", MIB).on("io1"),
        filled(environment, "hole").on("io0"),
        filled(environment, "keep").with_options("discard=off"),
        environment
            .disk("wide", MIB)
            .with_options("logical-block-size=4096,physical-block-size=16384"),
        environment.disk(SERIAL, MIB),
    ];
    let paths: Vec<_> = machine.disks.iter().map(|disk| &disk.path).collect();
    let mut running = environment.start(&machine);
    running.wait_for("ready");
    let mut monitor = running.monitor();
    resize(&mut running, &mut monitor, paths[0]);
    switch_cache(environment, &mut running, &mut monitor);
    discard(environment, &mut running, paths[2]);
    let ended = running.finish();
    ended.assert_success();

    let messages = ended.all("message");
    assert_eq!(messages.len(), 2, "the kernel's messages: {messages:?}");
    for (message, sectors) in messages.iter().zip(["32768", "8192"]) {
        let expected = format!("new size: {sectors} 512-byte logical blocks");
        assert!(message.contains(&expected), "{message}");
    }
    assert_eq!(ended.value("hole.zero"), "0", "bytes that are not zero");
    assert_eq!(ended.value("hole.rest"), "0", "bytes that were changed");
    let image = fs::read(paths[2]).expect("it can be read");
    let (zeroed, rest) = image.split_at(12 << 20);
    assert!(zeroed.iter().all(|byte| *byte == 0), "zeroes on the image");
    assert!(rest.iter().all(|byte| *byte == b'Z'), "the rest stays");

    // In bytes; the largest requests are 4194303 sectors and, of zeroes, what Linux makes of that.
    let limits = |serial: &str| -> Vec<u64> {
        let words = ended.value(&format!("limits.{serial}")).split(' ');
        words.map(|word| word.parse().expect("a number")).collect()
    };
    const MOST: u64 = 4_194_303 * 512;
    let hole = limits("hole");
    environment.note(&format!("limits of a disk on a file: {hole:?}"));
    // The physical block size is the backend's; Linux takes it for the smallest good request.
    assert_eq!((hole[0], hole[2], hole[3]), (512, hole[1], 0), "{hole:?}");
    assert!(hole[4] >= 512 && hole[4].is_power_of_two(), "{hole:?}");
    assert!(hole[5] > MOST - 65536 && hole[5] <= MOST, "{hole:?}");
    assert!(hole[6] > MOST - 65536 && hole[6] <= MOST, "{hole:?}");
    let keep = limits("keep");
    assert_eq!(keep[4..6], [0, 0], "no discard: {keep:?}");
    assert!(keep[6] > MOST - 65536, "zeroes all the same: {keep:?}");
    assert_eq!(limits("wide")[..4], [4096, 16384, 16384, 0]);
    assert_eq!(limits(SERIAL)[7], 0, "alignment_offset");
    Outcome::Held
}

/// A disk of 16 MiB whose image is all there.
fn filled(environment: &Environment, serial: &str) -> Disk {
    let disk = environment.disk(serial, 0);
    fs::write(&disk.path, vec![b'Z'; 16 << 20])
        .and_then(|()| File::open(&disk.path)?.sync_all())
        .expect("there is room");
    disk
}

/// Makes a disk longer and shorter.
fn resize(running: &mut Running, monitor: &mut Qmp, image: &Path) {
    for sectors in [32768, 8192] {
        monitor.execute(
            "block_resize",
            json!({"device": "size", "size": sectors * 512}),
        );
        running.send("resized");
        let seen = running.wait_for(&format!("size.{sectors}"));
        assert_eq!(seen, sectors.to_string(), "sectors that the guest sees");
        let length = image.metadata().expect("it exists").len();
        assert_eq!(length, sectors * 512, "the image's length");
    }
    let refused = monitor.try_execute("block_resize", json!({"device": "size", "size": -1}));
    assert!(refused.is_err(), "a size below zero: {refused:?}");
}

/// Without a write cache every write is followed by a sync on the host; with one, none is.
fn switch_cache(environment: &Environment, running: &mut Running, monitor: &mut Qmp) {
    for (nth, mode) in (1..).zip(["back", "through", "back"]) {
        let writeback = mode == "back";
        running.send("cache");
        running.wait_for_nth("cache.set", nth);
        let said = &monitor.disk("cache")["inserted"]["cache"]["writeback"];
        assert_eq!(*said, writeback, "write {mode}: what query-block says");
        let before = monitor.disk_counter("cache", "x-syncs");
        running.send("write");
        running.wait_for_nth("cache.written", nth);
        let syncs = monitor.disk_counter("cache", "x-syncs") - before;
        environment.note(&format!("write {mode}: {syncs} syncs of 16 writes"));
        assert_eq!(syncs, if writeback { 0 } else { 16 }, "write {mode}: syncs");
    }
}

/// What is discarded is gone from the image's allocated size; what is zeroed for good stays there.
fn discard(environment: &Environment, running: &mut Running, image: &Path) {
    let allocated = || image.metadata().expect("it exists").blocks() * 512;
    let mut expected = 16 * MIB;
    // Some file systems count their own bookkeeping of the file.
    let slack = MIB / 4;
    assert!(allocated().abs_diff(expected) <= slack, "filled");
    for (step, freed) in [("discard", 4 * MIB), ("zeroes", 0), ("punch", 4 * MIB)] {
        running.send(step);
        running.wait_for(&format!("done.{step}"));
        expected -= freed;
        let now = allocated();
        environment.note(&format!("after {step}: {} KiB allocated", now >> 10));
        assert!(now.abs_diff(expected) <= slack, "{step}: {now} bytes");
    }
}
