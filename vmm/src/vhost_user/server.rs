//! A disk's socket: one front end at a time, each in its turn.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use devices::virtio::block::Block;
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use vhost::vhost_user::{BackendReqHandler, Error as ProtocolError};

use super::session::Session;
use super::sigbus::Alarm;
use crate::qmp::Listener;
use crate::seccomp::{self, Filters};

/// Pause after the system refused something for want of file descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

/// What the thread and its owner share.
struct Shared {
    stopping: AtomicBool,
    /// Readable when it is to stop.
    wake: std::os::fd::OwnedFd,
    /// The connection that is served.
    current: Mutex<Option<UnixStream>>,
}

/// A disk that is served in a thread of its own.
pub struct Server {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves `block` to the front ends that come to `listener`, with the thread's filter of system calls.
    ///
    /// # Errors
    /// The thread or its descriptors cannot be made.
    pub fn start(
        listener: Listener,
        block: Block,
        filters: Option<Arc<Filters>>,
    ) -> io::Result<Server> {
        let id = block.handle().id().to_owned();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let shared = Arc::new(Shared {
            stopping: AtomicBool::new(false),
            wake: rustix::event::eventfd(0, flags)?,
            current: Mutex::new(None),
        });
        let service = Service {
            listener,
            session: Arc::new(Mutex::new(Session::new(block)?)),
            shared: shared.clone(),
            id: id.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("vhost {id}"))
            .spawn(move || {
                let narrowed = filters.map(|filters| filters.narrow(seccomp::Thread::VhostUser));
                if let Some(Err(error)) = narrowed {
                    // The common filter is still on.
                    tracing::error!("{error}");
                }
                service.run();
            })?;
        Ok(Server {
            shared,
            thread: Some(thread),
        })
    }

    /// Asks the thread to finish the requests, let the front end go and end.
    pub fn ask_to_stop(&self) {
        self.shared.stopping.store(true, Ordering::Release);
        // Full, it is readable already.
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        // The thread may be waiting for the rest of a message.
        if let Some(stream) = &*self.shared.current() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Whether the thread has ended.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.ask_to_stop();
        if let Some(thread) = self.thread.take() {
            // If it has panicked, the panic hook has told so.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn current(&self) -> std::sync::MutexGuard<'_, Option<UnixStream>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }
}

struct Service {
    listener: Listener,
    session: Arc<Mutex<Session>>,
    shared: Arc<Shared>,
    id: String,
}

impl Service {
    fn run(self) {
        while self.wait(&[self.listener.socket().as_fd()]) {
            match self.listener.accept() {
                Ok(stream) => self.serve(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!("disk {}: no front end taken: {error}", self.id);
                    std::thread::sleep(PAUSE);
                }
            }
        }
    }

    /// Waits until one of `fds` is readable. False when the thread is to end.
    fn wait(&self, fds: &[BorrowedFd<'_>]) -> bool {
        let all = fds.iter().copied().chain([self.shared.wake.as_fd()]);
        let mut all: Vec<PollFd<'_>> = all
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        // Interrupted, the caller finds nothing there and comes again.
        let _ = poll(&mut all, None);
        !self.shared.is_stopping()
    }

    fn serve(&self, stream: UnixStream) {
        tracing::info!("disk {}: a front end has come", self.id);
        let begun = self.lock().begin();
        let end = match begun.and_then(|alarm| self.converse(stream, &alarm)) {
            Ok(()) => "the front end has gone".to_owned(),
            Err(error) => format!("the front end was let go: {error}"),
        };
        *self.shared.current() = None;
        self.lock().end();
        match end.ends_with("has gone") {
            true => tracing::info!("disk {}: {end}", self.id),
            false => tracing::warn!("disk {}: {end}", self.id),
        }
    }

    /// Serves a connection to its end.
    fn converse(&self, stream: UnixStream, alarm: &Alarm) -> io::Result<()> {
        // Accepted so for the monitor; here a message is waited for to its end.
        stream.set_nonblocking(false)?;
        let watched = stream.try_clone()?;
        *self.shared.current() = Some(stream.try_clone()?);
        let mut requests = BackendReqHandler::from_stream(stream, self.session.clone());
        loop {
            if !self.wait(&[watched.as_fd(), alarm.event()]) {
                return Ok(());
            }
            if alarm.is_raised() {
                let lost = "a region's file was cut short while it was in use";
                return Err(io::Error::other(lost));
            }
            match requests.handle_request() {
                Ok(()) | Err(ProtocolError::SocketRetry(_)) => {}
                Err(ProtocolError::Disconnected) => return Ok(()),
                Err(_) if self.shared.is_stopping() => return Ok(()),
                Err(error) => return Err(io::Error::other(error.to_string())),
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
