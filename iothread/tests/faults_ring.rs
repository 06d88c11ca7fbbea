//! Faults of requests and their completions: numbers 7, 12, 13 and 15 of the list in
//! `tests/README.md`.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::{Cell, RefCell};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::rc::Rc;

use common::*;
use iothread::io_uring::{opcode, types};
use iothread::transfer::{MAX_RETRIES, Transfer};
use iothread::*;
use rustix::event::{PollFd, PollFlags};

type Then = Box<dyn Fn(&Context)>;

/// Tells when it is freed, and that nobody calls it afterwards.
struct Mortal {
    removed: Cell<bool>,
    calls: Cell<u32>,
    freed: Rc<Cell<u32>>,
    then: RefCell<Option<Then>>,
}

impl Drop for Mortal {
    fn drop(&mut self) {
        self.freed.set(self.freed.get() + 1);
    }
}

impl Mortal {
    fn called(&self, ctx: &Context) {
        assert!(!self.removed.get(), "called after its removal");
        self.calls.set(self.calls.get() + 1);
        if let Some(then) = &*self.then.borrow() {
            then(ctx);
        }
    }
}

impl EventHandler for Mortal {
    fn on_readable(&self, ctx: &Context) {
        self.called(ctx);
    }

    fn on_error(&self, _ctx: &Context, error: &std::io::Error) {
        panic!("the completion of another's watch came here: {error}");
    }

    fn poll(&self) -> bool {
        assert!(!self.removed.get(), "polled after its removal");
        false
    }
}

fn mortal(freed: &Rc<Cell<u32>>) -> Rc<Mortal> {
    Rc::new(Mortal {
        removed: Cell::new(false),
        calls: Cell::new(0),
        freed: freed.clone(),
        then: RefCell::new(None),
    })
}

/// Fails on a ring if a handler is freed with its watch in flight, or if the watch is not
/// cancelled. epoll and ppoll forget a descriptor at once.
#[test]
fn fault_07_removal_against_completion() {
    let _watchdog = Watchdog::new("fault 7");
    each_monitor(|setup| {
        for polling in [Polling::Never, Polling::Polled] {
            let ctx = context(setup, 32768);
            let freed = Rc::new(Cell::new(0));
            let mut expected = 0;
            // How far the watch has come when it is removed: wanted, in flight, with an event in
            // the kernel, with an event reaped by an iteration that has not dispatched it.
            for stage in 0..3 {
                for eventfd_handler in [true, false] {
                    let fd = eventfd();
                    let handler = mortal(&freed);
                    let id = if eventfd_handler {
                        ctx.add_eventfd("m", fd.as_raw_fd(), polling, handler.clone())
                    } else {
                        ctx.add_handler(
                            "m",
                            fd.as_raw_fd(),
                            Interest::Read,
                            polling,
                            handler.clone(),
                        )
                    }
                    .unwrap();
                    if stage >= 1 {
                        ctx.poll(false);
                    }
                    if stage == 2 {
                        signal(&fd);
                    }
                    ctx.remove_handler(id);
                    handler.removed.set(true);
                    drop(handler);
                    // The descriptor's number goes to another file at once, and the place to
                    // another handler, which must not get the old one's completion.
                    drop(fd);
                    expected += 1;
                    let other = eventfd();
                    let successor = mortal(&freed);
                    let id = ctx
                        .add_eventfd("s", other.as_raw_fd(), polling, successor.clone())
                        .unwrap();
                    for _ in 0..3 {
                        ctx.poll(false);
                    }
                    assert_eq!(
                        freed.get(),
                        expected,
                        "{setup}: stage {stage}: kept for ever"
                    );
                    assert_eq!(successor.calls.get(), 0, "{setup}: stage {stage}");
                    signal(&other);
                    run_until(&ctx, || successor.calls.get() == 1);
                    ctx.remove_handler(id);
                    drop(successor);
                    expected += 1;
                    while freed.get() < expected {
                        ctx.poll(false);
                    }
                }
            }
        }
    });
}

/// Fails if a deleted handler that was ready is dispatched.
#[test]
fn fault_07_a_handler_removes_itself_or_one_that_is_ready() {
    let _watchdog = Watchdog::new("fault 7, callbacks");
    each_monitor(|setup| {
        let ctx = context(setup, 32768);
        let freed = Rc::new(Cell::new(0));
        let (a, b) = (mortal(&freed), mortal(&freed));
        let (fd_a, fd_b) = (eventfd(), eventfd());
        let id_a = ctx
            .add_eventfd("a", fd_a.as_raw_fd(), Polling::Polled, a.clone())
            .unwrap();
        let id_b = ctx
            .add_eventfd("b", fd_b.as_raw_fd(), Polling::Polled, b.clone())
            .unwrap();
        for _ in 0..3 {
            ctx.poll(false);
        }
        // Whoever comes first removes both, in the middle of its own callback.
        for handler in [&a, &b] {
            let (a, b) = (Rc::downgrade(&a), Rc::downgrade(&b));
            *handler.then.borrow_mut() = Some(Box::new(move |ctx| {
                ctx.remove_handler(id_a);
                ctx.remove_handler(id_b);
                for handler in [&a, &b] {
                    handler.upgrade().unwrap().removed.set(true);
                }
                // And a nested loop reaps what the removal left.
                ctx.poll(false);
            }));
        }
        signal(&fd_a);
        signal(&fd_b);
        run_until(&ctx, || a.calls.get() + b.calls.get() == 1);
        for _ in 0..5 {
            ctx.poll(false);
        }
        assert_eq!(a.calls.get() + b.calls.get(), 1, "{setup}");
        drop((a, b));
        assert_eq!(freed.get(), 2, "{setup}");
    });
}

/// Fails if the loop's end does not wait until the kernel holds no request: one of those would
/// take what is written afterwards, into memory that may be another's by then.
#[test]
fn fault_07_a_loop_is_dropped_with_watches_and_requests_in_flight() {
    let _watchdog = Watchdog::new("fault 7, drop");
    each_monitor(|setup| {
        for _ in 0..5 {
            let freed = Rc::new(Cell::new(0));
            let ctx = context(setup, 32768);
            let (fd, reader_fd) = (eventfd(), eventfd());
            ctx.add_eventfd("m", fd.as_raw_fd(), Polling::Polled, mortal(&freed))
                .unwrap();
            if ctx.has_ring() {
                // Never completes by itself; the buffer is kept for whoever writes to it.
                let file = Rc::new(dup(&reader_fd));
                let buffer = Box::leak(Box::new([0u8; 8]));
                let fd = types::Fd(file.as_raw_fd());
                let entry = opcode::Read::new(fd, buffer.as_mut_ptr(), 8).build();
                // SAFETY: the closure keeps the descriptor, and the buffer is never freed.
                unsafe { ctx.add_sqe_once(entry, move |_, _| drop(file)) };
            }
            ctx.poll(false);
            ctx.poll(false);
            drop(ctx);
            assert_eq!(freed.get(), 1, "{setup}");
            for fd in [&fd, &reader_fd] {
                signal(fd);
                std::thread::sleep(std::time::Duration::from_millis(2));
                let mut fds = [PollFd::new(fd, PollFlags::IN)];
                let now = rustix::event::Timespec {
                    tv_sec: 0,
                    tv_nsec: 0,
                };
                let ready = rustix::event::poll(&mut fds, Some(&now)).unwrap();
                assert_eq!(ready, 1, "{setup}: a request outlived its loop");
            }
        }
    });
}

/// Whether pipes take RWF_NOWAIT, as they do since Linux 6.4.
fn pipes_can_refuse_to_wait() -> bool {
    let (reader, _writer) = std::io::pipe().unwrap();
    let mut byte = 0u8;
    let part = libc::iovec {
        iov_base: (&raw mut byte).cast(),
        iov_len: 1,
    };
    // SAFETY: one part, of one byte, which lives.
    let read =
        unsafe { libc::preadv2(reader.as_raw_fd(), &raw const part, 1, -1, libc::RWF_NOWAIT) };
    read < 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN)
}

/// Fails if EAGAIN is not tried again, or for ever.
#[test]
fn fault_12_spurious_eagain_is_tried_again_but_not_for_ever() {
    if !pipes_can_refuse_to_wait() {
        println!("skipped: fault_12 needs pipes that take RWF_NOWAIT (Linux 6.4)");
        return;
    }
    let _watchdog = Watchdog::new("fault 12");
    each_monitor(|setup| {
        let ctx = context(setup, 32768);
        if !has_ring(&ctx) {
            return;
        }
        let (reader, mut writer) = std::io::pipe().unwrap();
        let reader = Rc::new(reader);
        let result = Rc::new(RefCell::new(None));
        // With RWF_NOWAIT, a read of an empty pipe completes with EAGAIN.
        let start = |reader: Rc<std::io::PipeReader>| {
            let done = result.clone();
            Transfer::read(reader, vec![0; 5], 0)
                .with_flags(libc::RWF_NOWAIT)
                .start(&ctx, move |_, buffer, result| {
                    *done.borrow_mut() = Some((buffer, result.map_err(|e| e.raw_os_error())));
                });
        };
        let made = || ctx.remote().stats().submissions;
        start(reader);
        // Runs after the first completion was reaped, before the request is made again.
        ctx.defer(move |_| writer.write_all(b"later").unwrap());
        run_until(&ctx, || result.borrow().is_some());
        assert_eq!(result.take(), Some((b"later".to_vec(), Ok(5))), "{setup}");
        assert!(made() >= 2, "{setup}: the first one is meant to fail");

        let before = made();
        let (empty, _writer) = std::io::pipe().unwrap();
        start(Rc::new(empty));
        run_until(&ctx, || result.borrow().is_some());
        let (_, outcome) = result.take().unwrap();
        assert_eq!(outcome, Err(Some(libc::EAGAIN)), "{setup}");
        assert_eq!(made() - before, u64::from(MAX_RETRIES) + 1, "{setup}");
    });
}

/// Fails if the offset grows by less than the total done so far.
#[test]
fn fault_13_short_transfers_go_on_where_they_ended() {
    let _watchdog = Watchdog::new("fault 13");
    each_monitor(|setup| {
        let ctx = context(setup, 32768);
        if !has_ring(&ctx) {
            return;
        }
        let data: Vec<u8> = (0..10_000u32).map(|n| (n * 7 % 251) as u8).collect();
        let file = Rc::new(tempfile::tempfile().unwrap());
        let result = Rc::new(RefCell::new(None));
        for (pieces, offset) in [(997, 0), (1, 3), (4096, 4096)] {
            let length = if pieces == 1 { 40 } else { data.len() };
            let done = result.clone();
            Transfer::write(file.clone(), data[..length].to_vec(), offset)
                .in_pieces_of(pieces)
                .start(&ctx, move |_, _, result| {
                    *done.borrow_mut() = Some(result.unwrap());
                });
            run_until(&ctx, || result.borrow().is_some());
            assert_eq!(result.take(), Some(length));
            let read = Rc::new(RefCell::new(None));
            let done = read.clone();
            Transfer::read(file.clone(), vec![0; length], offset)
                .in_pieces_of(pieces + 1)
                .start(&ctx, move |_, buffer, result| {
                    *done.borrow_mut() = Some((buffer, result.unwrap()));
                });
            run_until(&ctx, || read.borrow().is_some());
            let (buffer, bytes) = read.take().unwrap();
            assert_eq!(bytes, length, "{setup}");
            assert!(
                buffer == data[..length],
                "{setup}: wrong data, pieces of {pieces}"
            );
        }
        // The end of the file ends a read.
        let done = result.clone();
        let end = file.metadata().unwrap().len();
        Transfer::read(file.clone(), vec![0; 100], end - 10)
            .in_pieces_of(7)
            .start(&ctx, move |_, _, result| {
                *done.borrow_mut() = Some(result.unwrap());
            });
        run_until(&ctx, || result.borrow().is_some());
        assert_eq!(result.take(), Some(10), "{setup}");
        let mut all = Vec::new();
        let mut reader = &*file;
        std::io::Seek::rewind(&mut reader).unwrap();
        reader.read_to_end(&mut all).unwrap();
        assert_eq!(all.len() as u64, end);
    });
}

/// Submits the next request from within the completion of the last.
struct Resubmit {
    id: Cell<Option<CompleterId>>,
    left: Cell<u32>,
    lowest: Cell<usize>,
    highest: Cell<usize>,
}

impl Completer for Resubmit {
    fn complete(&self, ctx: &Context, _token: u32, _result: i32) {
        let here = 0u8;
        let here = std::ptr::from_ref(&here).addr();
        self.lowest.set(self.lowest.get().min(here));
        self.highest.set(self.highest.get().max(here));
        if self.left.get() > 0 {
            self.left.set(self.left.get() - 1);
            // SAFETY: a NOP points nowhere.
            unsafe { ctx.add_sqe(opcode::Nop::new().build(), self.id.get().unwrap(), 0) };
        }
    }
}

/// Fails if completions are handed out by the call that submits.
#[test]
fn fault_15_synchronous_completions_do_not_recurse() {
    let _watchdog = Watchdog::new("fault 15");
    each_monitor(|setup| {
        let ctx = context(setup, 32768);
        if !has_ring(&ctx) {
            return;
        }
        let completer = Rc::new(Resubmit {
            id: Cell::new(None),
            left: Cell::new(20_000),
            lowest: Cell::new(usize::MAX),
            highest: Cell::new(0),
        });
        let id = ctx.register_completer(completer.clone());
        completer.id.set(Some(id));
        // SAFETY: a NOP points nowhere. It completes while it is submitted.
        unsafe { ctx.add_sqe(opcode::Nop::new().build(), id, 0) };
        assert_eq!(
            completer.left.get(),
            20_000,
            "{setup}: completed within the call"
        );
        while completer.left.get() > 0 || ctx.requests_in_flight() > 0 {
            ctx.poll(true);
        }
        let spread = completer.highest.get() - completer.lowest.get();
        assert!(spread < 4096, "{setup}: {spread} bytes of stack");
    });
}
