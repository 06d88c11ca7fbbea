//! The guest's memory as registered buffers of a ring: `READ_FIXED` and its kin.

use std::cell::Cell;
use std::io;

use iothread::io_uring::opcode;
use iothread::{BUFFER_MAX_BYTES, Context};
use libc::iovec;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::GuestMemory;

/// Most bytes of one registered buffer; few in tests, so that requests cross their bounds.
const PIECE_BYTES: usize = if cfg!(test) {
    1 << 20
} else {
    BUFFER_MAX_BYTES
};

/// A registered piece of memory: host addresses, and its slot in the ring.
struct Piece {
    start: usize,
    end: usize,
    slot: u16,
}

/// See the module. Queues of one ring that register the same memory share its slots, which the
/// context counts.
pub(super) struct FixedBuffers {
    // By address.
    pieces: Vec<Piece>,
    // Where the last segment was.
    recent: Cell<usize>,
    // The kernel has READV_FIXED and WRITEV_FIXED (Linux 6.15).
    vectored: bool,
}

impl FixedBuffers {
    /// Registers all of `mem` with the ring of `ctx`.
    ///
    /// # Errors
    /// As [`Context::register_buffer`]. Nothing is registered then.
    ///
    /// # Safety
    /// `mem` stays mapped until [`Self::unregister`].
    pub(super) unsafe fn register(ctx: &Context, mem: &GuestMemory) -> io::Result<FixedBuffers> {
        let mut fixed = FixedBuffers {
            pieces: Vec::new(),
            recent: Cell::new(0),
            vectored: ctx.supports(&[opcode::ReadvFixed::CODE, opcode::WritevFixed::CODE]),
        };
        for region in mem.iter() {
            let bytes = region.len() as usize;
            for offset in (0..bytes).step_by(PIECE_BYTES) {
                let start = region.as_ptr().wrapping_add(offset);
                let bytes = PIECE_BYTES.min(bytes - offset);
                // SAFETY: the caller's promise.
                let slot = unsafe { ctx.register_buffer(start, bytes) };
                match slot {
                    Ok(slot) => fixed.pieces.push(Piece {
                        start: start.addr(),
                        end: start.addr() + bytes,
                        // There are less than 2^16 slots.
                        slot: slot as u16,
                    }),
                    Err(error) => {
                        fixed.unregister(ctx);
                        return Err(error);
                    }
                }
            }
        }
        fixed.pieces.sort_unstable_by_key(|piece| piece.start);
        Ok(fixed)
    }

    /// Ends the registration; the memory may be unmapped then.
    pub(super) fn unregister(&self, ctx: &Context) {
        for piece in &self.pieces {
            ctx.unregister_buffer(piece.slot.into());
        }
    }

    /// The slot in which all of `segments` are. None if they are in several or, like bounce
    /// buffers, in none, and if the kernel cannot have several segments in a slot.
    #[inline]
    pub(super) fn slot(&self, segments: &[iovec]) -> Option<u16> {
        let (first, rest) = segments.split_first()?;
        let start = first.iov_base.addr();
        let recent = self.pieces.get(self.recent.get());
        let piece = match recent.filter(|piece| piece.start <= start && start < piece.end) {
            Some(piece) => piece,
            None => {
                let above = self.pieces.partition_point(|piece| piece.start <= start);
                let index = above.checked_sub(1)?;
                self.recent.set(index);
                &self.pieces[index]
            }
        };
        // The kernel takes no empty buffer for one of its slot's.
        let inside = |s: &iovec| {
            let start = s.iov_base.addr();
            let rest = piece.end.checked_sub(start);
            s.iov_len != 0 && piece.start <= start && rest.is_some_and(|rest| s.iov_len <= rest)
        };
        let fits = inside(first) && (rest.is_empty() || self.vectored && rest.iter().all(inside));
        fits.then_some(piece.slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: usize, bytes: usize) -> iovec {
        iovec {
            iov_base: std::ptr::without_provenance_mut(start),
            iov_len: bytes,
        }
    }

    #[test]
    fn a_slot_is_found_only_where_all_segments_are_in_it() {
        let piece = |start, end, slot| Piece { start, end, slot };
        let mut fixed = FixedBuffers {
            pieces: vec![
                piece(0x1000, 0x2000, 7),
                piece(0x2000, 0x3000, 3),
                piece(0x8000, usize::MAX, 9),
            ],
            recent: Cell::new(0),
            vectored: true,
        };
        let (low, high) = (at(0x1000, 0x1000), at(0x2fff, 1));
        // In both orders, as the last one found is looked at first.
        for _ in 0..2 {
            assert_eq!(fixed.slot(&[low]), Some(7));
            assert_eq!(fixed.slot(&[high]), Some(3));
            assert_eq!(fixed.slot(&[at(0x8000, 512), at(0x9000, 512)]), Some(9));
            for outside in [
                at(0xfff, 1),
                at(0, 1),
                at(0x3000, 1),
                at(0x7fff, 1),
                at(0x1fff, 2),
                at(0x1000, 0x1001),
                at(0x2fff, usize::MAX),
                at(0x1000, 0),
            ] {
                assert_eq!(fixed.slot(&[outside]), None, "{outside:?}");
                assert_eq!(fixed.slot(&[low, outside]), None, "{outside:?}");
            }
        }
        assert_eq!(fixed.slot(&[low, high]), None);
        assert_eq!(fixed.slot(&[]), None);
        fixed.vectored = false;
        assert_eq!(fixed.slot(&[low, low]), None);
        assert_eq!(fixed.slot(&[low]), Some(7));
    }
}
