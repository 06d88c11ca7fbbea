//! Shared memory whose file the front end cuts short.
//!
//! Touching a page beyond the end of its file is a SIGBUS (mmap(2)), and the front end may cut the
//! file whenever it likes. The handler puts anonymous memory in the place of such a mapping and
//! raises the alarm of the connection that it belongs to, which then ends; the thread that touched
//! it goes on with zeroes. Any other SIGBUS ends the process as before.
//!
//! A signal handler may use hardly anything, so the mappings are in a table of atomics.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use rustix::event::EventfdFlags;

/// Mappings watched at once, of all connections of the process.
const SLOTS: usize = 8192;

struct Slot {
    /// First byte; 0 is a free slot.
    start: AtomicUsize,
    end: AtomicUsize,
    alarm: AtomicPtr<Alarm>,
}

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        alarm: AtomicPtr::new(ptr::null_mut()),
    }
}; SLOTS];

/// Held by whoever takes or frees slots; the handler never takes it.
static CHANGE: Mutex<()> = Mutex::new(());

/// Raised when memory of a connection is gone.
#[derive(Debug)]
pub struct Alarm {
    raised: AtomicBool,
    event: OwnedFd,
}

impl Alarm {
    /// One that is not raised.
    pub fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            raised: AtomicBool::new(false),
            event: rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
        }))
    }

    /// Whether memory of the connection is gone.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::Acquire)
    }

    /// Readable when it is raised.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// A mapping that is watched as long as this lives, which must not be longer than the mapping.
#[derive(Debug)]
pub struct Watch {
    slot: usize,
    _alarm: Arc<Alarm>,
}

impl Watch {
    /// Watches `len` bytes from `start` on, a mapping of its own, in whole pages.
    ///
    /// # Errors
    /// The handler cannot be installed, or too many mappings are watched.
    pub fn new(start: *mut u8, len: usize, alarm: &Arc<Alarm>) -> io::Result<Self> {
        install()?;
        let _change = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
        let free = TABLE
            .iter()
            .position(|slot| slot.start.load(Ordering::Relaxed) == 0);
        let slot = free.ok_or_else(|| io::Error::other("too many memory regions are mapped"))?;
        let entry = &TABLE[slot];
        let page = rustix::param::page_size();
        entry
            .end
            .store(start.addr() + len.next_multiple_of(page), Ordering::Relaxed);
        entry
            .alarm
            .store(Arc::as_ptr(alarm).cast_mut(), Ordering::Relaxed);
        entry.start.store(start.addr(), Ordering::Release);
        Ok(Self {
            slot,
            _alarm: alarm.clone(),
        })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _change = CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
        TABLE[self.slot].start.store(0, Ordering::Release);
    }
}

fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    INSTALLED
        .get_or_init(|| {
            // SAFETY: an all-zero sigaction is a valid object to fill.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            // SAFETY: the handler has the signature that SA_SIGINFO asks for, and does only what a
            // signal handler may.
            match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) } {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
            }
        })
        .map_err(io::Error::from_raw_os_error)
}

extern "C" fn on_sigbus(_signal: i32, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel hands a valid siginfo to a handler with SA_SIGINFO, with an address for
    // SIGBUS.
    let (code, addr) = unsafe { ((*info).si_code, (*info).si_addr().addr()) };
    // SAFETY: the location of this thread's errno, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    let mended = code == libc::BUS_ADRERR && mend(addr);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    if !mended {
        // SAFETY: sets the default action: the faulting instruction is run again and ends the
        // process.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    }
}

fn mend(addr: usize) -> bool {
    for slot in &TABLE {
        let start = slot.start.load(Ordering::Acquire);
        if start == 0 || addr < start {
            continue;
        }
        let end = slot.end.load(Ordering::Relaxed);
        let alarm = slot.alarm.load(Ordering::Relaxed);
        if addr >= end || slot.start.load(Ordering::Acquire) != start {
            continue;
        }
        // SAFETY: start to end is one mapping that the watch's owner keeps, and this thread is just
        // touching it; other memory replaces it at the same place. A system call, nothing else.
        let mapped = unsafe {
            libc::mmap(
                ptr::with_exposed_provenance_mut(start),
                end - start,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if mapped == libc::MAP_FAILED {
            return false;
        }
        // SAFETY: the watch keeps the alarm, and whoever touches the mapping keeps the watch.
        let alarm = unsafe { &*alarm };
        alarm.raised.store(true, Ordering::Release);
        let one = 1u64;
        // SAFETY: writes 8 bytes of `one` to an eventfd that does not block; write(2) may be called
        // in a signal handler.
        unsafe { libc::write(alarm.event.as_raw_fd(), (&raw const one).cast(), 8) };
        return true;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{FileOffset, MmapRegion};

    #[test]
    fn memory_that_is_cut_away_reads_as_zeroes_and_raises_the_alarm_of_its_connection_alone() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(0x4000).unwrap();
        let other = Alarm::new().unwrap();
        let alarm = Alarm::new().unwrap();
        let map = || {
            let offset = FileOffset::new(file.try_clone().unwrap(), 0);
            MmapRegion::<()>::from_file(offset, 0x4000).unwrap()
        };
        let (untouched, region) = (map(), map());
        let _other = Watch::new(untouched.as_ptr(), 0x4000, &other).unwrap();
        let watch = Watch::new(region.as_ptr(), 0x4000, &alarm).unwrap();
        let byte = region.as_ptr().wrapping_add(0x3000);
        // SAFETY: within the mapping.
        unsafe { byte.write_volatile(7) };
        assert!(!alarm.is_raised());
        file.set_len(0x1000).unwrap();
        // SAFETY: within the mapping, which the handler replaces.
        assert_eq!(unsafe { byte.read_volatile() }, 0);
        assert!(alarm.is_raised() && !other.is_raised());
        let mut count = [0; 8];
        rustix::io::read(alarm.event(), &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 1);
        // SAFETY: as above; it is memory again.
        unsafe { byte.write_volatile(9) };
        drop(watch);
    }
}
