//! What `monitor=auto` does where io_uring is forbidden, and what a monitor asked for by name says.
//!
//! The errors are injected by a seccomp filter in a process of their own: this test program
//! started anew with a variable that names them.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::RefCell;
use std::process::Command;
use std::rc::Rc;

use common::*;
use iothread::transfer::Transfer;
use iothread::*;

const DENIED: &str = "IOTHREAD_TEST_DENIED";

/// Makes a system call of this thread fail with `errno`. By hand, as the crate for this knows
/// little-endian processors only.
fn deny(calls: &[libc::c_long], errno: i32) {
    let filter = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let answer = |action| filter(libc::BPF_RET | libc::BPF_K, 0, 0, action);
    // The number is the first word of what the filter sees (seccomp(2), struct seccomp_data), in the
    // processor's own byte order.
    let mut program = vec![filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for &call in calls {
        let number = u32::try_from(call).unwrap();
        program.push(filter(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            number,
        ));
        program.push(answer(libc::SECCOMP_RET_ERRNO | errno.unsigned_abs()));
    }
    program.push(answer(libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the first call takes numbers only; the second reads the program, which lives.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
}

/// Runs the test `name` of this program in a process of its own, in which [`DENIED`] is `what`.
fn in_child(name: &str, what: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env(DENIED, what)
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {stdout}{stderr}");
    assert!(stdout.contains("1 passed"), "{what}: nothing ran: {stdout}");
    stdout
}

/// The loop does its work with what is left.
fn works(ctx: &Context) {
    let handler = Counting::new();
    let (fd, _) = add_polled(ctx, "q", &handler);
    signal(&fd);
    run_until(ctx, || handler.readable.get() == 1);
    let timer = ctx.timer(|_| ());
    timer.arm_after_ns(100_000);
    run_until(ctx, || !timer.is_armed());
}

#[test]
fn auto_takes_the_ring_where_there_is_one() {
    let ctx = Context::new(ContextConfig::default()).unwrap();
    if !has_ring(&ctx) {
        return;
    }
    assert_eq!(
        (ctx.monitor(), ctx.fallback()),
        (MonitorKind::IoUring, None)
    );
}

#[test]
fn case_30_31_auto_falls_back_to_epoll_and_says_why() {
    let _watchdog = Watchdog::new("fallback");
    let Ok(denied) = std::env::var(DENIED) else {
        for (errno, needle) in [
            (libc::ENOSYS, "ENOSYS"),
            (libc::EPERM, "EPERM"),
            (libc::EACCES, "EPERM"),
            (libc::ENOMEM, "RLIMIT_MEMLOCK"),
            (libc::EMFILE, "RLIMIT_NOFILE"),
        ] {
            let output = in_child(
                "case_30_31_auto_falls_back_to_epoll_and_says_why",
                &errno.to_string(),
            );
            let at = output.find("fallback: ").unwrap();
            let line = output[at..].lines().next().unwrap();
            println!("{line}");
            assert!(line.contains(needle), "{line}");
        }
        return;
    };
    deny(&[libc::SYS_io_uring_setup], denied.parse().unwrap());
    let auto = Context::new(ContextConfig::default()).unwrap();
    assert_eq!(auto.monitor(), MonitorKind::Epoll);
    assert!(!auto.has_ring());
    let line = auto.fallback().unwrap();
    assert!(line.contains("io_uring") && line.contains("epoll") && !line.contains('\n'));
    println!("fallback: {line}");
    works(&auto);
    // By name it is an error that says the same.
    let by_name = |monitor| {
        Context::new(ContextConfig {
            monitor,
            ..ContextConfig::default()
        })
    };
    let error = by_name(MonitorKind::IoUring).unwrap_err().to_string();
    println!("error: {error}");
    assert!(error.contains("monitor=io_uring") && error.contains("monitor=auto"));
    // Without a ring, requests are refused where they are made by name, and the rest works.
    for monitor in [MonitorKind::Epoll, MonitorKind::Ppoll] {
        let ctx = by_name(monitor).unwrap();
        assert!(!ctx.has_ring() && ctx.fallback().is_none());
        assert_eq!(
            ctx.register_file(0).unwrap_err().raw_os_error(),
            Some(libc::ENOSYS)
        );
        works(&ctx);
    }
}

#[test]
fn auto_falls_back_to_ppoll_when_epoll_is_missing_too() {
    let _watchdog = Watchdog::new("fallback to ppoll");
    if std::env::var(DENIED).is_err() {
        in_child("auto_falls_back_to_ppoll_when_epoll_is_missing_too", "both");
        return;
    }
    deny(
        &[libc::SYS_io_uring_setup, libc::SYS_epoll_create1],
        libc::ENOSYS,
    );
    let ctx = Context::new(ContextConfig::default()).unwrap();
    assert_eq!(ctx.monitor(), MonitorKind::Ppoll);
    let line = ctx.fallback().unwrap();
    assert!(line.contains("ppoll") && line.contains("ENOSYS"), "{line}");
    works(&ctx);
    let error = Context::new(ContextConfig {
        monitor: MonitorKind::Epoll,
        ..ContextConfig::default()
    })
    .unwrap_err();
    assert!(error.to_string().contains("monitor=epoll"), "{error}");
}

/// To flags that it does not know a kernel answers EINVAL, as 6.0 does to DEFER_TASKRUN; the next
/// mode is tried. A filter cannot look into the flags, so here every mode is refused.
#[test]
fn a_kernel_that_refuses_every_mode_is_no_obstacle() {
    if std::env::var(DENIED).is_err() {
        in_child("a_kernel_that_refuses_every_mode_is_no_obstacle", "modes");
        return;
    }
    if Context::new(ContextConfig::default())
        .unwrap()
        .task_run()
        .is_none()
    {
        skip("refused modes: no io_uring on this host");
        return;
    }
    deny(&[libc::SYS_io_uring_setup], libc::EINVAL);
    let ctx = Context::new(ContextConfig::default()).unwrap();
    assert_eq!(ctx.monitor(), MonitorKind::Epoll);
    let thread = IoThread::start(IoThreadConfig {
        id: "old".into(),
        ..IoThreadConfig::default()
    });
    assert_eq!(
        thread.unwrap().remote().call(|ctx| ctx.monitor()),
        Ok(MonitorKind::Epoll)
    );
}

#[test]
fn an_iothread_defers_task_run_and_a_plain_context_does_not() {
    let ctx = Context::new(ContextConfig::default()).unwrap();
    if !has_ring(&ctx) {
        return;
    }
    assert_ne!(ctx.task_run(), Some(TaskRun::Defer));
    let thread = IoThread::start(IoThreadConfig {
        id: "io0".into(),
        ..IoThreadConfig::default()
    })
    .unwrap();
    let task_run = thread.remote().call(|ctx| ctx.task_run()).unwrap();
    println!("iothread: {task_run:?}, context: {:?}", ctx.task_run());
    assert!(task_run.is_some());
    // And its requests work.
    let read = thread.remote().call(|ctx| {
        let result = Rc::new(RefCell::new(None));
        let told = result.clone();
        let file = Rc::new(std::fs::File::open("/dev/zero").unwrap());
        Transfer::read(file, vec![1; 8], 0).start(ctx, move |_, buffer, _| {
            *told.borrow_mut() = Some(buffer);
        });
        run_until(ctx, || result.borrow().is_some());
        result.take()
    });
    assert_eq!(read, Ok(Some(vec![0; 8])));
}
