//! Linux AIO (io_submit(2)): QEMU's `aio=native`.
//!
//! Requests are gathered and submitted together, at the latest at the end of the batch. Completions
//! are read from the ring that the kernel maps into the process, so polling costs no system call;
//! an eventfd wakes the loop when it sleeps.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};

use iothread::{Context, Remote};
use vmm_sys_util::eventfd::EventFd;

use super::{Completion, Engine, Op, Transfer};

// linux/aio_abi.h
const CMD_FDSYNC: u16 = 3;
const CMD_PREADV: u16 = 7;
const CMD_PWRITEV: u16 = 8;
const FLAG_RESFD: u32 = 1;
/// First field that tells a ring that user space may read.
const RING_MAGIC: u32 = 0xa10a_10a1;

/// `struct iocb`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Iocb {
    data: u64,
    // The order of these two is the host's byte order's.
    #[cfg(target_endian = "little")]
    key: u32,
    rw_flags: i32,
    #[cfg(target_endian = "big")]
    key: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    eventfd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IoEvent {
    data: u64,
    object: u64,
    result: i64,
    result2: i64,
}

/// The head of the completion ring that `io_setup` maps at the context's address.
#[repr(C)]
struct RingHeader {
    id: u32,
    count: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compat_features: u32,
    incompat_features: u32,
    header_bytes: u32,
}

const _: () = assert!(size_of::<Iocb>() == 64 && size_of::<IoEvent>() == 32);
const _: () = assert!(size_of::<RingHeader>() == 32);

/// The kernel's AIO context.
struct AioContext(libc::c_ulong);

impl AioContext {
    fn new(events: u32) -> io::Result<AioContext> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: io_setup writes one `aio_context_t`, which is an unsigned long.
        let result = unsafe { libc::syscall(libc::SYS_io_setup, events, &mut context) };
        if result < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(AioContext(context))
    }

    fn ring(&self) -> &RingHeader {
        // SAFETY: the context's value is the address of the mapped ring, which stays mapped until
        // io_destroy.
        unsafe { &*std::ptr::with_exposed_provenance::<RingHeader>(self.0 as usize) }
    }
}

impl Drop for AioContext {
    fn drop(&mut self) {
        // SAFETY: destroys a context that io_setup made; waits for what is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// See the module.
pub(in super::super) struct LinuxAio {
    context: AioContext,
    event: EventFd,
    fd: RawFd,
    // One a token.
    iocbs: Box<[Iocb]>,
    queued: VecDeque<u32>,
    in_flight: usize,
    // The kernel took no more: wait for completions.
    blocked: bool,
    // Refused at submission; reported like completions.
    failed: Vec<Completion>,
    user_ring: bool,
    // Where `aio-max-batch` is read, once a batch.
    settings: Remote,
    max_batch: usize,
}

/// Requests gathered before they are submitted if the iothread does not say.
const DEFAULT_BATCH: usize = 32;

impl LinuxAio {
    /// An engine for `fd` with at most `tokens` requests at a time.
    ///
    /// # Errors
    /// `EAGAIN` when the system's `fs.aio-max-nr` is used up; `ENOSYS` without Linux AIO.
    pub(in super::super) fn new(ctx: &Context, fd: RawFd, tokens: u16) -> io::Result<LinuxAio> {
        let context = AioContext::new(u32::from(tokens))?;
        let ring = context.ring();
        // A ring of another layout is left to io_getevents.
        let user_ring = ring.magic == RING_MAGIC && ring.incompat_features == 0;
        Ok(LinuxAio {
            context,
            event: EventFd::new(libc::EFD_CLOEXEC)?,
            fd,
            iocbs: vec![Iocb::default(); usize::from(tokens)].into(),
            queued: VecDeque::with_capacity(usize::from(tokens)),
            in_flight: 0,
            blocked: false,
            failed: Vec::with_capacity(usize::from(tokens)),
            user_ring,
            settings: ctx.remote(),
            max_batch: DEFAULT_BATCH,
        })
    }

    fn fail(&mut self, token: u32, error: i32) {
        self.failed.push((token, -error));
        // Reported from the loop, never from within the submission.
        if let Err(error) = self.event.write(1) {
            tracing::error!(%error, "disk completion event failed");
        }
    }

    fn submit_queued(&mut self) {
        while !self.queued.is_empty() && !self.blocked {
            let mut pointers = [std::ptr::null::<Iocb>(); DEFAULT_BATCH];
            let count = self.queued.len().min(pointers.len());
            for (pointer, &token) in pointers.iter_mut().zip(&self.queued) {
                *pointer = &self.iocbs[token as usize];
            }
            // SAFETY: `count` pointers to control blocks that stay until their completions; their
            // buffers do as `submit`'s caller promised.
            let result = unsafe {
                libc::syscall(
                    libc::SYS_io_submit,
                    self.context.0,
                    count as libc::c_long,
                    pointers.as_ptr(),
                )
            };
            if result > 0 {
                self.in_flight += result as usize;
                self.queued.drain(..result as usize);
                continue;
            }
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                // Wait for completions, unless none will come.
                Some(libc::EAGAIN) if self.in_flight > 0 => self.blocked = true,
                // The first one is at fault.
                error => {
                    if let Some(token) = self.queued.pop_front() {
                        self.fail(token, error.unwrap_or(libc::EIO));
                    }
                }
            }
        }
    }

    fn take_events(&mut self, into: &mut Vec<Completion>) -> usize {
        let before = into.len();
        if !self.user_ring {
            return self.get_events(into);
        }
        let ring = self.context.ring();
        // Acquire: the events up to `tail` are written.
        let tail = ring.tail.load(Ordering::Acquire);
        let mut head = ring.head.load(Ordering::Relaxed);
        let events = std::ptr::from_ref(ring)
            .cast::<u8>()
            .wrapping_add(ring.header_bytes as usize)
            .cast::<IoEvent>();
        while head != tail {
            // SAFETY: `head` is below the ring's `count`, and its event was written before `tail`.
            let event = unsafe { events.add(head as usize).read_volatile() };
            into.push((event.data as u32, clamp(event.result)));
            head += 1;
            if head >= ring.count {
                head = 0;
            }
        }
        // Release: the events are read before their places are free.
        ring.head.store(head, Ordering::Release);
        into.len() - before
    }

    fn get_events(&self, into: &mut Vec<Completion>) -> usize {
        let before = into.len();
        let mut events = [IoEvent::default(); 32];
        loop {
            let mut now = libc::timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            // SAFETY: room for as many events as are asked for, and a timespec.
            let result = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context.0,
                    0 as libc::c_long,
                    events.len() as libc::c_long,
                    events.as_mut_ptr(),
                    &mut now,
                )
            };
            let count = usize::try_from(result).unwrap_or(0);
            let taken = events.iter().take(count);
            into.extend(taken.map(|e| (e.data as u32, clamp(e.result))));
            if count < events.len() {
                return into.len() - before;
            }
        }
    }
}

fn clamp(result: i64) -> i32 {
    result.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32
}

impl Engine for LinuxAio {
    fn can(&self, op: &Op) -> bool {
        matches!(op, Op::Read(_) | Op::Write(_) | Op::Sync)
    }

    unsafe fn submit(&mut self, _ctx: &Context, token: u32, op: Op) {
        let (opcode, buffer, bytes, offset) = match op {
            Op::Read(Transfer {
                segments,
                count,
                offset,
            }) => (CMD_PREADV, segments.expose_provenance(), count, offset),
            Op::Write(Transfer {
                segments,
                count,
                offset,
            }) => (CMD_PWRITEV, segments.expose_provenance(), count, offset),
            Op::Sync => (CMD_FDSYNC, 0, 0, 0),
            Op::Fallocate { .. } | Op::DeviceDiscard { .. } => {
                return self.fail(token, libc::EOPNOTSUPP);
            }
        };
        self.iocbs[token as usize] = Iocb {
            data: u64::from(token),
            opcode,
            fd: self.fd as u32,
            buffer: buffer as u64,
            bytes: u64::from(bytes),
            offset: offset as i64,
            flags: FLAG_RESFD,
            eventfd: self.event.as_raw_fd() as u32,
            ..Iocb::default()
        };
        self.queued.push_back(token);
        let free = self.iocbs.len() - self.in_flight;
        if self.queued.len() >= self.max_batch.min(free.max(1)) {
            self.submit_queued();
        }
    }

    fn end_batch(&mut self, _ctx: &Context) {
        self.submit_queued();
        self.max_batch = match usize::try_from(self.settings.settings().aio_max_batch) {
            Ok(0) | Err(_) => DEFAULT_BATCH,
            Ok(batch) => batch,
        };
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.event.as_raw_fd())
    }

    fn has_completions(&self) -> bool {
        if !self.failed.is_empty() {
            return true;
        }
        let ring = self.context.ring();
        self.user_ring && ring.tail.load(Ordering::Acquire) != ring.head.load(Ordering::Relaxed)
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        let count = self.take_events(into);
        self.in_flight -= count.min(self.in_flight);
        into.append(&mut self.failed);
        if count > 0 {
            self.blocked = false;
            self.submit_queued();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_refuses_at_once_comes_back_as_a_completion() {
        let ctx = Context::new(iothread::ContextConfig::default()).unwrap();
        let mut engine = LinuxAio::new(&ctx, -1, 4).unwrap();
        for token in 0..4 {
            // SAFETY: a sync points nowhere.
            unsafe { engine.submit(&ctx, token, Op::Sync) };
        }
        engine.end_batch(&ctx);
        assert!(engine.has_completions());
        let mut completions = Vec::new();
        engine.reap(&mut completions);
        assert_eq!(completions, [0, 1, 2, 3].map(|token| (token, -libc::EBADF)));
        assert!(!engine.has_completions());
    }
}
