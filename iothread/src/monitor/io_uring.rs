//! Readiness by the ring that also does the I/O: an iteration enters the kernel at most once.
//!
//! A descriptor is watched by a one-shot POLL_ADD, made anew after each event, which keeps
//! level-triggered semantics (a multishot one is edge-triggered and loses events that nobody
//! consumed). An eventfd of ours is watched by a READ that waits and consumes at once.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

use io_uring::{opcode, types};

use super::{Monitor, MonitorKind};
use crate::handler::{Armed, Node};
use crate::ring::Ring;
use crate::sqe::UserData;

/// See the module.
pub(crate) struct RingMonitor {
    ring: Rc<Ring>,
    /// Handlers to be watched from the next enter on.
    wanted: RefCell<Vec<Rc<Node>>>,
    /// `wanted` holds one that polling does not cover: enter before polling.
    urgent: Cell<bool>,
}

impl RingMonitor {
    pub(crate) fn new(ring: Rc<Ring>) -> Self {
        RingMonitor {
            ring,
            wanted: RefCell::default(),
            urgent: Cell::new(false),
        }
    }

    fn arm(&self, node: &Node) {
        let fd = types::Fd(node.fd);
        let entry = if node.eventfd {
            // Waits with O_NONBLOCK as well: the ring polls a file that can be polled.
            let size = u32::try_from(size_of::<u64>()).unwrap_or(8);
            opcode::Read::new(fd, node.count.get().cast(), size)
                .offset(u64::MAX)
                .build()
        } else {
            opcode::PollAdd::new(fd, node.interest.events()).build()
        };
        let entry = entry.user_data(UserData::node(node.index));
        // SAFETY: POLL_ADD points nowhere. READ writes to `node.count`; the node is kept until
        // the completion of the request has been seen, also when it is deleted before.
        unsafe { self.ring.push_own(&entry) };
        node.armed.set(Armed::InFlight);
    }

    fn arm_wanted(&self) {
        let mut wanted = self.wanted.borrow_mut();
        for node in wanted.drain(..) {
            if node.armed.get() == Armed::Wanted {
                self.arm(&node);
            }
        }
        self.urgent.set(false);
    }
}

impl Monitor for RingMonitor {
    fn kind(&self) -> MonitorKind {
        MonitorKind::IoUring
    }

    fn add(&self, node: &Rc<Node>) -> io::Result<()> {
        self.rearm(node);
        Ok(())
    }

    fn remove(&self, node: &Rc<Node>) -> bool {
        if node.armed.get() != Armed::InFlight {
            node.armed.set(Armed::No);
            return true;
        }
        // The kernel may not have the request yet, but it takes entries in order. It must have
        // both before we return: the caller may close the descriptor, and its number may come
        // to mean another file.
        let cancel = opcode::AsyncCancel::new(UserData::node(node.index)).build();
        // SAFETY: ASYNC_CANCEL points nowhere.
        unsafe { self.ring.push_own(&cancel.user_data(UserData::IGNORE)) };
        if let Err(error) = self.ring.submit() {
            tracing::error!(handler = node.name, %error, "cannot cancel a watch");
        }
        false
    }

    #[inline]
    fn rearm(&self, node: &Rc<Node>) {
        if node.armed.get() != Armed::No || node.deleted.get() {
            return;
        }
        let notifier = node.index == crate::context::NOTIFIER;
        if node.eventfd && !notifier {
            // Its event was consumed with the completion, so the next READ may be queued before
            // the handler has run.
            self.arm(node);
            return;
        }
        // A poll submitted before the handler has run would find the same event. The notifier
        // needs no watch before the next sleep: while the loop polls it looks at the flag itself.
        node.armed.set(Armed::Wanted);
        self.wanted.borrow_mut().push(Rc::clone(node));
        if !notifier {
            self.urgent.set(true);
        }
    }

    #[inline]
    fn pending(&self) -> bool {
        self.urgent.get()
    }

    fn must_scan(&self) -> bool {
        false
    }

    fn wait(&self, timeout_ns: i64, _ready: &mut dyn FnMut(u32, u32)) -> io::Result<()> {
        if !self.wanted.borrow().is_empty() {
            self.arm_wanted();
        }
        if timeout_ns == 0 {
            self.ring.submit()
        } else {
            self.ring.submit_and_wait(timeout_ns)
        }
    }

    fn pollable_fd(&self) -> io::Result<RawFd> {
        Ok(self.ring.fd())
    }
}
