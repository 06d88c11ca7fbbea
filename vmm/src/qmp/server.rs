//! The monitor's thread: accepts clients, runs their commands one at a time, tells them events.
//!
//! It is a thread of its own, so that no client, however it behaves, takes time from a disk or a vCPU.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use serde_json::Value;

use super::client::{Client, Execute, Gone};
use super::error::Error;
use super::event::Queue;
use super::message::{self, Call};
use super::socket::Listener;

/// Clients at once.
pub const MAX_CLIENTS: usize = 64;
/// Pause after the system refused something for want of file descriptors or memory.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest time that clients are given to take the last messages when the server stops.
const FAREWELL: Duration = Duration::from_millis(500);

/// What the server executes.
pub trait Commands: Send {
    /// Runs one command to its end.
    fn execute(&self, call: Call) -> Result<Value, Error>;
}

/// A running monitor. Dropping it sends the clients what is left, disconnects them and removes the socket.
#[derive(Debug)]
pub struct Server {
    stopping: Arc<AtomicBool>,
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Serves the clients of `listener` in a thread named `qmp`.
    ///
    /// # Errors
    /// The thread cannot be made.
    pub fn start(
        listener: Listener,
        commands: impl Commands + 'static,
        queue: Queue,
    ) -> std::io::Result<Self> {
        let stopping = Arc::new(AtomicBool::new(false));
        let queue = Arc::new(queue);
        let service = Service {
            listener,
            commands: WithEvents {
                commands,
                queue: Arc::clone(&queue),
            },
            stopping: Arc::clone(&stopping),
            clients: Vec::new(),
            accept_after: None,
        };
        let thread = std::thread::Builder::new()
            .name("qmp".to_owned())
            .spawn(move || service.run())?;
        Ok(Self {
            stopping,
            queue,
            thread: Some(thread),
        })
    }
}

impl Server {
    /// Stops as dropping does, and calls `serve` again and again meanwhile: a command under way may be waiting for
    /// something that this thread does.
    pub fn stop(self, mut serve: impl FnMut()) {
        self.ask_to_stop();
        while self
            .thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
        {
            serve();
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn ask_to_stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.queue.wake();
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

/// Commands, and the events that come of them.
struct WithEvents<C> {
    commands: C,
    queue: Arc<Queue>,
}

impl<C: Commands> Execute for WithEvents<C> {
    fn execute(&self, call: Call) -> (Vec<Value>, Result<Value, Error>) {
        let outcome = self.commands.execute(call);
        (self.queue.take().0, outcome)
    }
}

struct Service<C> {
    listener: Listener,
    commands: WithEvents<C>,
    stopping: Arc<AtomicBool>,
    clients: Vec<Client>,
    /// Until then no client is accepted.
    accept_after: Option<Instant>,
}

impl<C: Commands> Service<C> {
    fn run(mut self) {
        while !self.stopping.load(Ordering::Acquire) {
            self.commands.queue.rest();
            let (events, next) = self.commands.queue.take();
            self.broadcast(&events, None);
            let (listener, clients) = self.wait(next);
            self.serve(&clients);
            if listener {
                self.accept();
            }
        }
        self.farewell();
    }

    /// Waits until something is to be done: whether somebody connects, and which clients have a turn.
    fn wait(&mut self, next_event: Option<Instant>) -> (bool, Vec<bool>) {
        let now = Instant::now();
        self.accept_after = self.accept_after.filter(|at| *at > now);
        let deadline = next_event.into_iter().chain(self.accept_after).min();
        let timeout = deadline.map(|at| timespec(at.saturating_duration_since(now)));
        let listen = match self.accept_after {
            Some(_) => PollFlags::empty(),
            None => PollFlags::IN,
        };
        let wake = self.commands.queue.wake_fd();
        let mut fds = vec![
            PollFd::from_borrowed_fd(wake, PollFlags::IN),
            PollFd::new(self.listener.socket(), listen),
        ];
        fds.extend(self.clients.iter().map(|client| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, client.wants_input());
            flags.set(PollFlags::OUT, client.wants_output());
            PollFd::from_borrowed_fd(client.stream().as_fd(), flags)
        }));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                tracing::error!("QMP: poll: {errno}");
                std::thread::sleep(PAUSE);
            }
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        (ready[1], ready[2..].to_vec())
    }

    fn serve(&mut self, ready: &[bool]) {
        for (at, _) in ready.iter().enumerate().filter(|(_, ready)| **ready) {
            let events = self.clients[at].turn(&self.commands);
            self.broadcast(&events, Some(at));
        }
        self.clients.retain(|client| match client.gone() {
            None => true,
            Some(Gone::Closed) => {
                tracing::debug!("QMP client gone");
                false
            }
            Some(Gone::Deaf) => {
                tracing::warn!("QMP client dropped: it does not read its events");
                false
            }
        });
    }

    /// Tells all clients, but for the one that was told already.
    fn broadcast(&mut self, events: &[Value], told: Option<usize>) {
        for event in events {
            let line = message::line(event);
            for (at, client) in self.clients.iter_mut().enumerate() {
                if Some(at) != told {
                    client.tell(&line);
                }
            }
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok(stream) if self.clients.len() < MAX_CLIENTS => {
                    tracing::debug!("QMP client connected");
                    self.clients.push(Client::new(stream));
                }
                Ok(stream) => {
                    let refusal = Err(Error::TooManyClients(MAX_CLIENTS));
                    let line = message::line(&message::reply(None, refusal));
                    // A fresh connection has room for a line; a client that is gone does not matter.
                    let _ = send(&stream, &line, SendFlags::NOSIGNAL);
                }
                Err(error) => {
                    let errno = Errno::from_io_error(&error);
                    match errno {
                        Some(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
                        _ => {
                            tracing::warn!("QMP: cannot accept a client: {error}");
                            self.accept_after = Some(Instant::now() + PAUSE);
                        }
                    }
                    return;
                }
            }
        }
    }

    /// Gives the clients a moment to take what is left.
    fn farewell(&mut self) {
        let (events, _) = self.commands.queue.take();
        self.broadcast(&events, None);
        let deadline = Instant::now() + FAREWELL;
        loop {
            for client in &mut self.clients {
                client.flush();
            }
            self.clients
                .retain(|client| client.wants_output() && client.gone().is_none());
            let left = deadline.saturating_duration_since(Instant::now());
            if self.clients.is_empty() || left.is_zero() {
                return;
            }
            let mut fds: Vec<PollFd<'_>> = self
                .clients
                .iter()
                .map(|client| PollFd::new(client.stream(), PollFlags::OUT))
                .collect();
            // Interrupted or not, the loop looks at the clock.
            let _ = poll(&mut fds, Some(&timespec(left)));
        }
    }
}

fn timespec(duration: Duration) -> Timespec {
    // A deadline is at most seconds away.
    Timespec::try_from(duration).unwrap_or_default()
}

#[cfg(test)]
mod tests;
