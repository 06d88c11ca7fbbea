//! Page-aligned memory for direct I/O.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

/// Alignment of every buffer: enough for any device's O_DIRECT.
pub(super) const ALIGN_BYTES: usize = 4096;

/// A zeroed heap buffer aligned to [`ALIGN_BYTES`].
pub(super) struct AlignedBuffer {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the buffer owns its memory, like a `Box<[u8]>`.
unsafe impl Send for AlignedBuffer {}

impl AlignedBuffer {
    /// A buffer of `len` bytes, at least one.
    pub(super) fn new(len: usize) -> AlignedBuffer {
        // A length so large that it cannot be laid out is out of memory.
        let layout = Layout::from_size_align(len.max(1), ALIGN_BYTES)
            .unwrap_or_else(|_| handle_alloc_error(Layout::new::<u8>()));
        // SAFETY: the layout's size is not zero.
        let start = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(start) else {
            handle_alloc_error(layout)
        };
        AlignedBuffer { start, layout }
    }

    /// Its first byte.
    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Its length in bytes.
    pub(super) fn len(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}
