//! The user's terminal in raw mode, and its restoration whatever happens.
//!
//! While the guest owns the terminal its keys, Ctrl-C among them, go to the guest. The saved settings are kept in one
//! place for the whole process, so that every way out finds them: leaving [`RawMode`]'s scope, the panic hook, and the
//! handlers of signals that kill at once.

use std::io::IsTerminal;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Once, OnceLock};

use rustix::termios::{
    ControlModes, InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr,
    tcsetattr,
};

/// The terminal cannot be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "--serial stdio: the terminal refuses raw mode: {0}; redirect standard input, or use --serial none"
)]
pub struct Error(rustix::io::Errno);

/// The descriptor whose settings are in [`SAVED`]; -1 while the terminal is as it was found.
static RAW_FD: AtomicI32 = AtomicI32::new(-1);
/// Settings as found. Written once before `RAW_FD` is first set, and never again.
static SAVED: OnceLock<libc::termios> = OnceLock::new();
/// Someone is restoring right now.
static RESTORING: AtomicBool = AtomicBool::new(false);

/// The terminal on standard input in raw mode, for as long as this lives.
#[derive(Debug)]
pub struct RawMode {
    fd: RawFd,
}

impl RawMode {
    /// Puts standard input into raw mode. `None` if it is no terminal, or another process group has it (a job in the
    /// background): then nothing is touched until [`RawMode::resume`].
    pub fn enter() -> Result<Option<Self>, Error> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        install_last_resorts();
        let mode = Self {
            fd: stdin.as_raw_fd(),
        };
        mode.resume()?;
        Ok(Some(mode))
    }

    /// Raw mode again, after [`RawMode::suspend`] or when the job comes to the foreground.
    pub fn resume(&self) -> Result<(), Error> {
        if !self.has_terminal() {
            return Ok(());
        }
        let fd = self.fd();
        let found = tcgetattr(fd).map_err(Error)?;
        SAVED.get_or_init(|| {
            // SAFETY: an all-zero termios is a valid one, about to be overwritten.
            let mut saved: libc::termios = unsafe { std::mem::zeroed() };
            // SAFETY: the descriptor is open, and the pointer is to a termios.
            unsafe { libc::tcgetattr(self.fd, &raw mut saved) };
            saved
        });
        RAW_FD.store(self.fd, Ordering::SeqCst);
        tcsetattr(fd, OptionalActions::Now, &raw_settings(found)).map_err(Error)
    }

    /// Whether this process is in the terminal's foreground, so that it may read and set it.
    pub fn has_terminal(&self) -> bool {
        rustix::termios::tcgetpgrp(self.fd()).is_ok_and(|group| group == rustix::process::getpgrp())
    }

    fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: standard input stays open for the life of the process.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// The terminal as it was found, for as long as the process is stopped.
    pub fn suspend(&self) {
        restore();
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Raw input; output is still processed, so that messages of ours in between begin at the left.
fn raw_settings(mut settings: Termios) -> Termios {
    settings.input_modes -= InputModes::IGNBRK
        | InputModes::BRKINT
        | InputModes::PARMRK
        | InputModes::ISTRIP
        | InputModes::INLCR
        | InputModes::IGNCR
        | InputModes::ICRNL
        | InputModes::IXON;
    settings.local_modes -= LocalModes::ECHO
        | LocalModes::ECHONL
        | LocalModes::ICANON
        | LocalModes::ISIG
        | LocalModes::IEXTEN;
    settings.control_modes -= ControlModes::CSIZE | ControlModes::PARENB;
    settings.control_modes |= ControlModes::CS8;
    settings.special_codes[SpecialCodeIndex::VMIN] = 1;
    settings.special_codes[SpecialCodeIndex::VTIME] = 0;
    settings
}

/// Restores the terminal if it is raw. Callable at any time, from a signal handler too: only atomics and tcsetattr(3).
pub fn restore() {
    if RESTORING.swap(true, Ordering::SeqCst) {
        return;
    }
    let fd = RAW_FD.swap(-1, Ordering::SeqCst);
    if let (true, Some(saved)) = (fd >= 0, SAVED.get()) {
        // SAFETY: `fd` is standard input and `saved` a termios that the kernel filled.
        unsafe { libc::tcsetattr(fd, libc::TCSANOW, saved) };
    }
    RESTORING.store(false, Ordering::SeqCst);
}

/// Signals that end the process where it stands.
const FATAL: [i32; 7] = [
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGILL,
    libc::SIGFPE,
    libc::SIGABRT,
    libc::SIGSYS,
    libc::SIGQUIT,
];

/// What the fatal signals did before, in the order of [`FATAL`]: the standard library's message about a stack overflow
/// is among it.
static BEFORE: [OnceLock<libc::sigaction>; FATAL.len()] = [const { OnceLock::new() }; FATAL.len()];

/// Restoration on the ways out that run no destructors: a panic, and the fatal signals.
fn install_last_resorts() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let next = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            next(info);
        }));
        for (signal, before) in FATAL.into_iter().zip(&BEFORE) {
            // SAFETY: an all-zero sigaction is a valid one: default handling, no flags.
            let (mut action, mut old) = unsafe {
                (
                    std::mem::zeroed::<libc::sigaction>(),
                    std::mem::zeroed::<libc::sigaction>(),
                )
            };
            // SAFETY: both pointers are to sigactions.
            unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut old) };
            before.get_or_init(|| old);
            action.sa_sigaction = on_fatal as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            // SAFETY: the handler takes three arguments, as SA_SIGINFO says, and is async-signal-safe.
            unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
        }
    });
}

/// Restores the terminal and hands the signal to whoever had it before. Uses only what is async-signal-safe: atomics,
/// tcsetattr(3), sigaction(2), signal(2), raise(3).
extern "C" fn on_fatal(signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    restore();
    // SAFETY: SA_SIGINFO guarantees the pointer.
    let by_fault = unsafe { (*info).si_code } > 0 && signal != libc::SIGSYS;
    if by_fault {
        // The instruction runs again after the return, and faults again with its true address.
        let at = FATAL.iter().position(|fatal| *fatal == signal);
        if let Some(before) = at.and_then(|at| BEFORE[at].get()) {
            // SAFETY: `before` is what sigaction(2) returned.
            unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
            return;
        }
    }
    // What somebody sent does not come again by itself; its default is to end the process.
    // SAFETY: both are async-signal-safe.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}
