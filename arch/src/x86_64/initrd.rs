//! Placing and copying the initrd.

use std::ops::Range;

use crate::GuestMemory;
use crate::image::{FileRole, Image};
use crate::x86_64::error::{Error, FitRemedy, Result};
use crate::x86_64::layout::HOLE_START;

const PAGE: u64 = 4096;

/// Where the initrd goes: as high as it fits below `limit`, on a page boundary, so that the kernel
/// has the room after its own image for itself.
pub(crate) fn place(size_bytes: u64, kernel_end: u64, limit: u64) -> Result<Range<u64>> {
    if size_bytes == 0 {
        return Err(Error::EmptyInitrd);
    }
    let start = limit
        .checked_sub(size_bytes)
        .map(|start| start / PAGE * PAGE)
        .filter(|start| *start >= kernel_end);
    match start {
        Some(start) => Ok(start..start + size_bytes),
        None => Err(Error::InitrdDoesNotFit {
            size_bytes,
            room_bytes: limit.saturating_sub(kernel_end),
            kernel_end,
            limit,
            remedy: kernel_end
                .checked_add(size_bytes)
                .and_then(|end| end.checked_add(PAGE))
                .filter(|end| *end <= HOLE_START)
                .map_or(FitRemedy::Smaller, FitRemedy::for_end),
        }),
    }
}

/// Copies the initrd into the range that [`place`] gave.
pub(crate) fn copy<I: Image + ?Sized>(
    image: &I,
    mem: &GuestMemory,
    range: &Range<u64>,
) -> Result<()> {
    let len = (range.end - range.start) as usize;
    image
        .copy_to(0, mem, range.start, len)
        .map_err(|source| Error::Read {
            file: FileRole::Initrd,
            source,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn initrd_lies_at_the_end_on_a_page() {
        assert_eq!(
            place(5000, 32 * MIB, 64 * MIB).unwrap(),
            64 * MIB - 8192..64 * MIB - 8192 + 5000
        );
        // Exactly full.
        assert_eq!(
            place(32 * MIB, 32 * MIB, 64 * MIB).unwrap(),
            32 * MIB..64 * MIB
        );
    }

    #[test]
    fn what_does_not_fit_names_sizes_and_remedy() {
        let text = place(32 * MIB + 1, 32 * MIB, 64 * MIB)
            .unwrap_err()
            .to_string();
        assert!(text.contains("33554433 bytes"), "{text}");
        assert!(text.contains("33554432 are free"), "{text}");
        assert!(text.contains("at least --memory 65M"), "{text}");
        let text = place(HOLE_START, 32 * MIB, HOLE_START)
            .unwrap_err()
            .to_string();
        assert!(text.contains("use a smaller file"), "{text}");
        assert!(matches!(
            place(u64::MAX, 32 * MIB, 64 * MIB),
            Err(Error::InitrdDoesNotFit { .. })
        ));
        assert!(matches!(place(0, 0, MIB), Err(Error::EmptyInitrd)));
    }
}
