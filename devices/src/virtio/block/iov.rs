//! Lists of host buffers: copying between them and a flat buffer, and stepping over what is done.
//!
//! The buffers are guest RAM. The guest may write to it at any moment, so no Rust reference to it is
//! ever made: everything goes by raw pointer.

use libc::iovec;

/// The empty buffer.
pub(super) const EMPTY: iovec = iovec {
    iov_base: std::ptr::null_mut(),
    iov_len: 0,
};

/// Calls `f` with the pieces of `iov` behind the first `skip` bytes, `len` bytes in all, and the
/// offset of each from `skip`.
fn pieces(iov: &[iovec], mut skip: usize, len: usize, mut f: impl FnMut(*mut u8, usize, usize)) {
    let mut at = 0;
    for piece in iov {
        if at == len {
            return;
        }
        if skip >= piece.iov_len {
            skip -= piece.iov_len;
            continue;
        }
        let count = (piece.iov_len - skip).min(len - at);
        // `skip` is less than the piece's length.
        f(piece.iov_base.cast::<u8>().wrapping_add(skip), at, count);
        at += count;
        skip = 0;
    }
}

/// Copies `len` bytes at `from` into the buffers, behind the first `skip` bytes of them.
///
/// # Safety
/// `from` is readable for `len` bytes, and every buffer is writable for its length.
pub(super) unsafe fn scatter(iov: &[iovec], skip: usize, from: *const u8, len: usize) {
    pieces(iov, skip, len, |to, at, count| {
        // SAFETY: as the caller promises; the piece and the offset are within both.
        unsafe { std::ptr::copy(from.add(at), to, count) }
    });
}

/// Copies `len` bytes of the buffers, behind the first `skip`, to `to`.
///
/// # Safety
/// `to` is writable for `len` bytes, and every buffer is readable for its length.
pub(super) unsafe fn gather(iov: &[iovec], skip: usize, to: *mut u8, len: usize) {
    pieces(iov, skip, len, |from, at, count| {
        // SAFETY: as the caller promises; the piece and the offset are within both.
        unsafe { std::ptr::copy(from, to.add(at), count) }
    });
}

/// Zeroes everything behind the first `skip` bytes.
///
/// # Safety
/// Every buffer is writable for its length.
pub(super) unsafe fn zero(iov: &[iovec], skip: usize) {
    pieces(iov, skip, usize::MAX, |to, _, count| {
        // SAFETY: the piece is within a writable buffer.
        unsafe { std::ptr::write_bytes(to, 0, count) }
    });
}

/// Removes the first `count` bytes of the buffers, which have at least those. How many whole
/// buffers at the front are done with.
pub(super) fn advance(iov: &mut [iovec], mut count: usize) -> usize {
    let mut whole = 0;
    for piece in iov {
        if count < piece.iov_len {
            piece.iov_base = piece.iov_base.cast::<u8>().wrapping_add(count).cast();
            piece.iov_len -= count;
            break;
        }
        count -= piece.iov_len;
        whole += 1;
    }
    whole
}

/// Whether all buffers begin at a multiple of `memory` and are as long as a multiple of `length`.
pub(super) fn aligned(iov: &[iovec], memory: u32, length: u32) -> bool {
    let (mut bases, mut lengths) = (0, 0);
    for piece in iov {
        bases |= piece.iov_base.addr();
        lengths |= piece.iov_len;
    }
    bases & (memory as usize - 1) == 0 && lengths & (length as usize - 1) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Cuts `bytes` into buffers of the given lengths.
    fn cut(bytes: &mut [u8], lengths: &[usize]) -> Vec<iovec> {
        let mut at = 0;
        lengths
            .iter()
            .map(|&length| {
                let piece = &mut bytes[at..at + length];
                at += length;
                iovec {
                    iov_base: piece.as_mut_ptr().cast(),
                    iov_len: length,
                }
            })
            .collect()
    }

    proptest! {
        #[test]
        fn cutting_makes_no_difference(
            lengths in prop::collection::vec(0usize..9, 1..20),
            skip in 0usize..40,
            count in 0usize..40,
        ) {
            let total: usize = lengths.iter().sum();
            let skip = skip.min(total);
            let count = count.min(total - skip);
            let mut memory: Vec<u8> = (0..total as u8).collect();
            let flat = memory.clone();
            let mut iov = cut(&mut memory, &lengths);
            let mut got = vec![0; count];
            // SAFETY: the buffers are slices of `memory`, and `got` has `count` bytes.
            unsafe { gather(&iov, skip, got.as_mut_ptr(), count) };
            prop_assert_eq!(&got[..], &flat[skip..skip + count]);
            let new: Vec<u8> = (0..count as u8).map(|b| b ^ 0xff).collect();
            // SAFETY: as above.
            unsafe { scatter(&iov, skip, new.as_ptr(), count) };
            let mut expected = flat;
            expected[skip..skip + count].copy_from_slice(&new);
            prop_assert_eq!(&memory, &expected);
            // SAFETY: as above.
            unsafe { zero(&iov, skip) };
            expected[skip..].fill(0);
            prop_assert_eq!(&memory, &expected);
            let whole = advance(&mut iov, skip);
            let left: usize = iov[whole..].iter().map(|p| p.iov_len).sum();
            prop_assert_eq!(left, total - skip);
            if let Some(first) = iov[whole..].iter().find(|p| p.iov_len > 0) {
                prop_assert_eq!(first.iov_base.addr() - memory.as_ptr().addr(), skip);
            }
        }
    }

    #[test]
    fn alignment_is_that_of_every_buffer() {
        let at = |base: usize, len| iovec {
            iov_base: std::ptr::without_provenance_mut(base),
            iov_len: len,
        };
        assert!(aligned(&[at(0x1000, 512), at(0x2200, 1024)], 512, 512));
        assert!(!aligned(&[at(0x1000, 512), at(0x2201, 1024)], 512, 512));
        assert!(!aligned(&[at(0x1000, 511), at(0x2200, 1025)], 512, 512));
        assert!(aligned(&[at(0x1001, 511)], 1, 1));
        assert!(aligned(&[at(0x1004, 512)], 4, 512));
    }
}
