//! Whole runs of the embedded guest on disks: on iothreads, on several, on the main loop; with more disks than
//! interrupts; and what happens to requests that are under way when the run is ended.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::path::PathBuf;
use std::process::Command;

use common::{Finished, finish, has_kvm, pollux, run};
use rustix::process::{Pid, Signal, kill_process};

/// The embedded guest and images for it.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new(disks: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("guest.elf"), guest_image::elf().unwrap()).unwrap();
        let bench = Self { dir };
        for disk in 0..disks {
            let file = std::fs::File::create(bench.image(disk)).unwrap();
            file.set_len((1 + disk as u64) << 20).unwrap();
        }
        bench
    }

    fn image(&self, disk: usize) -> PathBuf {
        self.dir.path().join(format!("d{disk}.img"))
    }

    /// `pollux` with the guest, its job and `options`; `@N` in an option is the path of image N.
    fn command(&self, job: &str, options: &[&str]) -> Command {
        let mut command = pollux();
        command
            .arg("--kernel")
            .arg(self.dir.path().join("guest.elf"))
            .args(["--cmdline", job]);
        for option in options {
            let path = |at: usize| self.image(at).to_str().unwrap().to_owned();
            let option = (0..64).rev().fold((*option).to_owned(), |option, at| {
                option.replace(&format!("@{at}"), &path(at))
            });
            command.arg(option);
        }
        command
    }
}

/// The JSON lines of the guest.
fn lines(end: &Finished) -> Vec<serde_json::Value> {
    end.stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Writes a pattern everywhere and reads it back, with each disk's jobs side by side.
const WRITE_AND_VERIFY: &str =
    "disk=all verify=gen:1 bs=8k iodepth=8 job=w rw=write job=v rw=verify";

fn expect_success(end: &Finished) -> Vec<serde_json::Value> {
    assert_eq!(end.code(), Some(0), "{end:?}");
    let lines = lines(end);
    assert_eq!(lines.last().unwrap()["done"], true, "{end:?}");
    assert_eq!(lines.last().unwrap()["failed"], 0, "{end:?}");
    lines
}

#[test]
fn disks_work_on_iothreads_on_several_and_on_the_main_loop() {
    let test = "disks_work_on_iothreads_on_several_and_on_the_main_loop";
    if !has_kvm(test) {
        return;
    }
    let bench = Bench::new(4);
    let options = [
        "--cpus",
        "2",
        "--stats",
        "--iothread",
        "io0",
        "--iothread",
        "io1,poll-policy=per-handler",
        "--disk",
        "@0,iothread=io0,serial=first",
        "--disk",
        "@1,iothread=io0",
        "--disk",
        "@2,iothreads=io0:io1,vqs=1:0,queues=2",
        "--disk",
        "@3",
    ];
    let job = "verify=gen:1 bs=8k iodepth=8 job=w rw=write disk=0-1,3 and=w2 rw=write disk=2 queues=2 \
               job=v rw=verify disk=0-1,3 and=v2 rw=verify disk=2 queues=2";
    let end = run(&mut bench.command(job, &options));
    let lines = expect_success(&end);
    let disks = lines[0]["disks"].as_array().unwrap();
    let sizes: Vec<_> = disks
        .iter()
        .map(|disk| disk["capacity_sectors"].as_u64())
        .collect();
    assert_eq!(sizes, [2048, 4096, 6144, 8192].map(Some));
    assert_eq!(disks[2]["queues"], 2);
    for part in [
        "iothread io0: ",
        "iothread io1: ",
        "main loop: ",
        "polling: ",
        "disk disk3: ",
    ] {
        assert!(end.stderr.contains(part), "{part}: {}", end.stderr);
    }
    for disk in 0..4 {
        let bytes = std::fs::read(bench.image(disk)).unwrap();
        assert!(
            bytes.iter().any(|byte| *byte != 0),
            "disk {disk} was not written"
        );
    }
}

#[test]
fn every_monitor_and_engine_serves_a_disk() {
    if !has_kvm("every_monitor_and_engine_serves_a_disk") {
        return;
    }
    for monitor in ["auto", "io_uring", "epoll", "ppoll"] {
        for engine in ["io_uring", "native", "threads"] {
            let bench = Bench::new(2);
            let iothread = format!("io0,monitor={monitor}");
            let on_iothread = format!("@0,iothread=io0,engine={engine}");
            let on_main = format!("@1,engine={engine}");
            let options = [
                "--iothread",
                &iothread,
                "--disk",
                &on_iothread,
                "--disk",
                &on_main,
            ];
            let end = run(&mut bench.command(WRITE_AND_VERIFY, &options));
            expect_success(&end);
        }
    }
}

#[test]
fn disks_work_on_both_transports_side_by_side() {
    if !has_kvm("disks_work_on_both_transports_side_by_side") {
        return;
    }
    let bench = Bench::new(3);
    let options = [
        "--cpus",
        "2",
        "--iothread",
        "io0",
        "--disk",
        "@0,iothread=io0,transport=pci,queues=3",
        "--disk",
        "@1,iothread=io0,transport=mmio",
        "--disk",
        "@2",
    ];
    let end = run(&mut bench.command(WRITE_AND_VERIFY, &options));
    let lines = expect_success(&end);
    // The guest lists its mmio disks first.
    let disks = lines[0]["disks"].as_array().unwrap();
    let seen: Vec<_> = disks
        .iter()
        .map(|disk| {
            (
                disk["transport"].as_str().unwrap(),
                disk["queues"].as_u64().unwrap(),
            )
        })
        .collect();
    assert_eq!(seen, [("mmio", 1), ("pci", 3), ("pci", 2)]);
}

#[test]
fn a_hundred_disks_on_pci() {
    if !has_kvm("a_hundred_disks_on_pci") {
        return;
    }
    let bench = Bench::new(0);
    let image = |at: usize| bench.dir.path().join(format!("small{at}"));
    let disks: Vec<String> = (0..100)
        .map(|at| {
            std::fs::File::create(image(at))
                .unwrap()
                .set_len(65536)
                .unwrap();
            format!("{},iothread=io0", image(at).display())
        })
        .collect();
    let mut options = vec!["--iothread", "io0"];
    for disk in &disks {
        options.extend(["--disk", disk]);
    }
    let job = "disk=all verify=gen:1 bs=4k job=w rw=write job=v rw=verify";
    let end = run(&mut bench.command(job, &options));
    let lines = expect_success(&end);
    assert_eq!(lines[0]["disks"].as_array().unwrap().len(), 100);
}

#[test]
fn more_disks_than_interrupts_share_them() {
    if !has_kvm("more_disks_than_interrupts_share_them") {
        return;
    }
    let bench = Bench::new(24);
    let disks: Vec<String> = (0..24)
        .map(|disk| format!("@{disk},iothread=io0,transport=mmio"))
        .collect();
    let mut options = vec!["--iothread", "io0"];
    for disk in &disks {
        options.extend(["--disk", disk]);
    }
    let job = "disk=all verify=gen:1 bs=64k job=w rw=write size=1m job=v rw=verify size=1m";
    let end = run(&mut bench.command(job, &options));
    let lines = expect_success(&end);
    assert_eq!(lines[0]["disks"].as_array().unwrap().len(), 24);
}

#[test]
fn memory_beyond_the_hole_is_used() {
    if !has_kvm("memory_beyond_the_hole_is_used") {
        return;
    }
    let bench = Bench::new(1);
    let options = [
        "--memory",
        "4G",
        "--iothread",
        "io0",
        "--disk",
        "@0,iothread=io0",
    ];
    let job = format!("mem=high {WRITE_AND_VERIFY}");
    let end = run(&mut bench.command(&job, &options));
    let lines = expect_success(&end);
    assert!(
        lines[0]["ram"].to_string().contains("4294967296"),
        "{end:?}"
    );
}

#[test]
fn a_signal_ends_the_run_with_requests_under_way() {
    if !has_kvm("a_signal_ends_the_run_with_requests_under_way") {
        return;
    }
    for placement in ["", ",iothread=io0"] {
        let bench = Bench::new(1);
        let disk = format!("@0{placement}");
        let options = ["--stats", "--iothread", "io0", "--disk", &disk];
        let job = "disk=all bs=4k iodepth=32 job=w rw=randwrite runtime=60";
        let mut child = bench.command(job, &options).spawn().unwrap();
        let mut seen = Vec::new();
        while !seen.ends_with(b"\n") {
            let mut byte = [0];
            std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut byte).unwrap();
            seen.push(byte[0]);
        }
        std::thread::sleep(std::time::Duration::from_millis(300));
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let end = finish(child);
        assert_eq!(end.code(), Some(0), "{end:?}");
        // Every request that was handed to the host has come back.
        let numbers = end
            .stderr
            .lines()
            .filter(|line| line.contains(" requests, "));
        for line in numbers {
            let number = |what: &str| -> u64 {
                let before = line.split(what).next().unwrap();
                before.rsplit([' ', ',']).next().unwrap().parse().unwrap()
            };
            assert!(number(" completions") <= number(" requests"), "{line}");
        }
        assert!(end.stderr.contains("SIGTERM"), "{end:?}");
    }
}

#[test]
fn disks_that_cannot_be_are_refused() {
    if !has_kvm("disks_that_cannot_be_are_refused") {
        return;
    }
    let bench = Bench::new(2);
    let path = |name: &str| bench.dir.path().join(name).to_str().unwrap().to_owned();
    std::fs::write(path("empty"), b"").unwrap();
    std::fs::write(path("short"), [1; 511]).unwrap();
    let mut qcow2 = b"QFI\xfb\0\0\0\x03".to_vec();
    qcow2.resize(65536, 0);
    std::fs::write(path("image.qcow2"), &qcow2).unwrap();
    let before = std::fs::read(path("image.qcow2")).unwrap();
    let disk = |name: &str| format!("{},id=data", path(name));
    let cases = [
        (disk("missing"), ["missing", "truncate -s"]),
        (disk("empty"), ["empty", "truncate -s"]),
        (disk("short"), ["short", "511"]),
        (path("") + ",id=data", ["directory", "raw image"]),
        (disk("image.qcow2"), ["image.qcow2", "qemu-img convert"]),
        (
            format!("{},id=data,iothread=io9", path("d0.img")),
            ["io9", "--iothread id=io9"],
        ),
        (
            format!("{},id=data,engine=iouring", path("d0.img")),
            ["engine=iouring", "io_uring"],
        ),
    ];
    for (disk, parts) in cases {
        let end = run(&mut bench.command("", &["--disk", &disk]));
        assert_eq!(end.code(), Some(2), "{disk}: {end:?}");
        assert_eq!(end.stderr.lines().count(), 1, "{disk}: {end:?}");
        for part in parts.iter().chain(&["--disk"]) {
            assert!(
                end.stderr.contains(part),
                "{disk}: {:?} does not say {part:?}",
                end.stderr
            );
        }
    }
    assert_eq!(std::fs::read(path("image.qcow2")).unwrap(), before);
    // One image on two disks: the second does not get the lock.
    let end = run(&mut bench.command("", &["--disk", "@0,id=one", "--disk", "@0,id=two"]));
    assert_eq!(end.code(), Some(2), "{end:?}");
    assert!(
        end.stderr.contains("--disk id=two") && end.stderr.contains("locking=off"),
        "{end:?}"
    );
}

#[test]
fn iothreads_that_cannot_be_are_refused() {
    if !has_kvm("iothreads_that_cannot_be_are_refused") {
        return;
    }
    let bench = Bench::new(1);
    let end = run(&mut bench.command("", &["--iothread", "io0,cpus=9999"]));
    assert_eq!(end.code(), Some(2), "{end:?}");
    assert!(
        end.stderr.contains("--iothread id=io0: cpus=9999"),
        "{end:?}"
    );
}
