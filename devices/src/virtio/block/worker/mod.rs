//! One queue of a disk on its iothread: the hot path.
//!
//! kick or poll → pop every available chain → parse, check → engine; completions → status byte and
//! used element → one publication and at most one interrupt a batch. All of it runs in the queue's
//! home thread; other threads reach a worker only by a call into that thread.

mod bounce;
mod execute;

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::os::fd::AsRawFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iothread::{Completer, CompleterId, Context, EventHandler, HandlerId, Polling, Remote};
use vmm_sys_util::eventfd::EventFd;

use super::buffer::AlignedBuffer;
use super::check::{Decision, Shape, check};
use super::disk::Disk;
use super::engine::threads::Threads;
use super::engine::{self, Completion, Engine};
use super::request::{Free, Parsed, Pending, Rejected, Requests, Status};
use super::stats::QueueCounters;
use crate::virtio::device::Interrupt;
use crate::virtio::queue::{self, Queue};

thread_local! {
    // The workers at home in this thread. Looked up when one is started, stopped or called, never
    // on the hot path.
    static WORKERS: RefCell<HashMap<u64, Rc<Worker>>> = RefCell::default();
}

/// What a worker is made of, on its way to its home thread.
pub(super) struct Setup {
    pub(super) disk: Arc<Disk>,
    pub(super) index: u16,
    pub(super) features: u64,
    pub(super) notify: Arc<EventFd>,
    pub(super) interrupt: Arc<dyn Interrupt>,
    pub(super) carried: Carried,
}

/// What a queue takes along from one home thread to the next.
pub(super) struct Carried {
    queue: Queue,
    requests: Requests,
    parked: Vec<u32>,
}

// SAFETY: the pointers in the requests' slots point into guest RAM, which the queue keeps mapped,
// and into the slots themselves; none of it belongs to a thread.
unsafe impl Send for Carried {}

impl Carried {
    /// A queue at its beginning.
    pub(super) fn new(queue: Queue) -> Carried {
        let requests = Requests::new(queue.size());
        Carried {
            queue,
            requests,
            parked: Vec::new(),
        }
    }

    /// The next available entry that the queue would take.
    pub(super) fn next_avail(&self) -> u16 {
        self.queue.next_avail()
    }
}

/// Bounce buffers of one queue: a bounded number, made as they are needed and kept.
#[derive(Default)]
struct Bounce {
    free: Vec<AlignedBuffer>,
    made: usize,
    // Requests waiting for a buffer.
    waiting: VecDeque<u32>,
}

struct State {
    queue: Queue,
    requests: Requests,
    engine: Box<dyn Engine>,
    // For what the engine cannot do; made when first needed.
    helper: Option<Threads>,
    // Requests kept by the error policy `stop`, in order.
    parked: Vec<Pending>,
    bounce: Bounce,
    completions: Vec<Completion>,
    // Chains are available but no slot was free.
    starved: bool,
}

/// Why popping ended.
#[derive(PartialEq, Eq)]
enum Popped {
    Everything,
    NoSlot,
    OutOfBudget,
    Broken,
}

/// See the module.
pub(super) struct Worker {
    id: u64,
    this: Weak<Worker>,
    disk: Arc<Disk>,
    index: u16,
    features: u64,
    notify: Arc<EventFd>,
    interrupt: Arc<dyn Interrupt>,
    home: Remote,
    completer: Cell<Option<CompleterId>>,
    kick_handler: Cell<Option<HandlerId>>,
    engine_handlers: RefCell<Vec<HandlerId>>,
    // Poll mode is on: notifications stay off.
    polling: Cell<bool>,
    // The driver is gone: nothing is written to its memory any more.
    dropping: Cell<bool>,
    state: RefCell<State>,
}

/// Receives the eventfd of an engine that has one.
struct EngineEvents {
    worker: Weak<Worker>,
    helper: bool,
}

/// Runs `f` with the worker `id` of this thread, if it is still there.
fn with_worker(id: u64, f: impl FnOnce(&Rc<Worker>)) {
    let worker = WORKERS.with_borrow(|workers| workers.get(&id).cloned());
    if let Some(worker) = worker {
        f(&worker);
    }
}

/// Starts a worker in the thread of `ctx`; its id.
///
/// # Errors
/// The engine could not be set up.
pub(super) fn attach(ctx: &Context, setup: Setup) -> Result<u64, (String, Box<Carried>)> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let Carried {
        queue,
        requests,
        parked,
    } = setup.carried;
    let size = queue.size();
    // The engine needs the completer, which is the worker, which needs the engine: a completer that
    // hands on to the worker breaks the circle.
    let relay = Rc::new(Relay(RefCell::new(Weak::new())));
    let completer = ctx.register_completer(relay.clone());
    let engine = match engine::make(ctx, &setup.disk, completer, size) {
        Ok(engine) => engine,
        Err(error) => {
            ctx.unregister_completer(completer);
            let carried = Carried {
                queue,
                requests,
                parked,
            };
            return Err((error, Box::new(carried)));
        }
    };
    let event_fd = engine.event_fd();
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let parked = parked
        .iter()
        .filter_map(|&token| requests.resume(token))
        .collect();
    let worker = Rc::new_cyclic(|this: &Weak<Worker>| Worker {
        id,
        this: this.clone(),
        disk: setup.disk,
        index: setup.index,
        features: setup.features,
        notify: setup.notify,
        interrupt: setup.interrupt,
        home: ctx.remote(),
        completer: Cell::new(Some(completer)),
        kick_handler: Cell::new(None),
        engine_handlers: RefCell::default(),
        polling: Cell::new(false),
        dropping: Cell::new(false),
        state: RefCell::new(State {
            queue,
            requests,
            engine,
            helper: None,
            parked,
            bounce: Bounce::default(),
            completions: Vec::with_capacity(usize::from(size)),
            starved: false,
        }),
    });
    *relay.0.borrow_mut() = Rc::downgrade(&worker);
    if let Err(error) = worker.register(ctx, event_fd) {
        let carried = worker.detach(ctx, false);
        return Err((error, Box::new(carried)));
    }
    WORKERS.with_borrow_mut(|workers| workers.insert(id, worker.clone()));
    // Kicks that came before are repeated: look once.
    worker.kicked(ctx);
    Ok(id)
}

/// Stops the worker `id` of this thread: waits for its I/O and gives its queue back. With `forget`
/// the driver is gone: nothing is written to its memory, and kept requests are dropped.
pub(super) fn detach(ctx: &Context, id: u64, forget: bool) -> Option<Carried> {
    let worker = WORKERS.with_borrow_mut(|workers| workers.remove(&id))?;
    Some(worker.detach(ctx, forget))
}

/// Resubmits the requests that the worker `id` kept.
pub(super) fn resume(ctx: &Context, id: u64) {
    with_worker(id, |worker| worker.resume(ctx));
}

/// Waits until the worker `id` has no I/O under way. Requests that the driver has made available are
/// done too: their kick may not have been seen yet, and they would begin after the wait.
pub(super) fn drain(ctx: &Context, id: u64) {
    with_worker(id, |worker| {
        worker.kicked(ctx);
        worker.drain(ctx);
    });
}

/// The ring's completions, on their way to the worker.
struct Relay(RefCell<Weak<Worker>>);

impl Completer for Relay {
    #[inline]
    fn complete(&self, ctx: &Context, token: u32, result: i32) {
        // The worker outlives its requests, so the upgrade succeeds.
        if let Some(worker) = self.0.borrow().upgrade() {
            worker.complete(&mut worker.state.borrow_mut(), ctx, token, result);
        }
    }

    fn batch_end(&self, ctx: &Context) {
        if let Some(worker) = self.0.borrow().upgrade() {
            worker.end_batch(&mut worker.state.borrow_mut(), ctx);
        }
    }
}

impl EventHandler for EngineEvents {
    fn on_readable(&self, ctx: &Context) {
        if let Some(worker) = self.worker.upgrade() {
            worker.reap(ctx, self.helper);
        }
    }

    fn poll(&self) -> bool {
        self.worker.upgrade().is_some_and(|worker| {
            let state = worker.state.borrow();
            match &state.helper {
                Some(helper) if self.helper => helper.has_completions(),
                _ => state.engine.has_completions(),
            }
        })
    }

    fn poll_ready(&self, ctx: &Context) {
        self.on_readable(ctx);
    }
}

impl EventHandler for Worker {
    fn on_readable(&self, ctx: &Context) {
        self.counters().kicks.add(1);
        self.kicked(ctx);
    }

    #[inline]
    fn poll(&self) -> bool {
        let state = self.state.borrow();
        state.queue.has_avail() && state.requests.has_free()
    }

    fn poll_ready(&self, ctx: &Context) {
        self.kicked(ctx);
    }

    fn poll_begin(&self) {
        self.polling.set(true);
        self.state.borrow_mut().queue.disable_notifications();
    }

    fn poll_end(&self) {
        self.polling.set(false);
        // In use only when the queue's own work removes the handler, having found the driver broken:
        // then notifications stay off.
        let Ok(mut state) = self.state.try_borrow_mut() else {
            return;
        };
        // Without a free slot a kick could not be acted on; completions turn them on again. The
        // loop polls once more after this, so what came meanwhile is seen.
        if !state.starved {
            state.queue.enable_notifications();
        }
    }
}

impl Worker {
    #[inline]
    fn counters(&self) -> &QueueCounters {
        &self.disk.counters[usize::from(self.index)]
    }

    fn register(&self, ctx: &Context, event_fd: Option<i32>) -> Result<(), String> {
        let this = self.this.upgrade().ok_or("worker is gone")?;
        if let Some(fd) = event_fd {
            self.register_engine(ctx, fd, false)?;
        }
        let name = format!("{}/{}", self.disk.config.id, self.index);
        let handler = ctx
            .add_eventfd(&name, self.notify.as_raw_fd(), Polling::Polled, this)
            .map_err(|error| error.to_string())?;
        self.kick_handler.set(Some(handler));
        Ok(())
    }

    fn register_engine(&self, ctx: &Context, fd: i32, helper: bool) -> Result<(), String> {
        let name = format!("{}/{} engine", self.disk.config.id, self.index);
        let events = Rc::new(EngineEvents {
            worker: self.this.clone(),
            helper,
        });
        let handler = ctx
            .add_eventfd(&name, fd, Polling::Polled, events)
            .map_err(|error| error.to_string())?;
        self.engine_handlers.borrow_mut().push(handler);
        Ok(())
    }

    /// Looks into the queue.
    #[inline]
    fn kicked(&self, ctx: &Context) {
        let mut state = self.state.borrow_mut();
        self.run_queue(&mut state, ctx);
        self.end_batch(&mut state, ctx);
    }

    fn reap(&self, ctx: &Context, helper: bool) {
        let mut state = self.state.borrow_mut();
        let mut completions = std::mem::take(&mut state.completions);
        match &mut state.helper {
            Some(threads) if helper => threads.reap(&mut completions),
            _ => state.engine.reap(&mut completions),
        }
        for &(token, result) in &completions {
            self.complete(&mut state, ctx, token, result);
        }
        completions.clear();
        state.completions = completions;
        self.end_batch(&mut state, ctx);
    }

    /// Takes chains until there are none, and asks to be told of the next.
    #[inline]
    fn run_queue(&self, state: &mut State, ctx: &Context) {
        // A driver that makes chains available as fast as they are answered must not keep the
        // thread from its other disks.
        let mut budget = u32::from(state.queue.size()) * 2;
        if self.polling.get() {
            // Notifications are off and stay off; what comes later is polled.
            self.pop_all(state, ctx, &mut budget);
            return;
        }
        loop {
            state.queue.disable_notifications();
            match self.pop_all(state, ctx, &mut budget) {
                Popped::Everything if state.queue.enable_notifications() => {}
                Popped::OutOfBudget => {
                    // Go on in the next iteration.
                    if let Err(error) = self.notify.write(1) {
                        tracing::error!(%error, "queue notification failed");
                    }
                    return;
                }
                // With no slot free, completions go on where this ends.
                _ => return,
            }
        }
    }

    #[inline]
    fn pop_all(&self, state: &mut State, ctx: &Context, budget: &mut u32) -> Popped {
        if self.dropping.get() {
            return Popped::Broken;
        }
        if self.disk.broken.load(Ordering::Relaxed) {
            self.silence(state, ctx);
            return Popped::Broken;
        }
        let limits = self.disk.limits(self.features);
        loop {
            let Some(free) = state.requests.take() else {
                state.starved = true;
                return Popped::NoSlot;
            };
            if *budget == 0 {
                state.requests.put_back(free);
                return Popped::OutOfBudget;
            }
            *budget -= 1;
            let error = match state.queue.pop() {
                Ok(Some(head)) => match self.begin(state, ctx, free, head, &limits) {
                    Ok(()) => continue,
                    Err(error) => error,
                },
                Ok(None) => {
                    state.requests.put_back(free);
                    return Popped::Everything;
                }
                Err(error) => {
                    state.requests.put_back(free);
                    error
                }
            };
            self.break_device(state, ctx, error);
            return Popped::Broken;
        }
    }

    #[inline]
    fn begin(
        &self,
        state: &mut State,
        ctx: &Context,
        free: Free,
        head: u16,
        limits: &super::check::Limits,
    ) -> Result<(), queue::Error> {
        let parsed = match state.requests.parse(free, &state.queue, head) {
            Ok(parsed) => parsed,
            Err(Rejected::Answer(finished)) => {
                self.counters().invalid_operations.add(1);
                state.requests.retire(finished, &mut state.queue);
                return Ok(());
            }
            Err(Rejected::Broken(error, free)) => {
                state.requests.put_back(free);
                return Err(error);
            }
        };
        let shape = Shape {
            request_type: parsed.request_type,
            sector: parsed.sector,
            readable: parsed.readable,
            writable: parsed.writable,
        };
        match check(limits, shape, || state.requests.payload(&parsed)) {
            Decision::Run { kind, offset, len } => {
                let pending = state.requests.begin(parsed, kind, offset, len);
                self.start(state, ctx, pending);
            }
            Decision::Answer(status) => {
                if status != Status::Ok {
                    self.counters().invalid_operations.add(1);
                }
                self.answer(state, parsed, status, 0);
            }
            Decision::Id => {
                let written = state.requests.reply(&parsed, &self.disk.serial);
                self.answer(state, parsed, Status::Ok, written);
            }
            Decision::Broken(error) => {
                state.requests.abandon(parsed);
                return Err(error);
            }
        }
        Ok(())
    }

    fn answer(&self, state: &mut State, parsed: Parsed, status: Status, written: u32) {
        let finished = state.requests.answer(parsed, status, written);
        state.requests.retire(finished, &mut state.queue);
    }

    /// The end of a batch of chains or completions: submit, publish, interrupt.
    #[inline]
    fn end_batch(&self, state: &mut State, ctx: &Context) {
        if state.starved && state.requests.has_free() {
            state.starved = false;
            self.run_queue(state, ctx);
        }
        if !state.bounce.waiting.is_empty() {
            self.serve_bounce_waiters(state, ctx);
        }
        state.engine.end_batch(ctx);
        if let Some(helper) = &mut state.helper {
            helper.end_batch(ctx);
        }
        if !self.dropping.get() && state.queue.publish() {
            self.counters().interrupts.add(1);
            self.interrupt.queue(self.index);
        }
    }

    /// The driver broke the rules. The whole device stops, this queue at once, the others when
    /// they next look.
    #[cold]
    fn break_device(&self, state: &mut State, ctx: &Context, error: queue::Error) {
        if !self.disk.broken.swap(true, Ordering::AcqRel) {
            tracing::warn!(
                "disk {}: the guest's driver broke queue {}: {error}; the disk waits for a reset",
                self.disk.config.id,
                self.index
            );
            self.interrupt.needs_reset();
        }
        self.silence(state, ctx);
    }

    fn silence(&self, state: &mut State, ctx: &Context) {
        state.queue.set_broken();
        if let Some(handler) = self.kick_handler.take() {
            ctx.remove_handler(handler);
        }
    }

    /// Waits until nothing is in flight but what the error policy keeps.
    fn drain(&self, ctx: &Context) {
        loop {
            let busy = {
                let state = self.state.borrow();
                state.requests.in_flight() > state.parked.len()
            };
            if !busy {
                return;
            }
            ctx.poll(true);
        }
    }

    fn detach(&self, ctx: &Context, forget: bool) -> Carried {
        if let Some(handler) = self.kick_handler.take() {
            ctx.remove_handler(handler);
        }
        self.polling.set(false);
        if forget {
            self.dropping.set(true);
        } else {
            // A last look: what was made available before goes on to the new home.
            self.kicked(ctx);
        }
        self.drain(ctx);
        for handler in self.engine_handlers.take() {
            ctx.remove_handler(handler);
        }
        if let Some(completer) = self.completer.take() {
            ctx.unregister_completer(completer);
        }
        let mut state = self.state.borrow_mut();
        state.engine.detach(ctx);
        self.hand_over(&mut state, forget)
    }

    /// Takes queue and requests out of the state, which is not used any more.
    fn hand_over(&self, state: &mut State, forget: bool) -> Carried {
        let parked: Vec<Pending> = std::mem::take(&mut state.parked);
        let parked = if forget {
            for pending in parked {
                self.forget(state, pending);
            }
            Vec::new()
        } else {
            parked.into_iter().map(Pending::into_token).collect()
        };
        Carried {
            queue: state.queue.take(),
            requests: std::mem::replace(&mut state.requests, Requests::new(0)),
            parked,
        }
    }
}
