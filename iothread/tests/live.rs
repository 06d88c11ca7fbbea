//! What other threads see of a loop that runs, and what they change.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use common::*;
use iothread::*;

/// What a loop's own thread keeps of a test.
#[derive(Default)]
struct Kept {
    half: RefCell<Option<BottomHalf>>,
    handler: RefCell<Option<(Rc<Counting>, std::os::fd::OwnedFd)>>,
}

thread_local! {
    static KEPT: Kept = Kept::default();
}

/// Keeps a loop busy: a bottom half that schedules itself, with work for a polled handler in
/// every eighth iteration, so that poll mode comes and goes.
fn run_flat_out(remote: &Remote, stop: &Arc<AtomicBool>) {
    let stop = stop.clone();
    let setup = move |ctx: &Context| {
        let handler = Counting::new();
        let (fd, _) = add_polled(ctx, "busy", &handler);
        signal(&fd);
        let (kick, work) = (dup(&fd), handler.clone());
        let count = std::cell::Cell::new(0u32);
        let half = ctx.bottom_half(move |_| {
            count.set(count.get().wrapping_add(1));
            if count.get().is_multiple_of(8) {
                work.add_work(&kick);
            }
            KEPT.with(|kept| {
                if let Some(half) = &*kept.half.borrow()
                    && !stop.load(Ordering::Relaxed)
                {
                    half.schedule();
                }
            });
        });
        half.schedule();
        KEPT.with(|kept| {
            *kept.half.borrow_mut() = Some(half);
            *kept.handler.borrow_mut() = Some((handler, fd));
        });
    };
    remote.call(setup).unwrap();
}

fn forget() {
    KEPT.with(|kept| {
        kept.half.borrow_mut().take();
        kept.handler.borrow_mut().take();
    });
}

/// Fails if a setting is stored elsewhere than it is read back from, if one out of range is
/// stored, or if a loop in poll mode does not take M → 0.
#[test]
fn settings_change_flat_out_while_the_loop_runs_flat_out() {
    let _watchdog = Watchdog::new("settings");
    each_monitor(|setup| {
        let thread = iothread(setup, "live");
        let remote = thread.remote().clone();
        let stop = Arc::new(AtomicBool::new(false));
        run_flat_out(&remote, &stop);
        let before = remote.stats();
        // Until both have gone on for a while beside each other.
        let gone_on = || remote.stats().iterations > before.iterations + 500;
        for round in (0i64..).take_while(|round| *round < 2000 || !gone_on()) {
            // 0 among the values: it reads back as the default, and for poll-max-ns as 0.
            for (name, value, shown) in [
                ("poll-max-ns", round % 3 * 20_000, round % 3 * 20_000),
                ("poll-grow", round % 5, [2, 1, 2, 3, 4][round as usize % 5]),
                ("poll-shrink", round % 4, [2, 1, 2, 3][round as usize % 4]),
                (
                    "poll-weight",
                    round % 64,
                    [round % 64, 3][usize::from(round % 64 == 0)],
                ),
                ("aio-max-batch", round, round),
            ] {
                remote.set(name, value).unwrap();
                let settings = remote.settings();
                let read = match name {
                    "poll-max-ns" => settings.poll_max_ns,
                    "poll-grow" => settings.poll_grow,
                    "poll-shrink" => settings.poll_shrink,
                    "poll-weight" => settings.poll_weight,
                    _ => settings.aio_max_batch,
                };
                assert_eq!(read, shown, "{setup}: {name}={value}");
            }
            assert!(remote.set("poll-weight", 64).is_err());
            assert!(remote.set("poll-max-ns", -1).is_err());
            assert_ne!(remote.settings().poll_weight, 64);
        }
        let all = PollSettings {
            poll_max_ns: 7000,
            poll_grow: 7,
            poll_shrink: 8,
            poll_weight: 9,
            poll_alpha_milli: 11,
            aio_max_batch: 10,
        };
        remote.set_all(&all).unwrap();
        assert_eq!(remote.settings(), all);
        // The loop has the last ones: nothing is polled for longer.
        // Twice: the first may be run by an iteration that had begun before the change.
        for _ in 0..2 {
            remote.call(|_| ()).unwrap();
        }
        let after = remote.stats();
        assert!(after.window_ns <= 7000, "{setup}: {}", after.window_ns);
        remote.set("poll-max-ns", 0).unwrap();
        remote.call(|_| ()).unwrap();
        let off = remote.call(|ctx| !ctx.is_polling());
        assert!(off.unwrap(), "{setup}: still in poll mode");
        stop.store(true, Ordering::Relaxed);
        let ended = remote.call(|_| {
            let off = KEPT.with(|kept| kept.handler.borrow().as_ref().unwrap().0.is_off());
            forget();
            off
        });
        assert!(!ended.unwrap(), "{setup}: notifications stayed off");
        thread.stop().unwrap();
    });
}

/// Fails if stopping waits for all bottom halves to be done.
#[test]
fn a_bottom_half_that_schedules_itself_does_not_hold_a_stop() {
    let _watchdog = Watchdog::new("stop");
    each_monitor(|setup| {
        let thread = iothread(setup, "live");
        run_flat_out(thread.remote(), &Arc::new(AtomicBool::new(false)));
        let last = Arc::new(AtomicBool::new(false));
        let told = last.clone();
        thread
            .remote()
            .run(move |_| told.store(true, Ordering::Relaxed));
        thread.stop().unwrap();
        assert!(
            last.load(Ordering::Relaxed),
            "{setup}: what came before is run"
        );
    });
}

/// Fails if a count is taken back, if counts of removed handlers are lost, or if the loop waits for
/// its readers. That name and counts of a slot are of one handler is shown by `loom.rs`.
#[test]
fn statistics_are_read_flat_out_while_the_loop_runs_flat_out() {
    let _watchdog = Watchdog::new("statistics");
    each_monitor(|setup| {
        let thread = iothread(setup, "live");
        let remote = thread.remote().clone();
        let stop = Arc::new(AtomicBool::new(false));
        run_flat_out(&remote, &stop);
        // Handlers that come and go, so that slots are used again under other names.
        let flicker = {
            let (remote, stop) = (remote.clone(), stop.clone());
            std::thread::spawn(move || {
                for round in 0..200 {
                    let name = ["one", "another with a longer name", "ü"][round % 3];
                    let add = move |ctx: &Context| {
                        let handler = Counting::new();
                        let (fd, id) = add_polled(ctx, name, &handler);
                        signal(&fd);
                        run_until(ctx, || handler.readable.get() == 1);
                        ctx.remove_handler(id);
                    };
                    remote.call(add).unwrap();
                }
                stop.store(true, Ordering::Relaxed);
            })
        };
        let known = [
            "notifier",
            "completions",
            "busy",
            "one",
            "another with a longer name",
            "ü",
        ];
        let mut last = remote.stats();
        let mut reads = 0u64;
        while !stop.load(Ordering::Relaxed) {
            let now = remote.stats();
            let pairs = |s: &Stats| {
                [
                    s.iterations,
                    s.blocks,
                    s.poll_hits,
                    s.poll_misses,
                    s.poll_ns,
                    s.poll_vain_ns,
                    s.wakeups,
                    s.enters,
                    s.bottom_halves,
                    s.block_histogram.count(),
                    s.window_histogram.count(),
                ]
            };
            for (old, new) in pairs(&last).into_iter().zip(pairs(&now)) {
                assert!(new >= old, "{setup}: {last:?}, then {now:?}");
            }
            for handler in &now.handlers {
                assert!(known.contains(&&*handler.name), "{setup}: {handler:?}");
                assert!(
                    handler.poll_hits <= handler.events + 1,
                    "{setup}: {handler:?}"
                );
            }
            last = now;
            reads += 1;
        }
        flicker.join().unwrap();
        remote.call(|_| forget()).unwrap();
        assert!(reads >= 10, "{setup}: {reads}");
        thread.stop().unwrap();
        // The last word is exact: each of the 200 came once, under its name.
        let handlers = remote.stats().handlers;
        let events = |name: &str| handlers.iter().find(|h| h.name == name).map(|h| h.events);
        let expected = [Some(67), Some(67), Some(66)];
        assert_eq!(
            known[3..]
                .iter()
                .map(|name| events(name))
                .collect::<Vec<_>>(),
            expected
        );
    });
}

/// What a sleeping loop shows is exact. Fails if its numbers are shown
/// now and then only.
#[test]
fn statistics_of_a_sleeping_loop_are_complete() {
    let _watchdog = Watchdog::new("statistics asleep");
    each_monitor(|setup| {
        for poll_max_ns in [0, 32768] {
            let settings = PollSettings {
                poll_max_ns,
                ..PollSettings::default()
            };
            let thread = iothread_with(setup, "asleep", settings);
            let remote = thread.remote().clone();
            let ran = Arc::new(AtomicU32::new(0));
            for round in 1..=37 {
                let counter = ran.clone();
                remote.run(move |_| {
                    counter.fetch_add(1, Ordering::Relaxed);
                });
                while ran.load(Ordering::Relaxed) != round {
                    std::thread::yield_now();
                }
            }
            // Until it sleeps; nothing wakes it meanwhile.
            let complete = |stats: &Stats| {
                let windows = stats.window_histogram.count();
                let blocks = stats.block_histogram.count();
                stats.bottom_halves == 37
                    && stats.blocks >= 1
                    && (poll_max_ns == 0
                        || (windows, blocks) == (stats.iterations, stats.iterations))
            };
            let patience = std::time::Instant::now();
            while !complete(&remote.stats()) {
                let stats = remote.stats();
                assert!(
                    patience.elapsed() < Duration::from_secs(10),
                    "{setup}: {stats:?}"
                );
                std::thread::sleep(Duration::from_micros(200));
            }
            thread.stop().unwrap();
        }
    });
}
