//! Handlers: a file descriptor, what it waits for, and what to call.

use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

use crate::context::{COMPLETIONS, Context};
use crate::stats::HandlerSlot;

/// What a handler does. Callbacks take `&self`, because a callback may run a nested loop that
/// calls another one of the same handler.
pub trait EventHandler {
    /// The descriptor can be read (or has an error or hang-up); for an eventfd: it was signalled,
    /// and the loop has consumed its count.
    fn on_readable(&self, _ctx: &Context) {}
    /// The descriptor can be written (or has an error).
    fn on_writable(&self, _ctx: &Context) {}
    /// The descriptor cannot be watched any longer; no further event comes.
    fn on_error(&self, _ctx: &Context, _error: &io::Error) {}
    /// Is there work? Called again and again while the loop polls: a few nanoseconds, no system
    /// call, no side effect.
    fn poll(&self) -> bool {
        false
    }
    /// Does the work that [`Self::poll`] found.
    fn poll_ready(&self, _ctx: &Context) {}
    /// Polling begins: notifications are not needed for now.
    fn poll_begin(&self) {}
    /// Polling ends: notifications must come again. The loop calls [`Self::poll`] once more
    /// afterwards.
    fn poll_end(&self) {}
}

/// The events a handler waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Interest {
    /// Readable, hang-up, error.
    Read,
    /// Writable, error.
    Write,
    /// Both.
    ReadWrite,
}

impl Interest {
    /// Bits of `poll(2)` to ask for. epoll and io_uring use the same values for these.
    pub(crate) fn events(self) -> u32 {
        let bits = match self {
            Interest::Read => libc::POLLIN,
            Interest::Write => libc::POLLOUT,
            Interest::ReadWrite => libc::POLLIN | libc::POLLOUT,
        };
        u32::from(bits.cast_unsigned())
    }
}

/// Whether the loop may poll a handler instead of waiting for its descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Polling {
    /// Only its descriptor tells of work.
    Never,
    /// `poll` and `poll_ready` are implemented.
    Polled,
}

/// Names a handler of one context. Never reused while the handler it named could be confused
/// with another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HandlerId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// How a handler's descriptor stands with the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Armed {
    /// Neither asked for nor in flight.
    No,
    /// On the list of requests to make before the next wait.
    Wanted,
    /// The kernel has the request; a completion will come.
    InFlight,
}

pub(crate) const NOT_LISTED: u32 = u32::MAX;

/// A handler as the loop keeps it.
#[repr(C)]
pub(crate) struct Node {
    pub(crate) deleted: Cell<bool>,
    /// On the ready queue.
    pub(crate) queued: Cell<bool>,
    /// Polling found work.
    pub(crate) poll_hit: Cell<bool>,
    /// `poll_ready` is running; a nested loop must not poll this handler.
    pub(crate) busy: Cell<bool>,
    /// `poll_begin` was called and `poll_end` was not yet.
    pub(crate) begun: Cell<bool>,
    pub(crate) polled: bool,
    /// The loop consumes the eventfd's count itself.
    pub(crate) eventfd: bool,
    pub(crate) armed: Cell<Armed>,
    /// Events of the descriptor that were not dispatched yet.
    pub(crate) revents: Cell<u32>,
    /// Place on the poll list.
    pub(crate) listed: Cell<u32>,
    pub(crate) index: u32,
    pub(crate) fd: RawFd,
    pub(crate) last_dispatch_ns: Cell<i64>,
    pub(crate) handler: Rc<dyn EventHandler>,
    pub(crate) stats: HandlerSlot,
    /// A negative completion of the descriptor's watch, as an errno.
    pub(crate) error: Cell<i32>,
    pub(crate) interest: Interest,
    pub(crate) generation: u32,
    /// Watches in a row that ended with an error that means "again".
    pub(crate) retries: Cell<u32>,
    /// Where the ring's READ of an eventfd puts the count. Written by the kernel while a request
    /// is in flight; the node is kept until it has completed.
    pub(crate) count: UnsafeCell<u64>,
    pub(crate) name: String,
}

impl Node {
    pub(crate) fn id(&self) -> HandlerId {
        HandlerId {
            index: self.index,
            generation: self.generation,
        }
    }

    pub(crate) fn polling(&self) -> Polling {
        if self.polled {
            Polling::Polled
        } else {
            Polling::Never
        }
    }

    /// One of the loop's own, which the iteration itself looks after.
    #[inline]
    pub(crate) fn is_internal(&self) -> bool {
        self.index <= COMPLETIONS
    }

    #[inline]
    pub(crate) fn is_listed(&self) -> bool {
        self.listed.get() != NOT_LISTED
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("name", &self.name)
            .field("fd", &self.fd)
            .field("deleted", &self.deleted.get())
            .finish_non_exhaustive()
    }
}
