//! The filters of system calls: each kind of thread can do what its list says and nothing else, and a thread of a running
//! VM that steps outside ends it with a message.
//!
//! A filter cannot be taken off again, so every case runs in a child of this program, which calls itself.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use common::guest::Program;
use common::{Finished, Image, finish, has_kvm, run, wait_for};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use syscalls::Sysno;
use vmm::seccomp::{BACK_END, Filters, Mode, PROCESS, Thread, listed};

/// Tells this program to be the child of a case: `kind mode call argument…`.
const CHILD: &str = "POLLUX_SECCOMP_CHILD";

const KINDS: [Option<Thread>; 7] = [
    None,
    Some(Thread::Main),
    Some(Thread::Vcpu),
    Some(Thread::IoThread),
    Some(Thread::Worker),
    Some(Thread::VhostUserMain),
    Some(Thread::VhostUser),
];

/// The list that holds for such a thread besides its own.
fn common(kind: Option<Thread>) -> &'static str {
    match kind {
        Some(Thread::VhostUserMain | Thread::VhostUser) => BACK_END,
        _ => PROCESS,
    }
}

fn main() {
    if let Ok(case) = std::env::var(CHILD) {
        child(&case);
    }
    let mut trials: Vec<Trial> = KINDS
        .into_iter()
        .flat_map(|kind| {
            [
                trial(
                    &format!("{}_calls_nothing_unlisted", key(kind)),
                    move || nothing_unlisted(kind),
                ),
                trial(&format!("{}_arguments_are_limited", key(kind)), move || {
                    arguments_are_limited(kind)
                }),
            ]
        })
        .collect();
    trials.extend([
        trial("log_mode_lets_pass", log_mode_lets_pass),
        trial(
            "a_back_end_has_three_calls_more_than_a_vm",
            back_end_extends,
        ),
        trial(
            "every_thread_of_a_running_back_end_is_filtered",
            every_thread_of_a_back_end,
        ),
        trial("every_thread_of_a_running_vm_is_filtered", every_thread),
        trial("without_filters_nothing_is_stopped", without_filters),
        trial("a_bad_mode_is_refused", bad_mode),
    ]);
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn trial(name: &str, test: impl FnOnce() + Send + 'static) -> Trial {
    Trial::test(name, move || {
        test();
        Ok::<(), Failed>(())
    })
}

fn key(kind: Option<Thread>) -> &'static str {
    kind.map_or(PROCESS, Thread::key)
}

/// A system call by number, with its first arguments; the others are 0.
#[derive(Clone, Copy)]
struct Call(Sysno, [usize; 3]);

impl Call {
    fn bare(call: Sysno) -> Self {
        Self(call, [0; 3])
    }
}

/// Makes each call in a child with the filter of `kind`, and returns what became of the children.
fn try_calls(kind: Option<Thread>, mode: &str, calls: &[Call]) -> Vec<Finished> {
    let case = |call: &Call| {
        let Call(number, [a, b, c]) = *call;
        run(Command::new(std::env::current_exe().unwrap())
            .env(
                CHILD,
                format!("{} {mode} {} {a} {b} {c}", key(kind), number.id()),
            )
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped()))
    };
    calls.iter().map(case).collect()
}

/// Takes the filter, makes the call, and says so if it comes back.
fn child(case: &str) -> ! {
    let mut words = case.split(' ');
    let (kind, mode) = (words.next().unwrap(), words.next().unwrap());
    let numbers: Vec<usize> = words.map(|word| word.parse().unwrap()).collect();
    let mode = match mode {
        "on" => Mode::On,
        _ => Mode::Log,
    };
    let filters = Filters::new(mode).unwrap();
    let kind = KINDS.into_iter().flatten().find(|k| k.key() == kind);
    filters.install(common(kind)).unwrap();
    if let Some(kind) = kind {
        filters.narrow(kind).unwrap();
    }
    let [number, a, b, c] = numbers[..] else {
        panic!("{case}");
    };
    // SAFETY: in mode `on` the call is one that the filter stops; in mode `log` the tests name a harmless one.
    unsafe { libc::syscall(number as i64, a, b, c, 0, 0, 0) };
    let text = b"came back";
    // SAFETY: the bytes are there, and _exit(2) has no preconditions.
    unsafe {
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::_exit(0)
    }
}

fn assert_stopped(kind: Option<Thread>, call: Call, end: &Finished) {
    let name = call.0.name();
    let message = format!("called {name}, which its seccomp filter does not allow");
    assert!(
        end.code() == Some(1) && end.stderr.contains(&message),
        "{} {name}: {end:?}",
        key(kind)
    );
}

fn nothing_unlisted(kind: Option<Thread>) {
    let allowed = listed(key(kind));
    assert!(!allowed.is_empty());
    // A thread may do what both lists allow.
    let common = listed(common(kind));
    for entry in &allowed {
        assert!(
            common.contains(entry),
            "{entry:?} is not in the common list"
        );
    }
    // One of every family is enough to see that the list is closed; all of them take minutes on a slow machine.
    let never = [
        Sysno::execve,
        Sysno::execveat,
        Sysno::fork,
        Sysno::socket,
        Sysno::connect,
        Sysno::ptrace,
        Sysno::process_vm_writev,
        Sysno::mount,
        Sysno::chmod,
        Sysno::setuid,
        Sysno::bpf,
        Sysno::perf_event_open,
        Sysno::userfaultfd,
        Sysno::init_module,
        Sysno::reboot,
        Sysno::keyctl,
    ];
    let only_some = [
        Sysno::openat,
        Sysno::io_uring_setup,
        Sysno::clone3,
        Sysno::accept4,
        Sysno::pwritev,
        Sysno::io_uring_enter,
        Sysno::epoll_wait,
        Sysno::unlink,
    ];
    let unlisted = only_some
        .into_iter()
        .filter(|call| !allowed.iter().any(|(name, _)| name == call.name()));
    let calls: Vec<Call> = never.into_iter().chain(unlisted).map(Call::bare).collect();
    for (call, end) in calls.iter().zip(try_calls(kind, "on", &calls)) {
        assert_stopped(kind, *call, &end);
    }
}

fn arguments_are_limited(kind: Option<Thread>) {
    let executable = libc::PROT_READ as usize | libc::PROT_EXEC as usize;
    let calls = [
        Call(Sysno::mmap, [0, 4096, executable]),
        Call(Sysno::mprotect, [0, 4096, executable]),
        Call(Sysno::ioctl, [0, 0x5412, 0]), // TIOCSTI
        Call(Sysno::prctl, [libc::PR_SET_DUMPABLE as usize, 0, 0]),
    ];
    for (call, end) in calls.iter().zip(try_calls(kind, "on", &calls)) {
        assert_stopped(kind, *call, &end);
    }
    let vcpus_only = Call(Sysno::ioctl, [0, 0xae80, 0]); // KVM_RUN
    if !matches!(kind, None | Some(Thread::Vcpu)) {
        assert_stopped(kind, vcpus_only, &try_calls(kind, "on", &[vcpus_only])[0]);
    }
}

fn log_mode_lets_pass() {
    for kind in KINDS {
        let end = &try_calls(kind, "log", &[Call::bare(Sysno::getppid)])[0];
        assert_eq!(
            (end.code(), end.stderr.as_str()),
            (Some(0), "came back"),
            "{end:?}"
        );
    }
}

/// Threads of the VM that are there while it waits for its guest, and one call that each of them must not make.
const THREADS: [&str; 7] = [
    "pollux", "vcpu0", "vcpu1", "IO io0", "console", "qmp", "metrics",
];

fn every_thread() {
    if !has_kvm("every_thread_of_a_running_vm_is_filtered") {
        return;
    }
    for name in THREADS {
        let image = Image::new(&Program::new().print("up\n").hang());
        let disk = image.dir.path().join("disk.img");
        std::fs::write(&disk, [0; 4096]).unwrap();
        let qmp = format!("unix:{}", image.dir.path().join("qmp").display());
        let metrics = image.dir.path().join("metrics");
        let child = image
            .command()
            .args([
                "--cpus",
                "2",
                "--iothread",
                "io0",
                "--qmp",
                &qmp,
                "--metrics",
            ])
            .arg(metrics)
            .arg("--disk")
            .arg(format!("path={},iothread=io0", disk.display()))
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        let mut thread = None;
        wait_for("the guest's threads", || {
            thread = thread_named(pid, name);
            thread.is_some() && all_wait(pid, &THREADS)
        });
        inject(thread.unwrap(), Sysno::socket);
        // A vCPU thread notices when it next leaves the guest.
        let end = finish(child);
        let message = format!(
            "pollux: thread {name} called socket, which its seccomp filter does not allow; the VM ends."
        );
        assert!(end.stderr.contains(&message), "{name}: {end:?}");
        assert_eq!(
            (end.code(), end.status.signal()),
            (Some(1), None),
            "{end:?}"
        );
    }
}

/// Threads of `pollux vhost-user-blk`, as above.
const BACK_END_THREADS: [&str; 5] = ["pollux", "IO io0", "vhost d0", "qmp", "metrics"];

fn every_thread_of_a_back_end() {
    for name in BACK_END_THREADS {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        std::fs::write(path("disk.img"), [0; 4096]).unwrap();
        let child = common::pollux()
            .args(["vhost-user-blk", "--iothread", "io0", "--socket"])
            .arg(path("socket"))
            .args(["--qmp", &format!("unix:{}", path("qmp")), "--metrics"])
            .arg(path("metrics"))
            .args([
                "--disk",
                &format!("path={},id=d0,iothread=io0", path("disk.img")),
            ])
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let pid = child.id().cast_signed();
        let mut thread = None;
        wait_for("the disk's threads", || {
            thread = thread_named(pid, name);
            thread.is_some() && all_wait(pid, &BACK_END_THREADS)
        });
        inject(thread.unwrap(), Sysno::socket);
        let end = finish(child);
        let message = format!("pollux: thread {name} called socket, which its seccomp filter");
        assert!(end.stderr.contains(&message), "{name}: {end:?}");
        assert_eq!(
            (end.code(), end.status.signal()),
            (Some(1), None),
            "{end:?}"
        );
    }
}

fn back_end_extends() {
    let (mut ours, vms) = (listed(BACK_END), listed(PROCESS));
    ours.retain(|entry| !vms.contains(entry));
    let names: Vec<_> = ours.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["dup3", "memfd_create", "readlinkat"]);
    assert_eq!(listed(BACK_END).len(), vms.len() + 3);
}

fn thread_named(pid: i32, name: &str) -> Option<i32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    tasks.flatten().find_map(|task| {
        let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let id = task.file_name().to_str()?.parse().ok()?;
        (comm.trim_end() == name).then_some(id)
    })
}

/// Whether the filters are on everywhere (two at least on vCPUs) and the threads have come to rest in a system call.
fn all_wait(pid: i32, threads: &[&str]) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let tasks: Vec<_> = tasks.into_iter().flatten().flatten().collect();
    tasks.len() >= threads.len()
        && tasks.iter().all(|task| {
            let read = |file| std::fs::read_to_string(task.path().join(file)).unwrap_or_default();
            let name = read("comm");
            let status = read("status");
            let filters = status
                .lines()
                .find_map(|line| line.strip_prefix("Seccomp_filters:"))
                .and_then(|count| count.trim().parse::<u32>().ok());
            let narrow = ["vcpu", "IO ", "pollux", "vhost "];
            let wanted = 1 + u32::from(narrow.iter().any(|start| name.starts_with(start)));
            // Told since Linux 5.9.
            filters.is_none_or(|count| count >= wanted)
                && status.contains("Seccomp:\t2")
                && read("syscall").split(' ').count() > 1
        })
}

/// Makes a thread that is in a system call make another instead (ptrace(2)): the instruction it is in is run again with
/// another number.
fn inject(thread: i32, call: Sysno) {
    // SAFETY: the requests act on another process, and write only to the structures given, which outlive the calls.
    unsafe {
        let request = |request, address: usize, data: usize| {
            let result = libc::ptrace(request, thread, address, data);
            assert!(result >= 0, "ptrace: {}", std::io::Error::last_os_error());
        };
        request(libc::PTRACE_SEIZE, 0, 0);
        request(libc::PTRACE_INTERRUPT, 0, 0);
        let mut status = 0;
        assert_eq!(libc::waitpid(thread, &raw mut status, libc::__WALL), thread);
        let mut registers: libc::user_regs_struct = std::mem::zeroed();
        request(libc::PTRACE_GETREGS, 0, (&raw mut registers).addr());
        // The instruction pointer is behind the two bytes of `syscall`.
        registers.rip -= 2;
        registers.rax = call.id() as u64;
        // So that the kernel does not restart the interrupted call.
        registers.orig_rax = u64::MAX;
        request(libc::PTRACE_SETREGS, 0, (&raw const registers).addr());
        request(libc::PTRACE_DETACH, 0, 0);
    }
}

fn without_filters() {
    if !has_kvm("without_filters_nothing_is_stopped") {
        return;
    }
    let image = Image::new(&Program::new().print("up\n").hang());
    let child = image.command().args(["--seccomp", "off"]).spawn().unwrap();
    let pid = child.id().cast_signed();
    let mut thread = None;
    wait_for("the vCPU's thread", || {
        thread = thread_named(pid, "vcpu0");
        thread.is_some()
    });
    let status = std::fs::read_to_string(format!("/proc/{pid}/task/{}/status", thread.unwrap()));
    assert!(status.unwrap().contains("Seccomp:\t0"));
    kill_process(Pid::from_raw(pid).unwrap(), Signal::TERM).unwrap();
    finish(child);
}

fn bad_mode() {
    let end = run(common::pollux().args(["--kernel", "x", "--seccomp", "maybe"]));
    assert_eq!(end.code(), Some(2));
    assert!(
        end.stderr.contains("--seccomp maybe") && end.stderr.lines().count() == 1,
        "{}",
        end.stderr
    );
}
