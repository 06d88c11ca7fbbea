//! Signals as a descriptor of the main loop.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

/// Signals that the main loop takes instead of dying of them.
const TAKEN: [i32; 5] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGTSTP,
    libc::SIGCONT,
];

/// What a signal asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// End the run; who asked.
    End(String),
    /// Stop the process until it is continued.
    Suspend,
    /// The process was continued.
    Resume,
}

/// The signals of this process, blocked and readable.
#[derive(Debug)]
pub struct Signals {
    file: File,
}

impl Signals {
    /// Blocks the signals in this thread and those it starts later. Call it before any thread is started.
    pub fn take() -> io::Result<Self> {
        // SAFETY: an all-zero signal set is a valid object for sigemptyset(3) to fill.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: `set` is a signal set, and the signals' numbers are valid.
        unsafe {
            libc::sigemptyset(&raw mut set);
            for signal in TAKEN {
                libc::sigaddset(&raw mut set, signal);
            }
        }
        // SAFETY: `set` was filled above; the old mask is not asked for.
        let error =
            unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if error != 0 {
            return Err(io::Error::from_raw_os_error(error));
        }
        // A write beyond the limit of file sizes (RLIMIT_FSIZE) is an error of the disk's like any other.
        // SAFETY: no handler is installed.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        // SAFETY: `set` was filled above.
        let fd =
            unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            // SAFETY: the descriptor is new and nobody else's.
            file: unsafe { File::from_raw_fd(fd) },
        })
    }

    /// Readable when a signal has come.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The next signal that has come, if any.
    pub fn pending(&mut self) -> Option<Request> {
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        self.file.read_exact(&mut info).ok()?;
        // The signal's number and its sender's process id are the first and fourth 32-bit words (signalfd(2)).
        let word = |at: usize| {
            let bytes = info[at * 4..at * 4 + 4].try_into().unwrap_or_default();
            u32::from_ne_bytes(bytes)
        };
        let (signal, sender) = (word(0), word(3));
        Some(match i32::try_from(signal).unwrap_or_default() {
            libc::SIGTSTP => Request::Suspend,
            libc::SIGCONT => Request::Resume,
            libc::SIGINT => Request::End(by("SIGINT", signal, sender)),
            libc::SIGHUP => Request::End(by("SIGHUP", signal, sender)),
            _ => Request::End(by("SIGTERM", signal, sender)),
        })
    }
}

fn by(name: &str, signal: u32, sender: u32) -> String {
    match sender {
        // The kernel itself: a key of the terminal, or its end.
        0 => format!("signal {signal} ({name})"),
        pid => format!("signal {signal} ({name}) from process {pid}"),
    }
}
