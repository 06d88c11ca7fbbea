//! The main thread while the guest runs: signals, console input, the end of the run.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use iothread::Context;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use super::console::{Console, Input};
use super::control::Control;
use super::hypervisor::GuestConsole;
use super::lifecycle::{Lifecycle, Outcome};
use super::signals::{Request, Signals};

/// How long a guest that reported a panic may go on, to write its last messages and reset itself.
const PANIC_GRACE: Duration = Duration::from_secs(1);

/// How often a job in the background looks whether it has the terminal by now.
const LOOK_NS: i64 = 200_000_000;

/// The event loop cannot work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The event manager.
    #[error("main loop: {0}")]
    Events(#[from] event_manager::Error),
    /// The loop inside.
    #[error("main loop: {0}")]
    Context(#[from] iothread::Error),
    /// The timer.
    #[error("main loop: {0}")]
    Timer(#[from] rustix::io::Errno),
}

/// Everything that the main thread listens to.
pub struct MainLoop {
    /// Signals of the process.
    pub signals: Signals,
    /// The user's side of the console.
    pub console: Console,
    /// The guest's side.
    pub guest_console: Arc<dyn GuestConsole>,
    /// The end of the run.
    pub lifecycle: Arc<Lifecycle>,
    /// Tells clients of the monitor what happens.
    pub control: Arc<Control>,
    /// The loop of the disks that have no iothread, driven from this one.
    pub context: Context,
}

/// Runs until the run has ended, and says how. The console's terminal is restored when this returns.
pub fn run(parts: MainLoop) -> Result<Outcome, Error> {
    let (lifecycle, control) = (parts.lifecycle.clone(), parts.control.clone());
    let context_fd = parts.context.pollable_fd()?;
    let mut manager = EventManager::new()?;
    manager.add_subscriber(Subscriber {
        parts,
        context_fd,
        look: timerfd_create(
            TimerfdClockId::Monotonic,
            TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
        )?,
        input: Watch::Off,
    });
    let mut panic_deadline = None;
    loop {
        if let Some(outcome) = lifecycle.outcome() {
            return Ok(outcome);
        }
        if lifecycle.panic_reported() {
            control.guest_panicked();
            let deadline = *panic_deadline.get_or_insert_with(|| Instant::now() + PANIC_GRACE);
            if Instant::now() >= deadline {
                lifecycle.end(Outcome::GuestPanic);
                continue;
            }
        }
        manager.run_with_timeout(milliseconds_until(panic_deadline))?;
    }
}

/// A timeout for epoll: rounded up, -1 for ever.
fn milliseconds_until(deadline: Option<Instant>) -> i32 {
    deadline.map_or(-1, |deadline| {
        let left = deadline.saturating_duration_since(Instant::now());
        i32::try_from(left.as_millis() + 1).unwrap_or(i32::MAX)
    })
}

/// What the epoll data of an event says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token {
    Signal,
    Lifecycle,
    Input,
    InputRoom,
    Context,
    Look,
}

impl Token {
    const ALL: [Self; 6] = [
        Self::Signal,
        Self::Lifecycle,
        Self::Input,
        Self::InputRoom,
        Self::Context,
        Self::Look,
    ];
}

/// Whether the input's descriptor is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Watch {
    On,
    Off,
    /// epoll does not take it (a file): it is always readable.
    Impossible,
}

struct Subscriber {
    parts: MainLoop,
    context_fd: RawFd,
    /// Runs while another job has the terminal.
    look: OwnedFd,
    input: Watch,
}

impl MutEventSubscriber for Subscriber {
    fn init(&mut self, ops: &mut EventOps) {
        let always = [
            (self.parts.signals.fd(), Token::Signal),
            (self.parts.lifecycle.event().as_raw_fd(), Token::Lifecycle),
            (
                self.parts.guest_console.input_room().as_raw_fd(),
                Token::InputRoom,
            ),
            (self.context_fd, Token::Context),
            (self.look.as_raw_fd(), Token::Look),
        ];
        for (fd, token) in always {
            if let Err(error) = ops.add(events(fd, token)) {
                self.fail(error);
            }
        }
        if self.parts.console.in_background() {
            self.look_every(LOOK_NS);
            return;
        }
        self.watch_input(ops);
        if self.input == Watch::Impossible {
            self.read_input(ops);
        }
    }

    fn process(&mut self, event: Events, ops: &mut EventOps) {
        let token = Token::ALL
            .into_iter()
            .find(|token| *token as u32 == event.data());
        match token {
            Some(Token::Signal) => {
                while let Some(request) = self.parts.signals.pending() {
                    self.obey(request, ops);
                }
            }
            Some(Token::Lifecycle) => {
                // Only resets the event: the loop looks at the state itself.
                let _ = self.parts.lifecycle.event().read();
            }
            Some(Token::Input) => self.read_input(ops),
            Some(Token::InputRoom) => {
                let _ = self.parts.guest_console.input_room().read();
                let input = self.parts.console.offer(&*self.parts.guest_console);
                self.after_input(input, ops);
                if self.input == Watch::Impossible && input == Input::Watch {
                    self.read_input(ops);
                }
            }
            Some(Token::Context) => {
                self.parts.context.dispatch();
            }
            Some(Token::Look) => {
                let _ = rustix::io::read(&self.look, &mut [0u8; 8]);
                self.take_terminal(ops);
            }
            None => {}
        }
    }
}

impl Subscriber {
    fn obey(&mut self, request: Request, ops: &mut EventOps) {
        match request {
            Request::End(by) => self.parts.lifecycle.end(Outcome::Stopped(by)),
            Request::Suspend => {
                self.parts.console.suspend();
                // SAFETY: raise(3) has no preconditions.
                unsafe { libc::raise(libc::SIGSTOP) };
            }
            Request::Resume => self.take_terminal(ops),
        }
    }

    /// Takes the terminal if this job has it; otherwise looks again soon.
    fn take_terminal(&mut self, ops: &mut EventOps) {
        if self.parts.console.resume() {
            self.look_every(0);
            self.watch_input(ops);
        } else if self.parts.console.in_background() {
            self.unwatch_input(ops);
            self.look_every(LOOK_NS);
        }
    }

    /// Looks again and again; 0 stops that.
    fn look_every(&mut self, interval_ns: i64) {
        let interval = Timespec {
            tv_sec: 0,
            tv_nsec: interval_ns,
        };
        let timer = Itimerspec {
            it_interval: interval,
            it_value: interval,
        };
        if let Err(errno) = timerfd_settime(&self.look, TimerfdTimerFlags::empty(), &timer) {
            tracing::warn!("the terminal is not looked at in the background: {errno}");
        }
    }

    /// Reads input once; a file as long as the guest takes it.
    fn read_input(&mut self, ops: &mut EventOps) {
        loop {
            let input = self.parts.console.read(&*self.parts.guest_console);
            self.after_input(input, ops);
            if self.input != Watch::Impossible || input != Input::Watch {
                return;
            }
        }
    }

    fn after_input(&mut self, input: Input, ops: &mut EventOps) {
        match input {
            Input::Watch => self.watch_input(ops),
            Input::Wait | Input::End => self.unwatch_input(ops),
            Input::Background => self.take_terminal(ops),
            Input::Leave => self
                .parts
                .lifecycle
                .end(Outcome::Stopped("Ctrl-A x".to_owned())),
        }
    }

    fn watch_input(&mut self, ops: &mut EventOps) {
        if let (Some(fd), Watch::Off) = (self.parts.console.input_fd(), self.input) {
            self.input = match ops.add(events(fd, Token::Input)) {
                Ok(()) => Watch::On,
                // EPERM: a file, or a device without readiness.
                Err(_) => Watch::Impossible,
            };
        }
    }

    fn unwatch_input(&mut self, ops: &mut EventOps) {
        if self.input == Watch::On {
            self.input = Watch::Off;
            if let Some(fd) = self.parts.console.input_fd()
                && let Err(error) = ops.remove(events(fd, Token::Input))
            {
                self.fail(error);
            }
        }
    }

    /// A descriptor that cannot be watched would leave the VM without ears: the run ends.
    fn fail(&mut self, error: event_manager::Error) {
        let text = format!("main loop: {error}");
        self.parts.lifecycle.end(Outcome::ThreadDied(text));
    }
}

fn events(fd: RawFd, token: Token) -> Events {
    Events::with_data_raw(fd, token as u32, EventSet::IN)
}
