//! A guest and its disk: a thread puts requests on a queue in memory, kicks only when it is not
//! told otherwise, and waits for each. Meanwhile a third thread changes the settings and calls the
//! loop. No request may be lost, by whatever way the loop goes to sleep or into poll mode.
//! `IOTHREAD_STRESS_ROUNDS` sets the number of requests.
#![allow(clippy::unwrap_used)]

mod common;

use std::cell::{Cell, RefCell};
use std::os::fd::AsRawFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

use common::*;
use iothread::io_uring::{opcode, types};
use iothread::*;

/// What guest and disk share.
#[derive(Default)]
struct Queue {
    avail: AtomicU32,
    used: AtomicU32,
    /// The guest need not kick.
    no_notify: AtomicBool,
}

struct Disk {
    queue: Arc<Queue>,
    seen: Cell<u32>,
    id: Cell<Option<CompleterId>>,
    file: std::fs::File,
    buffer: Box<std::cell::UnsafeCell<[u8; 64]>>,
    time: Box<types::Timespec>,
}

impl Disk {
    fn work(&self, ctx: &Context) {
        while self.seen.get() != self.queue.avail.load(Ordering::Acquire) {
            let number = self.seen.get();
            self.seen.set(number.wrapping_add(1));
            let Some(id) = self.id.get() else {
                self.queue.used.fetch_add(1, Ordering::Release);
                continue;
            };
            let entry = match number % 3 {
                0 => opcode::Nop::new().build(),
                1 => {
                    let fd = types::Fd(self.file.as_raw_fd());
                    opcode::Read::new(fd, self.buffer.get().cast(), 64).build()
                }
                // Completes by itself, later.
                _ => opcode::Timeout::new(&raw const *self.time).build(),
            };
            // SAFETY: file, buffer and time are the disk's, which is kept until the loop's end.
            unsafe { ctx.add_sqe(entry, id, number) };
        }
    }
}

impl EventHandler for Disk {
    fn on_readable(&self, ctx: &Context) {
        self.work(ctx);
    }

    fn poll(&self) -> bool {
        self.seen.get() != self.queue.avail.load(Ordering::Acquire)
    }

    fn poll_ready(&self, ctx: &Context) {
        self.work(ctx);
    }

    fn poll_begin(&self) {
        self.queue.no_notify.store(true, Ordering::Relaxed);
    }

    fn poll_end(&self) {
        self.queue.no_notify.store(false, Ordering::Relaxed);
        // Before the loop looks a last time: either that sees a request, or the guest sees this.
        fence(Ordering::SeqCst);
    }
}

struct Completions(Weak<Disk>);

impl Completer for Completions {
    fn complete(&self, _ctx: &Context, _token: u32, _result: i32) {
        if let Some(disk) = self.0.upgrade() {
            disk.queue.used.fetch_add(1, Ordering::Release);
        }
    }
}

thread_local! {
    static DISKS: RefCell<Vec<Rc<Disk>>> = const { RefCell::new(Vec::new()) };
}

/// The guest: `rounds` requests, each waited for; some after a pause in which the loop sleeps.
fn guest(queue: &Queue, kick: &std::os::fd::OwnedFd, rounds: u32, setup: &str) {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    for round in 1..=rounds {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        match random % 16 {
            0 => std::thread::sleep(Duration::from_micros(random / 16 % 200)),
            1..4 => (0..random / 16 % 4000).for_each(|_| std::hint::spin_loop()),
            _ => {}
        }
        queue.avail.store(round, Ordering::Release);
        fence(Ordering::SeqCst);
        if !queue.no_notify.load(Ordering::Relaxed) {
            signal(kick);
        }
        let start = Instant::now();
        while queue.used.load(Ordering::Acquire) != round {
            std::thread::yield_now();
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{setup}: request {round} is lost; notifications {}",
                if queue.no_notify.load(Ordering::Relaxed) {
                    "off"
                } else {
                    "on"
                }
            );
        }
    }
}

/// Found to fail without the last look after `poll_end` (coop, epoll, ppoll), and without submitting
/// before the sleep (epoll, ppoll). Rarer losses are for the tests of each fault, and for `loom.rs`.
#[test]
fn no_request_is_lost_while_settings_change() {
    let _watchdog = Watchdog::after("stress", 300);
    let rounds =
        std::env::var("IOTHREAD_STRESS_ROUNDS").map_or(1500, |rounds| rounds.parse().unwrap());
    each_monitor(|setup| {
        let thread = iothread(setup, "stress");
        let remote = thread.remote().clone();
        let disks = [(); 2].map(|()| (Arc::new(Queue::default()), eventfd()));
        for (queue, fd) in &disks {
            let (queue, fd) = (queue.clone(), fd.as_raw_fd());
            let add = move |ctx: &Context| {
                let disk = Rc::new(Disk {
                    queue,
                    seen: Cell::new(0),
                    id: Cell::new(None),
                    file: std::fs::File::open("/dev/zero").unwrap(),
                    buffer: Box::new([0; 64].into()),
                    time: Box::new(types::Timespec::new().nsec(15_000)),
                });
                if ctx.has_ring() {
                    let completions = Completions(Rc::downgrade(&disk));
                    disk.id
                        .set(Some(ctx.register_completer(Rc::new(completions))));
                }
                ctx.add_eventfd(&format!("disk {fd}"), fd, Polling::Polled, disk.clone())
                    .unwrap();
                DISKS.with_borrow_mut(|disks| disks.push(disk));
            };
            remote.call(add).unwrap();
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let guests = disks.each_ref().map(|(queue, fd)| {
                scope.spawn(move || guest(queue, fd, rounds, &setup.to_string()))
            });
            scope.spawn(|| {
                for max_ns in [0, 32768, 200_000, 1].into_iter().cycle() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    remote.set("poll-max-ns", max_ns).unwrap();
                    remote.call(|_| ()).unwrap();
                    std::thread::sleep(Duration::from_micros(700));
                }
            });
            let ends = guests.map(std::thread::ScopedJoinHandle::join);
            stop.store(true, Ordering::Relaxed);
            assert!(ends.iter().all(Result::is_ok));
        });
        println!("{setup}: {} wake-ups", remote.stats().wakeups);
        thread.stop().unwrap();
    });
}
