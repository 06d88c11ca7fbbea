//! Faults that leave a loop asleep, or wake it for nothing: numbers 1, 2, 4, 5, 6, 14 and 16 of
//! the list in `tests/README.md`. A hang is reported by name.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::Cell;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use common::*;
use iothread::*;

/// Longer than any test runs: polling ends only by an event.
const FOR_EVER_NS: i64 = i64::MAX;

/// Fails if an iteration takes notifications without looking for what they announce.
#[test]
fn fault_01_non_blocking_polls_do_not_eat_notifications() {
    let _watchdog = Watchdog::new("fault 1");
    each_monitor(|setup| {
        for poll_max_ns in [0, 32768] {
            let ctx = context(setup, poll_max_ns);
            let ran = Arc::new(AtomicU32::new(0));
            let counter = ran.clone();
            let half = ctx.bottom_half(move |_| {
                counter.fetch_add(1, Ordering::Relaxed);
            });
            let remote = half.remote().unwrap();
            let seen = ran.clone();
            let other = std::thread::spawn(move || {
                for round in 0..300 {
                    remote.schedule();
                    // Every schedule is followed by a run, or this waits for ever.
                    while seen.load(Ordering::Relaxed) <= round {
                        std::thread::yield_now();
                    }
                }
            });
            while ran.load(Ordering::Relaxed) < 300 {
                // The non-blocking one takes the notification; the blocking one must not sleep
                // over the work.
                ctx.poll(false);
                if ran.load(Ordering::Relaxed) < 300 {
                    ctx.poll(true);
                }
            }
            other.join().unwrap();
        }
    });
}

/// Fails if an iteration that does not wait takes the notification and leaves the work, and the
/// next one does not look for it before it sleeps. That no other thread can call `poll` at all is
/// a matter of types: see [`Context`].
#[test]
fn fault_01_a_poll_that_does_not_wait_leaves_no_work_behind() {
    let _watchdog = Watchdog::new("fault 1, work left behind");
    each_monitor(|setup| {
        for poll_max_ns in [0, 32768] {
            let ctx = context(setup, poll_max_ns);
            let ran = Arc::new(AtomicU32::new(0));
            for round in 1..=20 {
                let (remote, counter) = (ctx.remote(), ran.clone());
                let other = std::thread::spawn(move || {
                    remote.run(move |_| {
                        counter.fetch_add(1, Ordering::Relaxed);
                    });
                });
                other.join().unwrap();
                ctx.poll(false);
                run_until(&ctx, || ran.load(Ordering::Relaxed) == round);
            }
        }
    });
}

/// Fails if the polling loop does not look at the notification.
#[test]
fn fault_02_notifications_are_seen_while_polling() {
    let _watchdog = Watchdog::new("fault 2");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, FOR_EVER_NS);
        let handler = Counting::new();
        let (fd, _) = add_polled(&ctx, "q", &handler);
        signal(&fd);
        run_until(&ctx, || handler.readable.get() == 1);
        let remote = ctx.remote();
        let polling = Arc::new(AtomicBool::new(false));
        let told = polling.clone();
        *handler.on_poll.borrow_mut() = Some(Box::new(move || told.store(true, Ordering::Relaxed)));
        let ran = Arc::new(AtomicBool::new(false));
        let done = ran.clone();
        let other = std::thread::spawn(move || {
            while !polling.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            // The loop is in the middle of a window that never ends by itself.
            remote.run(move |_| done.store(true, Ordering::Relaxed));
        });
        run_until(&ctx, || ran.load(Ordering::Relaxed));
        other.join().unwrap();
    });
}

/// Fails if the ring is not entered before polling (io_uring), or if the loop polls beside a
/// handler that cannot be polled (epoll, ppoll).
#[test]
fn fault_04_a_rearmed_watch_is_submitted_before_polling() {
    let _watchdog = Watchdog::new("fault 4");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, FOR_EVER_NS);
        // A listed handler that never has work makes the loop poll for ever.
        let polled = Counting::new();
        let (fd, _) = add_polled(&ctx, "polled", &polled);
        signal(&fd);
        run_until(&ctx, || polled.readable.get() == 1);
        // One that polling does not see: its watch must be made anew after each event.
        let handler = Counting::new();
        let (reader, writer) = std::io::pipe().unwrap();
        handler.drain.set(Some(reader.as_raw_fd()));
        ctx.add_handler(
            "pipe",
            reader.as_raw_fd(),
            Interest::Read,
            Polling::Never,
            handler.clone(),
        )
        .unwrap();
        let count = Arc::new(AtomicU32::new(0));
        let seen = count.clone();
        *handler.on_readable.borrow_mut() = Some(Box::new(move |_| {
            seen.fetch_add(1, Ordering::Relaxed);
        }));
        let events = count.clone();
        let other = std::thread::spawn(move || {
            for round in 0..20 {
                rustix::io::write(&writer, b"x").unwrap();
                while events.load(Ordering::Relaxed) <= round {
                    std::thread::yield_now();
                }
            }
        });
        run_until(&ctx, || count.load(Ordering::Relaxed) >= 20);
        other.join().unwrap();
    });
}

extern "C" fn ignore(_signal: libc::c_int) {}

fn without_restart() {
    // SAFETY: `ignore` does nothing, so it may run at any point; the struct is fully set.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = ignore as *const () as usize;
        libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut());
    }
}

/// Fails if a wait returns after the first enter, or with EINTR.
#[test]
fn fault_05_signals_are_no_events() {
    let _watchdog = Watchdog::new("fault 5");
    without_restart();
    each_monitor(|setup| {
        for with_timer in [true, false] {
            let ctx = context(setup, 0);
            let handler = Counting::new();
            let fd = eventfd();
            ctx.add_eventfd("e", fd.as_raw_fd(), Polling::Never, handler.clone())
                .unwrap();
            let fired = Rc::new(Cell::new(false));
            let flag = fired.clone();
            let timer = ctx.timer(move |_| flag.set(true));
            // The first iterations make the watches.
            for _ in 0..3 {
                ctx.poll(false);
            }
            let deadline_ns = now_ns() + 60_000_000;
            if with_timer {
                timer.arm_at_ns(deadline_ns);
            }
            // SAFETY: the thread joins the sender before it ends.
            let home = unsafe { libc::pthread_self() };
            let stop = Arc::new(AtomicBool::new(false));
            let (stopped, kick) = (stop.clone(), dup(&fd));
            let sender = std::thread::spawn(move || {
                let mut sent = 0;
                while !stopped.load(Ordering::Relaxed) {
                    // SAFETY: `home` waits for us.
                    unsafe { libc::pthread_kill(home, libc::SIGUSR1) };
                    sent += 1;
                    if sent == 60 && !with_timer {
                        signal(&kick);
                    }
                    std::thread::sleep(Duration::from_micros(500));
                }
            });
            let progress = ctx.poll(true);
            stop.store(true, Ordering::Relaxed);
            sender.join().unwrap();
            // One iteration: it ended by the event, not by a signal.
            assert!(progress, "{setup}: a signal ended the wait");
            if with_timer {
                assert!(fired.get() && now_ns() >= deadline_ns, "{setup}");
                assert_eq!(handler.readable.get(), 0, "{setup}");
            } else {
                assert_eq!(handler.readable.get(), 1, "{setup}");
            }
        }
    });
}

/// Fails if a wait uses the timespec of the one before.
#[test]
fn fault_06_timeouts_are_what_was_asked_for() {
    let _watchdog = Watchdog::new("fault 6");
    each_monitor(|setup| {
        let ctx = context(setup, 0);
        let fired = Rc::new(Cell::new(0));
        let counter = fired.clone();
        let timer = ctx.timer(move |_| counter.set(counter.get() + 1));
        for round in 1..=400 {
            // Different each time, so that an old one does not pass for the new.
            let delay_ns = 20_000 + i64::from(round) * 7919 % 400 * 500;
            let start_ns = now_ns();
            timer.arm_after_ns(delay_ns);
            // Memory that was the timespec of before, if it was kept anywhere, is used anew.
            let noise: Vec<Box<[u64; 2]>> = (0..8).map(|n| Box::new([u64::MAX >> 2, n])).collect();
            // One wait: neither too short, which a second one would hide, nor for ever.
            let progress = ctx.poll(true);
            drop(noise);
            assert!(progress && fired.get() == round, "{setup}: too early");
            assert!(now_ns() - start_ns >= delay_ns, "{setup}: fired too early");
        }
    });
}

/// Fails without the one pass of an iteration that neither polls nor waits.
#[test]
fn fault_14_iterations_that_do_not_wait_still_look() {
    let _watchdog = Watchdog::new("fault 14");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 1_000_000);
        let polled = Counting::new();
        let (fd, _) = add_polled(&ctx, "polled", &polled);
        signal(&fd);
        run_until(&ctx, || polled.readable.get() == 1);
        // Poll mode on, notifications off: only a pass can find the work.
        polled.work.set(1);
        run_until(&ctx, || polled.poll_ready.get() == 1);
        assert!(ctx.is_polling());
        for round in 2..10 {
            polled.work.set(1);
            for _ in 0..100 {
                ctx.poll(false);
            }
            assert_eq!(polled.poll_ready.get(), round, "{setup}: work is not seen");
        }
        // The descriptor of a handler that was never listed, in iterations that do not wait.
        let unlisted = Counting::new();
        let (fd, _) = add_polled(&ctx, "unlisted", &unlisted);
        signal(&fd);
        for _ in 0..1000 {
            ctx.poll(false);
        }
        assert_eq!(
            unlisted.readable.get(),
            1,
            "{setup}: descriptor is not seen"
        );
    });
}

/// Fails if work that the kernel has put off is not taken for pending (DEFER_TASKRUN).
#[test]
fn fault_14_a_busy_handler_does_not_starve_descriptors() {
    let _watchdog = Watchdog::new("fault 14, busy");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 1_000_000);
        let busy = Counting::new();
        let (fd, _) = add_polled(&ctx, "busy", &busy);
        signal(&fd);
        run_until(&ctx, || busy.readable.get() == 1);
        let handler = busy.clone();
        let half = Rc::new(ctx.bottom_half(move |_| handler.work.set(1)));
        let again = half.clone();
        // There is always work by the time of the next pass.
        *busy.on_poll_ready.borrow_mut() = Some(Box::new(move |_| again.schedule()));
        busy.work.set(1);
        let unlisted = Counting::new();
        let (fd, _) = add_polled(&ctx, "unlisted", &unlisted);
        ctx.poll(true);
        signal(&fd);
        for _ in 0..1000 {
            ctx.poll(true);
        }
        assert_eq!(
            unlisted.readable.get(),
            1,
            "{setup}: descriptor is not seen"
        );
        assert!(
            busy.poll_ready.get() > 100,
            "{setup}: {}",
            busy.poll_ready.get()
        );
        busy.on_poll_ready.borrow_mut().take();
    });
}

/// Fails if epoll or ppoll is not asked every so often, or if put-off work is not taken for pending
/// (DEFER_TASKRUN; the other modes run it at the next interrupt).
#[test]
fn fault_14_a_handler_that_always_has_work_does_not_starve_descriptors() {
    let _watchdog = Watchdog::new("fault 14, always busy");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 1_000_000);
        let busy = Counting::new();
        let (fd, _) = add_polled(&ctx, "busy", &busy);
        signal(&fd);
        run_until(&ctx, || busy.readable.get() == 1);
        let unlisted = Counting::new();
        let (fd, _) = add_polled(&ctx, "unlisted", &unlisted);
        let own = Rc::downgrade(&busy);
        *busy.on_poll.borrow_mut() = Some(Box::new(move || own.upgrade().unwrap().work.set(1)));
        // From another thread, and late: a system call of this one would help it along.
        let other = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(3));
            signal(&fd);
            fd
        });
        let start_ns = now_ns();
        while unlisted.readable.get() == 0 {
            ctx.poll(true);
            let late = now_ns() - start_ns > 5_000_000_000;
            assert!(!late, "{setup}: descriptor is not seen");
        }
        busy.on_poll.borrow_mut().take();
        other.join().unwrap();
    });
}

/// Fails if iterations that may not wait leave out the system call of epoll and ppoll, or put-off
/// work (DEFER_TASKRUN).
#[test]
fn fault_14_a_bottom_half_that_reschedules_itself_does_not_starve_descriptors() {
    let _watchdog = Watchdog::new("fault 14, bottom half");
    each_monitor(|setup| {
        for poll_max_ns in [0, 32768] {
            let ctx = context(setup, poll_max_ns);
            let slot: Rc<std::cell::RefCell<Option<BottomHalf>>> = Rc::default();
            let own = slot.clone();
            *slot.borrow_mut() = Some(ctx.bottom_half(move |_| {
                if let Some(half) = &*own.borrow() {
                    half.schedule();
                }
            }));
            slot.borrow().as_ref().unwrap().schedule();
            let handler = Counting::new();
            let (fd, _) = add_polled(&ctx, "q", &handler);
            for _ in 0..3 {
                ctx.poll(true);
            }
            for round in 1..5 {
                signal(&fd);
                for _ in 0..200 {
                    ctx.poll(true);
                }
                assert_eq!(handler.readable.get(), round, "{setup}");
            }
            slot.borrow_mut().take();
        }
    });
}

/// Fails if a window that ends without work is not followed by a sleep.
#[test]
fn fault_16_an_idle_loop_sleeps() {
    let _watchdog = Watchdog::new("fault 16");
    each_monitor(|setup| {
        let thread = iothread(setup, "idle");
        let remote = thread.remote().clone();
        let kick = remote
            .call(|ctx| {
                // Listed handlers and a window, as after a while of work.
                let handler = Counting::new();
                let (fd, _) = add_polled(ctx, "q", &handler);
                let kick = dup(&fd);
                std::mem::forget((handler, fd));
                kick
            })
            .unwrap();
        while remote.stats().iterations < 20 {
            signal(&kick);
            std::thread::sleep(Duration::from_micros(20));
        }
        std::thread::sleep(Duration::from_millis(50));
        let cpu = |pid: i32| {
            let clock = ((!pid) << 3) | 6;
            let mut time = libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // SAFETY: writes to `time` only. The clock is the CPU time of that thread.
            assert_eq!(unsafe { libc::clock_gettime(clock, &mut time) }, 0);
            time.tv_sec * 1_000_000_000 + time.tv_nsec
        };
        let before = (remote.stats(), cpu(thread.thread_id()));
        std::thread::sleep(Duration::from_millis(300));
        let after = (remote.stats(), cpu(thread.thread_id()));
        let iterations = after.0.iterations - before.0.iterations;
        let cpu_ns = after.1 - before.1;
        println!("{setup}: {iterations} iterations, {cpu_ns} ns of CPU in 300 ms");
        assert!(
            iterations <= 3,
            "{setup}: {iterations} iterations while idle"
        );
        assert!(cpu_ns < 30_000_000, "{setup}: {cpu_ns} ns");
        thread.stop().unwrap();
    });
}
