//! Carrying out one request: its stages, their results, its end.

use std::sync::atomic::Ordering;

use iothread::Context;
use libc::iovec;

use super::super::config::{CacheMode, ErrorPolicy};
use super::super::engine::threads::Threads;
use super::super::engine::{Engine, Op, Transfer};
use super::super::iov;
use super::super::range_lock::{RangeLocks, Waiter};
use super::super::request::{Kind, Pending, Slot, Stage, Status};
use super::lifecycle::with_worker;
use super::{State, Worker};

/// So often in a row an operation is done again after EINTR or EAGAIN.
const MAX_RETRIES: u8 = 20;

const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// Errors by which a filesystem or device says that it cannot punch or zero a range.
fn is_unsupported(errno: i32) -> bool {
    matches!(
        errno,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL | libc::ENODEV | libc::ENOTTY
    )
}

impl Worker {
    /// A checked request sets out.
    #[inline]
    pub(super) fn start(&self, state: &mut State, ctx: &Context, pending: Pending) {
        if let Some(locks) = &self.disk.locks
            && !self.lock_range(locks, state, &pending)
        {
            // Its slot is its place in the queue; `granted` goes on.
            let _waits = pending.into_token();
            return;
        }
        self.dispatch(state, ctx, pending);
    }

    /// Holds the blocks that a write touches. False if it has to wait for them.
    #[cold]
    fn lock_range(&self, locks: &RangeLocks, state: &mut State, pending: &Pending) -> bool {
        let align = u64::from(self.disk.image.alignment().offset);
        let token = pending.token();
        let slot = state.requests.slot(pending);
        if !slot.kind.writes() || slot.range_locked {
            return true;
        }
        slot.range_locked = true;
        let start = slot.offset / align * align;
        let end = (slot.offset + u64::from(slot.len)).next_multiple_of(align);
        let waiter = Waiter {
            worker: self.id,
            token,
            home: self.home.clone(),
        };
        locks.acquire(start, end, waiter)
    }

    fn unlock_range(&self, slot: &mut Slot, token: u32) {
        if !std::mem::take(&mut slot.range_locked) {
            return;
        }
        let Some(locks) = &self.disk.locks else {
            return;
        };
        for waiter in locks.release(self.id, token) {
            let (id, token) = (waiter.worker, waiter.token);
            waiter.home.run(move |ctx| {
                with_worker(id, |worker| worker.granted(ctx, token));
            });
        }
    }

    /// A request that waited for its range has it.
    fn granted(&self, ctx: &Context, token: u32) {
        let mut state = self.state.borrow_mut();
        if let Some(pending) = state.requests.resume(token) {
            self.dispatch(&mut state, ctx, pending);
            self.end_batch(&mut state, ctx);
        }
    }

    /// The first stage of a request, or of what is left of it.
    #[inline]
    fn dispatch(&self, state: &mut State, ctx: &Context, pending: Pending) {
        let slot = state.requests.slot(&pending);
        let (kind, offset, done, len) = (slot.kind, slot.offset, slot.done, slot.len);
        let stage = match kind {
            Kind::In | Kind::Out if done == len => return self.data_done(state, ctx, pending),
            Kind::In | Kind::Out => {
                let align = self.disk.image.alignment();
                let at = offset + u64::from(done);
                let straight = at.is_multiple_of(align.offset.into())
                    && (len - done).is_multiple_of(align.offset)
                    && (!self.disk.image.direct()
                        || iov::aligned(
                            state.requests.segments(&pending),
                            align.memory,
                            align.offset,
                        ));
                if !straight {
                    return self.bounce(state, ctx, pending);
                }
                Stage::Data
            }
            Kind::Flush if self.disk.config.cache == CacheMode::Unsafe => {
                return self.finish(state, pending, Status::Ok);
            }
            Kind::Flush => Stage::Sync,
            Kind::Discard if self.disk.image.is_block_device() => Stage::DeviceDiscard,
            Kind::Discard => Stage::Punch,
            Kind::WriteZeroes { .. } if done == len => {
                return self.data_done(state, ctx, pending);
            }
            Kind::WriteZeroes { unmap: true } if done == 0 && self.disk.config.discard => {
                Stage::Punch
            }
            Kind::WriteZeroes { .. }
                if done == 0 && !self.disk.no_zero_range.load(Ordering::Relaxed) =>
            {
                Stage::ZeroRange
            }
            Kind::WriteZeroes { .. } => return self.write_zeroes(state, ctx, pending),
        };
        self.issue(state, ctx, pending, stage);
    }

    /// Hands the operation of `stage` to the engine.
    #[inline]
    pub(super) fn issue(&self, state: &mut State, ctx: &Context, pending: Pending, stage: Stage) {
        let slot = state.requests.slot(&pending);
        slot.stage = stage;
        let rest = slot.offset + u64::from(slot.done);
        let range = (slot.offset, u64::from(slot.len));
        let bounce = |slot: &mut Slot| {
            slot.bounce_iov = iovec {
                iov_base: slot
                    .bounce
                    .as_ref()
                    .map_or(std::ptr::null_mut(), |buffer| {
                        // Within the buffer: `bounce_done` is at most `bounce_len`.
                        buffer.as_ptr().wrapping_add(slot.bounce_done as usize)
                    })
                    .cast(),
                iov_len: (slot.bounce_len - slot.bounce_done) as usize,
            };
            Transfer {
                segments: &slot.bounce_iov,
                count: 1,
                offset: slot.bounce_offset + u64::from(slot.bounce_done),
            }
        };
        let op = match stage {
            Stage::BounceRead | Stage::BounceFill => Op::Read(bounce(slot)),
            Stage::BounceWrite => Op::Write(bounce(slot)),
            Stage::Data | Stage::Zeroes => {
                let writes = slot.kind != Kind::In;
                let segments = state.requests.segments(&pending);
                let transfer = Transfer {
                    segments: segments.as_ptr(),
                    count: segments.len() as u32,
                    offset: rest,
                };
                if writes {
                    Op::Write(transfer)
                } else {
                    Op::Read(transfer)
                }
            }
            Stage::Punch | Stage::ZeroRange => Op::Fallocate {
                mode: if stage == Stage::Punch {
                    PUNCH_HOLE
                } else {
                    ZERO_RANGE
                },
                offset: range.0,
                len: range.1,
            },
            Stage::DeviceDiscard => Op::DeviceDiscard {
                offset: range.0,
                len: range.1,
            },
            Stage::Sync => {
                self.counters().syncs.add(1);
                Op::Sync
            }
        };
        let token = pending.into_token();
        if state.engine.can(&op) {
            // SAFETY: the operation points into the request's slot, into guest RAM and into
            // buffers that the slot or the disk owns. The slot is not reused before `complete`,
            // and the worker is not taken apart before all its requests are complete.
            unsafe { state.engine.submit(ctx, token, op) };
        } else {
            self.help(state, ctx, token, op);
        }
    }

    #[cold]
    fn help(&self, state: &mut State, ctx: &Context, token: u32, op: Op) {
        if state.helper.is_none() {
            match Threads::new(self.disk.image.fd()) {
                Ok(threads) => {
                    let fd = threads.event_fd().unwrap_or(-1);
                    match self.register_engine(ctx, fd, true) {
                        Ok(()) => state.helper = Some(threads),
                        Err(error) => tracing::error!("disk {}: {error}", self.disk.config.id),
                    }
                }
                Err(error) => tracing::error!("disk {}: {error}", self.disk.config.id),
            }
        }
        match &mut state.helper {
            // SAFETY: as in `issue`.
            Some(helper) => unsafe { helper.submit(ctx, token, op) },
            None => self.complete(state, ctx, token, -libc::ENOMEM),
        }
    }

    /// An operation is done.
    #[inline]
    pub(super) fn complete(&self, state: &mut State, ctx: &Context, token: u32, result: i32) {
        let Some(pending) = state.requests.resume(token) else {
            tracing::error!(
                "disk {}: completion of a request that is not under way",
                self.disk.config.id
            );
            return;
        };
        match u32::try_from(result) {
            Ok(count) => self.progress(state, ctx, pending, count),
            Err(_) => self.failed(state, ctx, pending, result.wrapping_neg()),
        }
    }

    #[inline]
    fn progress(&self, state: &mut State, ctx: &Context, pending: Pending, count: u32) {
        let slot = state.requests.slot(&pending);
        slot.retries = 0;
        match slot.stage {
            Stage::Data if slot.done + count == slot.len => {
                slot.done = slot.len;
                self.data_done(state, ctx, pending);
            }
            Stage::Data => self.short(state, ctx, pending, count),
            Stage::Zeroes => {
                slot.done += count;
                if count == 0 {
                    self.failed(state, ctx, pending, libc::ENOSPC);
                } else {
                    self.dispatch(state, ctx, pending);
                }
            }
            Stage::BounceRead | Stage::BounceFill | Stage::BounceWrite => {
                self.bounced(state, ctx, pending, count);
            }
            Stage::Punch | Stage::ZeroRange => {
                slot.done = slot.len;
                self.data_done(state, ctx, pending);
            }
            Stage::Sync | Stage::DeviceDiscard => self.finish(state, pending, Status::Ok),
        }
    }

    /// Part of the data was transferred. The rest begins behind the total that is done, not behind
    /// what this operation did.
    #[cold]
    fn short(&self, state: &mut State, ctx: &Context, pending: Pending, count: u32) {
        self.counters().retries.add(1);
        state.requests.advance(&pending, count);
        let align = self.disk.image.alignment().offset;
        let slot = state.requests.slot(&pending);
        slot.done += count;
        let rest = slot.offset + u64::from(slot.done);
        // With O_DIRECT only the end of the file cuts a block.
        let ends_here = count == 0 || !rest.is_multiple_of(align.into());
        match slot.kind {
            Kind::In if ends_here => {
                slot.done = slot.len;
                let segments = state.requests.segments(&pending);
                // SAFETY: what is left of a read's segments is writable guest RAM.
                unsafe { iov::zero(segments, 0) };
                self.data_done(state, ctx, pending);
            }
            Kind::Out if ends_here => self.failed(state, ctx, pending, libc::ENOSPC),
            _ => self.dispatch(state, ctx, pending),
        }
    }

    /// All of the data is where it belongs.
    #[inline]
    pub(super) fn data_done(&self, state: &mut State, ctx: &Context, pending: Pending) {
        let kind = state.requests.slot(&pending).kind;
        let synced = matches!(kind, Kind::Out | Kind::WriteZeroes { .. });
        if synced && self.disk.syncs_writes() {
            self.issue(state, ctx, pending, Stage::Sync);
        } else {
            self.finish(state, pending, Status::Ok);
        }
    }

    #[cold]
    pub(super) fn failed(&self, state: &mut State, ctx: &Context, pending: Pending, errno: i32) {
        let slot = state.requests.slot(&pending);
        let (kind, stage) = (slot.kind, slot.stage);
        if matches!(errno, libc::EINTR | libc::EAGAIN) && slot.retries < MAX_RETRIES {
            slot.retries += 1;
            self.counters().retries.add(1);
            return self.issue(state, ctx, pending, stage);
        }
        match (kind, stage) {
            (Kind::WriteZeroes { .. }, Stage::Punch) if is_unsupported(errno) => {
                return self.issue(state, ctx, pending, Stage::ZeroRange);
            }
            (Kind::WriteZeroes { .. }, Stage::ZeroRange) if is_unsupported(errno) => {
                // Misaligned ranges fail too, so this is remembered only when it is about the
                // filesystem.
                if errno == libc::EOPNOTSUPP {
                    self.disk.no_zero_range.store(true, Ordering::Relaxed);
                }
                return self.write_zeroes(state, ctx, pending);
            }
            (Kind::Discard, _) if is_unsupported(errno) => {
                return self.finish(state, pending, Status::Unsupp);
            }
            _ => {}
        }
        let action = self.disk.error_policy(kind, errno);
        self.disk.report(kind, errno, action);
        match action {
            ErrorPolicy::Stop => self.park(state, pending),
            ErrorPolicy::Ignore => {
                if kind == Kind::In {
                    // Not what was in the guest's memory before, at least.
                    let segments = state.requests.segments(&pending);
                    // SAFETY: a read's segments are writable guest RAM.
                    unsafe { iov::zero(segments, 0) };
                }
                self.finish(state, pending, Status::Ok);
            }
            _ => self.finish(state, pending, Status::IoErr),
        }
    }

    /// Keeps a request until the VM goes on. It holds nothing that another one may wait for.
    fn park(&self, state: &mut State, pending: Pending) {
        let token = pending.token();
        self.return_bounce(state, &pending);
        let slot = state.requests.slot(&pending);
        slot.retries = 0;
        self.unlock_range(slot, token);
        state.parked.push(pending);
    }

    /// Resubmits what was kept, in order.
    pub(super) fn resume(&self, ctx: &Context) {
        let mut state = self.state.borrow_mut();
        for pending in std::mem::take(&mut state.parked) {
            self.start(&mut state, ctx, pending);
        }
        self.end_batch(&mut state, ctx);
    }

    /// The end of a request.
    #[inline]
    fn finish(&self, state: &mut State, pending: Pending, status: Status) {
        let slot = state.requests.slot(&pending);
        if slot.bounce.is_some() || slot.range_locked {
            self.release(state, &pending);
        }
        if self.dropping.get() || state.queue.is_broken() {
            return state.requests.drop_pending(pending);
        }
        let slot = state.requests.slot(&pending);
        self.count(slot.kind, status, slot.offset, slot.len);
        let finished = state.requests.finish(pending, status);
        state.requests.retire(finished, &mut state.queue);
    }

    #[cold]
    fn release(&self, state: &mut State, pending: &Pending) {
        self.return_bounce(state, pending);
        let token = pending.token();
        self.unlock_range(state.requests.slot(pending), token);
    }

    /// Drops a kept request whose driver is gone.
    pub(super) fn forget(&self, state: &mut State, pending: Pending) {
        self.release(state, &pending);
        state.requests.drop_pending(pending);
    }

    #[inline]
    fn count(&self, kind: Kind, status: Status, offset: u64, len: u32) {
        let counters = self.counters();
        let bytes = u64::from(len);
        let ok = status == Status::Ok;
        let (operations, failed, total) = match kind {
            Kind::In => (
                &counters.rd_operations,
                &counters.failed_rd_operations,
                &counters.rd_bytes,
            ),
            Kind::Out => (
                &counters.wr_operations,
                &counters.failed_wr_operations,
                &counters.wr_bytes,
            ),
            Kind::Flush => {
                let (done, failed) = (
                    &counters.flush_operations,
                    &counters.failed_flush_operations,
                );
                return if ok { done } else { failed }.add(1);
            }
            Kind::Discard => (
                &counters.unmap_operations,
                &counters.failed_unmap_operations,
                &counters.unmap_bytes,
            ),
            Kind::WriteZeroes { .. } => (
                &counters.zeroes_operations,
                &counters.failed_unmap_operations,
                &counters.zeroes_bytes,
            ),
        };
        if !ok {
            return failed.add(1);
        }
        operations.add(1);
        total.add(bytes);
        if kind == Kind::Out {
            counters.wr_highest_offset.raise_to(offset + bytes);
        }
    }

    /// Writes zeroes as data: where the filesystem cannot zero ranges.
    #[cold]
    fn write_zeroes(&self, state: &mut State, ctx: &Context, pending: Pending) {
        let align = self.disk.image.alignment().offset;
        let slot = state.requests.slot(&pending);
        let rest = slot.len - slot.done;
        let at = slot.offset + u64::from(slot.done);
        if rest == 0 {
            return self.data_done(state, ctx, pending);
        }
        if !at.is_multiple_of(align.into()) || !rest.is_multiple_of(align) {
            return self.bounce(state, ctx, pending);
        }
        let piece = self.disk.zeroes.segment();
        let most = state.requests.segments_capacity() * piece.iov_len;
        let bytes = (rest as usize).min(most);
        let count = bytes.div_ceil(piece.iov_len);
        let last = bytes - (count - 1) * piece.iov_len;
        state.requests.fill_segments(&pending, piece, count, last);
        self.issue(state, ctx, pending, Stage::Zeroes);
    }
}
