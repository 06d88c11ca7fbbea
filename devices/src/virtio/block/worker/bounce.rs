//! Requests whose data is not aligned as the file demands: through a buffer that is.

use iothread::Context;

use super::super::buffer::AlignedBuffer;
use super::super::iov;
use super::super::request::{Kind, Pending, Slot, Stage};
use super::{State, Worker};

/// Bytes of a bounce buffer; larger requests go through it piece by piece.
const BOUNCE_BYTES: usize = 128 * 1024;
/// Bounce buffers of one queue.
const BOUNCE_BUFFERS: usize = 16;

impl Worker {
    /// The next piece of a request through a bounce buffer: its data is not aligned as the file
    /// demands.
    #[cold]
    pub(super) fn bounce(&self, state: &mut State, ctx: &Context, pending: Pending) {
        if !self.lend_bounce(state, &pending) {
            state.bounce.waiting.push_back(pending.into_token());
            return;
        }
        self.counters().bounced.add(1);
        let align = self.disk.image.alignment().offset;
        let slot = state.requests.slot(&pending);
        let at = slot.offset + u64::from(slot.done);
        let start = at / u64::from(align) * u64::from(align);
        // The piece, with the rest of the blocks it begins and ends in, fits the buffer.
        let room = BOUNCE_BYTES as u32 - (at - start) as u32;
        let bytes = (slot.len - slot.done).min(room);
        let end = (at + u64::from(bytes)).next_multiple_of(align.into());
        slot.bounce_offset = start;
        slot.bounce_len = (end - start) as u32;
        slot.bounce_done = 0;
        let whole = start == at && end == at + u64::from(bytes);
        if slot.kind == Kind::In {
            self.issue(state, ctx, pending, Stage::BounceRead);
        } else if whole {
            self.bounce_write(state, ctx, pending);
        } else {
            self.issue(state, ctx, pending, Stage::BounceFill);
        }
    }

    /// Bytes of data in the bounce buffer, and where in it they begin.
    fn bounce_data(slot: &Slot) -> (usize, usize) {
        let at = slot.offset + u64::from(slot.done);
        let begin = (at - slot.bounce_offset) as usize;
        let room = slot.bounce_len as usize - begin;
        (begin, room.min((slot.len - slot.done) as usize))
    }

    /// Puts the guest's data into the bounce buffer and writes it.
    fn bounce_write(&self, state: &mut State, ctx: &Context, pending: Pending) {
        let slot = state.requests.slot(&pending);
        slot.bounce_done = 0;
        let (begin, bytes) = Self::bounce_data(slot);
        let zeroes = slot.kind != Kind::Out;
        let Some(buffer) = &slot.bounce else {
            return self.failed(state, ctx, pending, libc::EIO);
        };
        let to = buffer.as_ptr().wrapping_add(begin);
        if zeroes {
            // SAFETY: `begin + bytes` is at most the piece's length, which fits the buffer.
            unsafe { std::ptr::write_bytes(to, 0, bytes) };
        } else {
            let segments = state.requests.segments(&pending);
            // SAFETY: as above; a write's segments are readable guest RAM.
            unsafe { iov::gather(segments, 0, to, bytes) };
        }
        self.issue(state, ctx, pending, Stage::BounceWrite);
    }

    #[cold]
    pub(super) fn bounced(&self, state: &mut State, ctx: &Context, pending: Pending, count: u32) {
        let align = self.disk.image.alignment().offset;
        let slot = state.requests.slot(&pending);
        let stage = slot.stage;
        slot.bounce_done += count;
        if slot.bounce_done < slot.bounce_len {
            // As in `short`: only the end of the file cuts a block.
            if count != 0 && slot.bounce_done.is_multiple_of(align) {
                self.counters().retries.add(1);
                return self.issue(state, ctx, pending, stage);
            }
            if stage == Stage::BounceWrite {
                return self.failed(state, ctx, pending, libc::ENOSPC);
            }
            let (from, len) = (slot.bounce_done as usize, slot.bounce_len as usize);
            if let Some(buffer) = &slot.bounce {
                // SAFETY: `from..len` is within the piece, which fits the buffer.
                unsafe { std::ptr::write_bytes(buffer.as_ptr().add(from), 0, len - from) };
            }
        }
        if stage == Stage::BounceFill {
            return self.bounce_write(state, ctx, pending);
        }
        let (begin, bytes) = Self::bounce_data(slot);
        let kind = slot.kind;
        let from = slot
            .bounce
            .as_ref()
            .map(|buffer| buffer.as_ptr().wrapping_add(begin).cast_const());
        if kind == Kind::In
            && let Some(from) = from
        {
            let segments = state.requests.segments(&pending);
            // SAFETY: `bytes` bytes of the buffer were read or zeroed; a read's segments are
            // writable guest RAM.
            unsafe { iov::scatter(segments, 0, from, bytes) };
        }
        if kind != Kind::Discard && !matches!(kind, Kind::WriteZeroes { .. }) {
            state.requests.advance(&pending, bytes as u32);
        }
        let slot = state.requests.slot(&pending);
        slot.done += bytes as u32;
        if slot.done == slot.len {
            self.return_bounce(state, &pending);
            self.data_done(state, ctx, pending);
        } else {
            self.bounce(state, ctx, pending);
        }
    }

    fn lend_bounce(&self, state: &mut State, pending: &Pending) -> bool {
        if state.requests.slot(pending).bounce.is_some() {
            return true;
        }
        let buffer = match state.bounce.free.pop() {
            Some(buffer) => buffer,
            None if state.bounce.made < BOUNCE_BUFFERS => {
                state.bounce.made += 1;
                AlignedBuffer::new(BOUNCE_BYTES)
            }
            None => return false,
        };
        state.requests.slot(pending).bounce = Some(buffer);
        true
    }

    pub(super) fn return_bounce(&self, state: &mut State, pending: &Pending) {
        if let Some(buffer) = state.requests.slot(pending).bounce.take() {
            state.bounce.free.push(buffer);
        }
    }

    /// Requests that waited for a buffer go on. Each takes one, so this ends.
    #[cold]
    pub(super) fn serve_bounce_waiters(&self, state: &mut State, ctx: &Context) {
        while !state.bounce.free.is_empty()
            && let Some(token) = state.bounce.waiting.pop_front()
        {
            if let Some(pending) = state.requests.resume(token) {
                self.bounce(state, ctx, pending);
            }
        }
    }
}
