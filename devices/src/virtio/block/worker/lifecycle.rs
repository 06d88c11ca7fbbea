//! A worker's beginning and end: attached to its home thread, drained, detached and carried on.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use iothread::{Context, Polling};
use vmm_sys_util::eventfd::EventFd;

use super::super::disk::Disk;
use super::super::engine;
use super::super::request::{Pending, Requests};
use super::{Bounce, EngineEvents, Relay, State, Worker};
use crate::virtio::device::Interrupt;
use crate::virtio::queue::Queue;

thread_local! {
    // The workers at home in this thread. Looked up when one is started, stopped or called, never
    // on the hot path.
    static WORKERS: RefCell<HashMap<u64, Rc<Worker>>> = RefCell::default();
}

/// What a worker is made of, on its way to its home thread.
pub(in super::super) struct Setup {
    pub(in super::super) disk: Arc<Disk>,
    pub(in super::super) index: u16,
    pub(in super::super) features: u64,
    pub(in super::super) notify: Arc<EventFd>,
    pub(in super::super) interrupt: Arc<dyn Interrupt>,
    pub(in super::super) carried: Carried,
}

/// What a queue takes along from one home thread to the next.
pub(in super::super) struct Carried {
    queue: Queue,
    requests: Requests,
    parked: Vec<u32>,
}

// SAFETY: the pointers in the requests' slots point into guest RAM, which the queue keeps mapped,
// and into the slots themselves; none of it belongs to a thread.
unsafe impl Send for Carried {}

impl Carried {
    /// A queue at its beginning.
    pub(in super::super) fn new(queue: Queue) -> Carried {
        let requests = Requests::new(queue.size());
        Carried {
            queue,
            requests,
            parked: Vec::new(),
        }
    }

    /// The next available entry that the queue would take.
    pub(in super::super) fn next_avail(&self) -> u16 {
        self.queue.next_avail()
    }
}

/// Runs `f` with the worker `id` of this thread, if it is still there.
pub(super) fn with_worker(id: u64, f: impl FnOnce(&Rc<Worker>)) {
    let worker = WORKERS.with_borrow(|workers| workers.get(&id).cloned());
    if let Some(worker) = worker {
        f(&worker);
    }
}

/// Starts a worker in the thread of `ctx`; its id.
///
/// # Errors
/// The engine could not be set up.
pub(in super::super) fn attach(ctx: &Context, setup: Setup) -> Result<u64, (String, Box<Carried>)> {
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
    // SAFETY: the queue keeps its memory mapped, and goes on only when the engine was detached.
    let engine = unsafe { engine::make(ctx, &setup.disk, completer, size, queue.ram().memory()) };
    let engine = match engine {
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
    // A driver that makes chains available as fast as they are answered must not keep the thread from
    // its other disks.
    let batch = engine.batch();
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
        again: RefCell::default(),
        batch: batch.unwrap_or(u32::from(size) * 2),
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
pub(in super::super) fn detach(ctx: &Context, id: u64, forget: bool) -> Option<Carried> {
    let worker = WORKERS.with_borrow_mut(|workers| workers.remove(&id))?;
    Some(worker.detach(ctx, forget))
}

/// Resubmits the requests that the worker `id` kept.
pub(in super::super) fn resume(ctx: &Context, id: u64) {
    with_worker(id, |worker| worker.resume(ctx));
}

/// Waits until the worker `id` has no I/O under way. Requests that the driver has made available are
/// done too: their kick may not have been seen yet, and they would begin after the wait.
pub(in super::super) fn drain(ctx: &Context, id: u64) {
    with_worker(id, |worker| {
        // What is available now, not what a driver goes on to make available.
        let size = u32::from(worker.state.borrow().queue.size());
        for _ in 0..size.div_ceil(worker.batch) {
            worker.kicked(ctx);
        }
        worker.drain(ctx);
    });
}

impl Worker {
    fn register(&self, ctx: &Context, event_fd: Option<i32>) -> Result<(), String> {
        let this = self.this.upgrade().ok_or("worker is gone")?;
        if let Some(fd) = event_fd {
            self.register_engine(ctx, fd, false)?;
        }
        let weak = self.this.clone();
        *self.again.borrow_mut() = Some(ctx.bottom_half(move |ctx| {
            if let Some(worker) = weak.upgrade() {
                worker.kicked(ctx);
            }
        }));
        let name = format!("{}/{}", self.disk.config.id, self.index);
        let handler = ctx
            .add_eventfd(&name, self.notify.as_raw_fd(), Polling::Polled, this)
            .map_err(|error| error.to_string())?;
        self.kick_handler.set(Some(handler));
        Ok(())
    }

    pub(super) fn register_engine(
        &self,
        ctx: &Context,
        fd: i32,
        helper: bool,
    ) -> Result<(), String> {
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
        self.again.take();
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
