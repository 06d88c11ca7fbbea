//! Handlers, bottom halves, timers, notification and requests, over every monitor.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::{Cell, RefCell};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::*;
use iothread::io_uring::{opcode, types};
use iothread::*;

#[test]
fn eventfd_is_consumed_once_a_signal() {
    let _watchdog = Watchdog::new("eventfd");
    each_monitor(|setup| {
        for nonblocking in [false, true] {
            let ctx = context(setup, 0);
            let handler = Counting::new();
            let mut flags = rustix::event::EventfdFlags::CLOEXEC;
            flags.set(rustix::event::EventfdFlags::NONBLOCK, nonblocking);
            let fd = rustix::event::eventfd(0, flags).unwrap();
            let h: Rc<dyn EventHandler> = handler.clone();
            ctx.add_eventfd("e", fd.as_raw_fd(), Polling::Never, h)
                .unwrap();
            for round in 1..=5 {
                signal(&fd);
                run_until(&ctx, || handler.readable.get() == round);
                for _ in 0..3 {
                    assert!(!ctx.poll(false), "{setup}: {nonblocking}");
                }
            }
            // Two signals may be seen as one, or the first one before the second.
            signal(&fd);
            signal(&fd);
            run_until(&ctx, || handler.readable.get() >= 6);
            while ctx.poll(false) {}
            assert!((6..=7).contains(&handler.readable.get()), "{setup}");
        }
    });
}

#[test]
fn descriptor_is_level_triggered() {
    let _watchdog = Watchdog::new("level");
    each_monitor(|setup| {
        let ctx = context(setup, 0);
        let handler = Counting::new();
        let (reader, writer) = std::io::pipe().unwrap();
        ctx.add_handler(
            "pipe",
            reader.as_raw_fd(),
            Interest::Read,
            Polling::Never,
            handler.clone(),
        )
        .unwrap();
        rustix::io::write(&writer, b"x").unwrap();
        // Nobody reads: it comes again and again.
        run_until(&ctx, || handler.readable.get() == 5);
        handler.drain.set(Some(reader.as_raw_fd()));
        run_until(&ctx, || handler.readable.get() == 6);
        for _ in 0..3 {
            ctx.poll(false);
        }
        assert_eq!(handler.readable.get(), 6, "{setup}");
        drop(writer);
        // Hang-up counts as readable.
        run_until(&ctx, || handler.readable.get() == 7);
    });
}

#[test]
fn writable_and_modify() {
    let _watchdog = Watchdog::new("writable");
    each_monitor(|setup| {
        let ctx = context(setup, 0);
        let handler = Counting::new();
        let (reader, writer) = std::io::pipe().unwrap();
        let id = ctx
            .add_handler(
                "w",
                writer.as_raw_fd(),
                Interest::Write,
                Polling::Never,
                handler.clone(),
            )
            .unwrap();
        run_until(&ctx, || handler.writable.get() >= 2);
        let new = ctx.modify_handler(id, Interest::Read).unwrap();
        assert_ne!(id, new);
        let before = handler.writable.get();
        for _ in 0..3 {
            ctx.poll(false);
        }
        assert_eq!(
            (handler.writable.get(), handler.readable.get()),
            (before, 0)
        );
        assert!(ctx.modify_handler(id, Interest::Read).is_err());
        drop(reader);
        run_until(&ctx, || handler.readable.get() > 0);
        ctx.remove_handler(new);
    });
}

#[test]
fn second_handler_of_a_descriptor_and_a_closed_one_are_refused() {
    each_monitor(|setup| {
        let ctx = context(setup, 0);
        let fd = eventfd();
        let add = |raw| ctx.add_eventfd("twice", raw, Polling::Never, Counting::new());
        let id = add(fd.as_raw_fd()).unwrap();
        let error = add(fd.as_raw_fd()).unwrap_err().to_string();
        assert!(
            error.contains("twice") && error.contains("File exists"),
            "{error}"
        );
        assert!(add(987_654).is_err());
        ctx.remove_handler(id);
        ctx.remove_handler(id);
        add(fd.as_raw_fd()).unwrap();
    });
}

#[test]
fn bottom_halves_run_in_order_and_once() {
    let _watchdog = Watchdog::new("bottom halves");
    each_monitor(|setup| {
        let ctx = context(setup, 0);
        let log = Rc::new(RefCell::new(Vec::new()));
        let half = {
            let log = log.clone();
            ctx.bottom_half(move |_| log.borrow_mut().push("half"))
        };
        half.schedule();
        half.schedule();
        let inner = log.clone();
        ctx.defer(move |ctx| {
            inner.borrow_mut().push("once");
            let inner = inner.clone();
            ctx.defer(move |_| inner.borrow_mut().push("next iteration"));
        });
        assert!(ctx.poll(true));
        assert_eq!(*log.borrow(), ["half", "once"]);
        assert!(ctx.poll(true));
        assert_eq!(log.borrow().len(), 3);
        half.schedule();
        half.cancel();
        assert!(!half.is_scheduled());
        assert!(!ctx.poll(false));
        half.schedule();
        drop(half);
        assert!(!ctx.poll(false));
        assert_eq!(log.borrow().len(), 3, "{setup}");
    });
}

#[test]
fn idle_bottom_half_is_no_progress_and_waits_at_most_10_ms() {
    let _watchdog = Watchdog::new("idle bottom half");
    each_monitor(|setup| {
        let ctx = context(setup, 0);
        let runs = Rc::new(Cell::new(0));
        let counter = runs.clone();
        let half = ctx.bottom_half(move |_| counter.set(counter.get() + 1));
        half.schedule_idle();
        let start = now_ns();
        assert!(!ctx.poll(true), "{setup}");
        assert_eq!(runs.get(), 1);
        assert!(now_ns() - start >= 9_000_000, "it slept");
        half.schedule_idle();
        half.schedule();
        assert!(ctx.poll(true));
        assert_eq!(runs.get(), 2);
    });
}

#[test]
fn timers_fire_in_order_and_can_be_moved() {
    let _watchdog = Watchdog::new("timers");
    each_monitor(|setup| {
        for poll_max_ns in [0, 32768] {
            let ctx = context(setup, poll_max_ns);
            let log = Rc::new(RefCell::new(Vec::new()));
            let timer = |name: &'static str| {
                let log = log.clone();
                ctx.timer(move |_| log.borrow_mut().push(name))
            };
            let (a, b, c, d) = (timer("a"), timer("b"), timer("c"), timer("d"));
            let start = now_ns();
            a.arm_after_ns(3_000_000);
            b.arm_after_ns(1_000_000);
            c.arm_after_ns(2_000_000);
            d.arm_after_ns(1_500_000);
            c.arm_at_ns(start + 6_000_000);
            d.disarm();
            run_until(&ctx, || log.borrow().len() == 3);
            assert_eq!(*log.borrow(), ["b", "a", "c"], "{setup}");
            assert!(now_ns() >= start + 6_000_000);
            assert!(!a.is_armed());
        }
    });
}

#[test]
fn a_timer_that_rearms_itself_in_the_past_does_not_hold_the_loop() {
    let _watchdog = Watchdog::new("timer in the past");
    each_monitor(|setup| {
        let ctx = context(setup, 0);
        let slot: Rc<RefCell<Option<Timer>>> = Rc::default();
        let fired = Rc::new(Cell::new(0));
        let (own, counter) = (slot.clone(), fired.clone());
        *slot.borrow_mut() = Some(ctx.timer(move |_| {
            counter.set(counter.get() + 1);
            own.borrow().as_ref().unwrap().arm_at_ns(1);
        }));
        slot.borrow().as_ref().unwrap().arm_at_ns(1);
        for round in 1..=3 {
            assert!(ctx.poll(true));
            assert_eq!(fired.get(), round, "{setup}");
        }
        slot.borrow_mut().take();
    });
}

#[test]
fn remote_run_call_and_bottom_half_wake_a_sleeping_loop() {
    let _watchdog = Watchdog::new("remote");
    each_monitor(|setup| {
        let thread = iothread(setup, "remote");
        let remote = thread.remote().clone();
        let count = Arc::new(AtomicU32::new(0));
        for round in 1..=200 {
            let counter = count.clone();
            remote.run(move |_| {
                counter.fetch_add(1, Ordering::Relaxed);
            });
            // Run before: in order. Borrows what the caller has.
            let text = format!("round {round}");
            let seen =
                remote.call(|ctx| (count.load(Ordering::Relaxed), ctx.name().len(), text.len()));
            assert_eq!(seen.unwrap(), (round, 6, text.len()), "{setup}");
            if round % 50 == 0 {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(
            remote.call(|_| panic!("in a call")),
            Err::<(), _>(CallError::Panicked)
        );
        let inner = remote.clone();
        assert_eq!(remote.call(move |_| inner.call(|_| 7).unwrap()), Ok(7));
        let counter = count.clone();
        let half = remote
            .call(move |ctx| {
                let half = ctx.bottom_half(move |_| {
                    counter.fetch_add(1000, Ordering::Relaxed);
                });
                let remote = half.remote().unwrap();
                // Keeps it alive in its own thread.
                std::mem::forget(half);
                remote
            })
            .unwrap();
        half.schedule();
        while count.load(Ordering::Relaxed) != 1200 {
            std::thread::yield_now();
        }
        assert_eq!(thread.stop(), Ok(()));
        assert_eq!(remote.call(|_| ()), Err(CallError::Closed));
        half.schedule();
    });
}

#[test]
fn file_is_read_through_the_ring() {
    let _watchdog = Watchdog::new("file");
    each_monitor(|setup| {
        let ctx = context(setup, 32768);
        if !has_ring(&ctx) {
            return;
        }
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"adaptive polling").unwrap();
        let mut buffer = vec![0u8; 16];
        let result = Rc::new(Cell::new(None));
        let done = result.clone();
        let entry = opcode::Read::new(types::Fd(file.as_raw_fd()), buffer.as_mut_ptr(), 16)
            .offset(0)
            .build();
        // SAFETY: `buffer` and `file` live until the completion below.
        unsafe { ctx.add_sqe_once(entry, move |_, result| done.set(Some(result))) };
        assert_eq!(result.get(), None, "never from within the call");
        assert_eq!(ctx.requests_in_flight(), 1);
        run_until(&ctx, || result.get().is_some());
        assert_eq!(result.get(), Some(16));
        assert_eq!(buffer, b"adaptive polling", "{setup}");
        assert_eq!(ctx.requests_in_flight(), 0);
    });
}

struct Batches {
    log: RefCell<Vec<String>>,
}

impl Completer for Batches {
    fn complete(&self, _ctx: &Context, token: u32, result: i32) {
        self.log.borrow_mut().push(format!("{token}={result}"));
    }

    fn batch_end(&self, _ctx: &Context) {
        self.log.borrow_mut().push("end".into());
    }
}

#[test]
fn completer_gets_tokens_and_one_batch_end() {
    let _watchdog = Watchdog::new("completer");
    each_monitor(|setup| {
        let ctx = context(setup, 32768);
        if !has_ring(&ctx) {
            return;
        }
        let batches = Rc::new(Batches {
            log: RefCell::default(),
        });
        let id = ctx.register_completer(batches.clone());
        for token in [7, u32::MAX, 0] {
            // SAFETY: a NOP points nowhere.
            unsafe { ctx.add_sqe(opcode::Nop::new().build(), id, token) };
        }
        run_until(&ctx, || batches.log.borrow().len() >= 4);
        assert_eq!(
            *batches.log.borrow(),
            ["7=0", "4294967295=0", "0=0", "end"],
            "{setup}"
        );
        // SAFETY: as above.
        unsafe { ctx.add_sqe(opcode::Nop::new().build(), id, 1) };
        ctx.unregister_completer(id);
        while ctx.requests_in_flight() != 0 {
            ctx.poll(true);
        }
        assert_eq!(batches.log.borrow().len(), 4, "told nobody");
        assert_eq!(Rc::strong_count(&batches), 1);
    });
}

#[test]
fn polling_begins_after_the_first_event_and_finds_work() {
    let _watchdog = Watchdog::new("polling");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 1_000_000_000);
        let handler = Counting::new();
        let (fd, _id) = add_polled(&ctx, "q", &handler);
        assert!(!ctx.poll(false));
        assert_eq!(handler.polls.get(), 0, "not listed yet");
        signal(&fd);
        run_until(&ctx, || handler.readable.get() == 1);
        handler.work.set(1);
        assert!(ctx.poll(true));
        assert_eq!(handler.poll_ready.get(), 1, "{setup}");
        assert!(ctx.is_polling() && handler.is_off());
        let stats = ctx.remote().stats();
        assert_eq!(stats.poll_hits, 1);
        let q = stats.handlers.iter().find(|h| h.name == "q").unwrap();
        assert_eq!((q.events, q.poll_hits, q.polled), (2, 1, true));
        // Removed in poll mode: notifications are on again.
        let id = _id;
        ctx.remove_handler(id);
        assert!(!handler.is_off());
    });
}

#[test]
fn iothread_has_its_name_and_reports_a_panic() {
    let _watchdog = Watchdog::new("panic");
    let told = Arc::new(std::sync::Mutex::new(String::new()));
    let listener = told.clone();
    let thread = IoThread::start(IoThreadConfig {
        id: "io0".into(),
        cpus: Some(vec![0]),
        on_panic: Some(Arc::new(move |id: &str, message: &str| {
            *listener.lock().unwrap() = format!("{id}: {message}");
        })),
        ..IoThreadConfig::default()
    })
    .unwrap();
    let comm = format!("/proc/self/task/{}/comm", thread.thread_id());
    assert_eq!(std::fs::read_to_string(comm).unwrap(), "IO io0\n");
    let allowed = std::fs::read_to_string(format!("/proc/self/task/{}/status", thread.thread_id()));
    assert!(allowed.unwrap().contains("Cpus_allowed_list:\t0\n"));
    let remote = thread.remote().clone();
    remote.run(|_| panic!("boom {}", 7));
    while told.lock().unwrap().is_empty() {
        std::thread::yield_now();
    }
    assert_eq!(*told.lock().unwrap(), "io0: boom 7");
    assert_eq!(thread.stop(), Err("boom 7".into()));
    assert_eq!(remote.call(|_| ()), Err(CallError::Closed));
}

#[test]
fn affinity_to_a_cpu_that_is_not_there_is_an_error() {
    let error = IoThread::start(IoThreadConfig {
        id: "io0".into(),
        cpus: Some(vec![1023]),
        ..IoThreadConfig::default()
    })
    .unwrap_err()
    .to_string();
    assert!(
        error.contains("io0") && error.contains("cpus=1023"),
        "{error}"
    );
}

#[test]
fn settings_out_of_range_are_refused_and_zero_reads_back_as_default() {
    let config = |settings| ContextConfig {
        settings,
        ..ContextConfig::default()
    };
    let error = Context::new(config(PollSettings {
        poll_weight: 64,
        ..PollSettings::default()
    }))
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "poll-weight value must be in range [0, 63], not 64"
    );
    let ctx = Context::new(config(PollSettings::default())).unwrap();
    let remote = ctx.remote();
    remote.set("poll-grow", 0).unwrap();
    assert_eq!(remote.settings().poll_grow, 2);
    assert!(remote.set("poll-shrink", -1).is_err());
    remote.set("poll-shrink", 9).unwrap();
    assert_eq!(remote.settings().poll_shrink, 9);
}
