//! Monitors: how the loop learns that descriptors are ready.

mod epoll;
mod io_uring;
mod ppoll;

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;
use std::str::FromStr;

pub(crate) use self::epoll::EpollMonitor;
pub(crate) use self::io_uring::RingMonitor;
pub(crate) use self::ppoll::PpollMonitor;
use crate::handler::Node;

/// Values of `monitor=`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum MonitorKind {
    /// io_uring where it can be had, else epoll.
    #[default]
    Auto,
    /// One ring for readiness and I/O.
    IoUring,
    /// epoll(7); I/O on a ring of its own where there is one.
    Epoll,
    /// ppoll(2); I/O on a ring of its own where there is one.
    Ppoll,
}

impl MonitorKind {
    /// The three that can be in use.
    pub const ALL: [MonitorKind; 3] =
        [MonitorKind::IoUring, MonitorKind::Epoll, MonitorKind::Ppoll];

    /// The name users write.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            MonitorKind::Auto => "auto",
            MonitorKind::IoUring => "io_uring",
            MonitorKind::Epoll => "epoll",
            MonitorKind::Ppoll => "ppoll",
        }
    }
}

impl fmt::Display for MonitorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A `monitor=` that names none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("monitor={0} is unknown; use auto, io_uring, epoll or ppoll")]
pub struct UnknownMonitor(pub String);

impl FromStr for MonitorKind {
    type Err = UnknownMonitor;

    fn from_str(name: &str) -> Result<Self, UnknownMonitor> {
        [MonitorKind::Auto]
            .into_iter()
            .chain(Self::ALL)
            .find(|kind| kind.name() == name)
            .ok_or_else(|| UnknownMonitor(name.into()))
    }
}

/// What a monitor does for the loop. Readiness is level-triggered: an event that nobody consumed
/// comes again.
pub(crate) trait Monitor {
    fn kind(&self) -> MonitorKind;

    /// Begins to watch a handler's descriptor.
    fn add(&self, node: &Rc<Node>) -> io::Result<()>;

    /// Stops watching. False if the kernel still holds a request for it, whose completion will
    /// come; until then the node must be kept.
    fn remove(&self, node: &Rc<Node>) -> bool;

    /// An event of the handler has arrived; watch for the next one.
    fn rearm(&self, _node: &Rc<Node>) {}

    /// Whether watches are to be made that polling does not cover, so that the kernel must be
    /// entered before the loop may poll.
    fn pending(&self) -> bool;

    /// Whether polling would keep handlers that cannot be polled from being seen, so that the
    /// loop must wait instead.
    fn polling_starves(&self) -> bool {
        false
    }

    /// Whether readiness is seen only by a system call, so that iterations that do not wait must
    /// look for it from time to time.
    fn must_scan(&self) -> bool {
        true
    }

    /// Makes the watches that are wanted and waits for `timeout_ns` (−1: for ever). `ready` is told the
    /// handler's index and its events, except by the ring, whose completions tell them.
    fn wait(&self, timeout_ns: i64, ready: &mut dyn FnMut(u32, u32)) -> io::Result<()>;

    /// One descriptor that is readable when [`Self::wait`] with timeout 0 would find something.
    fn pollable_fd(&self) -> io::Result<RawFd>;
}
