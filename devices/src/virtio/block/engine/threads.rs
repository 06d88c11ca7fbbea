//! A pool of threads that do plain system calls: works on every kernel and for every operation.
//!
//! One pool serves all disks of the process. It grows while operations wait and shrinks when they
//! stay away.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, LazyLock, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use iothread::Context;
use vmm_sys_util::eventfd::EventFd;

use super::{Completion, Engine, Op, Transfer};
use crate::sync::Mutex;

/// Most threads of the process' pool.
const MAX_THREADS: usize = 32;
/// A thread that had nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(10);
/// BLKDISCARD of `linux/fs.h`.
const BLKDISCARD: libc::c_ulong = 0x1277;

struct Job {
    token: u32,
    fd: RawFd,
    op: Op,
    done: Arc<Done>,
}

/// Where an engine's results arrive.
struct Done {
    completions: Mutex<Vec<Completion>>,
    // Set with the first completion of a batch: one eventfd write for all of them.
    signalled: AtomicBool,
    event: EventFd,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct Pool {
    state: Mutex<State>,
    work: Condvar,
}

static POOL: LazyLock<Pool> = LazyLock::new(Pool::default);

static ON_START: OnceLock<fn()> = OnceLock::new();

/// Has every worker of the process' pool call `hook` when it starts, before its first operation: it may want to limit
/// what it can do. The first hook stays.
pub fn on_worker_start(hook: fn()) {
    ON_START.get_or_init(|| hook);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    fn add(&'static self, jobs: &mut VecDeque<Job>) {
        let mut state = lock(&self.state);
        state.jobs.append(jobs);
        let missing = state.jobs.len().saturating_sub(state.idle);
        for _ in 0..missing.min(MAX_THREADS - state.threads) {
            let spawned = std::thread::Builder::new()
                .name("disk worker".into())
                .spawn(move || self.work());
            match spawned {
                Ok(_) => state.threads += 1,
                // With one thread at least, the jobs get done; without any, do them here.
                Err(error) => {
                    tracing::warn!(%error, "no thread for disk I/O");
                    break;
                }
            }
        }
        if state.threads == 0 {
            let jobs: Vec<Job> = state.jobs.drain(..).collect();
            drop(state);
            jobs.into_iter().for_each(Job::run);
            return;
        }
        // One thread, which wakes the next: a batch costs the iothread one system call at most.
        let wake = state.idle > 0;
        drop(state);
        if wake {
            self.work.notify_one();
        }
    }

    fn work(&self) {
        if let Some(hook) = ON_START.get() {
            hook();
        }
        let mut state = lock(&self.state);
        loop {
            if let Some(job) = state.jobs.pop_front() {
                let wake = state.idle > 0 && !state.jobs.is_empty();
                drop(state);
                if wake {
                    self.work.notify_one();
                }
                job.run();
                state = lock(&self.state);
                continue;
            }
            state.idle += 1;
            let (after, timeout) = self
                .work
                .wait_timeout(state, IDLE)
                .unwrap_or_else(PoisonError::into_inner);
            state = after;
            state.idle -= 1;
            if timeout.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }
}

fn result(value: isize) -> i32 {
    if value < 0 {
        let error = io::Error::last_os_error().raw_os_error();
        return -error.unwrap_or(libc::EIO);
    }
    // One call transfers less than 2 GiB.
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// Does `op` on `fd` at once.
///
/// # Safety
/// What `op` points to is valid.
unsafe fn execute(fd: RawFd, op: &Op) -> i32 {
    match *op {
        Op::Read(Transfer {
            segments,
            count,
            offset,
            // SAFETY: `count` segments, valid as the caller promises.
        }) => result(unsafe { libc::preadv(fd, segments, count as i32, offset as i64) }),
        Op::Write(Transfer {
            segments,
            count,
            offset,
            // SAFETY: `count` segments, valid as the caller promises.
        }) => result(unsafe { libc::pwritev(fd, segments, count as i32, offset as i64) }),
        // SAFETY: a system call on a descriptor and integers.
        Op::Sync => result(unsafe { libc::fdatasync(fd) } as isize),
        Op::Fallocate { mode, offset, len } => {
            // SAFETY: a system call on a descriptor and integers.
            result(unsafe { libc::fallocate(fd, mode, offset as i64, len as i64) } as isize)
        }
        Op::DeviceDiscard { offset, len } => {
            let range = [offset, len];
            // SAFETY: BLKDISCARD takes a pointer to two 64-bit integers.
            result(unsafe { libc::ioctl(fd, BLKDISCARD as _, range.as_ptr()) } as isize)
        }
    }
}

impl Job {
    fn run(self) {
        // SAFETY: the submitter keeps what the operation points to until it has the completion.
        let result = unsafe { execute(self.fd, &self.op) };
        lock(&self.done.completions).push((self.token, result));
        if !self.done.signalled.swap(true, Ordering::AcqRel)
            && let Err(error) = self.done.event.write(1)
        {
            tracing::error!(%error, "disk completion event failed");
        }
    }
}

/// See the module.
pub(in super::super) struct Threads {
    fd: RawFd,
    done: Arc<Done>,
    // Gathered until the end of the batch, so that the pool is locked once.
    queued: VecDeque<Job>,
}

impl Threads {
    /// An engine for `fd`.
    ///
    /// # Errors
    /// No eventfd could be made.
    pub(in super::super) fn new(fd: RawFd) -> io::Result<Threads> {
        Ok(Threads {
            fd,
            done: Arc::new(Done {
                completions: Mutex::default(),
                signalled: AtomicBool::new(false),
                event: EventFd::new(libc::EFD_CLOEXEC)?,
            }),
            queued: VecDeque::new(),
        })
    }
}

impl Engine for Threads {
    fn can(&self, _op: &Op) -> bool {
        true
    }

    unsafe fn submit(&mut self, _ctx: &Context, token: u32, op: Op) {
        self.queued.push_back(Job {
            token,
            fd: self.fd,
            op,
            done: self.done.clone(),
        });
    }

    fn end_batch(&mut self, _ctx: &Context) {
        if !self.queued.is_empty() {
            POOL.add(&mut self.queued);
        }
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.done.event.as_raw_fd())
    }

    fn has_completions(&self) -> bool {
        self.done.signalled.load(Ordering::Acquire)
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        // First the flag, then the list: a completion added in between is taken now and announced
        // once more for nothing, but never left behind.
        self.done.signalled.store(false, Ordering::SeqCst);
        into.append(&mut lock(&self.done.completions));
    }
}
