//! What O_DIRECT demands of offsets, lengths and memory.
//!
//! The kernel tells by statx since 6.1; else small reads are tried. Nothing else is trusted: the
//! block size that stat reports is a hint about speed, and a filesystem's may be above or below
//! what its device takes.

use std::fs::File;
use std::os::fd::AsRawFd;

use super::super::buffer::AlignedBuffer;

/// Alignment in bytes; powers of two, 1 where nothing is demanded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Of a buffer's address.
    pub memory: u32,
    /// Of the offset in the file, and of every buffer's length.
    pub offset: u32,
}

impl Alignment {
    /// Buffered I/O.
    pub const NONE: Alignment = Alignment {
        memory: 1,
        offset: 1,
    };
    /// The largest that is tried.
    const MAX: u32 = 4096;
}

/// What statx says about direct I/O on `file` (STATX_DIOALIGN). None if it does not know;
/// `Some(None)` if it knows that direct I/O does not work.
fn told(file: &File) -> Option<Option<Alignment>> {
    // SAFETY: all fields of `statx` are integers, for which zero is a value.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an open descriptor with an empty path (AT_EMPTY_PATH), and a buffer of the right
    // type.
    let result = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &mut stat,
        )
    };
    if result != 0 || stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        return None;
    }
    let (memory, offset) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    let valid = memory.is_power_of_two() && offset.is_power_of_two();
    Some(valid.then_some(Alignment { memory, offset }))
}

/// Whether a read of `len` bytes to memory aligned to `memory` works.
fn reads(file: &File, buffer: &AlignedBuffer, memory: u32, len: u32) -> bool {
    // An offset of `memory` into a page-aligned buffer is aligned to `memory` and no more.
    let shift = (memory % Alignment::MAX) as usize;
    // SAFETY: the buffer has room for `shift + len` bytes, both at most `Alignment::MAX`.
    let count = unsafe {
        libc::pread(
            file.as_raw_fd(),
            buffer.as_ptr().add(shift).cast(),
            len as usize,
            // A file shorter than this gives zero bytes, but only if the offset is acceptable.
            i64::from(len),
        )
    };
    count >= 0
}

fn tried(file: &File) -> Option<Alignment> {
    let buffer = AlignedBuffer::new(2 * Alignment::MAX as usize);
    let sizes = || (9..=12).map(|shift| 1u32 << shift);
    let offset = sizes().find(|&size| reads(file, &buffer, Alignment::MAX, size))?;
    let memory = sizes()
        .find(|&size| reads(file, &buffer, size, offset))
        .unwrap_or(Alignment::MAX);
    Some(Alignment { memory, offset })
}

#[cfg(test)]
thread_local! {
    /// Tests can demand a stricter alignment than the file's, to be on a host with larger blocks.
    pub(in super::super) static DEMANDED: std::cell::Cell<Option<Alignment>> =
        const { std::cell::Cell::new(None) };
}

/// The alignment that direct I/O on `file` (opened with O_DIRECT) needs; None if it does not work.
pub(super) fn probe(file: &File) -> Option<Alignment> {
    #[cfg(test)]
    if let Some(alignment) = DEMANDED.get() {
        return Some(alignment);
    }
    match told(file) {
        // Trust, but try: some filesystems answer for a device that is stricter.
        Some(Some(alignment)) => {
            let buffer = AlignedBuffer::new(2 * Alignment::MAX as usize);
            let Alignment { memory, offset } = alignment;
            if offset > Alignment::MAX || memory > Alignment::MAX {
                return None;
            }
            reads(file, &buffer, memory, offset)
                .then_some(alignment)
                .or_else(|| tried(file))
        }
        Some(None) => None,
        None => tried(file),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn what_is_probed_is_enough_to_read() {
        let path = tempfile::NamedTempFile::new().unwrap();
        path.as_file().set_len(1 << 20).unwrap();
        let Ok(file) = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECT)
            .open(path.path())
        else {
            println!("skipped: the temporary directory's filesystem has no O_DIRECT");
            return;
        };
        for alignment in [probe(&file), tried(&file)].into_iter().flatten() {
            let buffer = AlignedBuffer::new(8192);
            assert!(reads(&file, &buffer, alignment.memory, alignment.offset));
            assert!(alignment.offset.is_power_of_two());
        }
    }

    #[test]
    fn a_file_without_o_direct_takes_any_alignment_that_is_tried() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 20).unwrap();
        let found = tried(&file).unwrap();
        assert_eq!((found.memory, found.offset), (512, 512));
    }
}
