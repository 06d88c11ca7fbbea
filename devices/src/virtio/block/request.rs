//! A request's way through the device: chain → [`Parsed`] → [`Pending`] → [`Finished`].
//!
//! Each step consumes the type of the one before, so a request cannot be started without having
//! been checked, nor answered twice. What a request needs while it is on its way lives in a slot;
//! all slots exist before the first request does.

mod parse;

use std::mem::size_of;

use libc::iovec;

use super::buffer::AlignedBuffer;
use super::iov;
use crate::virtio::queue::{self, Queue};

/// Segments kept in the slot itself. Most requests have one or two; more go to the pool, whose
/// entries are a page apart and would all fall into the same cache sets.
const INLINE: usize = 4;
/// Most segments of a request: a descriptor that crosses from one RAM region into the next counts
/// twice. `readv` takes no more (UIO_MAXIOV).
const MAX_SEGMENTS: usize = 1024;

/// What the driver reads in the last byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Status {
    /// VIRTIO_BLK_S_OK
    Ok = 0,
    /// VIRTIO_BLK_S_IOERR
    IoErr = 1,
    /// VIRTIO_BLK_S_UNSUPP
    Unsupp = 2,
}

/// What a request does, once it is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    In,
    Out,
    Flush,
    Discard,
    WriteZeroes { unmap: bool },
}

impl Kind {
    /// Whether it changes the medium.
    pub(super) fn writes(self) -> bool {
        !matches!(self, Kind::In | Kind::Flush)
    }
}

/// What a pending request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its data, straight between guest RAM and file.
    Data,
    /// Part of its data, read into the bounce buffer for the guest.
    BounceRead,
    /// The blocks around misaligned data, read so that they can be written back.
    BounceFill,
    /// Part of its data, written from the bounce buffer.
    BounceWrite,
    /// A hole or a zeroed range made by the filesystem.
    Punch,
    ZeroRange,
    /// The block device's own discard.
    DeviceDiscard,
    /// Zeroes written as data.
    Zeroes,
    /// fdatasync, the last step of a flush or of a write in writethrough mode.
    Sync,
}

/// Where a slot's segments are.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Inline,
    Pool,
    Spill,
}

/// A request on its way.
pub(super) struct Slot {
    pub(super) kind: Kind,
    pub(super) stage: Stage,
    /// Consecutive failures that were retried.
    pub(super) retries: u8,
    /// Whether its range is locked against overlapping writes.
    pub(super) range_locked: bool,
    head: u16,
    place: Place,
    in_use: bool,
    /// The data segments not yet done with.
    first: u16,
    count: u16,
    /// Bytes of data in all, and those done.
    pub(super) len: u32,
    pub(super) done: u32,
    /// Offset of the data in the image, in bytes.
    pub(super) offset: u64,
    status: *mut u8,
    inline: [iovec; INLINE],
    spill: Vec<iovec>,
    pub(super) bounce: Option<AlignedBuffer>,
    /// Range of the image that the bounce buffer holds, and how much of it has been transferred.
    pub(super) bounce_offset: u64,
    pub(super) bounce_len: u32,
    pub(super) bounce_done: u32,
    /// The bounce buffer's segment, for the engine.
    pub(super) bounce_iov: iovec,
}

impl Slot {
    fn new() -> Slot {
        Slot {
            kind: Kind::Flush,
            stage: Stage::Data,
            retries: 0,
            range_locked: false,
            head: 0,
            place: Place::Inline,
            in_use: false,
            first: 0,
            count: 0,
            len: 0,
            done: 0,
            offset: 0,
            status: std::ptr::null_mut(),
            inline: [iov::EMPTY; INLINE],
            spill: Vec::new(),
            bounce: None,
            bounce_offset: 0,
            bounce_len: 0,
            bounce_done: 0,
            bounce_iov: iov::EMPTY,
        }
    }
}

/// A slot without a request.
#[must_use]
pub(super) struct Free(u16);

/// A request as the driver wrote it; nothing about it is checked but its shape.
#[must_use]
pub(super) struct Parsed {
    token: u16,
    /// The header's type.
    pub(super) request_type: u32,
    /// The header's sector.
    pub(super) sector: u64,
    /// Bytes that the device may read behind the header.
    pub(super) readable: u64,
    /// Bytes that the device may write before the status.
    pub(super) writable: u64,
    // Segments before this one are readable.
    split: u16,
    segments: u16,
}

/// A checked request in the hands of the device.
#[must_use]
pub(super) struct Pending(u16);

/// A request whose outcome is known; all that is left is to tell the driver.
#[must_use]
pub(super) struct Finished {
    token: u16,
    status: Status,
    /// Bytes written to the driver's buffers, the status among them.
    written: u32,
}

impl Pending {
    /// What an engine hands back when it is done.
    #[inline]
    pub(super) fn into_token(self) -> u32 {
        u32::from(self.0)
    }

    /// Its number, to speak of it while it is held.
    pub(super) fn token(&self) -> u32 {
        u32::from(self.0)
    }
}

/// Why a chain is no request.
pub(super) enum Rejected {
    /// It can be answered.
    Answer(Finished),
    /// It cannot: the driver is broken.
    Broken(queue::Error, Free),
}

/// All requests of a queue.
pub(super) struct Requests {
    slots: Box<[Slot]>,
    free: Vec<u16>,
    // `stride` segments for every slot.
    pool: AlignedBuffer,
    stride: usize,
}

impl Requests {
    /// Slots for a queue of `size` descriptors.
    pub(super) fn new(size: u16) -> Requests {
        // An odd number of cache lines apart, so that slots spread over the cache's sets.
        let stride = usize::from(size).max(INLINE) + 4;
        Requests {
            slots: (0..size).map(|_| Slot::new()).collect(),
            free: (0..size).rev().collect(),
            pool: AlignedBuffer::new(usize::from(size) * stride * size_of::<iovec>()),
            stride,
        }
    }

    /// A slot, unless all are in use.
    #[inline]
    pub(super) fn take(&mut self) -> Option<Free> {
        self.free.pop().map(Free)
    }

    /// Gives a slot back that was not used.
    #[inline]
    pub(super) fn put_back(&mut self, free: Free) {
        self.free.push(free.0);
    }

    /// Whether a slot is free.
    #[inline]
    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Number of requests on their way.
    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The slot of a pending request.
    #[inline]
    pub(super) fn slot(&mut self, pending: &Pending) -> &mut Slot {
        &mut self.slots[usize::from(pending.0)]
    }

    /// The request that an engine completed; None if there is none (an engine's fault).
    #[inline]
    pub(super) fn resume(&self, token: u32) -> Option<Pending> {
        let index = u16::try_from(token).ok()?;
        let slot = self.slots.get(usize::from(index))?;
        slot.in_use.then_some(Pending(index))
    }

    fn pool_base(&self, token: u16) -> *mut iovec {
        // In bounds: the pool has `stride` entries for every slot.
        self.pool
            .as_ptr()
            .cast::<iovec>()
            .wrapping_add(usize::from(token) * self.stride)
    }

    /// Number of segments that a slot can always hold: at least the queue's size.
    pub(super) fn segments_capacity(&self) -> usize {
        self.stride
    }

    fn segments_base(&mut self, token: u16) -> *mut iovec {
        let pool = self.pool_base(token);
        let slot = &mut self.slots[usize::from(token)];
        match slot.place {
            Place::Inline => slot.inline.as_mut_ptr(),
            Place::Pool => pool,
            Place::Spill => slot.spill.as_mut_ptr(),
        }
    }

    /// The data segments of a request that are not done with yet.
    #[inline]
    pub(super) fn segments(&mut self, pending: &Pending) -> &mut [iovec] {
        let base = self.segments_base(pending.0);
        let slot = &self.slots[usize::from(pending.0)];
        // SAFETY: `first + count` segments were written at `base` by `push` or `set_segments`, and
        // the borrow of `self` keeps them from being touched otherwise.
        unsafe {
            std::slice::from_raw_parts_mut(
                base.add(usize::from(slot.first)),
                usize::from(slot.count),
            )
        }
    }

    /// Replaces the data segments by `count` copies of `piece` but for the last, which has
    /// `last_len` bytes. At most [`Requests::segments_capacity`].
    pub(super) fn fill_segments(
        &mut self,
        pending: &Pending,
        piece: iovec,
        count: usize,
        last_len: usize,
    ) {
        let count = count.min(self.stride);
        let base = self.pool_base(pending.0);
        let slot = &mut self.slots[usize::from(pending.0)];
        slot.place = Place::Pool;
        slot.first = 0;
        slot.count = count as u16;
        for i in 0..count {
            let mut piece = piece;
            if i + 1 == count {
                piece.iov_len = last_len;
            }
            // SAFETY: `count` is at most `stride`, the number of entries at `base`.
            unsafe { base.add(i).write(piece) };
        }
    }

    /// Takes the first `bytes` of the data segments as done.
    pub(super) fn advance(&mut self, pending: &Pending, bytes: u32) {
        let whole = iov::advance(self.segments(pending), bytes as usize) as u16;
        let slot = self.slot(pending);
        slot.first += whole;
        slot.count -= whole;
    }

    #[inline]
    fn push(&mut self, token: u16, at: usize, segment: iovec) -> bool {
        let stride = self.stride;
        let pool = self.pool_base(token);
        let slot = &mut self.slots[usize::from(token)];
        if at < INLINE {
            slot.inline[at] = segment;
            return true;
        }
        if at >= MAX_SEGMENTS {
            return false;
        }
        if at == INLINE {
            slot.place = Place::Pool;
            for (i, piece) in slot.inline.iter().enumerate() {
                // SAFETY: the pool has more than INLINE entries for this slot.
                unsafe { pool.add(i).write(*piece) };
            }
        }
        if at < stride {
            // SAFETY: below `stride`, the number of entries at `pool`.
            unsafe { pool.add(at).write(segment) };
            return true;
        }
        // More segments than the driver was told that a request may have.
        if at == stride {
            slot.place = Place::Spill;
            slot.spill.clear();
            // SAFETY: all `stride` entries at `pool` have been written.
            let written = unsafe { std::slice::from_raw_parts(pool, stride) };
            slot.spill.extend_from_slice(written);
        }
        slot.spill.push(segment);
        true
    }

    /// Copies the payload of a parsed request, the bytes behind its header, up to `N` of them.
    pub(super) fn payload<const N: usize>(&mut self, parsed: &Parsed) -> [u8; N] {
        let base = self.segments_base(parsed.token);
        let mut bytes = [0; N];
        let count = parsed.readable.min(N as u64) as usize;
        // SAFETY: the first `split` segments were pushed by `collect`; they are guest RAM that the
        // queue keeps mapped.
        unsafe {
            let segments = std::slice::from_raw_parts(base, usize::from(parsed.split));
            iov::gather(segments, 0, bytes.as_mut_ptr(), count);
        }
        bytes
    }

    /// Writes `bytes` to the start of a parsed request's writable data. How many fitted.
    pub(super) fn reply(&mut self, parsed: &Parsed, bytes: &[u8]) -> u32 {
        let base = self.segments_base(parsed.token);
        let count = parsed.writable.min(bytes.len() as u64) as usize;
        let (split, segments) = (usize::from(parsed.split), usize::from(parsed.segments));
        // SAFETY: segments `split..segments` were pushed by `collect`; they are guest RAM that the
        // queue keeps mapped.
        unsafe {
            let writable = std::slice::from_raw_parts(base.add(split), segments - split);
            iov::scatter(writable, 0, bytes.as_ptr(), count);
        }
        count as u32
    }

    /// A checked request begins: `len` bytes at `offset` of the image.
    #[inline]
    pub(super) fn begin(&mut self, parsed: Parsed, kind: Kind, offset: u64, len: u32) -> Pending {
        let slot = &mut self.slots[usize::from(parsed.token)];
        let (first, end) = match kind {
            Kind::In => (parsed.split, parsed.segments),
            Kind::Out => (0, parsed.split),
            Kind::Flush | Kind::Discard | Kind::WriteZeroes { .. } => (0, 0),
        };
        slot.kind = kind;
        slot.stage = Stage::Data;
        slot.first = first;
        slot.count = end - first;
        slot.offset = offset;
        slot.len = len;
        slot.done = 0;
        slot.retries = 0;
        slot.range_locked = false;
        slot.in_use = true;
        Pending(parsed.token)
    }

    /// Answers a parsed request at once; `written` bytes of reply are in its buffers.
    #[inline]
    pub(super) fn answer(&mut self, parsed: Parsed, status: Status, written: u32) -> Finished {
        self.finish_token(parsed.token, status, written + 1)
    }

    /// Forgets a request that broke the rules.
    pub(super) fn abandon(&mut self, parsed: Parsed) {
        self.free.push(parsed.token);
    }

    fn finish_token(&mut self, token: u16, status: Status, written: u32) -> Finished {
        Finished {
            token,
            status,
            written,
        }
    }

    /// The outcome of a request is known.
    #[inline]
    pub(super) fn finish(&mut self, pending: Pending, status: Status) -> Finished {
        let slot = &mut self.slots[usize::from(pending.0)];
        slot.in_use = false;
        let data = match (slot.kind, status) {
            (Kind::In, Status::Ok) => slot.len,
            _ => 0,
        };
        self.finish_token(pending.0, status, data + 1)
    }

    /// Tells the driver: status byte and used element. The driver sees it when the queue publishes.
    #[inline]
    pub(super) fn retire(&mut self, finished: Finished, queue: &mut Queue) {
        let slot = &mut self.slots[usize::from(finished.token)];
        // SAFETY: `split_off_status` found this byte in guest RAM, which the queue keeps mapped.
        unsafe { slot.status.write_volatile(finished.status as u8) };
        queue.push_used(slot.head, finished.written);
        self.free.push(finished.token);
    }

    /// Forgets a request whose driver is gone.
    pub(super) fn drop_pending(&mut self, pending: Pending) {
        let slot = self.slot(&pending);
        slot.in_use = false;
        slot.bounce = None;
        self.free.push(pending.0);
    }
}

#[cfg(test)]
mod tests;
