//! Readiness by epoll(7), level-triggered.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, epoll};

use super::{Monitor, MonitorKind};
use crate::handler::{Node, Polling};

/// Events taken by one call.
const BATCH: usize = 64;

/// See the module.
pub(crate) struct EpollMonitor {
    epoll: OwnedFd,
    events: RefCell<Vec<epoll::Event>>,
    unpolled: Unpolled,
}

/// Counts the live handlers that only a system call can see: with one of them, the loop must not
/// poll, or a busy polled handler would keep it from ever being seen.
#[derive(Debug, Default)]
pub(super) struct Unpolled(std::cell::Cell<u32>);

impl Unpolled {
    fn concerns(node: &Node) -> bool {
        node.polling() == Polling::Never && !node.is_internal()
    }

    pub(super) fn add(&self, node: &Node) {
        self.0.set(self.0.get() + u32::from(Self::concerns(node)));
    }

    pub(super) fn remove(&self, node: &Node) {
        self.0.set(self.0.get() - u32::from(Self::concerns(node)));
    }

    pub(super) fn any(&self) -> bool {
        self.0.get() != 0
    }
}

impl EpollMonitor {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(EpollMonitor {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            events: RefCell::new(Vec::with_capacity(BATCH)),
            unpolled: Unpolled::default(),
        })
    }

    /// Waits for timeouts that epoll_wait, with its milliseconds, cannot express.
    fn wait_fine(&self, timeout_ns: i64) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
        let ready = ppoll(&mut fds, timeout_ns)?;
        Ok(ready != 0)
    }
}

/// ppoll(2) with a timeout in nanoseconds (−1: for ever), again after a signal.
pub(super) fn ppoll(fds: &mut [PollFd<'_>], timeout_ns: i64) -> io::Result<usize> {
    let deadline_ns = (timeout_ns > 0).then(|| crate::clock::now_ns().saturating_add(timeout_ns));
    let mut timeout_ns = timeout_ns;
    loop {
        let time = (timeout_ns >= 0).then_some(Timespec {
            tv_sec: timeout_ns / 1_000_000_000,
            tv_nsec: timeout_ns % 1_000_000_000,
        });
        match rustix::event::poll(fds, time.as_ref()) {
            Ok(ready) => return Ok(ready),
            Err(rustix::io::Errno::INTR) => {
                if let Some(deadline_ns) = deadline_ns {
                    timeout_ns = (deadline_ns - crate::clock::now_ns()).max(0);
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// The descriptor of a node, for the length of one call.
pub(super) fn borrow(node: &Node) -> BorrowedFd<'_> {
    // SAFETY: whoever adds a handler keeps its descriptor open until it has removed it; that is
    // the contract of `add_handler`. A number that was closed nevertheless gives EBADF.
    unsafe { BorrowedFd::borrow_raw(node.fd) }
}

impl Monitor for EpollMonitor {
    fn kind(&self) -> MonitorKind {
        MonitorKind::Epoll
    }

    fn add(&self, node: &Rc<Node>) -> io::Result<()> {
        let events = epoll::EventFlags::from_bits_retain(node.interest.events());
        let data = epoll::EventData::new_u64(node.index.into());
        epoll::add(&self.epoll, borrow(node), data, events)?;
        self.unpolled.add(node);
        Ok(())
    }

    fn remove(&self, node: &Rc<Node>) -> bool {
        self.unpolled.remove(node);
        // The descriptor may have been closed already, which removed it.
        let _ = epoll::delete(&self.epoll, borrow(node));
        true
    }

    fn pending(&self) -> bool {
        false
    }

    fn polling_starves(&self) -> bool {
        self.unpolled.any()
    }

    fn wait(&self, timeout_ns: i64, ready: &mut dyn FnMut(u32, u32)) -> io::Result<()> {
        let mut timeout_ns = timeout_ns;
        if timeout_ns > 0 {
            // As QEMU does: ppoll on the epoll descriptor keeps the nanoseconds.
            if !self.wait_fine(timeout_ns)? {
                return Ok(());
            }
            timeout_ns = 0;
        }
        let time = (timeout_ns == 0).then_some(Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        });
        let mut events = self.events.borrow_mut();
        events.clear();
        loop {
            match epoll::wait(&self.epoll, spare_capacity(&mut events), time.as_ref()) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        for event in events.iter() {
            let (data, flags) = (event.data, event.flags);
            let index = u32::try_from(data.u64()).unwrap_or(u32::MAX);
            ready(index, flags.bits());
        }
        Ok(())
    }

    fn pollable_fd(&self) -> io::Result<RawFd> {
        Ok(self.epoll.as_fd().as_raw_fd())
    }
}
