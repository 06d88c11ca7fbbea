//! Adding, changing and removing handlers, and dispatching what is ready.

use std::cell::{Cell, UnsafeCell};
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::rc::Rc;

use io_uring::{opcode, types};

use super::{COMPLETIONS, Context, NOTIFIER, State};
use crate::error::Error;
use crate::handler::{Armed, EventHandler, HandlerId, Interest, NOT_LISTED, Node, Polling};
use crate::monitor::MonitorKind;
use crate::sqe::UserData;
use crate::stats::HandlerSlot;
use crate::trace::TraceEvent;
use crate::transfer::MAX_RETRIES;

const READ_EVENTS: u32 = (libc::POLLIN | libc::POLLHUP | libc::POLLERR).cast_unsigned() as u32;
const WRITE_EVENTS: u32 = (libc::POLLOUT | libc::POLLHUP | libc::POLLERR).cast_unsigned() as u32;

/// The loop's own handlers do nothing: the iteration itself looks at what they stand for.
struct Internal;

impl EventHandler for Internal {}

struct NewHandler<'a> {
    name: &'a str,
    fd: RawFd,
    interest: Interest,
    polling: Polling,
    eventfd: bool,
    handler: Rc<dyn EventHandler>,
}

impl Context {
    /// Watches a descriptor that the handler reads and writes itself. With [`Polling::Polled`],
    /// polling begins after the descriptor's first event. The descriptor stays open until the
    /// handler is removed.
    ///
    /// # Errors
    /// [`Error::Watch`] when the monitor refuses the descriptor, or it has a handler here already.
    pub fn add_handler(
        &self,
        name: &str,
        fd: RawFd,
        interest: Interest,
        polling: Polling,
        handler: Rc<dyn EventHandler>,
    ) -> Result<HandlerId, Error> {
        self.0.add_node(NewHandler {
            name,
            fd,
            interest,
            polling,
            eventfd: false,
            handler,
        })
    }

    /// Watches an eventfd whose count the loop consumes: `on_readable` is called after a signal,
    /// and does not read. Nobody else may read it. With or without EFD_NONBLOCK.
    ///
    /// # Errors
    /// As [`Self::add_handler`].
    pub fn add_eventfd(
        &self,
        name: &str,
        fd: RawFd,
        polling: Polling,
        handler: Rc<dyn EventHandler>,
    ) -> Result<HandlerId, Error> {
        self.0.add_node(NewHandler {
            name,
            fd,
            interest: Interest::Read,
            polling,
            eventfd: true,
            handler,
        })
    }

    /// Changes what a handler waits for. It starts anew: not polled until its next event.
    ///
    /// # Errors
    /// As [`Self::add_handler`]; then the handler is gone.
    pub fn modify_handler(&self, id: HandlerId, interest: Interest) -> Result<HandlerId, Error> {
        let state = &self.0;
        let Some(old) = state.find(id) else {
            return Err(Error::Watch {
                fd: -1,
                name: "that was removed".into(),
                source: io::Error::from_raw_os_error(libc::ENOENT),
            });
        };
        state.remove_node(&old);
        state.add_node(NewHandler {
            name: &old.name,
            fd: old.fd,
            interest,
            polling: old.polling(),
            eventfd: old.eventfd,
            handler: Rc::clone(&old.handler),
        })
    }

    /// Removes a handler. No callback of it runs after this returns, except `poll_end` in it,
    /// when notifications are off: the caller looks for work a last time. A signal of an eventfd
    /// that came just before may have been consumed.
    pub fn remove_handler(&self, id: HandlerId) {
        if let Some(node) = self.0.find(id) {
            self.0.remove_node(&node);
        }
    }
}

impl State {
    pub(super) fn add_internal_handlers(&self) -> Result<(), Error> {
        self.insert_at(
            NOTIFIER,
            NewHandler {
                name: "notifier",
                fd: self.notifier_fd(),
                interest: Interest::Read,
                polling: Polling::Polled,
                eventfd: true,
                handler: Rc::new(Internal),
            },
        )?;
        self.shared
            .handlers
            .slot(COMPLETIONS)
            .assign(self.ring.is_some().then_some("completions"));
        // A ring beside epoll or ppoll is one descriptor among the others.
        if let Some(ring) = &self.ring
            && self.monitor.kind() != MonitorKind::IoUring
        {
            self.insert_at(
                COMPLETIONS,
                NewHandler {
                    name: "completions",
                    fd: ring.fd(),
                    interest: Interest::Read,
                    polling: Polling::Polled,
                    eventfd: false,
                    handler: Rc::new(Internal),
                },
            )?;
        }
        Ok(())
    }

    fn find(&self, id: HandlerId) -> Option<Rc<Node>> {
        let nodes = self.nodes.borrow();
        let node = nodes.get(id.index as usize)?.as_ref()?;
        (node.generation == id.generation && !node.deleted.get()).then(|| Rc::clone(node))
    }

    fn add_node(&self, new: NewHandler<'_>) -> Result<HandlerId, Error> {
        let watch_error = |source: io::Error| Error::Watch {
            fd: new.fd,
            name: new.name.into(),
            source,
        };
        // SAFETY: used for this call only; a number that is not open gives EBADF.
        rustix::io::fcntl_getfd(unsafe { BorrowedFd::borrow_raw(new.fd) })
            .map_err(|errno| watch_error(errno.into()))?;
        let taken = self
            .nodes
            .borrow()
            .iter()
            .flatten()
            .any(|node| node.fd == new.fd && !node.deleted.get());
        if taken {
            return Err(watch_error(io::Error::from_raw_os_error(libc::EEXIST)));
        }
        let index = self.free_nodes.borrow_mut().pop().unwrap_or_else(|| {
            let mut nodes = self.nodes.borrow_mut();
            nodes.push(None);
            u32::try_from(nodes.len() - 1).unwrap_or(u32::MAX)
        });
        self.insert_at(index, new).inspect_err(|_| {
            self.free_nodes.borrow_mut().push(index);
        })
    }

    fn insert_at(&self, index: u32, new: NewHandler<'_>) -> Result<HandlerId, Error> {
        let generation = self.generation.get().wrapping_add(1);
        self.generation.set(generation);
        let node = Rc::new(Node {
            deleted: Cell::new(false),
            queued: Cell::new(false),
            poll_hit: Cell::new(false),
            busy: Cell::new(false),
            begun: Cell::new(false),
            polled: new.polling == Polling::Polled,
            eventfd: new.eventfd,
            armed: Cell::new(Armed::No),
            revents: Cell::new(0),
            listed: Cell::new(NOT_LISTED),
            index,
            fd: new.fd,
            last_dispatch_ns: Cell::new(0),
            handler: new.handler,
            stats: HandlerSlot::new(&self.shared, index),
            error: Cell::new(0),
            interest: new.interest,
            generation,
            retries: Cell::new(0),
            count: UnsafeCell::new(0),
            name: new.name.into(),
        });
        let id = node.id();
        self.monitor.add(&node).map_err(|source| Error::Watch {
            fd: new.fd,
            name: new.name.into(),
            source,
        })?;
        self.shared.handlers.slot(index).assign(Some(new.name));
        if self.tracing.get() {
            self.tell_sink(|sink| sink.handler(index.into(), new.fd, new.name));
        }
        self.nodes.borrow_mut()[index as usize] = Some(node);
        self.kick_outside();
        Ok(id)
    }

    fn remove_node(&self, node: &Rc<Node>) {
        node.deleted.set(true);
        node.revents.set(0);
        node.poll_hit.set(false);
        self.unlist(node);
        // Whoever takes it over, or looks a last time, expects notifications to be on.
        if node.begun.replace(false) {
            node.handler.poll_end();
        }
        self.shared.handlers.retire(node.index);
        if self.monitor.remove(node) {
            self.free_node(node.index);
        }
    }

    fn free_node(&self, index: u32) {
        let node = self.nodes.borrow_mut()[index as usize].take();
        self.free_nodes.borrow_mut().push(index);
        // Dropped without a borrow held: the handler's own drop may call us.
        drop(node);
    }

    /// The ring's watch of a handler has completed. The node is still in its slot, also when it
    /// was deleted: this completion is what that waited for.
    pub(crate) fn node_completed(&self, index: u32, result: i32) {
        let node = self.nodes.borrow()[index as usize].clone();
        let Some(node) = node else { return };
        node.armed.set(Armed::No);
        if node.deleted.get() {
            self.free_node(index);
            return;
        }
        if result < 0 {
            let again = matches!(-result, libc::EAGAIN | libc::EINTR | libc::ENOMEM);
            let retries = node.retries.get() + 1;
            if !again || retries > MAX_RETRIES {
                node.error.set(-result);
                self.queue_ready(&node, 0);
                return;
            }
            node.retries.set(retries);
        } else {
            node.retries.set(0);
            let revents = if node.eventfd {
                READ_EVENTS
            } else {
                result.cast_unsigned()
            };
            self.queue_ready(&node, revents);
        }
        self.monitor.rearm(&node);
    }

    /// A handler's descriptor has events, as epoll or ppoll found.
    pub(super) fn fd_ready(&self, index: u32, revents: u32) {
        let nodes = self.nodes.borrow();
        let Some(node) = nodes.get(index as usize).and_then(Option::as_ref) else {
            return;
        };
        if node.deleted.get() || (node.eventfd && !consume(node.fd)) {
            return;
        }
        if revents & u32::from(libc::POLLNVAL.cast_unsigned()) != 0 {
            node.error.set(libc::EBADF);
        }
        self.queue_ready(node, revents);
    }

    pub(super) fn queue_ready(&self, node: &Rc<Node>, revents: u32) {
        node.revents.set(node.revents.get() | revents);
        if !node.queued.replace(true) {
            self.ready.borrow_mut().push_back(Rc::clone(node));
        }
    }

    /// Dispatches what is ready, also what an outer iteration has found and not yet come to: each
    /// event is handled once, and a nested loop may be waiting for it.
    pub(super) fn dispatch_ready(&self, ctx: &Context, dispatch_ns: i64) -> bool {
        let mut progress = false;
        loop {
            let Some(node) = self.ready.borrow_mut().pop_front() else {
                return progress;
            };
            progress |= self.dispatch(ctx, &node, dispatch_ns);
        }
    }

    fn dispatch(&self, ctx: &Context, node: &Rc<Node>, dispatch_ns: i64) -> bool {
        node.queued.set(false);
        let revents = node.revents.replace(0);
        let hit = node.poll_hit.replace(false);
        let errno = node.error.replace(0);
        if node.deleted.get() || node.is_internal() {
            return false;
        }
        let handler = &node.handler;
        let counters = node.stats.get();
        let found = hit && revents == 0 && errno == 0;
        match found {
            true => counters.hits.add(1),
            false => counters.fd_events.add(1),
        }
        if errno != 0 {
            self.shared.counters.errors.add(1);
            let error = io::Error::from_raw_os_error(errno);
            tracing::warn!(handler = node.name, fd = node.fd, %error, "watch failed");
            handler.on_error(ctx, &error);
            return true;
        }
        if self.max_ns.get() != 0 && node.polled {
            if !node.is_listed() && revents != 0 {
                self.list(node, revents);
            }
            if node.is_listed() {
                self.note_work(node, dispatch_ns);
                self.mark_active(node.index);
                self.trace(|ctx| TraceEvent::PollDispatch {
                    ctx,
                    node: node.index.into(),
                    revents,
                });
            }
        }
        if found {
            self.run_poll_ready(ctx, node);
            return true;
        }
        if revents & READ_EVENTS != 0 && node.interest != Interest::Write {
            handler.on_readable(ctx);
        }
        if revents & WRITE_EVENTS != 0 && node.interest != Interest::Read && !node.deleted.get() {
            handler.on_writable(ctx);
        }
        true
    }

    /// Cancels all that the kernel has of ours, and waits until it holds no request that points to
    /// memory of ours or of our users.
    pub(super) fn cancel_all(&self) {
        let Some(ring) = self.ring.as_deref() else {
            return;
        };
        let watched = |node: &&Rc<Node>| node.armed.get() == Armed::InFlight;
        let nodes = self.nodes.borrow();
        let mut outstanding = 0;
        for node in nodes.iter().flatten().filter(watched) {
            outstanding += 1;
            if !node.deleted.get() {
                self.monitor.remove(node);
            }
        }
        let requests = self.requests.in_flight();
        outstanding += requests;
        if requests != 0 {
            // One that waits for something may wait for ever. Kernels before 5.19 do not know
            // "any", and then those are waited for.
            let cancel = opcode::AsyncCancel2::new(types::CancelBuilder::any()).build();
            // SAFETY: ASYNC_CANCEL points nowhere.
            unsafe { ring.push_own(&cancel.user_data(UserData::IGNORE)) };
        }
        while outstanding != 0 {
            if ring.submit_and_wait(-1).is_err() {
                // Without the kernel's word the memory cannot be given back: keep it for good.
                for node in nodes.iter().flatten() {
                    std::mem::forget(Rc::clone(node));
                }
                return;
            }
            while ring.refresh() {
                while let Some(completion) = ring.pop() {
                    outstanding -= u32::from(UserData::is_counted(completion.user_data));
                }
            }
        }
    }
}

/// Takes the count of an eventfd. False if there was none. Never waits, blocking or not.
fn consume(fd: RawFd) -> bool {
    let mut count = [0; 8];
    // SAFETY: used for this call only; the handler's owner keeps it open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let buffers = &mut [io::IoSliceMut::new(&mut count)];
    rustix::io::preadv2(fd, buffers, u64::MAX, rustix::io::ReadWriteFlags::NOWAIT) == Ok(8)
}
