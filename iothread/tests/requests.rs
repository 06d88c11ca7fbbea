//! Requests on the loop's ring: from everywhere, cancelled, linked, and more than the queues hold.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::rc::Rc;

use common::*;
use iothread::io_uring::{opcode, squeue, types};
use iothread::*;

/// Runs `test` with a loop that has a ring, over every monitor.
fn each_ring(config: impl Fn(Setup) -> ContextConfig, test: impl Fn(&Context, Setup)) {
    each_monitor(|setup| {
        let ctx = Context::new(config(setup)).unwrap();
        if has_ring(&ctx) {
            test(&ctx, setup);
        }
    });
}

fn nop() -> squeue::Entry {
    opcode::Nop::new().build()
}

/// Counts results by token.
#[derive(Default)]
struct Results {
    log: RefCell<Vec<(u32, i32)>>,
    batches: Cell<u32>,
}

impl Completer for Results {
    fn complete(&self, _ctx: &Context, token: u32, result: i32) {
        self.log.borrow_mut().push((token, result));
    }

    fn batch_end(&self, _ctx: &Context) {
        self.batches.set(self.batches.get() + 1);
    }
}

fn register(ctx: &Context) -> (Rc<Results>, CompleterId) {
    let results = Rc::new(Results::default());
    let id = ctx.register_completer(results.clone());
    (results, id)
}

#[test]
fn from_bottom_half_timer_handler_completion_and_nested_loop() {
    let _watchdog = Watchdog::new("requests from everywhere");
    let always = |setup: Setup| ContextConfig {
        policy: PolicyKind::Always,
        ..setup.config()
    };
    each_ring(always, |ctx, setup| {
        let done = Rc::new(Cell::new(0));
        let submit = {
            let done = done.clone();
            move |ctx: &Context| {
                let done = done.clone();
                // SAFETY: a NOP points nowhere.
                unsafe { ctx.add_sqe_once(nop(), move |_, _| done.set(done.get() + 1)) };
            }
        };
        let expect = |count: u32| run_until(ctx, || done.get() == count);
        ctx.defer(submit.clone());
        expect(1);
        let timer = ctx.timer(submit.clone());
        timer.arm_after_ns(100_000);
        expect(2);
        let handler = Counting::new();
        *handler.on_readable.borrow_mut() = Some(Box::new(submit.clone()));
        let (fd, _) = add_polled(ctx, "q", &handler);
        signal(&fd);
        expect(3);
        *handler.on_poll_ready.borrow_mut() = Some(Box::new(submit.clone()));
        handler.add_work(&fd);
        expect(4);
        let inner = submit.clone();
        // SAFETY: a NOP points nowhere.
        unsafe { ctx.add_sqe_once(nop(), move |ctx, _| inner(ctx)) };
        expect(5);
        let (inner, count) = (submit.clone(), done.clone());
        ctx.defer(move |ctx| {
            inner(ctx);
            run_until(ctx, || count.get() == 6);
        });
        ctx.poll(true);
        assert_eq!(done.get(), 6, "{setup}: not completed in the nested loop");
        // From a callback that runs just before the loop sleeps.
        let (inner, weak) = (submit.clone(), ctx.downgrade());
        *handler.on_poll_end.borrow_mut() = Some(Box::new(move || inner(&weak.upgrade().unwrap())));
        run_until(ctx, || done.get() >= 7);
        handler.on_poll_end.borrow_mut().take();
    });
}

#[test]
fn cancelled() {
    let _watchdog = Watchdog::new("cancel");
    each_ring(Setup::config, |ctx, setup| {
        for submitted in [false, true] {
            // A read of an empty pipe waits.
            let (reader, _writer) = std::io::pipe().unwrap();
            let mut buffer = [0u8; 8];
            let mut read =
                || opcode::Read::new(types::Fd(reader.as_raw_fd()), buffer.as_mut_ptr(), 8);
            let result = Rc::new(Cell::new(None));
            let told = result.clone();
            // SAFETY: pipe and buffer outlive the completion, which is waited for.
            let id = unsafe {
                ctx.add_sqe_once(read().build(), move |_, result| told.set(Some(result)))
            };
            let (results, completer) = register(ctx);
            // SAFETY: as above.
            unsafe { ctx.add_sqe(read().build(), completer, 5) };
            if submitted {
                for _ in 0..3 {
                    ctx.poll(false);
                }
            }
            ctx.cancel(id);
            ctx.cancel_sqe(completer, 5);
            run_until(ctx, || ctx.requests_in_flight() == 0);
            assert_eq!(result.get(), Some(-libc::ECANCELED), "{setup}");
            assert_eq!(*results.log.borrow(), [(5, -libc::ECANCELED)], "{setup}");
            // Cancelling what is done is harmless, also when its place serves another request.
            let told = result.clone();
            // SAFETY: a NOP points nowhere.
            unsafe { ctx.add_sqe_once(nop(), move |_, result| told.set(Some(result))) };
            ctx.cancel(id);
            run_until(ctx, || ctx.requests_in_flight() == 0);
            assert_eq!(result.get(), Some(0), "{setup}");
            ctx.unregister_completer(completer);
        }
    });
}

#[test]
fn linked_chains_stay_whole_when_the_queue_is_full() {
    let _watchdog = Watchdog::new("chains");
    let small = |setup: Setup| ContextConfig {
        submission_entries: 4,
        completion_entries: 16,
        ..setup.config()
    };
    each_ring(small, |ctx, setup| {
        let file = tempfile::tempfile().unwrap();
        let fd = types::Fd(file.as_raw_fd());
        let (results, id) = register(ctx);
        let link = squeue::Flags::IO_LINK;
        let data = [b"one".as_slice(), b"two", b"six"];
        for fill in 0..6 {
            results.log.borrow_mut().clear();
            // So many requests are on the queue of 4 already.
            for n in 0..fill {
                // SAFETY: a NOP points nowhere.
                unsafe { ctx.add_sqe(nop(), id, 100 + n) };
            }
            let write = |text: &'static [u8], at: u64| {
                let length = u32::try_from(text.len()).unwrap();
                opcode::Write::new(fd, text.as_ptr(), length)
                    .offset(at)
                    .build()
            };
            // The second one fails (no descriptor of that number), so the third is cancelled:
            // only if the three were submitted as one chain.
            let failing = opcode::Write::new(types::Fd(987_654), data[1].as_ptr(), 3).build();
            // SAFETY: static data, and a file that outlives the completions.
            unsafe {
                ctx.add_sqe(write(data[0], 0).flags(link), id, 1);
                ctx.add_sqe(failing.flags(link), id, 2);
                ctx.add_sqe(write(data[2], 3), id, 3);
            }
            let expected = fill as usize + 3;
            run_until(ctx, || results.log.borrow().len() == expected);
            let result_of = |token| {
                let log = results.log.borrow();
                log.iter().find(|(t, _)| *t == token).unwrap().1
            };
            assert_eq!(result_of(1), 3, "{setup}: {fill}");
            assert_eq!(result_of(2), -libc::EBADF, "{setup}: {fill}");
            assert_eq!(
                result_of(3),
                -libc::ECANCELED,
                "{setup}: {fill}: the chain was cut"
            );
        }
        // A handler that is added and removed while a chain is open does not join it.
        // SAFETY: as above.
        unsafe { ctx.add_sqe(nop().flags(link), id, 1) };
        let handler = Counting::new();
        let (fd, handler_id) = add_polled(ctx, "q", &handler);
        signal(&fd);
        // SAFETY: as above.
        unsafe { ctx.add_sqe(nop(), id, 2) };
        run_until(ctx, || handler.readable.get() == 1);
        ctx.remove_handler(handler_id);
        run_until(ctx, || ctx.requests_in_flight() == 0);
    });
}

#[test]
fn a_chain_that_its_owner_does_not_end_goes_with_the_next_enter() {
    let _watchdog = Watchdog::new("open chain");
    each_ring(Setup::config, |ctx, setup| {
        let (results, id) = register(ctx);
        // SAFETY: a NOP points nowhere.
        unsafe { ctx.add_sqe(nop().flags(squeue::Flags::IO_LINK), id, 1) };
        run_until(ctx, || !results.log.borrow().is_empty());
        assert_eq!(*results.log.borrow(), [(1, 0)], "{setup}");
    });
}

#[test]
fn more_requests_than_the_queues_hold() {
    let _watchdog = Watchdog::new("overflow");
    let tiny = |setup: Setup| ContextConfig {
        submission_entries: 4,
        completion_entries: 8,
        ..setup.config()
    };
    each_ring(tiny, |ctx, setup| {
        let (results, id) = register(ctx);
        for round in 1..=3 {
            // All at once: the submission queue is full 250 times, the completion queue overflows.
            for token in 0..1000 {
                // SAFETY: a NOP points nowhere.
                unsafe { ctx.add_sqe(nop(), id, token) };
            }
            let expected = round * 1000;
            run_until(ctx, || results.log.borrow().len() == expected);
        }
        let mut tokens: Vec<u32> = results.log.borrow().iter().map(|(t, _)| *t).collect();
        tokens.sort_unstable();
        let expected: Vec<u32> = (0..1000).flat_map(|t| [t; 3]).collect();
        assert!(tokens == expected, "{setup}: lost or doubled");
        // Completions that come when they like, more than the queue holds.
        results.log.borrow_mut().clear();
        let pipes: Vec<_> = (0..100).map(|_| std::io::pipe().unwrap()).collect();
        let mut buffers = vec![0u8; 100];
        for (token, (reader, _)) in (0..).zip(&pipes) {
            let fd = types::Fd(reader.as_raw_fd());
            let at = &raw mut buffers[token as usize];
            // SAFETY: pipes and buffers outlive the completions.
            unsafe { ctx.add_sqe(opcode::Read::new(fd, at, 1).build(), id, token) };
        }
        ctx.poll(false);
        for (n, (_, writer)) in (0u8..).zip(&pipes) {
            rustix::io::write(writer, &[n]).unwrap();
        }
        run_until(ctx, || results.log.borrow().len() == 100);
        assert!(
            results.log.borrow().iter().all(|(_, result)| *result == 1),
            "{setup}"
        );
        let expected: Vec<u8> = (0..100).collect();
        assert_eq!(buffers, expected, "{setup}");
    });
}

#[test]
fn batch_end_of_an_outer_iteration_is_called_in_a_nested_loop() {
    let _watchdog = Watchdog::new("batch end, nested");
    struct Waits {
        results: Rc<Results>,
    }
    impl Completer for Waits {
        fn complete(&self, ctx: &Context, _token: u32, _result: i32) {
            // Waits for what the other completer publishes at the end of its batch.
            run_until(ctx, || self.results.batches.get() == 1);
        }
    }
    each_ring(Setup::config, |ctx, setup| {
        let (results, first) = register(ctx);
        let second = ctx.register_completer(Rc::new(Waits {
            results: results.clone(),
        }));
        // SAFETY: a NOP points nowhere.
        unsafe {
            ctx.add_sqe(nop(), first, 1);
            ctx.add_sqe(nop(), second, 2);
        }
        run_until(ctx, || ctx.requests_in_flight() == 0);
        ctx.poll(false);
        assert_eq!(results.batches.get(), 1, "{setup}");
    });
}

#[test]
fn completer_may_go_in_its_own_callback() {
    let _watchdog = Watchdog::new("unregister within");
    struct Goes {
        id: Cell<Option<CompleterId>>,
        calls: Cell<u32>,
        freed: Rc<Cell<bool>>,
    }
    impl Drop for Goes {
        fn drop(&mut self) {
            self.freed.set(true);
        }
    }
    impl Completer for Goes {
        fn complete(&self, ctx: &Context, _token: u32, _result: i32) {
            self.calls.set(self.calls.get() + 1);
            assert_eq!(self.calls.get(), 1, "told after it was unregistered");
            ctx.unregister_completer(self.id.take().unwrap());
            assert!(!self.freed.get(), "freed under its own feet");
            // Its place is not given away while requests are in flight.
            let other = ctx.register_completer(Rc::new(Results::default()));
            ctx.unregister_completer(other);
        }
        fn batch_end(&self, _ctx: &Context) {
            panic!("told of the batch after it was unregistered");
        }
    }
    each_ring(Setup::config, |ctx, setup| {
        let freed = Rc::new(Cell::new(false));
        let goes = Rc::new(Goes {
            id: Cell::new(None),
            calls: Cell::new(0),
            freed: freed.clone(),
        });
        let id = ctx.register_completer(goes.clone());
        goes.id.set(Some(id));
        drop(goes);
        for token in 0..3 {
            // SAFETY: a NOP points nowhere.
            unsafe { ctx.add_sqe(nop(), id, token) };
        }
        run_until(ctx, || ctx.requests_in_flight() == 0);
        ctx.poll(false);
        assert!(freed.get(), "{setup}: kept for ever");
    });
}

#[test]
fn registered_files() {
    let _watchdog = Watchdog::new("registered");
    each_ring(Setup::config, |ctx, setup| {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"registered").unwrap();
        let slots: Vec<u32> = (0..3)
            .map(|_| ctx.register_file(file.as_raw_fd()).unwrap())
            .collect();
        assert_eq!(slots, [0, 1, 2]);
        ctx.unregister_file(1);
        ctx.unregister_file(1);
        assert_eq!(ctx.register_file(file.as_raw_fd()).unwrap(), 1);
        let mut buffer = vec![0u8; 4096];
        let entry = opcode::Read::new(types::Fixed(1), buffer.as_mut_ptr(), 10).build();
        let result = Rc::new(Cell::new(None));
        let told = result.clone();
        // SAFETY: file and buffer outlive the completion.
        unsafe { ctx.add_sqe_once(entry, move |_, result| told.set(Some(result))) };
        run_until(ctx, || result.get().is_some());
        assert_eq!(result.get(), Some(10), "{setup}");
        assert_eq!(&buffer[..10], b"registered");
        for _ in 3..FILE_SLOTS {
            ctx.register_file(file.as_raw_fd()).unwrap();
        }
        let full = ctx.register_file(file.as_raw_fd()).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ENFILE));
    });
}

/// What READ_FIXED of 10 bytes of `file` into `buffer` by `slot` gives.
fn read_fixed(ctx: &Context, file: &File, buffer: &mut [u8], slot: u32) -> i32 {
    let fd = types::Fd(file.as_raw_fd());
    let slot = u16::try_from(slot).unwrap();
    let entry = opcode::ReadFixed::new(fd, buffer.as_mut_ptr(), 10, slot).build();
    let result = Rc::new(Cell::new(None));
    let told = result.clone();
    // SAFETY: file and buffer outlive the completion, which is waited for.
    unsafe { ctx.add_sqe_once(entry, move |_, result| told.set(Some(result))) };
    run_until(ctx, || result.get().is_some());
    result.get().unwrap()
}

#[test]
fn registered_buffers_are_shared_until_the_last_user_goes() {
    let _watchdog = Watchdog::new("registered buffers");
    each_ring(Setup::config, |ctx, setup| {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"registered").unwrap();
        let mut buffers = [vec![0u8; 8192], vec![0u8; 8192]];
        let register = |buffer: &mut Vec<u8>, bytes| {
            // SAFETY: the buffers outlive the context's use of them.
            unsafe { ctx.register_buffer(buffer.as_mut_ptr(), bytes) }
        };
        let Ok(first) = register(&mut buffers[0], 8192) else {
            println!(
                "skipped: registered_buffers_are_shared_until_the_last_user_goes needs Linux 5.19 and locked memory"
            );
            return;
        };
        let second = register(&mut buffers[1], 8192).unwrap();
        assert_ne!(first, second);
        assert_eq!(register(&mut buffers[0], 8192).unwrap(), first, "{setup}");
        // As long as another: not the same memory.
        let part = register(&mut buffers[0], 4096).unwrap();
        assert!(part != first && part != second);
        ctx.unregister_buffer(part);
        ctx.unregister_buffer(part);
        for _ in 0..2 {
            assert_eq!(
                read_fixed(ctx, &file, &mut buffers[0], first),
                10,
                "{setup}"
            );
            assert_eq!(&buffers[0][..10], b"registered");
            buffers[0].fill(0);
            ctx.unregister_buffer(first);
        }
        // Fails if the last one does not empty the slot.
        assert_eq!(
            read_fixed(ctx, &file, &mut buffers[0], first),
            -libc::EFAULT
        );
        assert_eq!(
            read_fixed(ctx, &file, &mut buffers[0], second),
            -libc::EFAULT,
            "wrong memory"
        );
        assert_eq!(read_fixed(ctx, &file, &mut buffers[1], second), 10);
        ctx.unregister_buffer(u32::MAX);
        ctx.unregister_buffer(second);
        // As many as there are, differing in length.
        let mut many = vec![0u8; BUFFER_SLOTS as usize];
        let slots: Vec<u32> = (1..=many.len())
            .map(|bytes| register(&mut many, bytes).unwrap())
            .collect();
        let full = register(&mut buffers[0], 8192).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ENFILE));
        slots
            .into_iter()
            .for_each(|slot| ctx.unregister_buffer(slot));
        assert!(ctx.supports(&[opcode::Read::CODE]) && !ctx.supports(&[250]));
        assert!(!ctx.supports(&[opcode::Read::CODE, 250]));
    });
}

#[test]
fn completions_are_a_polled_handler_unless_told_otherwise() {
    let _watchdog = Watchdog::new("completions as a handler");
    each_monitor(|setup| {
        for poll_completions in [true, false] {
            let ctx = Context::new(ContextConfig {
                poll_completions,
                ..setup.config()
            })
            .unwrap();
            if !has_ring(&ctx) {
                return;
            }
            let (_results, id) = register(&ctx);
            for _ in 0..5 {
                // SAFETY: a NOP points nowhere.
                unsafe { ctx.add_sqe(nop(), id, 0) };
                run_until(&ctx, || ctx.requests_in_flight() == 0);
            }
            let stats = ctx.remote().stats();
            let completions = stats.handlers.iter().find(|h| h.name == "completions");
            let completions = completions.unwrap();
            assert_eq!(completions.polled, poll_completions, "{setup}");
            assert_eq!(stats.completions, 5);
            if poll_completions {
                assert!(completions.events >= 1, "{setup}");
            }
        }
    });
}
