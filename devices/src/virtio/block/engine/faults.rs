//! A host that misbehaves, for tests: an engine that fails or shortens some of its operations.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use iothread::Context;
use libc::iovec;
use vmm_sys_util::eventfd::EventFd;

use super::{Completion, Engine, Op, Transfer};

/// What happens to an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is carried out.
    None,
    /// It fails with this errno and nothing is done.
    Errno(i32),
    /// Only so many bytes at most are transferred, at least one.
    Short(usize),
}

/// Decides about each operation in turn: its number, whether it writes.
pub(crate) type Script = Arc<dyn Fn(u64, bool) -> Fault + Send + Sync>;

static SCRIPTS: Mutex<Option<HashMap<String, Script>>> = Mutex::new(None);

/// From now on disks with this id have a host that follows `script`. They must use io_uring.
pub(crate) fn set_script(id: &str, script: Script) {
    let mut scripts = SCRIPTS.lock().unwrap();
    scripts
        .get_or_insert_default()
        .insert(id.to_owned(), script);
}

/// Puts the script of disk `id`, if there is one, before `engine`.
pub(crate) fn wrap(id: &str, fd: RawFd, engine: Box<dyn Engine>) -> Box<dyn Engine> {
    let script = SCRIPTS
        .lock()
        .unwrap()
        .as_ref()
        .and_then(|scripts| scripts.get(id).cloned());
    match script {
        Some(script) => Box::new(Faulty {
            inner: engine,
            script,
            fd,
            count: 0,
            done: Vec::new(),
            event: EventFd::new(0).unwrap(),
        }),
        None => engine,
    }
}

struct Faulty {
    inner: Box<dyn Engine>,
    script: Script,
    fd: RawFd,
    count: u64,
    done: Vec<Completion>,
    event: EventFd,
}

impl Faulty {
    fn complete(&mut self, token: u32, result: i32) {
        self.done.push((token, result));
        self.event.write(1).unwrap();
    }

    /// Transfers the first `most` bytes of `transfer`.
    fn shorten(&self, transfer: Transfer, most: usize, writes: bool) -> i32 {
        // SAFETY: the submitter keeps the segments until the completion.
        let segments =
            unsafe { std::slice::from_raw_parts(transfer.segments, transfer.count as usize) };
        let mut left = most.max(1);
        let mut cut: Vec<iovec> = Vec::new();
        for segment in segments {
            let mut piece = *segment;
            piece.iov_len = piece.iov_len.min(left);
            left -= piece.iov_len;
            cut.push(piece);
        }
        let (start, count) = (cut.as_ptr(), cut.len() as i32);
        let offset = transfer.offset as i64;
        // SAFETY: parts of the submitter's segments.
        let result = unsafe {
            if writes {
                libc::pwritev(self.fd, start, count, offset)
            } else {
                libc::preadv(self.fd, start, count, offset)
            }
        };
        assert!(result >= 0, "{}", std::io::Error::last_os_error());
        result as i32
    }
}

impl Engine for Faulty {
    fn can(&self, op: &Op) -> bool {
        self.inner.can(op)
    }

    unsafe fn submit(&mut self, ctx: &Context, token: u32, op: Op) {
        let writes = !matches!(op, Op::Read(_));
        let fault = (self.script)(self.count, writes);
        self.count += 1;
        match (fault, op) {
            (Fault::Errno(errno), _) => self.complete(token, -errno),
            (Fault::Short(most), Op::Read(t) | Op::Write(t)) => {
                let result = self.shorten(t, most, writes);
                self.complete(token, result);
            }
            // SAFETY: the caller's promise.
            _ => unsafe { self.inner.submit(ctx, token, op) },
        }
    }

    fn end_batch(&mut self, ctx: &Context) {
        self.inner.end_batch(ctx);
    }

    fn event_fd(&self) -> Option<RawFd> {
        assert!(self.inner.event_fd().is_none(), "io_uring only");
        Some(self.event.as_raw_fd())
    }

    fn has_completions(&self) -> bool {
        !self.done.is_empty()
    }

    fn reap(&mut self, into: &mut Vec<Completion>) {
        into.append(&mut self.done);
    }

    fn detach(&mut self, ctx: &Context) {
        self.inner.detach(ctx);
    }
}
