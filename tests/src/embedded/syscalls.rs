//! System calls that a request costs the iothread, as strace counts them: none of its own. Only the
//! loop's enters, which carry a batch each, and one interrupt a batch.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;

use super::disk::Image;
use super::vm::{Running, Vm};
use super::{Bench, Test};

pub const TESTS: &[Test] = &[
    Test::new("syscalls_of_io_uring", |bench| {
        // Enters that submit and wait, and interrupts.
        let calls = ["io_uring_enter", "write"];
        counted(bench, "engine=io_uring,direct=off", &calls);
        counted(bench, "engine=io_uring,direct=on", &calls);
    })
    .needs_strace(),
    Test::new("syscalls_of_native", |bench| {
        let calls = ["io_uring_enter", "write", "io_submit", "io_getevents"];
        counted(bench, "engine=native,direct=on", &calls);
    })
    .needs_strace(),
    Test::new("syscalls_of_threads", |bench| {
        // Threads that sleep are woken.
        let calls = ["io_uring_enter", "write", "futex"];
        counted(bench, "engine=threads,direct=off", &calls);
    })
    .needs_strace(),
];

/// A thread under strace.
struct Strace {
    child: Child,
    table: std::path::PathBuf,
    _directory: tempfile::TempDir,
}

impl Strace {
    /// Attaches to a thread; returns as soon as its calls are counted.
    fn attach(bench: &Bench, id: u32) -> Result<Strace, String> {
        let directory = bench.directory();
        let table = directory.path().join("calls");
        let mut child = Command::new("strace")
            .args(["-c", "-p", &id.to_string(), "-o"])
            .arg(&table)
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| format!("strace: {error}; install strace"))?;
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        match lines.next() {
            Some(Ok(line)) if line.contains("attached") => {
                // The pipe stays open, so that its end finds a reader.
                thread::spawn(move || lines.for_each(drop));
                Ok(Strace {
                    child,
                    table,
                    _directory: directory,
                })
            }
            line => {
                let _ = child.kill();
                let _ = child.wait();
                Err(format!("strace cannot attach here: {line:?}"))
            }
        }
    }

    /// Detaches; the number of each call, by its name.
    fn detach(mut self) -> BTreeMap<String, u64> {
        let id = self.child.id().to_string();
        let sent = Command::new("kill").args(["-s", "INT", &id]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        self.child.wait().expect("strace ends");
        let table = std::fs::read_to_string(&self.table).expect("strace's table");
        // % time, seconds, usecs/call, calls, errors if any, name.
        let rows = table.lines().filter_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let calls = words.get(3)?.parse().ok()?;
            Some(((*words.last()?).to_owned(), calls))
        });
        rows.filter(|(name, _)| name != "total").collect()
    }
}

/// Why strace cannot be used here, if it cannot.
pub fn usable(bench: &Bench) -> Result<(), String> {
    let mut sleeper = Command::new("sleep")
        .arg("60")
        .spawn()
        .expect("a process to look at");
    let attached = Strace::attach(bench, sleeper.id()).map(Strace::detach);
    let _ = sleeper.kill();
    let _ = sleeper.wait();
    attached.map(drop)
}

fn thread_of(vm: &Running, name: &str) -> u32 {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", vm.id())).expect("the VM's threads");
    let mut found = tasks.flatten().filter(|task| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim_end() == name)
    });
    let task = found.next().expect("a thread of the name");
    let id = task.file_name().to_string_lossy().parse();
    id.expect("a thread's id")
}

/// Runs read requests on a disk with `options`, of which only `batched` calls may depend on their
/// number.
fn counted(bench: &Bench, options: &str, batched: &[&str]) {
    const MIB: u64 = 1 << 20;
    for (depth, requests) in [(32, 100_000), (1, 5_000)] {
        let directory = bench.directory();
        let image = Image::new(&directory, "disk", 16 * MIB);
        let jobs = format!(
            "job=warm rw=write bs=64k iodepth=8 job=ready rw=echo completion=irq \
             job=load rw=randread bs=4k iodepth={depth} ios={requests}"
        );
        let mut vm = Vm::new(bench, &jobs)
            .iothread("id=io0")
            .disk(&image, &format!("iothread=io0,{options}"))
            .start();
        vm.wait_for("invitation", |line| line["reading"] == true);
        let strace = Strace::attach(bench, thread_of(&vm, "IO io0"))
            .unwrap_or_else(|error| panic!("{error}"));
        vm.type_text("\n");
        let line = vm.good_job("load");
        let calls = strace.detach();
        assert_eq!(line["errors"], 0, "{line}");
        vm.good_end();
        let shares: Vec<String> = calls
            .iter()
            .map(|(name, count)| format!("{name} {:.4}", *count as f64 / f64::from(requests)))
            .collect();
        println!(
            "{options}, depth {depth}, {requests} requests, calls a request: {}",
            shares.join(", ")
        );
        let calls_of = |name: &str| calls.get(name).copied().unwrap_or(0);
        for (name, &count) in &calls {
            // Some for what happens now and then: at most 32 threads start in the pool, with a few
            // calls each, and may end and start again.
            assert!(
                batched.contains(&name.as_str()) || count < 500,
                "{options}, depth {depth}: {name} {count} times for {requests} requests"
            );
        }
        let requests = u64::from(u32::try_from(requests).expect("it fits"));
        // At depth 1 a batch is one request: submitted, waited for, and then the next one waited
        // for, and on a busy machine the loop goes to sleep once more in between. At depth 32 it is several, whatever the machine does besides.
        let (most, total) = match depth {
            1 => (6 * requests, calls.values().sum::<u64>()),
            _ => (requests / 2, calls.values().sum()),
        };
        assert!(
            total < most,
            "{options}, depth {depth}: {total} calls for {requests} requests"
        );
        // One interrupt a batch, and a request is in one batch.
        assert!(
            calls_of("write") <= requests + 100,
            "{options}: {} writes for {requests} requests",
            calls_of("write")
        );
    }
}
