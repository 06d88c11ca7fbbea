//! The loop's state and its public face. One iteration is in `iterate.rs`, polling in
//! `polling.rs`, driving by another loop in `embed.rs`.

mod embed;
mod handlers;
mod iterate;
mod measure;
mod polling;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::EventfdFlags;

use self::embed::Outside;
use self::polling::PollList;
use crate::bottom_half::BottomHalves;
use crate::error::Error;
use crate::handler::Node;
use crate::inbox::Inbox;
use crate::monitor::{EpollMonitor, Monitor, MonitorKind, PpollMonitor, RingMonitor};
use crate::notify::Notify;
use crate::policy::{Policy, PolicyKind};
use crate::remote::{Remote, Shared, enter_thread, leave_thread};
use crate::ring::{Ring, TaskRun, explain};
use crate::settings::{PollSettings, SharedSettings};
use crate::sqe::Requests;
use crate::stats::{HandlerSlot, HandlerTable, LoopCounters};
use crate::timer::Timers;
use crate::trace::{TraceEvent, TraceSink};

/// Slot of the notifier's handler.
pub(crate) const NOTIFIER: u32 = 0;
/// Slot of the completion ring, as a polled handler.
pub(crate) const COMPLETIONS: u32 = 1;

/// How a [`Context`] is to be.
#[derive(Debug, Clone)]
pub struct ContextConfig {
    /// For messages and statistics.
    pub name: String,
    /// How readiness is learned.
    pub monitor: MonitorKind,
    /// The polling rule.
    pub policy: PolicyKind,
    /// Its settings.
    pub settings: PollSettings,
    /// Completions of `add_sqe` count as a polled handler of their own.
    pub poll_completions: bool,
    /// Entries of the submission queue; a power of two. When it is full it is submitted.
    pub submission_entries: u32,
    /// Entries of the completion queue; a power of two. More completions at once than that cost
    /// further enters, nothing else.
    pub completion_entries: u32,
    /// How long a handler stays on the poll list without being dispatched, in nanoseconds.
    pub idle_ns: i64,
    /// How the kernel runs completion work. An [`IoThread`](crate::IoThread) makes
    /// [`TaskRun::Defer`] of [`TaskRun::Auto`].
    pub task_run: TaskRun,
}

impl Default for ContextConfig {
    fn default() -> Self {
        ContextConfig {
            name: "main".into(),
            monitor: MonitorKind::default(),
            policy: PolicyKind::default(),
            settings: PollSettings::default(),
            poll_completions: true,
            submission_entries: 256,
            completion_entries: 4096,
            idle_ns: polling::IDLE_NS,
            task_run: TaskRun::Auto,
        }
    }
}

/// An event loop. Belongs to the thread that made it; cloning makes another reference.
///
/// No other thread can run an iteration, and so take away a notification that the home thread
/// sleeps for: it has a [`Remote`], which cannot.
///
/// ```compile_fail,E0277
/// let ctx = iothread::Context::new(iothread::ContextConfig::default()).unwrap();
/// std::thread::spawn(move || ctx.poll(false));
/// ```
#[derive(Clone)]
pub struct Context(Rc<State>);

/// A reference that does not keep the loop alive.
#[derive(Clone)]
pub struct WeakContext(Weak<State>);

impl WeakContext {
    /// The loop, if it still exists.
    #[must_use]
    pub fn upgrade(&self) -> Option<Context> {
        self.0.upgrade().map(Context)
    }
}

/// What a [`Context`] refers to.
pub(crate) struct State {
    // What an iteration reads comes first.
    pub(crate) shared: Arc<Shared>,
    pub(crate) ring: Option<Rc<Ring>>,
    monitor: Box<dyn Monitor>,
    /// `poll_max_ns` in effect; 0: polling is off.
    pub(crate) max_ns: Cell<i64>,
    window_ns: Cell<i64>,
    settings_seen: Cell<u32>,
    /// Nested iterations, the outermost included.
    depth: Cell<u32>,
    /// Poll mode is on: notifications of the listed handlers are off.
    poll_started: Cell<bool>,
    pub(crate) completions_listed: Cell<bool>,
    pub(crate) poll_completions: bool,
    must_scan: bool,
    /// Iterations since the monitor was last asked.
    unscanned: Cell<u32>,
    idle_ns: i64,
    /// When idle handlers are looked for next.
    idle_check_ns: Cell<i64>,
    last_completion_ns: Cell<i64>,
    /// When the events of the current iteration were in hand.
    dispatch_ns: Cell<i64>,
    /// Polling found work in the current iteration.
    polled: Cell<bool>,
    poll_list: RefCell<PollList>,
    /// A handler was deleted while the list was being walked.
    list_stale: Cell<bool>,
    /// Counts of the completion ring.
    pub(crate) completions: HandlerSlot,
    /// When the loop's numbers were last read for its policy or a trace.
    read_ns: Cell<i64>,
    /// When intervals were last shown to other threads.
    published_ns: Cell<i64>,
    ready: RefCell<VecDeque<Rc<Node>>>,
    /// Slots dispatched, those of outer iterations below those of nested ones.
    active: RefCell<Vec<u32>>,
    policy: RefCell<Box<dyn Policy>>,
    pub(crate) bottom_halves: BottomHalves,
    pub(crate) timers: Timers,
    pub(crate) requests: Requests,
    pub(crate) completion_entries: u32,
    nodes: RefCell<Vec<Option<Rc<Node>>>>,
    free_nodes: RefCell<Vec<u32>>,
    generation: Cell<u32>,
    outside: Outside,
    tracing: Cell<bool>,
    trace_sink: RefCell<Option<Rc<dyn TraceSink>>>,
    trace_id: u64,
    fallback: Option<String>,
    /// The last error of the monitor that was reported.
    reported: Cell<i32>,
}

struct Monitors {
    monitor: Box<dyn Monitor>,
    ring: Option<Rc<Ring>>,
    fallback: Option<String>,
}

fn setup(what: &'static str) -> impl FnOnce(std::io::Error) -> Error {
    move |source| Error::Setup { what, source }
}

fn open_monitor(config: &ContextConfig) -> Result<Monitors, Error> {
    // epoll and ppoll watch the ring's descriptor, which DEFER_TASKRUN makes mute.
    let task_run = match config.monitor {
        MonitorKind::Epoll | MonitorKind::Ppoll if config.task_run == TaskRun::Defer => {
            TaskRun::Coop
        }
        _ => config.task_run,
    };
    let entries = (config.submission_entries, config.completion_entries);
    let ring = Ring::new(entries.0, entries.1, task_run).map(Rc::new);
    let mut fallback = None;
    let monitor: Box<dyn Monitor> = match (config.monitor, &ring) {
        (MonitorKind::Auto | MonitorKind::IoUring, Ok(ring)) => {
            Box::new(RingMonitor::new(Rc::clone(ring)))
        }
        (MonitorKind::IoUring, Err(error)) => {
            return Err(Error::Monitor {
                name: "io_uring",
                reason: explain(error),
            });
        }
        (MonitorKind::Auto, Err(error)) => {
            let reason = explain(error);
            match EpollMonitor::new() {
                Ok(epoll) => {
                    fallback = Some(format!(
                        "io_uring cannot be used ({reason}); falling back to epoll"
                    ));
                    Box::new(epoll)
                }
                Err(error) => {
                    fallback = Some(format!(
                        "io_uring cannot be used ({reason}), nor epoll ({error}); falling back \
                         to ppoll"
                    ));
                    Box::new(PpollMonitor::default())
                }
            }
        }
        (MonitorKind::Epoll, _) => {
            Box::new(EpollMonitor::new().map_err(|error| Error::Monitor {
                name: "epoll",
                reason: error.to_string(),
            })?)
        }
        (MonitorKind::Ppoll, _) => Box::new(PpollMonitor::default()),
    };
    if let Some(line) = &fallback {
        tracing::warn!(iothread = config.name, "{line}");
    }
    Ok(Monitors {
        monitor,
        ring: ring.ok(),
        fallback,
    })
}

impl Context {
    /// A loop for the calling thread.
    ///
    /// # Errors
    /// A setting out of range, a monitor asked for by name that cannot be had, or a system call
    /// that fails (descriptors used up).
    pub fn new(config: ContextConfig) -> Result<Context, Error> {
        config.settings.validate()?;
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|errno| setup("eventfd")(errno.into()))?;
        let Monitors {
            monitor,
            ring,
            fallback,
        } = open_monitor(&config)?;
        let shared = Arc::new(Shared {
            notify: Notify::new(),
            inbox: Inbox::new(),
            settings: SharedSettings::new(&config.settings),
            counters: LoopCounters::new(),
            handlers: HandlerTable::new(),
            eventfd,
            name: config.name,
            policy: config.policy,
        });
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let state = State {
            max_ns: Cell::new(config.settings.poll_max_ns),
            window_ns: Cell::new(0),
            settings_seen: Cell::new(shared.settings.generation()),
            depth: Cell::new(0),
            poll_started: Cell::new(false),
            completions_listed: Cell::new(false),
            poll_completions: config.poll_completions,
            must_scan: monitor.must_scan(),
            unscanned: Cell::new(0),
            idle_ns: config.idle_ns,
            idle_check_ns: Cell::new(0),
            last_completion_ns: Cell::new(0),
            dispatch_ns: Cell::new(0),
            polled: Cell::new(false),
            poll_list: RefCell::default(),
            list_stale: Cell::new(false),
            completions: HandlerSlot::new(&shared, COMPLETIONS),
            read_ns: Cell::new(0),
            published_ns: Cell::new(0),
            ready: RefCell::default(),
            active: RefCell::default(),
            policy: RefCell::new(config.policy.build(&config.settings)),
            bottom_halves: BottomHalves::default(),
            timers: Timers::new(),
            requests: Requests::default(),
            completion_entries: config.completion_entries,
            // The two slots of our own.
            nodes: RefCell::new(vec![None, None]),
            free_nodes: RefCell::default(),
            generation: Cell::new(0),
            outside: Outside::default(),
            tracing: Cell::new(false),
            trace_sink: RefCell::default(),
            trace_id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            fallback,
            reported: Cell::new(0),
            monitor,
            ring,
            shared,
        };
        state.window_ns.set(state.policy.borrow().window_ns());
        state.show_window();
        let ctx = Context(Rc::new(state));
        ctx.0.add_internal_handlers()?;
        enter_thread(&ctx);
        Ok(ctx)
    }

    #[inline]
    pub(crate) fn state(&self) -> &State {
        &self.0
    }

    /// A reference that does not keep the loop alive, for what the loop itself keeps.
    #[must_use]
    pub fn downgrade(&self) -> WeakContext {
        WeakContext(Rc::downgrade(&self.0))
    }

    /// A handle for other threads.
    #[must_use]
    pub fn remote(&self) -> Remote {
        Remote::new(&self.0.shared)
    }

    /// The loop's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.shared.name
    }

    /// The monitor in use; never `Auto`.
    #[must_use]
    pub fn monitor(&self) -> MonitorKind {
        self.0.monitor.kind()
    }

    /// How the kernel runs the ring's completion work; None without a ring.
    #[must_use]
    pub fn task_run(&self) -> Option<TaskRun> {
        self.0.ring.as_ref().map(|ring| ring.task_run())
    }

    /// Why `monitor=auto` did not take io_uring, in one line; None if it did.
    #[must_use]
    pub fn fallback(&self) -> Option<&str> {
        self.0.fallback.as_deref()
    }

    /// Whether poll mode is on, which means that notifications are off. A handler that is added
    /// or attached meanwhile gets its `poll_begin` when it joins the poll list.
    #[must_use]
    pub fn is_polling(&self) -> bool {
        self.0.poll_started.get()
    }

    /// Requests of `add_sqe` and `add_sqe_once` whose completion is still to come.
    #[must_use]
    pub fn requests_in_flight(&self) -> u32 {
        self.0.requests.in_flight()
    }

    /// One iteration: polls, waits if `blocking` until there is something to do, does it. True if
    /// there was progress; a notification alone is none, nor is an idle bottom half. May be called
    /// from any callback of the same loop.
    pub fn poll(&self, blocking: bool) -> bool {
        self.0.iterate(self, blocking)
    }

    /// Sends trace events to `sink` from now on, after the names and settings that they refer to;
    /// None switches them off.
    pub fn set_trace_sink(&self, sink: Option<Rc<dyn TraceSink>>) {
        if let Some(sink) = &sink {
            self.0.describe_to(&**sink);
        }
        self.0.tracing.set(sink.is_some());
        *self.0.trace_sink.borrow_mut() = sink;
    }

    /// The number by which trace events tell this loop from others of the process.
    #[must_use]
    pub fn trace_id(&self) -> u64 {
        self.0.trace_id
    }

    /// Ends the loop's dealings with other threads and waits until all requests on the ring have
    /// completed. Bottom halves handed over before are run, and what those schedule, but not for
    /// ever; later calls fail.
    pub fn shut_down(&self) {
        /// Iterations for bottom halves alone: one that always schedules itself ends here.
        const LAST_ITERATIONS: u32 = 1000;
        self.0.close_inbox();
        let mut left = LAST_ITERATIONS;
        loop {
            if self.0.requests.in_flight() == 0 {
                if left == 0 || !self.0.bottom_halves.any() {
                    break;
                }
                left -= 1;
            }
            self.poll(true);
        }
        self.0.publish();
    }
}

impl State {
    /// The ring, which `add_sqe` needs.
    #[inline]
    pub(crate) fn ring(&self) -> &Ring {
        self.ring
            .as_deref()
            .expect("add_sqe needs a ring; has_ring() tells whether there is one")
    }

    /// The trace point: `event` is only made when somebody listens.
    #[inline]
    pub(crate) fn trace<'a>(&self, event: impl FnOnce(u64) -> TraceEvent<'a>) {
        if self.tracing.get() {
            self.trace_cold(&event(self.trace_id));
        }
    }

    #[cold]
    fn trace_cold(&self, event: &TraceEvent<'_>) {
        self.tell_sink(|sink| sink.event(event));
    }

    #[cold]
    fn tell_sink(&self, tell: impl FnOnce(&dyn TraceSink)) {
        let sink = self.trace_sink.borrow().clone();
        if let Some(sink) = sink {
            tell(&*sink);
        }
    }

    /// Handlers and settings, to a sink that has just come.
    #[cold]
    fn describe_to(&self, sink: &dyn TraceSink) {
        sink.settings(&self.shared.settings.load());
        if let Some(ring) = &self.ring {
            sink.handler(COMPLETIONS.into(), ring.fd(), "completions");
        }
        let nodes = self.nodes.borrow();
        for node in nodes.iter().flatten().filter(|node| !node.deleted.get()) {
            sink.handler(node.index.into(), node.fd, &node.name);
        }
    }

    /// Reports a failing system call of the monitor, once for a row of equal ones, and keeps the
    /// loop from spinning on it.
    #[cold]
    fn monitor_failed(&self, error: &std::io::Error) {
        self.shared.counters.errors.add(1);
        let code = error.raw_os_error().unwrap_or(-1);
        if self.reported.replace(code) != code {
            tracing::error!(iothread = self.shared.name, %error, "the event loop's wait failed");
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }

    /// Whether the current iteration runs within another one.
    #[inline]
    pub(crate) fn depth_is_nested(&self) -> bool {
        self.depth.get() > 1
    }

    fn notifier_fd(&self) -> RawFd {
        self.shared.eventfd.as_raw_fd()
    }
}

impl Drop for State {
    fn drop(&mut self) {
        leave_thread(&self.shared);
        self.close_inbox();
        self.drop_bottom_halves();
        self.cancel_all();
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("name", &self.name())
            .field("monitor", &self.monitor())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for WeakContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WeakContext")
    }
}
