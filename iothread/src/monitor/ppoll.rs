//! Readiness by ppoll(2): works everywhere, costs with every descriptor.

use std::cell::{OnceCell, RefCell};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;

use rustix::event::{PollFd, PollFlags, epoll};

use super::epoll::{Unpolled, borrow, ppoll};
use super::{Monitor, MonitorKind};
use crate::handler::{Interest, Node};

/// See the module.
#[derive(Default)]
pub(crate) struct PpollMonitor {
    nodes: RefCell<Vec<Rc<Node>>>,
    unpolled: Unpolled,
    /// Made when another loop shall watch this one: an epoll set of the same descriptors.
    outside: OnceCell<OwnedFd>,
}

fn flags(node: &Node) -> PollFlags {
    match node.interest {
        Interest::Read => PollFlags::IN,
        Interest::Write => PollFlags::OUT,
        Interest::ReadWrite => PollFlags::IN | PollFlags::OUT,
    }
}

/// What happened, as bits of `poll(2)`, whose type in rustix differs by processor.
fn happened(revents: PollFlags) -> u32 {
    [
        (PollFlags::IN, libc::POLLIN),
        (PollFlags::OUT, libc::POLLOUT),
        (PollFlags::PRI, libc::POLLPRI),
        (PollFlags::ERR, libc::POLLERR),
        (PollFlags::HUP, libc::POLLHUP),
        (PollFlags::NVAL, libc::POLLNVAL),
    ]
    .into_iter()
    .filter(|(flag, _)| revents.contains(*flag))
    .fold(0, |all, (_, bit)| all | u32::from(bit.cast_unsigned()))
}

fn watch_outside(set: &OwnedFd, node: &Node) -> io::Result<()> {
    let events = epoll::EventFlags::from_bits_retain(node.interest.events());
    let data = epoll::EventData::new_u64(node.index.into());
    Ok(epoll::add(set, borrow(node), data, events)?)
}

impl Monitor for PpollMonitor {
    fn kind(&self) -> MonitorKind {
        MonitorKind::Ppoll
    }

    fn add(&self, node: &Rc<Node>) -> io::Result<()> {
        if let Some(set) = self.outside.get() {
            watch_outside(set, node)?;
        }
        self.nodes.borrow_mut().push(Rc::clone(node));
        self.unpolled.add(node);
        Ok(())
    }

    fn remove(&self, node: &Rc<Node>) -> bool {
        self.unpolled.remove(node);
        if let Some(set) = self.outside.get() {
            let _ = epoll::delete(set, borrow(node));
        }
        self.nodes
            .borrow_mut()
            .retain(|other| !Rc::ptr_eq(other, node));
        true
    }

    fn pending(&self) -> bool {
        false
    }

    fn polling_starves(&self) -> bool {
        self.unpolled.any()
    }

    fn wait(&self, timeout_ns: i64, ready: &mut dyn FnMut(u32, u32)) -> io::Result<()> {
        let nodes = self.nodes.borrow();
        let mut fds: Vec<PollFd<'_>> = nodes
            .iter()
            .map(|node| PollFd::from_borrowed_fd(borrow(node), flags(node)))
            .collect();
        if ppoll(&mut fds, timeout_ns)? != 0 {
            for (node, fd) in nodes.iter().zip(&fds) {
                let revents = fd.revents();
                if !revents.is_empty() {
                    ready(node.index, happened(revents));
                }
            }
        }
        Ok(())
    }

    fn pollable_fd(&self) -> io::Result<RawFd> {
        if let Some(set) = self.outside.get() {
            return Ok(set.as_raw_fd());
        }
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for node in self.nodes.borrow().iter() {
            watch_outside(&set, node)?;
        }
        Ok(self.outside.get_or_init(|| set).as_raw_fd())
    }
}
