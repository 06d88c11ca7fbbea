//! What the tests of the loop share.
#![allow(dead_code, clippy::unwrap_used)]

use std::cell::{Cell, RefCell};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

use iothread::{
    Context, ContextConfig, EventHandler, IoThread, IoThreadConfig, MonitorKind, PolicyKind,
    PollSettings, TaskRun,
};
use rustix::event::EventfdFlags;

/// A monitor, and how its ring runs completion work.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Setup {
    pub monitor: MonitorKind,
    pub task_run: TaskRun,
}

impl std::fmt::Display for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "monitor={} task_run={}",
            self.monitor,
            self.task_run.name()
        )
    }
}

impl Setup {
    pub fn is_ring(self) -> bool {
        self.monitor == MonitorKind::IoUring
    }

    pub fn config(self) -> ContextConfig {
        ContextConfig {
            name: "test".into(),
            monitor: self.monitor,
            task_run: self.task_run,
            ..ContextConfig::default()
        }
    }
}

/// Runs a test over every monitor, with the ring's task-run modes. What this host has not
/// is named and counted as skipped; `POLLUX_NO_SKIP=1` makes that a failure.
/// `IOTHREAD_TEST_SETUP=epoll`, or `defer`, `coop`, `plain` for the ring's modes, runs one only.
pub fn each_monitor(test: impl Fn(Setup)) {
    let ring = TaskRun::ALL.map(|task_run| (MonitorKind::IoUring, task_run));
    let others = [
        (MonitorKind::Epoll, TaskRun::Auto),
        (MonitorKind::Ppoll, TaskRun::Auto),
    ];
    for (monitor, task_run) in ring.into_iter().chain(others) {
        let setup = Setup { monitor, task_run };
        if let Some(only) = std::env::var_os("IOTHREAD_TEST_SETUP")
            && only != monitor.name()
            && only != task_run.name()
        {
            continue;
        }
        match Context::new(setup.config()) {
            Ok(ctx) if setup.is_ring() && ctx.task_run() != Some(task_run) => {
                skip(&format!("{setup}: this kernel has it not"));
            }
            Ok(_) => {
                println!("{setup}");
                test(setup);
            }
            Err(error) => skip(&format!("{setup}: {error}")),
        }
    }
}

/// Says that something was not tested.
pub fn skip(what: &str) {
    assert!(
        std::env::var_os("POLLUX_NO_SKIP").is_none(),
        "skipped: {what}"
    );
    println!("SKIPPED: {what}");
}

/// Whether requests can be made; says so if not.
pub fn has_ring(ctx: &Context) -> bool {
    if !ctx.has_ring() {
        skip("requests: no io_uring on this host");
    }
    ctx.has_ring()
}

/// A loop that polls for up to `poll_max_ns` (0: not at all) by the default rule.
pub fn context(setup: Setup, poll_max_ns: i64) -> Context {
    context_with(setup, PolicyKind::Weighted, poll_max_ns)
}

/// A loop with the given rule.
pub fn context_with(setup: Setup, policy: PolicyKind, poll_max_ns: i64) -> Context {
    Context::new(ContextConfig {
        policy,
        settings: PollSettings {
            poll_max_ns,
            ..PollSettings::default()
        },
        ..setup.config()
    })
    .unwrap()
}

/// A running iothread called `id`, with the loop of `setup`.
pub fn iothread(setup: Setup, id: &str) -> IoThread {
    iothread_with(setup, id, PollSettings::default())
}

/// The same with settings of its own.
pub fn iothread_with(setup: Setup, id: &str, settings: PollSettings) -> IoThread {
    let context = ContextConfig {
        settings,
        ..setup.config()
    };
    IoThread::start(IoThreadConfig {
        id: id.into(),
        context,
        ..IoThreadConfig::default()
    })
    .unwrap()
}

/// An eventfd.
pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

/// Signals an eventfd.
pub fn signal(fd: &OwnedFd) {
    rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
}

/// A second descriptor of the same file, for another thread.
pub fn dup(fd: &OwnedFd) -> OwnedFd {
    rustix::io::fcntl_dupfd_cloexec(fd, 3).unwrap()
}

/// Ends the process if a test does not finish: a hang is a failure with a name.
pub struct Watchdog(std::sync::mpsc::Sender<()>);

impl Watchdog {
    pub fn new(what: &'static str) -> Self {
        Self::after(what, 60)
    }

    pub fn after(what: &'static str, seconds: u64) -> Self {
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            let wait = receiver.recv_timeout(Duration::from_secs(seconds));
            if wait == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                eprintln!("HANG: {what} did not finish within {seconds} s");
                std::process::abort();
            }
        });
        Watchdog(sender)
    }
}

type Callback = Box<dyn Fn(&Context)>;

/// A handler that counts its calls, and whose work is a number in memory: what a queue of a guest
/// is to the loop.
#[derive(Default)]
pub struct Counting {
    /// Work that `poll` finds and `poll_ready` does.
    pub work: Cell<u32>,
    pub readable: Cell<u32>,
    pub writable: Cell<u32>,
    pub polls: Cell<u64>,
    pub poll_ready: Cell<u32>,
    pub begun: Cell<u32>,
    pub ended: Cell<u32>,
    pub errors: RefCell<Vec<i32>>,
    pub on_readable: RefCell<Option<Callback>>,
    pub on_poll_ready: RefCell<Option<Callback>>,
    pub on_poll: RefCell<Option<Box<dyn Fn()>>>,
    pub on_poll_end: RefCell<Option<Box<dyn Fn()>>>,
    /// Read from when readable (not for eventfds of the loop).
    pub drain: Cell<Option<RawFd>>,
}

impl Counting {
    pub fn new() -> Rc<Self> {
        Rc::default()
    }

    /// What a guest does: adds work, and notifies unless notifications are off.
    pub fn add_work(&self, fd: &OwnedFd) {
        self.work.set(1);
        if !self.is_off() {
            signal(fd);
        }
    }

    /// Whether its notifications are off.
    pub fn is_off(&self) -> bool {
        self.begun.get() > self.ended.get()
    }
}

fn bump<T: Copy + std::ops::Add<Output = T> + From<u8>>(cell: &Cell<T>) {
    cell.set(cell.get() + T::from(1));
}

impl EventHandler for Counting {
    fn on_readable(&self, ctx: &Context) {
        bump(&self.readable);
        self.work.set(0);
        if let Some(fd) = self.drain.get() {
            let mut buffer = [0; 512];
            // SAFETY: the test keeps the descriptor open.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
            let _ = rustix::io::read(fd, &mut buffer);
        }
        if let Some(callback) = &*self.on_readable.borrow() {
            callback(ctx);
        }
    }

    fn on_writable(&self, _ctx: &Context) {
        bump(&self.writable);
    }

    fn on_error(&self, _ctx: &Context, error: &std::io::Error) {
        self.errors
            .borrow_mut()
            .push(error.raw_os_error().unwrap_or(0));
    }

    fn poll(&self) -> bool {
        bump(&self.polls);
        if let Some(callback) = &*self.on_poll.borrow() {
            callback();
        }
        self.work.get() != 0
    }

    fn poll_ready(&self, ctx: &Context) {
        bump(&self.poll_ready);
        if let Some(callback) = &*self.on_poll_ready.borrow() {
            callback(ctx);
        }
        self.work.set(0);
    }

    fn poll_begin(&self) {
        bump(&self.begun);
    }

    fn poll_end(&self) {
        bump(&self.ended);
        if let Some(callback) = &*self.on_poll_end.borrow() {
            callback();
        }
    }
}

/// Adds a polled eventfd handler.
pub fn add_polled(
    ctx: &Context,
    name: &str,
    handler: &Rc<Counting>,
) -> (OwnedFd, iothread::HandlerId) {
    let fd = eventfd();
    let handler: Rc<dyn EventHandler> = Rc::clone(handler) as _;
    let id = ctx
        .add_eventfd(name, fd.as_raw_fd(), iothread::Polling::Polled, handler)
        .unwrap();
    (fd, id)
}

/// Iterates until `done`.
pub fn run_until(ctx: &Context, done: impl Fn() -> bool) {
    while !done() {
        ctx.poll(true);
    }
}
