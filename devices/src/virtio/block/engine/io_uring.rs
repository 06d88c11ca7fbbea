//! Operations on the loop's own ring. All that an iteration submits goes to the kernel with the
//! loop's one enter.
//!
//! The file is registered. Guest memory is where `fixedbufs` says so: measured by
//! `benches/registered_buffers` as CPU time of the submitting thread, registered to plain, medians
//! of nine turns: reads from the page cache 0.99 to 1.04 up to 8 KiB and 1.13 at 64 KiB, at depth 1
//! and 32 alike; O_DIRECT reads 0.91 to 0.93 at depth 1, and at depth 32 0.84 (512 bytes), 0.79
//! (4 KiB), 0.81 (8 KiB), 0.54 (64 KiB). So it pays for O_DIRECT only, and its price is that all of
//! the guest's memory is populated and pinned from the driver's start on (RLIMIT_MEMLOCK; no page of
//! it can be swapped or be a hole any more).

use std::os::fd::RawFd;

use io_uring::opcode;
use io_uring::squeue::Entry;
use io_uring::types::{Fd, Fixed, FsyncFlags};
use iothread::{CompleterId, Context};

use super::fixed::FixedBuffers;
use super::{Engine, Op, Transfer};

/// See the module.
pub(in super::super) struct IoUring {
    fd: RawFd,
    slot: Option<u32>,
    fixed: Option<FixedBuffers>,
    completer: CompleterId,
    inline: bool,
}

/// Most operations of one enter where it copies from the page cache: the driver goes on with the
/// first of 32 while the others are copied, on a processor of its own. Measured over vhost-user with
/// 8 KiB at depth 32, five turns on two idle processors, against no such limit: 430,000 and 195,000
/// IOPS for a driver that waits for interrupts, 618,000 and 457,000 for one that polls. 8 did worse.
const INLINE_BATCH: u32 = 16;

#[cfg(test)]
thread_local! {
    /// Operations in registered buffers that were made in this thread: of one segment, of several.
    pub(in super::super) static FIXED_OPS: std::cell::Cell<(u64, u64)> = const {
        std::cell::Cell::new((0, 0))
    };
}

/// Where a transfer's data is: the builders' differing arguments.
enum Place {
    /// Address and length.
    One(*mut u8, u32),
    /// Address, length and slot of the registered buffers.
    OneFixed(*mut u8, u32, u16),
    Many,
    /// Slot of the registered buffers.
    ManyFixed(u16),
}

impl IoUring {
    /// An engine for `fd` whose completions go to `completer`, and whose buffers may be `fixed`.
    /// Operations are carried out `inline` if the file is read through the page cache. The context must
    /// have a ring.
    pub(super) fn new(
        ctx: &Context,
        fd: RawFd,
        completer: CompleterId,
        fixed: Option<FixedBuffers>,
        inline: bool,
    ) -> IoUring {
        IoUring {
            fd,
            // Without a slot the descriptor serves as well.
            slot: ctx
                .register_file(fd)
                .inspect_err(|error| tracing::debug!(%error, "no slot for a registered file"))
                .ok(),
            fixed,
            completer,
            inline,
        }
    }

    #[inline]
    fn place(&self, transfer: &Transfer) -> Place {
        // SAFETY: an operation's segments are valid until it completes.
        let segments =
            unsafe { std::slice::from_raw_parts(transfer.segments, transfer.count as usize) };
        let fixed = self.fixed.as_ref().and_then(|fixed| fixed.slot(segments));
        #[cfg(test)]
        if fixed.is_some() {
            let (one, many) = FIXED_OPS.get();
            let single = u64::from(segments.len() == 1);
            FIXED_OPS.set((one + single, many + 1 - single));
        }
        match (segments, fixed) {
            ([one], None) => Place::One(one.iov_base.cast(), one.iov_len as u32),
            ([one], Some(slot)) => Place::OneFixed(one.iov_base.cast(), one.iov_len as u32, slot),
            (_, None) => Place::Many,
            (_, Some(slot)) => Place::ManyFixed(slot),
        }
    }

    #[inline]
    fn entry(&self, op: &Op) -> Option<Entry> {
        // The builders are generic over descriptor and slot.
        macro_rules! transfer {
            ($target:expr, $t:expr, $one:ident, $one_fixed:ident, $many:ident, $many_fixed:ident) => {
                match self.place(&$t) {
                    Place::One(to, len) => opcode::$one::new($target, to, len)
                        .offset($t.offset)
                        .build(),
                    Place::OneFixed(to, len, slot) => {
                        let entry = opcode::$one_fixed::new($target, to, len, slot);
                        entry.offset($t.offset).build()
                    }
                    Place::Many => {
                        let entry = opcode::$many::new($target, $t.segments, $t.count);
                        entry.offset($t.offset).build()
                    }
                    Place::ManyFixed(slot) => {
                        let entry = opcode::$many_fixed::new($target, $t.segments, $t.count, slot);
                        entry.offset($t.offset).build()
                    }
                }
            };
        }
        macro_rules! build {
            ($target:expr) => {{
                let target = $target;
                match *op {
                    Op::Read(t) => transfer!(target, t, Read, ReadFixed, Readv, ReadvFixed),
                    Op::Write(t) => transfer!(target, t, Write, WriteFixed, Writev, WritevFixed),
                    Op::Sync => opcode::Fsync::new(target)
                        .flags(FsyncFlags::DATASYNC)
                        .build(),
                    Op::Fallocate { mode, offset, len } => opcode::Fallocate::new(target, len)
                        .offset(offset)
                        .mode(mode)
                        .build(),
                    Op::DeviceDiscard { .. } => return None,
                }
            }};
        }
        Some(match self.slot {
            Some(slot) => build!(Fixed(slot)),
            None => build!(Fd(self.fd)),
        })
    }
}

impl Engine for IoUring {
    fn can(&self, op: &Op) -> bool {
        !matches!(op, Op::DeviceDiscard { .. })
    }

    #[inline]
    unsafe fn submit(&mut self, ctx: &Context, token: u32, op: Op) {
        let entry = self
            .entry(&op)
            .unwrap_or_else(|| opcode::Nop::new().build());
        // SAFETY: the caller keeps what the operation points to; the file is open as long as the
        // disk is, which outlives its requests.
        unsafe { ctx.add_sqe(entry, self.completer, token) };
    }

    fn batch(&self) -> Option<u32> {
        self.inline.then_some(INLINE_BATCH)
    }

    fn detach(&mut self, ctx: &Context) {
        if let Some(slot) = self.slot.take() {
            ctx.unregister_file(slot);
        }
        if let Some(fixed) = self.fixed.take() {
            fixed.unregister(ctx);
        }
    }
}
