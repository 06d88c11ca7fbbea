//! A loop inside another one: by prepare, check and dispatch, and by event-manager.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

use common::*;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use iothread::io_uring::{opcode, types};
use iothread::transfer::Transfer;
use iothread::*;
use rustix::event::{PollFd, PollFlags, Timespec};

/// Over every monitor whose ring can be watched.
fn each_embeddable(test: impl Fn(Setup)) {
    each_monitor(|setup| {
        if setup.task_run == TaskRun::Defer {
            let ctx = context(setup, 0);
            let error = ctx.pollable_fd().unwrap_err().to_string();
            assert!(error.contains("DEFER_TASKRUN"), "{error}");
        } else {
            test(setup);
        }
    });
}

/// Sleeps as the outer loop does: on the one descriptor, without a limit of its own. True if it
/// became readable before the test's patience ended.
fn wait(fd: RawFd, patience: Duration) -> bool {
    // SAFETY: the loop that owns it outlives the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let limit = Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap(),
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    loop {
        match rustix::event::poll(&mut fds, Some(&limit)) {
            Ok(ready) => return ready != 0,
            // A completion under COOP_TASKRUN may interrupt.
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => panic!("{error}"),
        }
    }
}

/// Drives the loop by its descriptor alone until `done`.
fn drive(ctx: &Context, setup: Setup, what: &str, done: impl Fn() -> bool) {
    let fd = ctx.pollable_fd().unwrap();
    while !done() {
        assert!(
            wait(fd, Duration::from_secs(20)),
            "{setup}: {what}: the descriptor does not become readable"
        );
        ctx.dispatch();
    }
    // With nothing left to do it is silent.
    for _ in 0..8 {
        ctx.dispatch();
    }
    assert!(
        !wait(fd, Duration::from_millis(1)),
        "{setup}: {what}: it stays readable"
    );
    assert!(!ctx.check(), "{setup}: {what}");
}

#[test]
fn one_descriptor_tells_of_everything() {
    let _watchdog = Watchdog::new("embedded");
    each_embeddable(|setup| {
        let ctx = context(setup, 32768);
        let count = Rc::new(Cell::new(0));
        let bump = {
            let count = count.clone();
            move |_: &Context| count.set(count.get() + 1)
        };
        let reached = |n: u32| {
            let count = count.clone();
            move || count.get() == n
        };
        // Descriptors are watched, and requests made, before the outer loop knows of us or after.
        let early = Counting::new();
        let (early_fd, _) = add_polled(&ctx, "early", &early);
        ctx.defer(bump.clone());
        drive(&ctx, setup, "deferred before", reached(1));
        let late = Counting::new();
        let (late_fd, _) = add_polled(&ctx, "late", &late);
        signal(&early_fd);
        drive(&ctx, setup, "early handler", || early.readable.get() == 1);
        signal(&late_fd);
        drive(&ctx, setup, "late handler", || late.readable.get() == 1);
        signal(&late_fd);
        drive(&ctx, setup, "late handler again", || {
            late.readable.get() == 2
        });
        // Made between iterations, while the outer loop may sleep already.
        ctx.defer(bump.clone());
        drive(&ctx, setup, "deferred", reached(2));
        let half = ctx.bottom_half(bump.clone());
        half.schedule();
        drive(&ctx, setup, "bottom half", reached(3));
        half.schedule_idle();
        drive(&ctx, setup, "idle bottom half", reached(4));
        let timer = ctx.timer(bump.clone());
        timer.arm_after_ns(3_000_000);
        drive(&ctx, setup, "timer", reached(5));
        // From another thread, while the outer loop sleeps.
        let remote = half.remote().unwrap();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            remote.schedule();
        });
        drive(&ctx, setup, "remote bottom half", reached(6));
        thread.join().unwrap();
        if !has_ring(&ctx) {
            return;
        }
        // One that completes at once, and one that completes while the outer loop sleeps.
        let inner = bump.clone();
        // SAFETY: a NOP points nowhere.
        unsafe { ctx.add_sqe_once(opcode::Nop::new().build(), move |ctx, _| inner(ctx)) };
        drive(&ctx, setup, "request", reached(7));
        for round in 8..12 {
            let (reader, writer) = std::io::pipe().unwrap();
            let inner = bump.clone();
            Transfer::read(Rc::new(reader), vec![0; 1], 0).start(&ctx, move |ctx, _, result| {
                assert_eq!(result.unwrap(), 1);
                inner(ctx);
            });
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(10));
                rustix::io::write(&writer, b"x").unwrap();
            });
            drive(&ctx, setup, "request that waits", reached(round));
            thread.join().unwrap();
        }
        assert!(!ctx.is_polling());
    });
}

#[test]
fn prepare_tells_how_long_to_sleep() {
    let _watchdog = Watchdog::new("prepare");
    each_embeddable(|setup| {
        let ctx = context(setup, 32768);
        assert_eq!(ctx.prepare(), -1, "{setup}");
        assert!(!ctx.check());
        let timer = ctx.timer(|_| ());
        timer.arm_after_ns(50_000_000);
        let timeout = ctx.prepare();
        assert!((1..=50_000_000).contains(&timeout), "{setup}: {timeout}");
        timer.arm_at_ns(1);
        assert_eq!(ctx.prepare(), 0);
        assert!(ctx.check());
        assert!(ctx.dispatch());
        ctx.defer(|_| ());
        assert_eq!(ctx.prepare(), 0);
        assert!(ctx.check() && ctx.dispatch());
        ctx.remote().notify();
        assert!(ctx.check());
        assert!(
            !ctx.dispatch(),
            "{setup}: a notification alone is no progress"
        );
    });
}

#[test]
fn poll_mode_ends_when_another_loop_takes_over() {
    let _watchdog = Watchdog::new("embedded after polling");
    each_embeddable(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 1_000_000_000);
        let handler = Counting::new();
        let (fd, _) = add_polled(&ctx, "q", &handler);
        signal(&fd);
        run_until(&ctx, || handler.readable.get() == 1);
        handler.work.set(1);
        run_until(&ctx, || handler.poll_ready.get() == 1);
        assert!(handler.is_off());
        // Work that nobody is notified of.
        handler.work.set(1);
        drive(&ctx, setup, "work from poll mode", || {
            handler.poll_ready.get() == 2
        });
        assert!(!handler.is_off(), "{setup}");
    });
}

/// A [`Context`] as one of event-manager's subscribers.
struct Driven {
    ctx: Context,
    rounds: Rc<Cell<u32>>,
}

impl MutEventSubscriber for Driven {
    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        self.rounds.set(self.rounds.get() + 1);
        self.ctx.dispatch();
    }

    fn init(&mut self, ops: &mut EventOps) {
        let fd = self.ctx.pollable_fd().unwrap();
        // SAFETY: the context outlives the subscription.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        ops.add(Events::new(&fd, EventSet::IN)).unwrap();
    }
}

#[test]
fn event_manager_drives_a_context() {
    let _watchdog = Watchdog::new("event-manager");
    each_embeddable(|setup| {
        let ctx = context(setup, 32768);
        let rounds = Rc::new(Cell::new(0));
        let mut manager = EventManager::new().unwrap();
        let driven = Driven {
            ctx: ctx.clone(),
            rounds: rounds.clone(),
        };
        manager.add_subscriber(Box::new(driven) as Box<dyn MutEventSubscriber>);
        let log = Rc::new(RefCell::new(Vec::new()));
        let note = |name: &'static str| {
            let log = log.clone();
            move |_: &Context| log.borrow_mut().push(name)
        };
        let timer = ctx.timer(note("timer"));
        timer.arm_after_ns(20_000_000);
        ctx.defer(note("deferred"));
        let handler = Counting::new();
        *handler.on_readable.borrow_mut() = Some(Box::new(note("handler")));
        let (fd, _) = add_polled(&ctx, "q", &handler);
        let mut buffer = vec![0u8; 4];
        let file = std::fs::File::open("/dev/zero").unwrap();
        let mut expected = 3;
        if has_ring(&ctx) {
            let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer.as_mut_ptr(), 4);
            let note = note("request");
            // SAFETY: file and buffer outlive the completion.
            unsafe { ctx.add_sqe_once(entry.build(), move |ctx, _| note(ctx)) };
            expected += 1;
        }
        signal(&fd);
        while log.borrow().len() < expected {
            // Without a timeout of its own.
            manager.run().unwrap();
        }
        log.borrow_mut().sort_unstable();
        let all = ["deferred", "handler", "request", "timer"];
        let all: Vec<_> = all
            .into_iter()
            .filter(|n| expected == 4 || *n != "request")
            .collect();
        assert_eq!(*log.borrow(), all, "{setup}");
        let before = rounds.get();
        for _ in 0..20 {
            manager.run_with_timeout(2).unwrap();
        }
        assert!(
            rounds.get() - before <= 3,
            "{setup}: it is woken for nothing"
        );
    });
}
