//! Everything at once for as long as one likes: 16 disks on 4 iothreads, all of whose data is verified, while
//! settings, polling rules, iothreads, sizes and the VM's state change at random, and writes fail now and then.
//! The process must not grow meanwhile. And many VMs at once.
//!
//! `tests/soak SECONDS [SEED]` runs it for longer than the tests do.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rand_mt::Mt64;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};

use super::disk::Image;
use super::vm::{Running, Vm};
use super::{Bench, Test};
use crate::qmp::Qmp;

pub const TESTS: &[Test] = &[
    Test::new("soak", soak).needs_qmp().needs_pci(),
    Test::new("fifty_vms_at_once", fifty_vms_at_once),
];

const MIB: u64 = 1 << 20;
const DISKS: usize = 16;
const IOTHREADS: usize = 4;
/// What the guest uses of each disk; its size is never less.
const REGION: u64 = 2 * MIB;
/// How long it lasts if nobody says otherwise.
const SECONDS: u64 = 20;
/// The guest's memory, all of it there from the start so that the process' does not grow for it.
const MEMORY: &str = "size=160M,prefault=on";
/// Longest wait for a write to fail, or for the VM to run again.
const PATIENCE: Duration = Duration::from_secs(600);

const POLICIES: [&str; 5] = ["weighted", "per-handler", "context", "off", "always"];
const MONITORS: [&str; 3] = ["io_uring", "epoll", "ppoll"];

/// A number from the environment.
pub fn number<T: FromStr>(name: &str, default: T) -> T {
    match env::var(name) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{name}={text} is no number")),
        Err(_) => default,
    }
}

/// Random choices.
pub struct Chance(Mt64);

impl Chance {
    /// From `POLLUX_SOAK_SEED`, or a new seed; it is printed.
    pub fn new(what: &str) -> Chance {
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        let seed = number("POLLUX_SOAK_SEED", now.as_secs());
        eprintln!("{what}: POLLUX_SOAK_SEED={seed}");
        Chance(Mt64::new(seed))
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.0.next_u64() % limit
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// The guest's jobs: rounds that differ in what they ask, then a look at everything that was written.
fn jobs(chance: &mut Chance, duration: Duration) -> String {
    // The command line has room for some twenty.
    let rounds = (duration.as_secs() / 10).clamp(1, 16);
    let round = duration.as_secs_f64() / rounds as f64;
    let mut jobs = format!("verify=track size={REGION} timeout=600s");
    for number in 0..rounds {
        let bytes = chance.of(&["512", "4k", "16k", "64k"]);
        let depth = chance.of(&[1, 4, 8, 16]);
        let segments = chance.of(&["", " segs=3 cut=odd"]);
        let completion = chance.of(&["", " completion=poll", " event_idx=off"]);
        let flush = chance.of(&["", " fsync=8"]);
        jobs += &format!(
            " job=r{number} rw=randrw bs={bytes} iodepth={depth} runtime={round:.0}s{segments}{completion}{flush}"
        );
    }
    jobs + " job=check rw=verify bs=64k iodepth=2"
}

fn iothread_options(chance: &mut Chance, id: usize) -> Value {
    json!({
        "qom-type": "iothread",
        "id": format!("io{id}"),
        "poll-policy": chance.of(&POLICIES),
        "monitor": chance.of(&MONITORS),
    })
}

fn soak(bench: &Bench) {
    let duration = Duration::from_secs(number("POLLUX_SOAK_SECONDS", SECONDS));
    let mut chance = Chance::new("soak");
    let directory = bench.directory();
    let images: Vec<_> = (0..DISKS)
        .map(|disk| Image::new(&directory, &format!("disk{disk}"), REGION))
        .collect();
    let socket = directory.path().join("qmp");
    let mut vm = Vm::new(bench, &jobs(&mut chance, duration))
        .cpus(2)
        .memory(MEMORY)
        .arguments(&["--qmp", &format!("unix:{}", socket.display())]);
    for id in 0..IOTHREADS {
        let (policy, monitor) = (chance.of(&POLICIES), chance.of(&MONITORS));
        vm = vm.iothread(&format!("id=io{id},poll-policy={policy},monitor={monitor}"));
    }
    for (disk, image) in images.iter().enumerate() {
        let engine = ["io_uring", "native", "threads", "io_uring"][disk % 4];
        let direct = ["on", "off"][disk / 4 % 2];
        let transport = ["pci", "mmio"][disk / 8];
        vm = vm.disk(
            image,
            &format!(
                "id=disk{disk},iothread=io{},engine={engine},direct={direct},transport={transport},werror=stop",
                disk % IOTHREADS
            ),
        );
    }
    let mut vm = vm.start();
    vm.machine();
    let mut soak = Soak {
        qmp: Qmp::connect(&socket),
        process: vm.id(),
        chance,
        done: BTreeMap::new(),
        homes: (0..DISKS).map(|disk| disk % IOTHREADS).collect(),
    };
    let begin = Instant::now();
    // The last round is to be under way still.
    let end = begin + duration - (duration / 20).min(Duration::from_secs(10));
    let mut first: Option<Size> = None;
    let mut resident = [0; 4];
    while Instant::now() < end {
        for _ in 0..10 {
            soak.step();
        }
        let size = Size::settled(vm.id(), first.as_ref());
        let quarter = (begin.elapsed().as_secs_f64() / duration.as_secs_f64() * 4.0) as usize;
        let largest = &mut resident[quarter.min(3)];
        *largest = size.resident_bytes.max(*largest);
        // The first quarter fills caches and pools.
        if quarter > 0 {
            size.expect_like(first.get_or_insert(size));
        }
    }
    soak.run_again();
    let first = first.expect("more than one quarter");
    eprintln!(
        "soak: {:?} in {:?}; KiB resident, by quarter: {:?}; {} descriptors, {} threads",
        soak.done,
        begin.elapsed(),
        resident.map(|bytes| bytes >> 10),
        first.descriptors,
        first.threads
    );
    finish(vm);
}

/// All rounds went well, and everything reads as it was written.
fn finish(mut vm: Running) {
    loop {
        let line = vm.wait_for("line of a job", |line| line["job"].is_string());
        if line["ok"].is_boolean() && line["ok"] != true {
            vm.fail("a job went wrong");
        }
        if line["job"] == "check" {
            assert!(line["verified_sectors"].as_u64() > Some(0), "{line}");
            break;
        }
    }
    vm.good_end();
}

/// What a process takes of the host.
#[derive(Clone, Copy, Debug)]
struct Size {
    resident_bytes: u64,
    descriptors: usize,
    /// Without those that the kernel and the disks' pool start and end as they need them.
    threads: usize,
}

impl Size {
    fn of(process: u32) -> Size {
        let folder = PathBuf::from(format!("/proc/{process}"));
        let status = fs::read_to_string(folder.join("status")).expect("the VM's status");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = resident.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok());
        let tasks = fs::read_dir(folder.join("task")).expect("the VM's threads");
        let names = tasks
            .flatten()
            .filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
        let pools = ["disk worker", "iou-wrk"];
        Size {
            resident_bytes: kib.expect("VmRSS") << 10,
            descriptors: fs::read_dir(folder.join("fd"))
                .expect("descriptors")
                .count(),
            threads: names
                .filter(|name| !pools.iter().any(|pool| name.starts_with(pool)))
                .count(),
        }
    }

    /// As [`Size::of`], when threads that are ending have gone and new ones of the pools have their names.
    fn settled(process: u32, first: Option<&Size>) -> Size {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let size = Size::of(process);
            if first.is_none_or(|first| size.threads == first.threads) || Instant::now() > deadline
            {
                return size;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn expect_like(&self, first: &Size) {
        /// Buffers for misaligned requests: as many and as large as the guest makes, which differs from round to
        /// round.
        const ROOM: u64 = DISKS as u64 * 16 * (64 << 10) + 8 * MIB;
        /// Iothreads differ in them by their monitor and the engines of their disks.
        const SPARE_DESCRIPTORS: usize = 12;
        assert!(
            self.descriptors <= first.descriptors + SPARE_DESCRIPTORS
                && self.threads == first.threads
                && self.resident_bytes <= first.resident_bytes + ROOM,
            "{self:?} after {first:?}"
        );
    }
}

/// What changes.
struct Soak {
    qmp: Qmp,
    process: u32,
    chance: Chance,
    /// How often each kind of change was made.
    done: BTreeMap<&'static str, u32>,
    /// Each disk's iothread.
    homes: Vec<usize>,
}

impl Soak {
    fn step(&mut self) {
        let kinds = ["settings", "moves", "iothreads", "stops", "sizes", "errors"];
        let name = self.chance.of(&kinds);
        let begun = Instant::now();
        match name {
            "settings" => self.change_settings(),
            "moves" => self.move_a_disk(),
            "iothreads" => self.replace_an_iothread(),
            "stops" => self.stop_and_cont(),
            "sizes" => self.resize(),
            _ => self.fail_writes(),
        }
        if begun.elapsed() > Duration::from_secs(1) {
            eprintln!("soak: {name} took {:?}", begun.elapsed());
        }
        *self.done.entry(name).or_default() += 1;
        let pause = Duration::from_millis(self.chance.below(30));
        thread::sleep(pause);
    }

    fn change_settings(&mut self) {
        let iothread = format!("io{}", self.chance.below(IOTHREADS as u64));
        let (name, values): (_, &[i64]) = self.chance.of(&[
            ("poll-max-ns", &[0, 1, 32_768, 1_000_000][..]),
            ("poll-grow", &[0, 2, 4]),
            ("poll-shrink", &[0, 2]),
            ("poll-weight", &[1, 3, 5]),
            ("aio-max-batch", &[0, 1, 16]),
        ]);
        let value = self.chance.of(values);
        self.qmp.set(&iothread, name, value);
    }

    fn put(&mut self, disk: usize, iothread: usize) {
        let arguments =
            json!({"device": format!("disk{disk}"), "iothread": format!("io{iothread}")});
        self.qmp.execute("blockdev-change-iothread", arguments);
    }

    fn move_a_disk(&mut self) {
        let disk = self.chance.below(DISKS as u64) as usize;
        let iothread = self.chance.below(IOTHREADS as u64) as usize;
        self.put(disk, iothread);
        self.homes[disk] = iothread;
    }

    /// Its disks wait on another while it is ended and made again, with another rule and monitor.
    fn replace_an_iothread(&mut self) {
        let old = self.chance.below(IOTHREADS as u64) as usize;
        let disks: Vec<_> = (0..DISKS).filter(|disk| self.homes[*disk] == old).collect();
        for disk in &disks {
            self.put(*disk, (old + 1) % IOTHREADS);
        }
        self.qmp
            .execute("object-del", json!({"id": format!("io{old}")}));
        let options = iothread_options(&mut self.chance, old);
        self.qmp.execute("object-add", options);
        for disk in &disks {
            self.put(*disk, old);
        }
    }

    fn status(&mut self) -> Value {
        self.qmp.execute("query-status", json!({}))["status"].take()
    }

    fn stop_and_cont(&mut self) {
        self.qmp.execute("stop", json!({}));
        // A write that was refused earlier may come to its end only now.
        let status = self.status();
        assert!(status == "paused" || status == "io-error", "{status}");
        let pause = Duration::from_millis(self.chance.below(10));
        thread::sleep(pause);
        self.run_again();
    }

    /// Larger than the guest's part of it, or as at first.
    fn resize(&mut self) {
        let disk = self.chance.below(DISKS as u64);
        let size = REGION + self.chance.below(3) * MIB;
        let arguments = json!({"device": format!("disk{disk}"), "size": size});
        self.qmp.execute("block_resize", arguments);
    }

    /// Writes behind some place in the images fail for a moment, which stops the VM.
    fn fail_writes(&mut self) {
        let limit = self.chance.below(REGION / 4096) * 4096;
        self.limit_files(Some(limit));
        let begun = Instant::now();
        while self.status() == "running" && begun.elapsed() < Duration::from_millis(300) {
            thread::sleep(Duration::from_millis(2));
        }
        self.limit_files(None);
        if self.status() == "io-error" {
            *self.done.entry("stops for an error").or_default() += 1;
        }
        self.run_again();
    }

    /// The largest offset that the VM may write at (setrlimit(2), RLIMIT_FSIZE).
    fn limit_files(&self, limit: Option<u64>) {
        let pid = i32::try_from(self.process).ok().and_then(Pid::from_raw);
        let limit = Rlimit {
            current: limit,
            maximum: None,
        };
        prlimit(pid, Resource::Fsize, limit).expect("a limit of the VM");
    }

    /// Goes on until no failed write stops it any more.
    fn run_again(&mut self) {
        let begun = Instant::now();
        let mut running = 0;
        while running < 3 {
            assert!(begun.elapsed() < PATIENCE, "the VM does not run again");
            match self.status() == "running" {
                true => running += 1,
                false => {
                    running = 0;
                    self.qmp.execute("cont", json!({}));
                }
            }
            thread::sleep(Duration::from_millis(3));
        }
    }
}

/// They start together, write and verify on a disk each, and end.
fn fifty_vms_at_once(bench: &Bench) {
    const VMS: usize = 50;
    let directory = bench.directory();
    let images: Vec<_> = (0..VMS)
        .map(|vm| Image::new(&directory, &format!("disk{vm}"), MIB))
        .collect();
    let start = |image: &Image| {
        let jobs = "verify=gen:1 timeout=60s job=write rw=write bs=16k iodepth=4 job=read rw=verify bs=16k iodepth=4";
        let vm = Vm::new(bench, jobs).memory("64M").iothread("id=io0");
        vm.disk(image, "iothread=io0").start()
    };
    let mut vms: Vec<Running> = images.iter().map(start).collect();
    for vm in &mut vms {
        vm.good_job("write");
        vm.good_job("read");
    }
    for vm in vms {
        vm.good_end();
    }
    for image in &images {
        image.expect_written(0..MIB / super::disk::SECTOR_BYTES, 0, 1);
    }
}
