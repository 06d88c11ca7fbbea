//! Faults of poll mode: numbers 3, 8, 9, 10 and 11 of the list in `tests/README.md`.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use common::*;
use iothread::trace::{TraceEvent, TraceSink};
use iothread::*;

/// A loop whose handlers leave the list after a millisecond.
fn impatient(setup: Setup) -> Context {
    Context::new(ContextConfig {
        policy: PolicyKind::Always,
        idle_ns: 1_000_000,
        settings: PollSettings {
            poll_max_ns: 1_000_000,
            ..PollSettings::default()
        },
        ..setup.config()
    })
    .unwrap()
}

/// Fails if idle handlers are not removed.
#[test]
fn fault_03_case_27_idle_handlers_leave_the_list_and_come_back() {
    let _watchdog = Watchdog::new("fault 3");
    assert_eq!(ContextConfig::default().idle_ns, 7_000_000_000);
    each_monitor(|setup| {
        let ctx = impatient(setup);
        let handlers: Vec<_> = (0..100)
            .map(|n| {
                let handler = Counting::new();
                let (fd, id) = add_polled(&ctx, &format!("disk {n}"), &handler);
                (handler, fd, id)
            })
            .collect();
        for (handler, fd, _) in &handlers {
            signal(fd);
            run_until(&ctx, || handler.readable.get() == 1);
        }
        let busy = &handlers[0].0;
        let polled = || {
            let stats = ctx.remote().stats();
            stats.handlers.iter().filter(|h| h.polled).count()
        };
        let start_ns = now_ns();
        while polled() > 1 {
            busy.add_work(&handlers[0].1);
            ctx.poll(true);
            let waited_ns = now_ns() - start_ns;
            assert!(
                waited_ns < 20_000_000_000,
                "{setup}: {} are listed",
                polled()
            );
        }
        // Now a pass asks the busy one only, and the others are notified again.
        let asked = |n: usize| handlers[n].0.polls.get();
        let before: Vec<u64> = (1..100).map(asked).collect();
        for _ in 0..50 {
            busy.add_work(&handlers[0].1);
            ctx.poll(true);
        }
        assert_eq!(before, (1..100).map(asked).collect::<Vec<_>>(), "{setup}");
        assert!(handlers[1..].iter().all(|(h, _, _)| !h.is_off()), "{setup}");
        // Notified, one is polled again.
        signal(&handlers[50].1);
        run_until(&ctx, || handlers[50].0.readable.get() == 2);
        assert!(polled() >= 1, "{setup}");
    });
}

/// Fails if each pass asks all, or if the turn does not move on.
#[test]
fn fault_03_idle_handlers_that_are_still_listed_are_asked_in_turns() {
    let _watchdog = Watchdog::new("fault 3, turns");
    const IDLE: usize = 200;
    each_monitor(|setup| {
        // None leaves the list meanwhile, which would help as well.
        let ctx = Context::new(ContextConfig {
            policy: PolicyKind::Always,
            idle_ns: i64::MAX,
            settings: PollSettings {
                poll_max_ns: 300_000,
                ..PollSettings::default()
            },
            ..setup.config()
        })
        .unwrap();
        let handlers: Vec<_> = (0..=IDLE)
            .map(|n| {
                let handler = Counting::new();
                let (fd, id) = add_polled(&ctx, &format!("disk {n}"), &handler);
                (handler, fd, id)
            })
            .collect();
        for (handler, fd, _) in &handlers {
            signal(fd);
            run_until(&ctx, || handler.readable.get() == 1);
        }
        let (busy, busy_fd, _) = &handlers[0];
        let busy_rounds = |rounds: u32| {
            for _ in 0..rounds {
                let before = busy.poll_ready.get() + busy.readable.get();
                busy.add_work(busy_fd);
                run_until(&ctx, || {
                    busy.poll_ready.get() + busy.readable.get() > before
                });
            }
        };
        let asked = || {
            handlers[1..]
                .iter()
                .map(|(h, _, _)| h.polls.get())
                .sum::<u64>()
        };
        // Until they have rested for a millisecond. A pass asks the busy one in any case.
        let start_ns = now_ns();
        loop {
            let (before, passes) = (asked(), busy.polls.get());
            busy_rounds(64);
            let every_time = (busy.polls.get() - passes) * IDLE as u64;
            if (asked() - before) * 3 < every_time {
                break;
            }
            assert!(
                now_ns() - start_ns < 10_000_000_000,
                "{setup}: asked every time"
            );
        }
        // All take turns, also beside one that always has work, and also after some have gone.
        for (n, (handler, fd, id)) in handlers.iter().enumerate().skip(1) {
            let before = handler.poll_ready.get() + handler.readable.get();
            handler.add_work(fd);
            busy_rounds(40);
            let after = handler.poll_ready.get() + handler.readable.get();
            assert_eq!(after, before + 1, "{setup}: {n} waits for its turn");
            if n % 3 == 0 {
                ctx.remove_handler(*id);
            }
        }
    });
}

/// Fails without the last look after a handler has left the list.
#[test]
fn fault_03_work_that_came_before_notifications_are_on_again_is_found() {
    let _watchdog = Watchdog::new("fault 3, last look");
    each_monitor(|setup| {
        let ctx = impatient(setup);
        let (busy, idle) = (Counting::new(), Counting::new());
        let (busy_fd, _) = add_polled(&ctx, "busy", &busy);
        let (idle_fd, _) = add_polled(&ctx, "idle", &idle);
        signal(&busy_fd);
        signal(&idle_fd);
        run_until(&ctx, || busy.readable.get() + idle.readable.get() == 2);
        // The guest adds work just as the handler leaves the list: too late for the last pass,
        // too early for a notification.
        let late = Rc::new(Cell::new(false));
        let (own, told) = (Rc::downgrade(&idle), late.clone());
        *idle.on_poll_end.borrow_mut() = Some(Box::new(move || {
            own.upgrade().unwrap().work.set(1);
            told.set(true);
        }));
        let found = Rc::new(Cell::new(false));
        let (told, seen) = (late.clone(), found.clone());
        *idle.on_poll_ready.borrow_mut() = Some(Box::new(move |_| seen.set(told.get())));
        let timer = ctx.timer(|_| ());
        while !found.get() {
            if !idle.is_off() && !late.get() {
                // Not listed yet, or it has left before the trap was set.
                signal(&idle_fd);
            }
            busy.add_work(&busy_fd);
            // A moment without events, in which poll mode begins.
            timer.arm_after_ns(50_000);
            run_until(&ctx, || !timer.is_armed());
        }
    });
}

/// Fails if a handler in its poll_ready is polled or called by a nested loop.
#[test]
fn fault_08_a_nested_loop_in_poll_ready_does_not_recurse() {
    let _watchdog = Watchdog::new("fault 8");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 100_000);
        let handler = Counting::new();
        let other = Counting::new();
        let (fd, _) = add_polled(&ctx, "q", &handler);
        let (other_fd, _) = add_polled(&ctx, "other", &other);
        signal(&fd);
        signal(&other_fd);
        run_until(&ctx, || handler.readable.get() + other.readable.get() == 2);
        let depth = Rc::new(Cell::new(0));
        let deepest = Rc::new(Cell::new(0));
        let (inside, most, side) = (depth.clone(), deepest.clone(), other.clone());
        *handler.on_poll_ready.borrow_mut() = Some(Box::new(move |ctx| {
            inside.set(inside.get() + 1);
            most.set(most.get().max(inside.get()));
            if inside.get() < 50 {
                // The condition still holds. The nested loop serves others meanwhile.
                let before = side.poll_ready.get();
                side.work.set(1);
                while side.poll_ready.get() == before {
                    ctx.poll(true);
                }
                ctx.poll(false);
            }
            inside.set(inside.get() - 1);
        }));
        for round in 1..=3 {
            handler.work.set(1);
            run_until(&ctx, || handler.poll_ready.get() >= round);
        }
        assert_eq!(deepest.get(), 1, "{setup}: poll_ready within poll_ready");
        assert_eq!(handler.poll_ready.get(), 3, "{setup}");
        handler.on_poll_ready.borrow_mut().take();
    });
}

/// Fails if an iteration takes the events to itself, where a nested one does not see them.
#[test]
fn fault_08_an_event_that_a_nested_loop_handled_is_not_handled_again() {
    let _watchdog = Watchdog::new("fault 8, twice");
    each_monitor(|setup| {
        let ctx = context(setup, 0);
        let (a, b) = (Counting::new(), Counting::new());
        let (fd_a, _) = add_polled(&ctx, "a", &a);
        let (fd_b, _) = add_polled(&ctx, "b", &b);
        for _ in 0..3 {
            ctx.poll(false);
        }
        // Whichever comes first waits for the other in a nested loop: the outer one has its
        // event already.
        let wait_for = |handler: &Rc<Counting>| -> Box<dyn Fn(&Context)> {
            let other = Rc::downgrade(handler);
            Box::new(move |ctx: &Context| {
                let other = other.upgrade().unwrap();
                run_until(ctx, || other.readable.get() > 0);
            })
        };
        *a.on_readable.borrow_mut() = Some(wait_for(&b));
        *b.on_readable.borrow_mut() = Some(wait_for(&a));
        signal(&fd_a);
        signal(&fd_b);
        run_until(&ctx, || a.readable.get() + b.readable.get() >= 2);
        for _ in 0..3 {
            ctx.poll(false);
        }
        assert_eq!((a.readable.get(), b.readable.get()), (1, 1), "{setup}");
    });
}

#[derive(Default)]
struct BlockTimes(RefCell<Vec<i64>>);

impl TraceSink for BlockTimes {
    fn event(&self, event: &TraceEvent<'_>) {
        if let TraceEvent::PollObserve { block_ns, .. } = event {
            self.0.borrow_mut().push(*block_ns);
        }
    }
}

/// Fails if the wait is measured after the callbacks.
#[test]
fn fault_09_case_28_callbacks_do_not_count_as_waiting() {
    let _watchdog = Watchdog::new("fault 9");
    const CALLBACK_NS: i64 = 50_000_000;
    each_monitor(|setup| {
        let ctx = context(setup, 32768);
        let times = Rc::new(BlockTimes::default());
        let handler = Counting::new();
        let (fd, _) = add_polled(&ctx, "q", &handler);
        for _ in 0..3 {
            ctx.poll(false);
        }
        ctx.set_trace_sink(Some(times.clone()));
        *handler.on_readable.borrow_mut() = Some(Box::new(|_| {
            let until_ns = now_ns() + CALLBACK_NS;
            while now_ns() < until_ns {}
        }));
        for round in 1..=5 {
            signal(&fd);
            run_until(&ctx, || handler.readable.get() == round);
        }
        // Of five waits that end at once, at least one is not held up by the machine.
        let times = times.0.borrow();
        let of_events = times.iter().copied().filter(|ns| *ns > 0);
        let shortest = of_events.min().unwrap();
        assert!(times.len() >= 5);
        assert!(shortest < CALLBACK_NS / 2, "{setup}: {times:?}");
        let longer = times.iter().filter(|ns| **ns >= CALLBACK_NS).count();
        assert!(longer < 5, "{setup}: {times:?}");
    });
}

/// Fails if poll mode is left with a timeout of 0.
#[test]
fn fault_10_case_29_poll_mode_stays_on_while_nothing_is_slept() {
    let _watchdog = Watchdog::new("fault 10");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 1_000_000_000);
        let handler = Counting::new();
        let (fd, _) = add_polled(&ctx, "q", &handler);
        signal(&fd);
        run_until(&ctx, || handler.readable.get() == 1);
        for round in 1..=200 {
            handler.work.set(1);
            run_until(&ctx, || handler.poll_ready.get() == round);
            ctx.defer(|_| ());
            ctx.poll(true);
            ctx.poll(false);
        }
        let toggled = (handler.begun.get(), handler.ended.get());
        assert_eq!(toggled, (1, 0), "{setup}: notifications were switched");
    });
}

/// A handler in poll mode, with notifications off.
fn in_poll_mode(ctx: &Context) -> (Rc<Counting>, std::os::fd::OwnedFd, HandlerId) {
    let handler = Counting::new();
    let (fd, id) = add_polled(ctx, "q", &handler);
    signal(&fd);
    run_until(ctx, || handler.readable.get() == 1);
    handler.work.set(1);
    run_until(ctx, || handler.poll_ready.get() == 1);
    assert!(ctx.is_polling() && handler.is_off());
    (handler, fd, id)
}

/// Fails if a removal does not call poll_end.
#[test]
fn fault_11_removal_in_poll_mode_leaves_notifications_on() {
    let _watchdog = Watchdog::new("fault 11, removal");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 1_000_000_000);
        let (handler, _fd, id) = in_poll_mode(&ctx);
        ctx.remove_handler(id);
        assert!(!handler.is_off(), "{setup}");
        // Attached again, to a loop in poll mode: switched off only once polling covers it.
        let (fd, id) = add_polled(&ctx, "q", &handler);
        signal(&fd);
        run_until(&ctx, || handler.readable.get() == 2);
        handler.work.set(1);
        run_until(&ctx, || handler.poll_ready.get() == 2);
        ctx.remove_handler(id);
        assert!(!handler.is_off(), "{setup}");
    });
}

/// Fails if a loop whose polling was switched off does not leave poll mode.
#[test]
fn fault_11_polling_switched_off_in_poll_mode_leaves_notifications_on() {
    let _watchdog = Watchdog::new("fault 11, setting");
    each_monitor(|setup| {
        for blocking in [false, true] {
            let ctx = context_with(setup, PolicyKind::Always, 1_000_000_000);
            let (handler, fd, _) = in_poll_mode(&ctx);
            // Work that nobody was notified of must be found as well.
            handler.work.set(1);
            ctx.remote().set("poll-max-ns", 0).unwrap();
            if blocking {
                run_until(&ctx, || handler.poll_ready.get() == 2);
            } else {
                ctx.poll(false);
            }
            assert_eq!(handler.poll_ready.get(), 2, "{setup}");
            assert!(!ctx.is_polling() && !handler.is_off(), "{setup}");
            let asked = handler.polls.get();
            signal(&fd);
            run_until(&ctx, || handler.readable.get() == 2);
            assert_eq!(handler.polls.get(), asked, "{setup}: polled although off");
        }
    });
}

/// Fails if a handler that was off the list while poll mode changed is not told afterwards.
#[test]
fn fault_11_a_drain_in_poll_ready_leaves_notifications_on() {
    let _watchdog = Watchdog::new("fault 11, drain");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 100_000);
        let (handler, _fd, _) = in_poll_mode(&ctx);
        let remote = ctx.remote();
        // A nested loop that sleeps leaves poll mode while this handler is taken off.
        *handler.on_poll_ready.borrow_mut() = Some(Box::new(move |ctx| {
            let done = Rc::new(Cell::new(false));
            let flag = done.clone();
            let timer = ctx.timer(move |_| flag.set(true));
            timer.arm_after_ns(2_000_000);
            run_until(ctx, || done.get());
            assert!(!ctx.is_polling());
            // From here on the loop polls nothing, so nobody enters and leaves poll mode for us.
            remote.set("poll-max-ns", 0).unwrap();
        }));
        handler.work.set(1);
        run_until(&ctx, || handler.poll_ready.get() == 2);
        assert!(!handler.is_off(), "{setup}: its notifications stayed off");
        handler.on_poll_ready.borrow_mut().take();
    });
}

/// Fails if handlers are not asked once more after poll_end.
#[test]
fn leaving_poll_mode_looks_once_more() {
    let _watchdog = Watchdog::new("last look before sleep");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 200_000);
        let (handler, _fd, _) = in_poll_mode(&ctx);
        // Work that comes after the last pass and before notifications are on: nobody tells.
        let own = Rc::downgrade(&handler);
        *handler.on_poll_end.borrow_mut() = Some(Box::new(move || {
            own.upgrade().unwrap().work.set(1);
        }));
        run_until(&ctx, || handler.poll_ready.get() == 2);
        assert!(handler.ended.get() >= 1, "{setup}");
    });
}
