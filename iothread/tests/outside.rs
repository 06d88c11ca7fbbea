//! A ring that another wait watches: beside epoll or ppoll, and from another loop. Completions that
//! come while that wait sleeps must end it.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

use std::cell::Cell;
use std::io::Write;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use io_uring::{opcode, types};
use iothread::{Completer, Context, ContextConfig, MonitorKind, PollSettings};
use rustix::event::{PollFd, PollFlags, Timespec};

/// Far beyond what a wake-up takes on a busy machine, and what a missed one would cost.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Default)]
struct Done(Cell<Option<i32>>);

impl Completer for Done {
    fn complete(&self, _ctx: &Context, _token: u32, result: i32) {
        self.0.set(Some(result));
    }
}

fn unpolled(monitor: MonitorKind) -> Context {
    Context::new(ContextConfig {
        monitor,
        settings: PollSettings {
            poll_max_ns: 0,
            ..PollSettings::default()
        },
        ..ContextConfig::default()
    })
    .unwrap()
}

/// Reads from a pipe that is written to when the loop sleeps; `turn` is one turn of the wait.
fn late_completion_ends_the_wait(ctx: &Context, mut turn: impl FnMut()) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    let done = Rc::new(Done::default());
    let completer = ctx.register_completer(done.clone());
    let mut buffer = [0u8; 8];
    let read = opcode::Read::new(types::Fd(reader.as_raw_fd()), buffer.as_mut_ptr(), 8).build();
    // SAFETY: the buffer and the pipe outlive the completion, which is waited for below.
    unsafe { ctx.add_sqe(read, completer, 0) };
    let writer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(100));
        writer.write_all(b"late").unwrap();
        writer
    });
    let start = Instant::now();
    while done.0.get().is_none() {
        turn();
        assert!(
            start.elapsed() < PATIENCE,
            "the completion did not end the wait"
        );
    }
    assert_eq!(done.0.get(), Some(4));
    drop(writer.join().unwrap());
    ctx.unregister_completer(completer);
}

#[test]
fn a_ring_beside_epoll_or_ppoll_wakes_them() {
    for monitor in [MonitorKind::Epoll, MonitorKind::Ppoll] {
        let ctx = unpolled(monitor);
        if !ctx.has_ring() {
            eprintln!("skipped: a_ring_beside_epoll_or_ppoll_wakes_them needs io_uring");
            return;
        }
        // Should the wake-up be missed, this ends the wait for the assertion to strike.
        let remote = ctx.remote();
        let alarm = std::thread::spawn(move || {
            std::thread::park_timeout(PATIENCE);
            remote.notify();
        });
        late_completion_ends_the_wait(&ctx, || {
            ctx.poll(true);
        });
        alarm.thread().unpark();
        alarm.join().unwrap();
    }
}

#[test]
fn an_outer_loop_is_woken_by_completions_and_by_other_threads() {
    for monitor in MonitorKind::ALL {
        let ctx = unpolled(monitor);
        if !ctx.has_ring() {
            eprintln!("skipped: an_outer_loop_is_woken… needs io_uring");
            return;
        }
        let fd = ctx.pollable_fd().unwrap();
        // SAFETY: the descriptor lives as long as `ctx`.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        let turn = || {
            let mut fds = [PollFd::new(&fd, PollFlags::IN)];
            let timeout = Timespec {
                tv_sec: 60,
                tv_nsec: 0,
            };
            if rustix::event::poll(&mut fds, Some(&timeout)).unwrap() != 0 {
                ctx.dispatch();
            }
        };
        late_completion_ends_the_wait(&ctx, turn);

        let remote = ctx.remote();
        let finished = Arc::new(AtomicBool::new(false));
        let caller = std::thread::spawn({
            let finished = finished.clone();
            move || {
                for number in 0..3 {
                    std::thread::sleep(Duration::from_millis(20));
                    assert_eq!(remote.call(move |_| number), Ok(number));
                }
                // In the loop itself, so that it does not sleep again without having seen it.
                remote.run(move |_| finished.store(true, Ordering::Relaxed));
            }
        });
        let start = Instant::now();
        while !finished.load(Ordering::Relaxed) {
            turn();
            assert!(
                start.elapsed() < PATIENCE,
                "{monitor}: a call did not wake the outer loop"
            );
        }
        caller.join().unwrap();
    }
}
