//! How a request reaches the host's kernel: the loop's ring, Linux AIO, or a pool of threads.
//!
//! An engine belongs to one queue and lives in its home thread. It gets operations and tokens, and
//! gives back tokens and results: a count of bytes or a negative errno. What a result means, it
//! does not know.

#[cfg(test)]
pub(super) mod faults;
mod fixed;
pub(super) mod io_uring;
pub(super) mod linux_aio;
pub(super) mod threads;

use std::os::fd::RawFd;

use iothread::{CompleterId, Context};
use libc::iovec;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use self::fixed::FixedBuffers;
use self::io_uring::IoUring;
use self::linux_aio::LinuxAio;
use self::threads::Threads;
pub use self::threads::on_worker_start;
use super::config::{EngineKind, FixedBufs};
use super::disk::Disk;
use crate::GuestMemory;

/// One operation on the image.
///
/// The buffers that it points to must stay as they are until its result has come back.
#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
    /// `preadv`
    Read(Transfer),
    /// `pwritev`
    Write(Transfer),
    /// `fdatasync`
    Sync,
    /// `fallocate`
    Fallocate { mode: i32, offset: u64, len: u64 },
    /// The block device ioctl BLKDISCARD.
    DeviceDiscard { offset: u64, len: u64 },
}

/// The data of a read or write.
#[derive(Clone, Copy, Debug)]
pub(super) struct Transfer {
    pub(super) segments: *const iovec,
    pub(super) count: u32,
    pub(super) offset: u64,
}

// SAFETY: the pointer is only used by whoever executes the operation, while the request's slot
// keeps what it points to.
unsafe impl Send for Transfer {}

/// A result: the operation's token, and a count of bytes or a negative errno.
pub(super) type Completion = (u32, i32);

/// See the module.
///
/// # Safety
/// (of `submit`'s callers) What an operation points to stays until its completion was taken.
pub(super) trait Engine {
    /// Whether this engine can do `op`; else the thread pool must.
    fn can(&self, op: &Op) -> bool;

    /// Takes an operation. Never fails: what goes wrong comes back as a completion.
    ///
    /// # Safety
    /// What `op` points to stays valid until its completion has come back.
    unsafe fn submit(&mut self, ctx: &Context, token: u32, op: Op);

    /// No more operations come for now: submit what was gathered.
    fn end_batch(&mut self, _ctx: &Context) {}

    /// The eventfd that tells of completions; None if they come by the context's completer.
    fn event_fd(&self) -> Option<RawFd> {
        None
    }

    /// Most operations to be submitted before completions are looked for, if that matters.
    fn batch(&self) -> Option<u32> {
        None
    }

    /// Whether completions can be reaped, seen without a system call.
    fn has_completions(&self) -> bool {
        false
    }

    /// Takes the completions that are there.
    fn reap(&mut self, _into: &mut Vec<Completion>) {}

    /// Takes back what was set up in the context.
    fn detach(&mut self, _ctx: &Context) {}
}

/// The engine of one queue of `size` descriptors in `mem`: the one asked for, or the best that works.
///
/// # Errors
/// The one asked for is not there.
///
/// # Safety
/// `mem` stays mapped until the engine was detached.
pub(super) unsafe fn make(
    ctx: &Context,
    disk: &Disk,
    completer: CompleterId,
    size: u16,
    mem: &GuestMemory,
) -> Result<Box<dyn Engine>, String> {
    let fd = disk.image.fd();
    let ring = || {
        // SAFETY: the caller's promise; `detach` ends the registration.
        let fixed = unsafe { fixed_buffers(ctx, disk, mem) };
        let inline = !disk.image.direct();
        Box::new(IoUring::new(ctx, fd, completer, fixed, inline))
    };
    let threads = || match Threads::new(fd) {
        Ok(engine) => Ok(Box::new(engine)),
        Err(error) => Err(format!("engine=threads: {error}")),
    };
    let engine: Box<dyn Engine> = match disk.config.engine {
        Some(EngineKind::IoUring) if ctx.has_ring() => ring(),
        Some(EngineKind::IoUring) => {
            return Err(format!(
                "engine=io_uring: there is no io_uring in {}",
                ctx.remote().name()
            ));
        }
        Some(EngineKind::Native) => match LinuxAio::new(ctx, fd, size) {
            Ok(engine) => Box::new(engine),
            Err(error) => return Err(format!("engine=native: {error}")),
        },
        Some(EngineKind::Threads) => threads()?,
        None if ctx.has_ring() => ring(),
        // Linux AIO is asynchronous for direct I/O only.
        None if disk.image.direct() => match LinuxAio::new(ctx, fd, size) {
            Ok(engine) => Box::new(engine),
            Err(_) => threads()?,
        },
        None => threads()?,
    };
    if !ctx.has_ring() {
        disk.without_fixedbufs("they take io_uring, which there is none of here");
    }
    #[cfg(test)]
    let engine = faults::wrap(&disk.config.id, fd, engine);
    Ok(engine)
}

/// The guest's memory registered with the ring, if the disk is to have that and the host allows it.
///
/// # Safety
/// As [`FixedBuffers::register`].
unsafe fn fixed_buffers(ctx: &Context, disk: &Disk, mem: &GuestMemory) -> Option<FixedBuffers> {
    let wanted = match disk.config.fixedbufs {
        FixedBufs::Off => false,
        FixedBufs::Direct => disk.image.direct(),
        FixedBufs::On => true,
    };
    if !wanted {
        return None;
    }
    // SAFETY: the caller's promise.
    match unsafe { FixedBuffers::register(ctx, mem) } {
        Ok(fixed) => Some(fixed),
        Err(error) => {
            let name = ctx.remote().name().to_owned();
            disk.without_fixedbufs(&refusal(&name, mem, &error));
            None
        }
    }
}

/// Why the memory cannot be registered, and what helps.
fn refusal(iothread: &str, mem: &GuestMemory, error: &std::io::Error) -> String {
    let remedy = match error.raw_os_error() {
        Some(libc::ENOMEM) => {
            let mebibytes = mem.iter().map(|region| region.len()).sum::<u64>() >> 20;
            format!("; raise ulimit -l by {mebibytes} MiB for each iothread, or give")
        }
        Some(libc::EINVAL) => "; use Linux 5.19 or newer, or give".to_owned(),
        Some(libc::EOPNOTSUPP | libc::EFAULT) => {
            "; it is of a file whose pages cannot be pinned; give".to_owned()
        }
        _ => "; give".to_owned(),
    };
    format!("{iothread} cannot register the guest's memory: {error}{remedy} fixedbufs=off")
}
