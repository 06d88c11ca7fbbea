//! The two ends of the guest's console on the host: where its output goes, where its input comes from.

mod escape;

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use rustix::pty::OpenptFlags;
use rustix::termios::OptionalActions;

use self::escape::{Escape, Key};
use super::hypervisor::GuestConsole;
use super::terminal::{self, RawMode};
use crate::config;

/// Why there is no console.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Standard output is closed, or the like.
    #[error("--serial stdio: {0}; give the process a standard output, or use --serial none")]
    Stdio(io::Error),
    /// The terminal refuses.
    #[error(transparent)]
    Terminal(#[from] terminal::Error),
    /// The output file cannot be made.
    #[error("--serial file={0}: {1}; name a file that can be written")]
    File(PathBuf, io::Error),
    /// There is no pseudo-terminal to be had.
    #[error("--serial pty: {0}; use --serial stdio or file=PATH")]
    Pty(io::Error),
}

/// Where the guest's input comes from, and the state of the user's terminal.
pub struct Console {
    source: Option<Source>,
    /// The input has ended; its descriptor stays, to be unwatched.
    ended: bool,
    raw: Option<RawMode>,
    escape: Escape,
    /// Typed, and not yet taken by the guest.
    pending: Vec<u8>,
}

enum Source {
    Stdin,
    /// The user's side is kept open, so that its absence does not read as an error for ever.
    Pty {
        ours: File,
        _users: OwnedFd,
    },
}

/// What came of looking at the input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// Go on, with the descriptor watched.
    Watch,
    /// Go on, without watching the descriptor until [`Console::offer`] says so.
    Wait,
    /// Another job has the terminal: go on without watching the descriptor until [`Console::resume`] says so. A shell
    /// tells nobody that it brings a running job to the foreground, so that this has to be asked for from time to time.
    Background,
    /// There will be no more input.
    End,
    /// The user wants to leave.
    Leave,
}

/// Most bytes kept for a guest that does not take its input.
const MAX_PENDING_BYTES: usize = 64 << 10;

impl Console {
    /// The console's output, and its input side. A file is made anew, so this comes last of all that can fail.
    pub fn open(config: &config::Serial) -> Result<(Box<dyn Write + Send>, Self), Error> {
        let (output, source): (Box<dyn Write + Send>, _) = match config {
            config::Serial::Stdio => {
                let output = io::stdout()
                    .as_fd()
                    .try_clone_to_owned()
                    .map_err(Error::Stdio)?;
                (Box::new(File::from(output)), Some(Source::Stdin))
            }
            config::Serial::File(path) => (Box::new(create(path)?), None),
            config::Serial::Pty => {
                let source = open_pty().map_err(|error| Error::Pty(error.into()))?;
                let Source::Pty { ours, .. } = &source else {
                    unreachable!("open_pty gives a pty");
                };
                (
                    Box::new(ours.try_clone().map_err(Error::Pty)?),
                    Some(source),
                )
            }
            config::Serial::None => (Box::new(io::sink()), None),
        };
        let raw = match source {
            Some(Source::Stdin) => RawMode::enter()?,
            _ => None,
        };
        let console = Self {
            source,
            ended: false,
            raw,
            escape: Escape::default(),
            pending: Vec::new(),
        };
        Ok((output, console))
    }

    /// The descriptor to watch for input.
    pub fn input_fd(&self) -> Option<RawFd> {
        self.source.as_ref().map(|source| source.fd().as_raw_fd())
    }

    /// Whether input comes from a terminal that another job has.
    pub fn in_background(&self) -> bool {
        self.raw.as_ref().is_some_and(|raw| !raw.has_terminal())
    }

    /// Reads what was typed and offers it to `guest`.
    pub fn read(&mut self, guest: &dyn GuestConsole) -> Input {
        let Some(source) = self.source.as_ref().filter(|_| !self.ended) else {
            return Input::End;
        };
        if self.in_background() {
            // Reading would stop this process.
            return Input::Background;
        }
        let mut buffer = [0; 4096];
        let count = match rustix::io::read(source.fd(), &mut buffer) {
            Ok(count) => count,
            Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => return Input::Watch,
            Err(error) => {
                tracing::warn!(%error, "console input failed");
                0
            }
        };
        if count == 0 {
            self.ended = true;
            return Input::End;
        }
        match self.take(&buffer[..count]) {
            true => Input::Leave,
            false => self.offer(guest),
        }
    }

    /// Offers what the guest has not taken yet.
    pub fn offer(&mut self, guest: &dyn GuestConsole) -> Input {
        if !self.pending.is_empty() {
            let taken = guest.input(&self.pending);
            self.pending.drain(..taken);
        }
        // A terminal is read on, or the user could not leave a guest that does not listen.
        match (self.ended, self.pending.is_empty() || self.raw.is_some()) {
            (true, _) => Input::End,
            (false, true) => Input::Watch,
            (false, false) => Input::Wait,
        }
    }

    /// Keeps typed bytes for the guest; true if the user wants to leave.
    fn take(&mut self, bytes: &[u8]) -> bool {
        if self.raw.is_none() {
            self.pending.extend_from_slice(bytes);
            return false;
        }
        for byte in bytes {
            match self.escape.key(*byte) {
                Key::Guest(byte) if self.pending.len() < MAX_PENDING_BYTES => {
                    self.pending.push(byte)
                }
                Key::Guest(_) | Key::Held => {}
                Key::Help => eprint!("{}", escape::HELP),
                Key::Leave => return true,
            }
        }
        false
    }

    /// The process is about to be stopped: the terminal goes back to the shell.
    pub fn suspend(&self) {
        if let Some(raw) = &self.raw {
            raw.suspend();
        }
    }

    /// The process goes on; whether the input is to be watched again.
    pub fn resume(&self) -> bool {
        match &self.raw {
            Some(raw) => match raw.resume() {
                Ok(()) => raw.has_terminal(),
                Err(error) => {
                    tracing::warn!("{error}");
                    false
                }
            },
            None => false,
        }
    }
}

impl Source {
    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            // SAFETY: standard input stays open for the life of the process.
            Self::Stdin => unsafe { BorrowedFd::borrow_raw(libc::STDIN_FILENO) },
            Self::Pty { ours, .. } => ours.as_fd(),
        }
    }
}

fn create(path: &Path) -> Result<File, Error> {
    File::create(path).map_err(|error| Error::File(path.to_owned(), error))
}

/// A new pseudo-terminal in raw mode; tells its name.
fn open_pty() -> Result<Source, rustix::io::Errno> {
    let ours = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    rustix::pty::grantpt(&ours)?;
    rustix::pty::unlockpt(&ours)?;
    let name = rustix::pty::ptsname(&ours, Vec::new())?;
    let users = rustix::fs::open(
        &name,
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC,
        rustix::fs::Mode::empty(),
    )?;
    let mut settings = rustix::termios::tcgetattr(&users)?;
    settings.make_raw();
    rustix::termios::tcsetattr(&users, OptionalActions::Now, &settings)?;
    // Nobody may be there to read: output must not block the writer.
    rustix::io::ioctl_fionbio(&ours, true)?;
    eprintln!("pollux: the serial console is {}", name.to_string_lossy());
    Ok(Source::Pty {
        ours: File::from(ours),
        _users: users,
    })
}
