//! Signals and sudden death during I/O.

use std::thread;
use std::time::Duration;

use super::disk::{Image, SECTOR_BYTES};
use super::soak::{Chance, number};
use super::vm::{Running, Vm};
use super::{Bench, Test};

pub const TESTS: &[Test] = &[
    Test::new("sigterm_during_io", |bench| {
        signal_during_io(bench, "TERM", "sigterm")
    }),
    Test::new("sigint_during_io", |bench| {
        signal_during_io(bench, "INT", "sigint")
    }),
    Test::new("signals_that_mean_nothing_during_io", harmless_signals),
    Test::new("killed_during_writes", killed_during_writes),
];

const MIB: u64 = 1 << 20;

/// A VM with four busy disks on two iothreads, in the middle of its work.
fn busy(bench: &Bench, images: &[Image], runtime: &str) -> Running {
    let jobs = format!("job=busy rw=randrw bs=4k iodepth=8 verify=track runtime={runtime}");
    let vm = Vm::new(bench, &jobs)
        .cpus(2)
        .iothread("id=io0")
        .iothread("id=io1");
    let vm = images.iter().enumerate().fold(vm, |vm, (i, image)| {
        vm.disk(image, &format!("iothread=io{}", i % 2))
    });
    let mut vm = vm.start();
    vm.machine();
    thread::sleep(Duration::from_millis(300));
    vm
}

fn images(directory: &tempfile::TempDir) -> Vec<Image> {
    (0..4)
        .map(|i| Image::new(directory, &format!("disk{i}"), 4 * MIB))
        .collect()
}

fn signal_during_io(bench: &Bench, signal: &str, words: &str) {
    let directory = bench.directory();
    let images = images(&directory);
    let vm = busy(bench, &images, "600s");
    vm.signal(signal);
    vm.end().expect(0, words);
    // Nothing is left that holds the images.
    busy(bench, &images, "100ms").good_end();
}

/// Signals interrupt system calls; none of them may be taken for an error of the disk.
fn harmless_signals(bench: &Bench) {
    let directory = bench.directory();
    let images = images(&directory);
    let mut vm = busy(bench, &images, "1500ms");
    for _ in 0..100 {
        vm.signal("WINCH");
        vm.signal("CONT");
        thread::sleep(Duration::from_millis(3));
    }
    let line = vm.good_job("busy");
    assert_eq!(line["errors"], 0);
    vm.good_end();
}

fn killed_during_writes(bench: &Bench) {
    const BLOCK_SECTORS: u64 = 8;
    const BLOCKS: u64 = 256;
    let mut chance = Chance::new("killed_during_writes");
    let all = [
        "direct=off,cache=writeback",
        "direct=on",
        "engine=threads",
        "engine=native,direct=on",
    ];
    let kills = number("POLLUX_KILLS", all.len());
    for options in all.iter().cycle().take(kills) {
        let directory = bench.directory();
        let image = Image::new(&directory, "disk", BLOCKS * BLOCK_SECTORS * SECTOR_BYTES);
        let jobs =
            "job=writes rw=write bs=4k iodepth=8 fsync=16 verify=gen:1 report=flush runtime=600s";
        let vm = Vm::new(bench, jobs).iothread("id=io0");
        let mut vm = vm.disk(&image, &format!("iothread=io0,{options}")).start();
        let mut flushed = 0;
        // Past the first pass over the disk, so that some blocks are overwritten.
        let enough = BLOCKS + chance.below(200);
        while flushed < enough {
            let line = vm.wait_for("flush", |line| line["flushed"].is_u64());
            flushed = line["flushed"].as_u64().unwrap_or(0);
        }
        thread::sleep(Duration::from_micros(chance.below(5000)));
        let end = vm.kill();
        // The image can be used at once, though the kernel may still be freeing the killed
        // process's ring, and with it the lock.
        let jobs = "job=again rw=randread bs=4k iodepth=8 runtime=20ms";
        Vm::new(bench, jobs).disk(&image, "").start().good_end();
        let last = end.console.iter().rev().find_map(|line| {
            serde_json::from_str::<serde_json::Value>(line).ok()?["flushed"].as_u64()
        });
        let flushed = last.unwrap_or(0).max(flushed);
        // Write number i goes to block i mod BLOCKS, in generation 1 + i / BLOCKS.
        for write in 0..flushed {
            let (block, generation) = (write % BLOCKS, 1 + write / BLOCKS);
            for sector in block * BLOCK_SECTORS..(block + 1) * BLOCK_SECTORS {
                let tag = image.tag(sector);
                assert_eq!((tag.sector, tag.disk), (sector, 0), "{options}");
                assert!(
                    u64::from(tag.generation) >= generation,
                    "{options}: sector {sector} has generation {} after a flush of {generation}",
                    tag.generation
                );
            }
        }
    }
}
