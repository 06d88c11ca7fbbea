//! Reads and writes by the ring that are carried through: a short one goes on where it ended, a
//! spurious EAGAIN or EINTR is tried again, a bounded number of times.

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::rc::Rc;

use io_uring::{opcode, types};

use crate::context::Context;

/// How often in a row a request is made again after EAGAIN or EINTR before that is the result.
pub const MAX_RETRIES: u32 = 16;

/// Where a read or write of many bytes stands. Numbers only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    offset_bytes: u64,
    total_bytes: usize,
    done_bytes: usize,
    retries: u32,
}

/// What to do after a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Make a request for the rest: see [`Progress::next_offset`] and [`Progress::done`].
    Again,
    /// All is done, or the file has ended.
    Finished,
    /// It failed with this errno.
    Failed(i32),
}

impl Progress {
    /// Nothing of `total_bytes` from `offset_bytes` on is done.
    #[must_use]
    pub fn new(offset_bytes: u64, total_bytes: usize) -> Self {
        Progress {
            offset_bytes,
            total_bytes,
            done_bytes: 0,
            retries: 0,
        }
    }

    /// Bytes done so far, by all requests together.
    #[must_use]
    pub fn done(&self) -> usize {
        self.done_bytes
    }

    /// Bytes still to do.
    #[must_use]
    pub fn left(&self) -> usize {
        self.total_bytes - self.done_bytes
    }

    /// Where the next request begins: after the total of what is done, not only after what the
    /// last request did.
    #[must_use]
    pub fn next_offset(&self) -> u64 {
        self.offset_bytes.saturating_add(self.done_bytes as u64)
    }

    /// Takes the result of a request for the rest: a count or a negative errno.
    #[must_use]
    pub fn after(&mut self, result: i32) -> Step {
        match usize::try_from(result) {
            Ok(0) => Step::Finished,
            Ok(bytes) => {
                self.retries = 0;
                self.done_bytes = (self.done_bytes + bytes).min(self.total_bytes);
                if self.left() == 0 {
                    Step::Finished
                } else {
                    Step::Again
                }
            }
            Err(_) => match result.wrapping_neg() {
                libc::EAGAIN | libc::EINTR if self.retries < MAX_RETRIES => {
                    self.retries += 1;
                    Step::Again
                }
                errno => Step::Failed(errno),
            },
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
}

/// A read or write that owns its buffer and its file, so that nothing can be taken from under the
/// kernel.
pub struct Transfer<F> {
    direction: Direction,
    file: Rc<F>,
    buffer: Vec<u8>,
    progress: Progress,
    piece_bytes: usize,
    flags: i32,
}

impl<F: AsFd + 'static> Transfer<F> {
    fn new(direction: Direction, file: Rc<F>, buffer: Vec<u8>, offset_bytes: u64) -> Self {
        Transfer {
            direction,
            file,
            progress: Progress::new(offset_bytes, buffer.len()),
            buffer,
            // What one read(2) transfers at most.
            piece_bytes: 0x7fff_f000,
            flags: 0,
        }
    }

    /// Reads into the whole of `buffer`, or up to the end of the file.
    #[must_use]
    pub fn read(file: Rc<F>, buffer: Vec<u8>, offset_bytes: u64) -> Self {
        Self::new(Direction::Read, file, buffer, offset_bytes)
    }

    /// Writes the whole of `buffer`.
    #[must_use]
    pub fn write(file: Rc<F>, buffer: Vec<u8>, offset_bytes: u64) -> Self {
        Self::new(Direction::Write, file, buffer, offset_bytes)
    }

    /// Makes requests of at most so many bytes, one after the other.
    #[must_use]
    pub fn in_pieces_of(mut self, bytes: usize) -> Self {
        self.piece_bytes = bytes.max(1);
        self
    }

    /// Flags of preadv2(2) for the requests, for example `RWF_DSYNC`.
    #[must_use]
    pub fn with_flags(mut self, flags: i32) -> Self {
        self.flags = flags;
        self
    }

    /// Starts. `done` gets the buffer back with the number of bytes transferred, which is less than
    /// its length only at the end of the file.
    ///
    /// # Panics
    /// Without a ring (see [`Context::has_ring`]).
    pub fn start(
        mut self,
        ctx: &Context,
        done: impl FnOnce(&Context, Vec<u8>, io::Result<usize>) + 'static,
    ) {
        let begin = self.progress.done();
        let piece = self.progress.left().min(self.piece_bytes);
        let length = u32::try_from(piece).unwrap_or(u32::MAX);
        let fd = types::Fd(self.file.as_fd().as_raw_fd());
        let at = self.buffer[begin..].as_mut_ptr();
        let offset = self.progress.next_offset();
        let entry = match self.direction {
            Direction::Read => opcode::Read::new(fd, at, length)
                .offset(offset)
                .rw_flags(self.flags)
                .build(),
            Direction::Write => opcode::Write::new(fd, at, length)
                .offset(offset)
                .rw_flags(self.flags)
                .build(),
        };
        let completed = move |ctx: &Context, result: i32| match self.progress.after(result) {
            Step::Again => self.start(ctx, done),
            Step::Finished => {
                let bytes = self.progress.done();
                done(ctx, self.buffer, Ok(bytes));
            }
            Step::Failed(errno) => {
                let error = io::Error::from_raw_os_error(errno);
                done(ctx, self.buffer, Err(error));
            }
        };
        // SAFETY: the closure owns buffer and file; it is kept until the completion, and the
        // buffer's memory does not move with it.
        unsafe { ctx.add_sqe_once(entry, completed) };
    }
}

impl<F> fmt::Debug for Transfer<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer")
            .field("direction", &self.direction)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn offset_grows_by_the_total() {
        let mut progress = Progress::new(4096, 100);
        assert_eq!(progress.after(30), Step::Again);
        assert_eq!(progress.after(30), Step::Again);
        assert_eq!(progress.next_offset(), 4096 + 60);
        assert_eq!(progress.after(40), Step::Finished);
        assert_eq!(progress.done(), 100);
    }

    #[test]
    fn retries_are_bounded_and_begin_anew_after_progress() {
        let mut progress = Progress::new(0, 10);
        for _ in 0..MAX_RETRIES {
            assert_eq!(progress.after(-libc::EAGAIN), Step::Again);
        }
        assert_eq!(progress.after(1), Step::Again);
        for _ in 0..MAX_RETRIES {
            assert_eq!(progress.after(-libc::EINTR), Step::Again);
        }
        let failed = Step::Failed(libc::EAGAIN);
        assert_eq!(progress.after(-libc::EAGAIN), failed);
        assert_eq!(progress.after(-libc::EIO), Step::Failed(libc::EIO));
        assert_eq!(progress.after(i32::MIN), Step::Failed(i32::MIN));
    }

    proptest! {
        /// However a file is cut into pieces, each byte is asked for once and in order.
        #[test]
        fn pieces_are_contiguous(offset in 0u64..1 << 40, total in 1usize..5000, cuts in prop::collection::vec(1i32..700, 1..40)) {
            let mut progress = Progress::new(offset, total);
            let mut expected = offset;
            for cut in cuts {
                let bytes = cut.min(i32::try_from(progress.left()).unwrap());
                prop_assert_eq!(progress.next_offset(), expected);
                expected += u64::from(bytes.unsigned_abs());
                if progress.after(bytes) == Step::Finished {
                    prop_assert_eq!(expected, offset + total as u64);
                    break;
                }
            }
        }
    }
}
