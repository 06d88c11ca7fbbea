//! The situations that the benchmarks measure.
#![allow(dead_code, clippy::unwrap_used)]

use std::cell::Cell;
use std::hint::black_box;
use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

use iothread::io_uring::{IoUring, opcode, types};
use iothread::{
    Completer, CompleterId, Context, ContextConfig, EventHandler, MonitorKind, PolicyKind,
    PollSettings, Polling, TaskRun,
};
use rustix::event::EventfdFlags;

pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

pub fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
}

/// A queue as the loop sees it: an index in memory that moves when there is work.
#[derive(Default)]
pub struct Queue {
    avail: Cell<u32>,
    seen: Cell<u32>,
    /// Signalled when notifications are switched on, as by a guest that has been waiting for it.
    kick: Cell<Option<i32>>,
    events: Cell<u64>,
}

impl EventHandler for Queue {
    fn on_readable(&self, ctx: &Context) {
        self.poll_ready(ctx);
    }

    #[inline]
    fn poll(&self) -> bool {
        self.avail.get() != self.seen.get()
    }

    fn poll_ready(&self, _ctx: &Context) {
        self.seen.set(self.avail.get());
        self.events.set(self.events.get() + 1);
    }

    fn poll_end(&self) {
        if let Some(fd) = self.kick.get() {
            // SAFETY: the scenario owns the descriptor.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
        }
    }
}

/// A loop with handlers that are all on the poll list.
pub struct Listed {
    ctx: Context,
    queues: Vec<(Rc<Queue>, OwnedFd)>,
}

pub fn context(task_run: TaskRun, policy: PolicyKind, poll_max_ns: i64) -> Context {
    Context::new(ContextConfig {
        monitor: MonitorKind::IoUring,
        policy,
        task_run,
        settings: PollSettings {
            poll_max_ns,
            ..PollSettings::default()
        },
        ..ContextConfig::default()
    })
    .unwrap()
}

impl Listed {
    pub fn new(handlers: usize, policy: PolicyKind, poll_max_ns: i64) -> Self {
        Self::on(context(TaskRun::Defer, policy, poll_max_ns), handlers)
    }

    fn on(ctx: Context, handlers: usize) -> Self {
        let queues: Vec<_> = (0..handlers)
            .map(|n| {
                let queue = Rc::new(Queue::default());
                let fd = eventfd();
                ctx.add_eventfd(
                    &format!("queue {n}"),
                    fd.as_raw_fd(),
                    Polling::Polled,
                    queue.clone(),
                )
                .unwrap();
                (queue, fd)
            })
            .collect();
        for (queue, fd) in &queues {
            signal(fd);
            while queue.events.get() == 0 {
                ctx.poll(true);
            }
        }
        Listed { ctx, queues }
    }

    /// One iteration that finds work of the first handler by polling.
    #[inline]
    pub fn hit(&self) {
        let queue = &self.queues[0].0;
        queue.avail.set(queue.avail.get().wrapping_add(1));
        while !self.ctx.poll(true) {}
        black_box(queue.events.get());
    }

    /// Makes every further iteration a miss: the window ends, and only then comes a kick.
    pub fn prepare_misses(&self) {
        let (queue, fd) = &self.queues[0];
        queue.kick.set(Some(fd.as_raw_fd()));
    }

    /// One iteration that polls in vain and then sleeps.
    #[inline]
    pub fn miss(&self) {
        while !self.ctx.poll(true) {}
    }
}

/// A sleep in the kernel that a signalled eventfd ends: by the loop.
pub struct Blocked {
    ctx: Context,
    queue: Rc<Queue>,
    fd: OwnedFd,
}

impl Blocked {
    pub fn new() -> Self {
        Self::in_mode(TaskRun::Defer)
    }

    pub fn in_mode(task_run: TaskRun) -> Self {
        let ctx = context(task_run, PolicyKind::Weighted, 0);
        let queue = Rc::new(Queue::default());
        let fd = eventfd();
        ctx.add_eventfd("queue", fd.as_raw_fd(), Polling::Polled, queue.clone())
            .unwrap();
        Blocked { ctx, queue, fd }
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub fn remote(&self) -> iothread::Remote {
        self.ctx.remote()
    }

    /// `kick` makes somebody signal the descriptor.
    #[inline]
    pub fn round(&self, kick: &mut dyn FnMut(&OwnedFd)) {
        kick(&self.fd);
        while !self.ctx.poll(true) {}
        black_box(self.queue.events.get());
    }
}

/// Another thread, that signals a descriptor when asked.
pub struct Partner {
    ask: std::sync::Arc<OwnedFd>,
    stop: std::sync::Arc<std::sync::atomic::AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Partner {
    pub fn new(answer: &OwnedFd) -> Self {
        let answer = rustix::io::fcntl_dupfd_cloexec(answer, 3).unwrap();
        let ask = std::sync::Arc::new(eventfd());
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let (asked, stopped) = (ask.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            loop {
                rustix::io::read(&*asked, &mut [0; 8]).unwrap();
                if stopped.load(std::sync::atomic::Ordering::Relaxed) {
                    return;
                }
                signal(&answer);
            }
        });
        Partner {
            ask,
            stop,
            thread: Some(thread),
        }
    }

    pub fn ask(&self) {
        signal(&self.ask);
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        self.stop.store(true, std::sync::atomic::Ordering::Relaxed);
        self.ask();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

/// The same by hand: a READ of the eventfd, and one enter that submits and waits.
pub struct Bare {
    ring: IoUring,
    fd: OwnedFd,
    count: Box<u64>,
}

impl Bare {
    pub fn new() -> Self {
        let ring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .build(256)
            .unwrap();
        Bare {
            ring,
            fd: eventfd(),
            count: Box::new(0),
        }
    }

    pub fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    pub fn run(&mut self, rounds: u64, kick: &mut dyn FnMut(&OwnedFd)) {
        let (mut submitter, mut sq, mut cq) = self.ring.split();
        let _ = submitter.register_ring_fd();
        for _ in 0..rounds {
            kick(&self.fd);
            let at = (&raw mut *self.count).cast();
            let entry = opcode::Read::new(types::Fd(self.fd.as_raw_fd()), at, 8)
                .offset(u64::MAX)
                .build();
            // SAFETY: the count outlives the completion, which is waited for.
            unsafe { sq.push(&entry).unwrap() };
            sq.sync();
            // A wait may end before the event, as by a signal.
            loop {
                submitter.submit_and_wait(1).unwrap();
                cq.sync();
                sq.sync();
                if let Some(completion) = cq.next() {
                    black_box(completion);
                    break;
                }
            }
        }
        let _ = submitter.unregister_ring_fd();
    }
}

/// What a request does. The first two complete while they are submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Nothing, so that the loop's own cost shows.
    Nop,
    /// A read of 512 bytes from the page cache.
    Read,
    /// Waits 10 µs and completes in an interrupt, as a disk does.
    Timer,
}

/// Requests in a closed loop.
pub struct Requests {
    ctx: Context,
    completer: Rc<Closed>,
    idle: Vec<(Rc<Queue>, OwnedFd)>,
}

struct Closed {
    id: Cell<Option<CompleterId>>,
    avail: Cell<u32>,
    depth: u32,
    done: Cell<u64>,
    work: Work,
    file: std::fs::File,
    buffer: std::cell::UnsafeCell<Vec<u8>>,
    time: Box<types::Timespec>,
    fd: OwnedFd,
    notify: Cell<bool>,
}

impl EventHandler for Closed {
    fn on_readable(&self, ctx: &Context) {
        self.poll_ready(ctx);
    }

    #[inline]
    fn poll(&self) -> bool {
        self.avail.get() != 0
    }

    fn poll_ready(&self, ctx: &Context) {
        let id = self.id.get().unwrap();
        for token in 0..self.avail.replace(0) {
            let entry = match self.work {
                Work::Nop => opcode::Nop::new().build(),
                Work::Timer => opcode::Timeout::new(&raw const *self.time).build(),
                Work::Read => {
                    // SAFETY: the buffer has 512 bytes for each token.
                    let at = unsafe { (*self.buffer.get()).as_mut_ptr().add(token as usize * 512) };
                    opcode::Read::new(types::Fixed(0), at, 512)
                        .offset(u64::from(token) * 512)
                        .build()
                }
            };
            // SAFETY: file, buffer and time live as long as the loop runs.
            unsafe { ctx.add_sqe(entry, id, token) };
        }
    }

    fn poll_begin(&self) {
        self.notify.set(false);
    }

    fn poll_end(&self) {
        self.notify.set(true);
    }
}

impl Completer for Closed {
    #[inline]
    fn complete(&self, _ctx: &Context, _token: u32, _result: i32) {
        self.done.set(self.done.get() + 1);
    }

    fn batch_end(&self, _ctx: &Context) {
        self.avail.set(self.depth);
        if self.notify.get() {
            signal(&self.fd);
        }
    }
}

impl Requests {
    /// A queue of `depth` requests, beside `idle` listed handlers without work.
    pub fn new(depth: u32, idle: usize, poll_max_ns: i64, work: Work) -> Self {
        let ctx = context(TaskRun::Defer, PolicyKind::Weighted, poll_max_ns);
        Self::on(Listed::on(ctx, idle), depth, work)
    }

    /// The same with no idle handlers, on a ring of another mode.
    pub fn in_mode(task_run: TaskRun, depth: u32, poll_max_ns: i64, work: Work) -> Self {
        let ctx = context(task_run, PolicyKind::Weighted, poll_max_ns);
        Self::on(Listed::on(ctx, 0), depth, work)
    }

    fn on(listed: Listed, depth: u32, work: Work) -> Self {
        let ctx = listed.ctx;
        let completer = Rc::new(Closed {
            id: Cell::new(None),
            avail: Cell::new(depth),
            depth,
            done: Cell::new(0),
            work,
            file: tempfile::tempfile().unwrap(),
            buffer: std::cell::UnsafeCell::new(vec![0; depth as usize * 512]),
            time: Box::new(types::Timespec::new().nsec(10_000)),
            fd: eventfd(),
            notify: Cell::new(true),
        });
        std::io::Write::write_all(&mut &completer.file, &vec![1; depth as usize * 512]).unwrap();
        ctx.register_file(completer.file.as_raw_fd()).unwrap();
        let id = ctx.register_completer(completer.clone());
        completer.id.set(Some(id));
        let fd = completer.fd.as_raw_fd();
        ctx.add_eventfd("busy", fd, Polling::Polled, completer.clone())
            .unwrap();
        signal(&completer.fd);
        let idle = listed.queues;
        let requests = Requests {
            ctx,
            completer,
            idle,
        };
        requests.run(1000);
        requests
    }

    /// Runs at least so many requests.
    pub fn run(&self, requests: u64) {
        let until = self.completer.done.get() + requests;
        while self.completer.done.get() < until {
            self.ctx.poll(true);
        }
    }
}
