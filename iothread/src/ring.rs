//! One io_uring: its queues in user space, and when the kernel is entered.
//!
//! The ring belongs to one thread. Submissions gather in the queue and go to the kernel with the
//! next enter; completions are read from shared memory. A flag in shared memory tells when the
//! kernel has put completion work off, so that an enter is worth while.

use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::cqueue::CompletionQueue;
use io_uring::squeue::{self, Entry, SubmissionQueue};
use io_uring::{CompletionStatus, EnterFlags, IoUring, Submitter, types};

use crate::clock::now_ns;

/// How the kernel runs completion work for the ring's thread. A mode that the kernel has not is
/// replaced by the next one of [`TaskRun::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum TaskRun {
    /// `Coop`.
    #[default]
    Auto,
    /// Only when the thread enters the ring (`IORING_SETUP_DEFER_TASKRUN`, 6.1): the cheapest. But
    /// nobody who waits on the ring's descriptor is woken then, so a loop with such a ring cannot
    /// be driven by another one.
    Defer,
    /// At the thread's next system call of any kind (`IORING_SETUP_COOP_TASKRUN`, 5.19).
    Coop,
    /// By interrupting the thread.
    Plain,
}

impl TaskRun {
    /// The modes from the best to the last resort.
    pub const ALL: [TaskRun; 3] = [TaskRun::Defer, TaskRun::Coop, TaskRun::Plain];

    /// For messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            TaskRun::Auto => "auto",
            TaskRun::Defer => "defer",
            TaskRun::Coop => "coop",
            TaskRun::Plain => "plain",
        }
    }
}

/// A completion, copied out of the ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Completion {
    pub(crate) user_data: u64,
    pub(crate) result: i32,
}

/// See the module.
pub(crate) struct Ring {
    // These borrow from `ring` and are dropped before it.
    sq: ManuallyDrop<UnsafeCell<SubmissionQueue<'static>>>,
    cq: ManuallyDrop<UnsafeCell<CompletionQueue<'static>>>,
    submitter: ManuallyDrop<Submitter<'static>>,
    status: CompletionStatus,
    ring: *mut IoUring,
    /// The kernel sets a flag when completion work waits for an enter.
    taskrun_flag: bool,
    mode: TaskRun,
    /// Entries that found the queue full although it was submitted; in order.
    backlog: RefCell<VecDeque<Entry>>,
    /// A chain of linked entries whose end is still to come. The kernel ends a chain with the
    /// enter that submits it, so a chain is queued only as a whole.
    chain: RefCell<Vec<Entry>>,
    /// `backlog` or `chain` holds something.
    held: Cell<bool>,
    enters: Cell<u64>,
}

fn is_linked(entry: &Entry) -> bool {
    let linked = squeue::Flags::IO_LINK | squeue::Flags::IO_HARDLINK;
    // SAFETY: an Entry is the kernel's 64-byte io_uring_sqe, whose second byte is `flags`.
    let flags = unsafe { *std::ptr::from_ref(entry).cast::<u8>().add(1) };
    flags & linked.bits() != 0
}

impl Ring {
    /// A ring for the calling thread, in the given mode or the next one that the kernel knows.
    pub(crate) fn new(
        entries: u32,
        completion_entries: u32,
        task_run: TaskRun,
    ) -> io::Result<Ring> {
        let modes = match task_run {
            TaskRun::Defer => &TaskRun::ALL[..],
            TaskRun::Auto | TaskRun::Coop => &TaskRun::ALL[1..],
            TaskRun::Plain => &TaskRun::ALL[2..],
        };
        let mut last = io::Error::from_raw_os_error(libc::EINVAL);
        for &mode in modes {
            let mut builder = IoUring::builder();
            builder
                .dontfork()
                .setup_cqsize(completion_entries)
                .setup_clamp();
            match mode {
                TaskRun::Defer => builder
                    .setup_submit_all()
                    .setup_single_issuer()
                    .setup_defer_taskrun()
                    .setup_taskrun_flag(),
                TaskRun::Coop => builder
                    .setup_submit_all()
                    .setup_coop_taskrun()
                    .setup_taskrun_flag(),
                TaskRun::Plain | TaskRun::Auto => &mut builder,
            };
            match builder.build(entries) {
                Ok(ring) => return Self::from_ring(ring, mode),
                // EINVAL: this kernel does not know the flags.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    fn from_ring(ring: IoUring, mode: TaskRun) -> io::Result<Ring> {
        let params = ring.params();
        // The youngest feature that the loop relies on; the timeout with the wait is of 5.11.
        if !params.is_feature_skip_cqe_on_success() || !params.is_feature_nodrop() {
            return Err(io::Error::from_raw_os_error(libc::ENOSYS));
        }
        let ring = Box::into_raw(Box::new(ring));
        // SAFETY: `ring` was just made from a box and is freed only in `drop`, after everything
        // that borrows from it.
        let (mut submitter, sq, cq) = unsafe { (*ring).split() };
        // Saves a descriptor lookup with each enter; kernels before 5.18 have it not.
        let _ = submitter.register_ring_fd();
        // SAFETY: `status` is kept no longer than the ring.
        let status = unsafe { cq.status() };
        Ok(Ring {
            sq: ManuallyDrop::new(UnsafeCell::new(sq)),
            cq: ManuallyDrop::new(UnsafeCell::new(cq)),
            submitter: ManuallyDrop::new(submitter),
            status,
            ring,
            taskrun_flag: mode != TaskRun::Plain,
            mode,
            backlog: RefCell::default(),
            chain: RefCell::default(),
            held: Cell::new(false),
            enters: Cell::new(0),
        })
    }

    /// Runs `f` on the submission queue. `f` may not call this ring.
    #[inline]
    fn with_sq<R>(&self, f: impl FnOnce(&mut SubmissionQueue<'static>) -> R) -> R {
        // SAFETY: the ring is !Sync, and no closure given to `with_sq` calls back into it, so
        // this is the only reference.
        f(unsafe { &mut *self.sq.get() })
    }

    /// The mode in use; never `Auto`.
    pub(crate) fn task_run(&self) -> TaskRun {
        self.mode
    }

    pub(crate) fn fd(&self) -> RawFd {
        // SAFETY: `ring` lives until `drop`.
        unsafe { (*self.ring).as_raw_fd() }
    }

    pub(crate) fn submitter(&self) -> &Submitter<'static> {
        &self.submitter
    }

    /// Enters since the ring was made.
    pub(crate) fn enters(&self) -> u64 {
        self.enters.get()
    }

    /// Whether completions can be read now. Two loads.
    #[inline]
    pub(crate) fn has_completions(&self) -> bool {
        !self.status.is_empty()
    }

    /// Whether the kernel has something that only an enter brings: completion work put off, or
    /// completions that found the queue full.
    #[inline]
    pub(crate) fn kernel_has_work(&self) -> bool {
        self.with_sq(|sq| (self.taskrun_flag && sq.taskrun()) || sq.cq_overflow())
    }

    /// Whether entries wait to be submitted.
    #[inline]
    pub(crate) fn has_unsubmitted(&self) -> bool {
        self.with_sq(|sq| !sq.is_empty()) || self.held.get()
    }

    /// Whether an iteration must look at the ring before it may poll or sleep.
    #[inline]
    pub(crate) fn pending(&self) -> bool {
        self.has_completions() || self.has_unsubmitted() || self.kernel_has_work()
    }

    /// Queues one entry. A full queue is submitted, or the entry held back; it never fails.
    ///
    /// # Safety
    /// What the entry points to must be valid until its completion.
    #[inline]
    pub(crate) unsafe fn push(&self, entry: &Entry) {
        if !self.held.get() && !is_linked(entry) {
            // SAFETY: the caller's promise.
            let pushed = self.with_sq(|sq| unsafe { sq.push(entry) });
            if pushed.is_ok() {
                return;
            }
        }
        self.push_slow(entry);
    }

    #[cold]
    fn push_slow(&self, entry: &Entry) {
        self.held.set(true);
        self.chain.borrow_mut().push(entry.clone());
        if !is_linked(entry) {
            self.end_chain();
        }
    }

    /// Queues an entry of the loop itself, ahead of a chain that its owner has not ended yet.
    ///
    /// # Safety
    /// As [`Self::push`].
    #[inline]
    pub(crate) unsafe fn push_own(&self, entry: &Entry) {
        if self.backlog.borrow().is_empty() {
            // SAFETY: the caller's promise.
            let pushed = self.with_sq(|sq| unsafe { sq.push(entry) });
            if pushed.is_ok() {
                return;
            }
        }
        self.held.set(true);
        self.backlog.borrow_mut().push_back(entry.clone());
        self.drain_backlog();
    }

    /// The chain is complete: queues it.
    fn end_chain(&self) {
        self.backlog
            .borrow_mut()
            .extend(self.chain.borrow_mut().drain(..));
        self.drain_backlog();
    }

    /// Moves held entries to the queue, submitting it when it is full.
    fn drain_backlog(&self) {
        while !self.flush_backlog() {
            let before = self.backlog.borrow().len();
            if let Err(error) = self.enter(0, -1) {
                // Nobody to report it to here; the next wait meets the same error.
                tracing::debug!(%error, "submission queue is full");
                return;
            }
            self.flush_backlog();
            if self.backlog.borrow().len() == before {
                // The kernel takes nothing until completions are reaped.
                return;
            }
        }
    }

    /// Moves held entries to the queue, whole chains only. True if none is left.
    fn flush_backlog(&self) -> bool {
        let mut backlog = self.backlog.borrow_mut();
        while !backlog.is_empty() {
            let links = backlog.iter().take_while(|entry| is_linked(entry)).count();
            let length = (links + 1).min(backlog.len());
            let fits = self.with_sq(|sq| {
                // A chain longer than the queue cannot stay whole; the kernel breaks it.
                let length = length.min(sq.capacity());
                if sq.capacity() - sq.len() < length {
                    return false;
                }
                for entry in backlog.drain(..length) {
                    // SAFETY: `push` was promised that the entry's memory stays valid; there is
                    // room, as was just seen.
                    let _ = unsafe { sq.push(&entry) };
                }
                true
            });
            if !fits {
                return false;
            }
        }
        self.held.set(!self.chain.borrow().is_empty());
        true
    }

    /// Submits what is queued and runs put-off completion work, without waiting.
    pub(crate) fn submit(&self) -> io::Result<()> {
        if self.held.get() {
            self.end_chain();
        }
        if self.with_sq(|sq| !sq.is_empty()) || self.kernel_has_work() {
            self.enter(0, -1)?;
        }
        Ok(())
    }

    /// Submits what is queued and waits until there is a completion, or for `timeout_ns` (−1: for
    /// ever). Signals do not end the wait.
    pub(crate) fn submit_and_wait(&self, timeout_ns: i64) -> io::Result<()> {
        if self.held.get() {
            self.end_chain();
        }
        if self.has_completions() || timeout_ns == 0 {
            return self.submit();
        }
        let deadline_ns = (timeout_ns > 0).then(|| now_ns().saturating_add(timeout_ns));
        let mut timeout_ns = timeout_ns;
        loop {
            let timed_out = self.enter(1, timeout_ns)?;
            if timed_out || self.has_completions() {
                return Ok(());
            }
            if let Some(deadline_ns) = deadline_ns {
                timeout_ns = deadline_ns - now_ns();
                if timeout_ns <= 0 {
                    return Ok(());
                }
            }
        }
    }

    /// One io_uring_enter: submits everything queued, waits for `want` completions, at most
    /// `timeout_ns` (−1: no limit). True if the time ran out. EINTR is no error, nor is a kernel
    /// that takes nothing more until completions are reaped.
    fn enter(&self, want: usize, timeout_ns: i64) -> io::Result<bool> {
        self.with_sq(SubmissionQueue::sync);
        self.enters.set(self.enters.get() + 1);
        let result = if timeout_ns > 0 {
            // Ours until the call returns: the kernel copies the time before it sleeps.
            let time = types::Timespec::new()
                .sec((timeout_ns / 1_000_000_000).cast_unsigned())
                .nsec(u32::try_from(timeout_ns % 1_000_000_000).unwrap_or(0));
            let args = types::SubmitArgs::new().timespec(&time);
            self.submitter.submit_with_args(want, &args)
        } else {
            // Put-off work is only run, and overflown completions flushed, with GETEVENTS.
            let get_events = want > 0 || self.kernel_has_work();
            let flags = if get_events {
                EnterFlags::GETEVENTS.bits()
            } else {
                0
            };
            // Both are bounded by the ring's size, which is a u32.
            let submit = u32::try_from(self.with_sq(|sq| sq.len())).unwrap_or(u32::MAX);
            let want = u32::try_from(want).unwrap_or(1);
            // SAFETY: there is no argument for the kernel to follow.
            unsafe {
                self.submitter
                    .enter::<libc::sigset_t>(submit, want, flags, None)
            }
        };
        self.with_sq(SubmissionQueue::sync);
        match result {
            Ok(_) => Ok(false),
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME) => Ok(true),
                Some(libc::EINTR) => Ok(false),
                Some(libc::EBUSY | libc::EAGAIN) if self.has_completions() || want == 0 => {
                    Ok(false)
                }
                _ => Err(error),
            },
        }
    }

    /// Tells the kernel which places are free again and looks what has come. True if there are
    /// completions for [`Self::pop`].
    #[inline]
    pub(crate) fn refresh(&self) -> bool {
        // SAFETY: the ring is !Sync and nothing in here calls back into it.
        let cq = unsafe { &mut *self.cq.get() };
        cq.sync();
        !CompletionQueue::is_empty(cq)
    }

    /// The next completion of those that the last [`Self::refresh`] saw.
    #[inline]
    pub(crate) fn pop(&self) -> Option<Completion> {
        // SAFETY: the ring is !Sync and nothing in here calls back into it.
        let entry = unsafe { &mut *self.cq.get() }.next()?;
        Some(Completion {
            user_data: entry.user_data(),
            result: entry.result(),
        })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: each is dropped once, here; they borrow from `ring`, which is freed last.
        unsafe {
            ManuallyDrop::drop(&mut self.sq);
            ManuallyDrop::drop(&mut self.cq);
            ManuallyDrop::drop(&mut self.submitter);
            drop(Box::from_raw(self.ring));
        }
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("mode", &self.mode)
            .finish_non_exhaustive()
    }
}

/// Why a ring cannot be had, in words that name what forbids it.
pub(crate) fn explain(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => {
            "ENOSYS: this kernel has no io_uring, or that of a kernel before 5.17".into()
        }
        Some(libc::EPERM | libc::EACCES) => {
            let sysctl = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
            match sysctl.as_deref().map(str::trim) {
                Ok("2") => "EPERM: sysctl kernel.io_uring_disabled=2 forbids it".into(),
                Ok("1") => "EPERM: sysctl kernel.io_uring_disabled=1 allows it only with \
                            CAP_SYS_ADMIN or in the group kernel.io_uring_group"
                    .into(),
                _ => "EPERM: a seccomp filter or security module forbids it".into(),
            }
        }
        Some(libc::ENOMEM) => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
            match limit {
                Some(bytes) => format!(
                    "ENOMEM: RLIMIT_MEMLOCK is {} KiB; raise it with ulimit -l",
                    bytes / 1024
                ),
                None => "ENOMEM: the kernel has no memory for it".into(),
            }
        }
        Some(libc::EMFILE) => "EMFILE: RLIMIT_NOFILE is used up; raise it with ulimit -n".into(),
        _ => error.to_string(),
    }
}
