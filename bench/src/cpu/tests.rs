use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

const PID: i32 = 100;

/// A thread as a made-up /proc shows it; times in ticks of 10 ms.
#[derive(Clone, Debug)]
struct Thread {
    tid: i32,
    name: String,
    start: u64,
    user: u64,
    system: u64,
    guest: u64,
    run_ns: Option<u64>,
}

fn thread(tid: i32, name: &str, user: u64, system: u64, guest: u64) -> Thread {
    let run_ns = Some((user + system) * 10_000_000);
    Thread {
        tid,
        name: name.into(),
        start: 7,
        user,
        system,
        guest,
        run_ns,
    }
}

fn stat_line(t: &Thread) -> String {
    let mut fields = vec!["0".to_string(); 50];
    fields[0] = "S".into();
    for (number, value) in [(14, t.user), (15, t.system), (22, t.start), (43, t.guest)] {
        fields[number - 3] = value.to_string();
    }
    format!("{} ({}) {}\n", t.tid, t.name, fields.join(" "))
}

fn write_proc(root: &Path, threads: &[Thread], process: (u64, u64)) {
    let directory = root.join(PID.to_string());
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(directory.join("task")).expect("mkdir");
    fs::write(
        root.join("stat"),
        "cpu  10 0 20 30 0 0 0 0 5 0\ncpu0 1 2 3\n",
    )
    .expect("stat");
    let whole = Thread {
        user: process.0,
        system: process.1,
        ..thread(PID, "vmm", 0, 0, 0)
    };
    fs::write(directory.join("stat"), stat_line(&whole)).expect("stat");
    for t in threads {
        let task = directory.join("task").join(t.tid.to_string());
        fs::create_dir_all(&task).expect("mkdir");
        fs::write(task.join("stat"), stat_line(t)).expect("stat");
        if let Some(ns) = t.run_ns {
            fs::write(task.join("schedstat"), format!("{ns} 5 6\n")).expect("schedstat");
        }
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t3\nnonvoluntary_ctxt_switches:\t4\n";
        fs::write(task.join("status"), status).expect("status");
    }
}

fn usage(begin: &[Thread], end: &[Thread]) -> Usage {
    let sum = |list: &[Thread]| {
        list.iter()
            .fold((0, 0), |(u, s), t| (u + t.user, s + t.system))
    };
    usage_of_process(begin, sum(begin), end, sum(end))
}

fn usage_of_process(begin: &[Thread], b: (u64, u64), end: &[Thread], e: (u64, u64)) -> Usage {
    let root = TempDir::new().expect("a directory");
    let process = Process::at(root.path(), PID);
    write_proc(root.path(), begin, b);
    let first = process.snapshot().expect("begin");
    write_proc(root.path(), end, e);
    Usage::between(&first, &process.snapshot().expect("end"))
}

fn group<'a>(usage: &'a Usage, name: &str) -> &'a GroupUsage {
    usage
        .groups
        .iter()
        .find(|g| g.group.to_string() == name)
        .expect(name)
}

#[test]
fn threads_are_grouped_by_name() {
    for (name, is_main, shown) in [
        ("qemu-system-x86", true, "main"),
        ("IO io0", false, "IO io0"),
        ("IO a b", false, "IO a b"),
        ("vcpu0", false, "vcpu0"),
        ("vcpu63", false, "vcpu63"),
        ("CPU 11/KVM", false, "vcpu11"),
        ("iou-wrk-1234", false, "iou-wrk"),
        ("iou-sqp-1234", false, "iou-wrk"),
        ("vcpux", false, "other"),
        ("CPU 1/TCG", false, "vcpu1"),
        ("CPU x/KVM", false, "other"),
        ("worker", false, "other"),
        ("vcpu0", true, "main"),
    ] {
        assert_eq!(Group::of(name, is_main).to_string(), shown, "{name}");
    }
}

#[test]
fn only_the_interval_counts_and_guest_time_is_told_apart() {
    let begin = [
        thread(PID, "pollux", 5, 5, 0),
        thread(101, "IO io0", 100, 100, 0),
        thread(102, "vcpu0", 500, 50, 400),
    ];
    let end = [
        thread(PID, "pollux", 6, 7, 0),
        thread(101, "IO io0", 130, 110, 0),
        thread(102, "vcpu0", 600, 60, 480),
    ];
    let used = usage(&begin, &end);
    let io = group(&used, "IO io0");
    assert_eq!(
        (io.total_ns, io.user_ns, io.system_ns),
        (400_000_000, 300_000_000, 100_000_000)
    );
    let vcpu = group(&used, "vcpu0");
    assert_eq!(vcpu.guest_ns, 800_000_000);
    assert_eq!(vcpu.user_ns, 200_000_000);
    assert_eq!(vcpu.system_ns, 100_000_000);
    assert_eq!(group(&used, "main").total_ns, 30_000_000);
    assert_eq!(used.total_ns(), 30_000_000 + 400_000_000 + 1_100_000_000);
    assert_eq!(used.of_ns(Group::is_io), 430_000_000);
    assert_eq!(used.groups.len(), 3);
}

#[test]
fn a_thread_that_appears_counts_from_its_start() {
    let begin = [thread(PID, "q", 0, 0, 0)];
    let end = [
        thread(PID, "q", 0, 0, 0),
        thread(7, "iou-wrk-100", 3, 4, 0),
        thread(8, "iou-wrk-100", 1, 1, 0),
    ];
    let used = usage(&begin, &end);
    assert_eq!(group(&used, "iou-wrk").total_ns, 90_000_000);
    assert_eq!(group(&used, "iou-wrk").threads, 2);
}

#[test]
fn a_thread_that_ends_is_counted_by_the_process() {
    let begin = [thread(PID, "q", 0, 0, 0), thread(7, "worker", 10, 10, 0)];
    let end = [thread(PID, "q", 1, 0, 0)];
    let used = usage_of_process(&begin, (10, 10), &end, (30, 20));
    let ended = group(&used, "ended");
    assert_eq!((ended.threads, ended.total_ns), (1, 290_000_000));
}

#[test]
fn an_id_that_is_used_again_is_another_thread() {
    let begin = [thread(PID, "q", 0, 0, 0), thread(7, "IO a", 900, 0, 0)];
    let again = Thread {
        start: 99,
        ..thread(7, "IO b", 20, 0, 0)
    };
    let used = usage_of_process(
        &begin,
        (900, 0),
        &[thread(PID, "q", 0, 0, 0), again],
        (925, 0),
    );
    assert_eq!(group(&used, "IO b").total_ns, 200_000_000);
    assert_eq!(group(&used, "ended").threads, 1);
}

#[test]
fn names_may_hold_anything() {
    for name in [") R 1 2", "IO (x) y", "", "a b) c (d"] {
        let begin = [thread(PID, "q", 0, 0, 0), thread(9, name, 1, 0, 0)];
        let end = [thread(PID, "q", 0, 0, 0), thread(9, name, 3, 0, 0)];
        assert_eq!(usage(&begin, &end).total_ns(), 20_000_000, "{name}");
    }
}

#[test]
fn without_schedstat_ticks_are_used() {
    let bare = |user| Thread {
        run_ns: None,
        ..thread(9, "IO x", user, 0, 0)
    };
    let main = thread(PID, "q", 0, 0, 0);
    let used = usage(&[main.clone(), bare(1)], &[main, bare(5)]);
    assert_eq!(group(&used, "IO x").total_ns, 40_000_000);
}

#[test]
fn a_process_that_is_gone_is_said_so() {
    let root = TempDir::new().expect("a directory");
    let error = Process::at(root.path(), 5)
        .snapshot()
        .expect_err("no process");
    assert!(matches!(error, Error::Gone(5)), "{error}");
}

#[test]
fn the_hosts_time_is_in_percent() {
    let begin = HostTimes {
        user: 100,
        idle: 1000,
        ..HostTimes::default()
    };
    let end = HostTimes {
        user: 150,
        system: 20,
        soft: 10,
        idle: 1015,
        iowait: 5,
        ..HostTimes::default()
    };
    let host = HostUsage::between(&begin, &end);
    assert_eq!(
        (
            host.user_percent,
            host.system_percent,
            host.soft_percent,
            host.idle_percent
        ),
        (50.0, 20.0, 10.0, 20.0)
    );
    assert_eq!(HostUsage::between(&begin, &begin), HostUsage::default());
}

/// The real /proc: a thread that spins is charged to its name, one that sleeps is not. How
/// much it gets depends on the machine's load, so only its own clock is compared.
#[test]
fn a_real_thread_is_charged_by_its_name() {
    let stop = Arc::new(AtomicBool::new(false));
    let (own, flag) = (std::sync::mpsc::channel(), stop.clone());
    let spinner = std::thread::Builder::new()
        .name("IO spin".into())
        .spawn(move || {
            while !flag.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
            own.0.send(thread_cpu()).expect("receiver");
        })
        .expect("a thread");
    let (sleeper_flag, parked) = (stop.clone(), Duration::from_millis(5));
    let sleeper = std::thread::Builder::new()
        .name("vcpu3".into())
        .spawn(move || {
            while !sleeper_flag.load(Ordering::Relaxed) {
                std::thread::sleep(parked);
            }
        })
        .expect("a thread");
    let process = Process::new(i32::try_from(std::process::id()).expect("a pid"));
    let begin = process.snapshot().expect("begin");
    let start = Instant::now();
    let used = loop {
        std::thread::sleep(Duration::from_millis(50));
        let used = Usage::between(&begin, &process.snapshot().expect("end"));
        let spun = group(&used, "IO spin").total_ns;
        if spun > 100_000_000 || start.elapsed() > Duration::from_secs(60) {
            break used;
        }
    };
    stop.store(true, Ordering::Relaxed);
    spinner.join().expect("spinner");
    sleeper.join().expect("sleeper");
    let by_clock = own.1.recv().expect("its own clock");
    let by_us = group(&used, "IO spin").total_ns;
    assert!(by_us > 100_000_000, "{used:?}");
    assert!(
        by_us <= by_clock + 20_000_000,
        "we say {by_us}, its clock {by_clock}"
    );
    assert!(group(&used, "vcpu3").total_ns < by_us / 2, "{used:?}");
    assert!(group(&used, "vcpu3").sleeps > 0, "{used:?}");
}

fn thread_cpu() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec for the call to fill in.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(result, 0);
    u64::try_from(time.tv_sec).expect("positive") * 1_000_000_000
        + u64::try_from(time.tv_nsec).expect("positive")
}

fn some_thread(tid: i32) -> impl Strategy<Value = Thread> {
    (
        "[ -~]{0,15}",
        0u64..3,
        0u64..1000,
        0u64..1000,
        0u64..1500,
        any::<bool>(),
    )
        .prop_map(move |(name, start, user, system, guest, exact)| Thread {
            tid,
            name,
            start,
            user,
            system,
            guest,
            run_ns: exact.then_some((user + system) * 10_000_000 + 1234),
        })
}

fn some_threads() -> impl Strategy<Value = Vec<Thread>> {
    proptest::collection::btree_set(100i32..108, 0..8)
        .prop_flat_map(|tids| tids.into_iter().map(some_thread).collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever comes, goes or runs backwards: no panic, and the parts never exceed the whole.
    #[test]
    fn parts_never_exceed_the_whole(begin in some_threads(), end in some_threads()) {
        let used = usage(&begin, &end);
        for g in &used.groups {
            prop_assert!(g.user_ns + g.system_ns + g.guest_ns <= g.total_ns, "{:?}", g);
        }
        let shown: usize = used
            .groups
            .iter()
            .filter(|g| g.group != Group::Ended)
            .map(|g| g.threads)
            .sum();
        prop_assert_eq!(shown, end.len());
        let names: Vec<_> = used.groups.iter().map(|g| g.group.to_string()).collect();
        for (i, name) in names.iter().enumerate() {
            prop_assert!(!names[..i].contains(name));
        }
    }
}
