//! Interrupts: eventfds of the front end's.
//!
//! A disk's iothread writes them, once a batch, and must not wait there: an eventfd that was opened to
//! block does so when its count is full, and a hostile front end can keep it full. Such a one is
//! signalled by the kernel instead, which never waits: it is registered with a small ring, where each
//! NOP is a signal (io_uring_register_eventfd(3)).

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use devices::virtio::device::Interrupt;
use io_uring::{IoUring, opcode};
use rustix::event::EventfdFlags;
use rustix::fs::{Mode, OFlags};

/// The folder of this process' descriptors, which may be out of reach later ([`crate::sandbox`]).
static DESCRIPTORS: OnceLock<OwnedFd> = OnceLock::new();

/// Opens what [`is_eventfd`] needs, while it can be opened.
///
/// # Errors
/// There is no /proc.
pub fn prepare() -> io::Result<()> {
    descriptors().map(drop)
}

fn descriptors() -> io::Result<&'static OwnedFd> {
    if let Some(folder) = DESCRIPTORS.get() {
        return Ok(folder);
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open("/proc/self/fd", flags, Mode::empty())?;
    Ok(DESCRIPTORS.get_or_init(|| folder))
}

/// Whether a descriptor is an eventfd: anything else may block, or be readable for ever.
pub fn is_eventfd(fd: BorrowedFd<'_>) -> bool {
    let Ok(folder) = descriptors() else {
        return false;
    };
    let mut name = [MaybeUninit::uninit(); 64];
    let link = rustix::fs::readlinkat_raw(folder, fd.as_raw_fd().to_string(), &mut name);
    link.is_ok_and(|(name, _)| name == b"anon_inode:[eventfd]")
}

/// Nobody wants to be told.
const SILENT: u8 = 0;
/// The eventfd in the slot does not block.
const PLAIN: u8 = 1;
/// The kernel signals it.
const BY_RING: u8 = 2;

/// One queue's interrupt. Its descriptor keeps its number when the front end gives another eventfd, so
/// that the iothread needs no lock to find it.
struct Call {
    slot: OwnedFd,
    mode: AtomicU8,
    ring: Mutex<Option<IoUring>>,
}

impl Call {
    fn new() -> io::Result<Call> {
        let flags = EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC;
        Ok(Call {
            slot: rustix::event::eventfd(0, flags)?,
            mode: AtomicU8::new(SILENT),
            ring: Mutex::new(None),
        })
    }

    #[inline]
    fn signal(&self) {
        match self.mode.load(Ordering::Acquire) {
            PLAIN => {
                // Full, it is signalled already.
                let _ = rustix::io::write(&self.slot, &1u64.to_ne_bytes());
            }
            BY_RING => self.signal_by_ring(),
            _ => {}
        }
    }

    fn signal_by_ring(&self) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(ring) = ring.as_mut() else { return };
        // SAFETY: a NOP points nowhere.
        let queued = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
        // The ring is empty whenever nobody holds it; what can fail is the system call.
        let sent = queued
            .map_err(io::Error::other)
            .and_then(|()| ring.submit());
        if let Err(error) = sent {
            tracing::error!(%error, "cannot signal the front end");
        }
        ring.completion().for_each(drop);
    }

    fn set(&self, fd: Option<OwnedFd>) -> io::Result<()> {
        let Some(fd) = fd else {
            self.mode.store(SILENT, Ordering::Release);
            return Ok(());
        };
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        if rustix::fs::fcntl_getfl(&fd)?.contains(OFlags::NONBLOCK) {
            // SAFETY: both are open descriptors; the slot's number stays ours and means the
            // eventfd from now on, at once for whoever writes it meanwhile.
            let done =
                unsafe { libc::dup3(fd.as_raw_fd(), self.slot.as_raw_fd(), libc::O_CLOEXEC) };
            if done < 0 {
                return Err(io::Error::last_os_error());
            }
            self.mode.store(PLAIN, Ordering::Release);
            *ring = None;
        } else {
            let new = IoUring::new(2)?;
            new.submitter().register_eventfd(fd.as_raw_fd())?;
            *ring = Some(new);
            self.mode.store(BY_RING, Ordering::Release);
        }
        Ok(())
    }
}

/// The interrupts of a disk.
pub struct Calls {
    disk: String,
    queues: Vec<Call>,
    /// Signalled when the front end's driver has broken the disk.
    errors: Mutex<Vec<Option<OwnedFd>>>,
}

impl Calls {
    /// Silent ones, for `queues` queues of the disk `disk`.
    pub fn new(disk: String, queues: usize) -> io::Result<Calls> {
        Ok(Calls {
            disk,
            queues: (0..queues).map(|_| Call::new()).collect::<Result<_, _>>()?,
            errors: Mutex::new((0..queues).map(|_| None).collect()),
        })
    }

    /// The eventfd of a queue's interrupt, from now on; none is silence.
    ///
    /// # Errors
    /// It blocks, and there is no io_uring to signal it by; or descriptors have run out.
    pub fn set(&self, queue: usize, fd: Option<OwnedFd>) -> io::Result<()> {
        self.queues[queue].set(fd)
    }

    /// The eventfd of a queue's errors.
    pub fn set_error(&self, queue: usize, fd: Option<OwnedFd>) {
        let mut errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        errors[queue] = fd;
    }

    /// Forgets all eventfds.
    pub fn clear(&self) {
        for (index, call) in self.queues.iter().enumerate() {
            call.mode.store(SILENT, Ordering::Release);
            *call.ring.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.set_error(index, None);
        }
    }
}

impl Interrupt for Calls {
    #[inline]
    fn queue(&self, index: u16) {
        if let Some(call) = self.queues.get(usize::from(index)) {
            call.signal();
        }
    }

    fn config(&self) {
        // The protocol crate has no message for it, so sizes do not change (see `backend`).
    }

    fn needs_reset(&self) {
        tracing::warn!(
            "disk {}: its front end is told by the error eventfds",
            self.disk
        );
        let errors = self.errors.lock().unwrap_or_else(PoisonError::into_inner);
        for error in errors.iter().flatten() {
            // One that may block is left alone: this is the iothread.
            let flags = rustix::fs::fcntl_getfl(error);
            if flags.is_ok_and(|flags| flags.contains(OFlags::NONBLOCK)) {
                let _ = rustix::io::write(error, &1u64.to_ne_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};
    use std::os::fd::AsFd;

    fn eventfd(flags: EventfdFlags) -> OwnedFd {
        rustix::event::eventfd(0, flags).unwrap()
    }

    fn count(fd: &OwnedFd) -> u64 {
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        let now = rustix::event::Timespec::default();
        if poll(&mut fds, Some(&now)).unwrap() == 0 {
            return 0;
        }
        let mut bytes = [0; 8];
        rustix::io::read(fd, &mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn both_kinds_are_signalled_and_the_last_one_given_counts() {
        let calls = Calls::new("d".to_owned(), 2).unwrap();
        let plain = eventfd(EventfdFlags::NONBLOCK);
        let blocking = eventfd(EventfdFlags::empty());
        calls.queue(0);
        for fd in [&plain, &blocking, &plain] {
            calls.set(0, Some(fd.try_clone().unwrap())).unwrap();
            calls.queue(0);
            calls.queue(1);
            assert_eq!(count(fd), 1);
        }
        assert_eq!((count(&plain), count(&blocking)), (0, 0));
        calls.set(0, None).unwrap();
        calls.queue(0);
        assert_eq!(count(&plain), 0);
        // Out of range, as a broken caller would.
        calls.queue(2);
    }

    #[test]
    fn a_count_that_is_kept_full_does_not_hold_the_caller() {
        let calls = Calls::new("d".to_owned(), 1).unwrap();
        for flags in [EventfdFlags::NONBLOCK, EventfdFlags::empty()] {
            let fd = eventfd(flags);
            rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            calls.set(0, Some(fd.try_clone().unwrap())).unwrap();
            for _ in 0..100 {
                calls.queue(0);
            }
        }
    }

    #[test]
    fn other_descriptors_are_told_from_eventfds() {
        assert!(is_eventfd(eventfd(EventfdFlags::empty()).as_fd()));
        assert!(!is_eventfd(tempfile::tempfile().unwrap().as_fd()));
        let (pipe, _other) = std::io::pipe().unwrap();
        assert!(!is_eventfd(pipe.as_fd()));
    }
}
