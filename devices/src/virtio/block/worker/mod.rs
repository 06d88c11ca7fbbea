//! One queue of a disk on its iothread: the hot path.
//!
//! kick or poll → pop every available chain → parse, check → engine; completions → status byte and
//! used element → one publication and at most one interrupt a batch. All of it runs in the queue's
//! home thread; other threads reach a worker only by a call into that thread.

mod bounce;
mod execute;
mod lifecycle;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Weak;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use iothread::{BottomHalf, Completer, CompleterId, Context, EventHandler, HandlerId, Remote};
use vmm_sys_util::eventfd::EventFd;

use super::buffer::AlignedBuffer;
use super::check::{Decision, Shape, check};
use super::disk::Disk;
use super::engine::threads::Threads;
use super::engine::{Completion, Engine};
use super::request::{Free, Parsed, Pending, Rejected, Requests, Status};
use super::stats::QueueCounters;
use crate::virtio::device::Interrupt;
use crate::virtio::queue::{self, Queue};
pub(super) use lifecycle::{Carried, Setup, attach, detach, drain, resume};

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
    // Looks into the queue again where a batch had no room for all of it.
    again: RefCell<Option<BottomHalf>>,
    // Most requests that are begun before completions are looked for.
    batch: u32,
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
        let mut budget = self.batch;
        if self.polling.get() {
            // Notifications are off and stay off; what is left or comes later is polled.
            self.pop_all(state, ctx, &mut budget);
            return;
        }
        loop {
            state.queue.disable_notifications();
            match self.pop_all(state, ctx, &mut budget) {
                Popped::Everything if state.queue.enable_notifications() => {}
                Popped::OutOfBudget => {
                    if let Some(again) = &*self.again.borrow() {
                        again.schedule();
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
            if *budget == 0 && state.queue.has_avail() {
                state.requests.put_back(free);
                return Popped::OutOfBudget;
            }
            *budget = budget.saturating_sub(1);
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
}
