//! What other threads may do with a loop.

use std::cell::RefCell;
use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

use crate::bottom_half::{Call, Job};
use crate::context::{Context, WeakContext};
use crate::error::{CallError, SettingError};
use crate::inbox::{Inbox, Item};
use crate::notify::Notify;
use crate::policy::PolicyKind;
use crate::settings::{PollSettings, SharedSettings};
use crate::stats::{HandlerTable, LoopCounters, Stats};

/// The part of a loop that other threads see.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) notify: Notify,
    pub(crate) inbox: Inbox<Job>,
    pub(crate) settings: SharedSettings,
    pub(crate) counters: LoopCounters,
    pub(crate) handlers: HandlerTable,
    pub(crate) eventfd: OwnedFd,
    pub(crate) name: String,
    pub(crate) policy: PolicyKind,
}

impl Shared {
    /// The loop shall look for work: wakes it if it sleeps.
    pub(crate) fn notify(&self) {
        if self.notify.notify() {
            self.counters.wakeups.fetch_add(1, Ordering::Relaxed);
            self.kick();
        }
    }

    pub(crate) fn kick(&self) {
        // Fails only when the count is at its limit, and then the loop is awake anyway.
        let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
    }
}

/// A call under way. Fields are dropped in order: what the call borrows goes before the sender,
/// whose end lets the caller return.
struct Task<F, R> {
    f: F,
    sender: mpsc::SyncSender<Result<R, CallError>>,
}

thread_local! {
    /// The loops of this thread, so that a call to one of them needs no waiting.
    static HERE: RefCell<Vec<(*const Shared, WeakContext)>> = const { RefCell::new(Vec::new()) };
}

/// Makes a loop known to its thread.
pub(crate) fn enter_thread(ctx: &Context) {
    let shared = Arc::as_ptr(&ctx.state().shared);
    HERE.with_borrow_mut(|here| here.push((shared, ctx.downgrade())));
}

/// The loop behind `shared` has ended.
pub(crate) fn leave_thread(shared: &Arc<Shared>) {
    let shared = Arc::as_ptr(shared);
    // At the end of the thread the list may be gone already.
    let _ = HERE.try_with(|here| here.borrow_mut().retain(|(other, _)| *other != shared));
}

fn here(shared: &Arc<Shared>) -> Option<Context> {
    let wanted = Arc::as_ptr(shared);
    let find = |here: &RefCell<Vec<(*const Shared, WeakContext)>>| {
        let here = here.borrow();
        let found = here.iter().find(|(shared, _)| *shared == wanted);
        found.and_then(|(_, ctx)| ctx.upgrade())
    };
    HERE.try_with(find).ok().flatten()
}

/// A handle to a [`Context`] for any thread.
#[derive(Clone)]
pub struct Remote {
    shared: Arc<Shared>,
}

impl Remote {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Remote {
            shared: Arc::clone(shared),
        }
    }

    /// The loop's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The rule the loop polls by.
    #[must_use]
    pub fn policy(&self) -> PolicyKind {
        self.shared.policy
    }

    /// Makes the loop go through an iteration if it sleeps.
    pub fn notify(&self) {
        self.shared.notify();
    }

    /// Runs `f` once in the loop's thread, in its next iteration. If the loop has ended, `f` is
    /// dropped.
    pub fn run(&self, f: impl FnOnce(&Context) + Send + 'static) {
        let _ = self.push(Box::new(f));
    }

    fn push(&self, call: Call) -> Result<(), CallError> {
        let item = Item::new(Job::Call(Mutex::new(Some(call))));
        if self.shared.inbox.push(&item).is_err() {
            return Err(CallError::Closed);
        }
        self.shared.notify();
        Ok(())
    }

    /// Runs `f` in the loop's thread and waits for its result. In that thread itself it runs at
    /// once.
    ///
    /// # Errors
    /// [`CallError::Closed`] if the loop has ended or ends before `f` ran;
    /// [`CallError::Panicked`] if `f` panicked, which the loop survives.
    pub fn call<R: Send>(&self, f: impl FnOnce(&Context) -> R + Send) -> Result<R, CallError> {
        if let Some(ctx) = here(&self.shared) {
            let result = catch_unwind(AssertUnwindSafe(|| f(&ctx)));
            return result.map_err(|_| CallError::Panicked);
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        let task = Task { f, sender };
        let call: Box<dyn FnOnce(&Context) + Send + '_> = Box::new(move |ctx| {
            let Task { f, sender } = task;
            let result = catch_unwind(AssertUnwindSafe(|| f(ctx)));
            let _ = sender.send(result.map_err(|_| CallError::Panicked));
        });
        // SAFETY: only the lifetime changes. We do not return before `f`, and with it everything
        // borrowed, is gone: run (then the result is sent after it was consumed), or dropped
        // unrun (then it is dropped before the sender, being the earlier field of `Task`).
        let call: Call = unsafe { std::mem::transmute(call) };
        self.push(call)?;
        receiver.recv().unwrap_or(Err(CallError::Closed))
    }

    /// Settings in effect; one given as 0 shows its default.
    #[must_use]
    pub fn settings(&self) -> PollSettings {
        self.shared.settings.load().effective(self.shared.policy)
    }

    /// Changes one setting by its name, from the loop's next iteration on.
    ///
    /// # Errors
    /// Unknown name, or value out of range; then nothing is changed.
    pub fn set(&self, name: &str, value: i64) -> Result<(), SettingError> {
        self.shared.settings.set(name, value)?;
        self.shared.notify();
        Ok(())
    }

    /// Changes all settings.
    ///
    /// # Errors
    /// A value out of range; then nothing is changed.
    pub fn set_all(&self, settings: &PollSettings) -> Result<(), SettingError> {
        self.shared.settings.set_all(settings)?;
        self.shared.notify();
        Ok(())
    }

    /// The loop's numbers: exact in its own thread, else as of the last millisecond or the last
    /// sleep. Takes no lock and does not disturb the loop.
    #[must_use]
    pub fn stats(&self) -> Stats {
        if let Some(ctx) = here(&self.shared) {
            ctx.state().publish();
        }
        Stats::read(&self.shared.counters, &self.shared.handlers)
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote")
            .field("name", &self.shared.name)
            .finish_non_exhaustive()
    }
}
