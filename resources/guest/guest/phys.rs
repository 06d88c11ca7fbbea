//! Reads and writes of physical memory and device registers, all of which is mapped one to one.
//!
//! These functions are safe to call in the sense that matters here: the guest is one program that
//! owns the whole machine, a hostile driver must be able to write anywhere on purpose, and an address
//! that is nowhere ends in a page fault that is reported. Memory that Rust knows of (statics, stacks)
//! is never passed to them, except rings and buffers from [`crate::memory::alloc`], of which no
//! reference exists while a device may write to them.

use core::cell::UnsafeCell;

/// A physical address.
pub type Addr = u64;

macro_rules! accessors {
    ($read:ident, $write:ident, $type:ty) => {
        #[inline(always)]
        pub fn $read(addr: Addr) -> $type {
            // SAFETY: see the module's comment; volatile, as a device may be behind it.
            unsafe { (addr as *const $type).read_volatile() }
        }

        #[inline(always)]
        pub fn $write(addr: Addr, value: $type) {
            // SAFETY: see the module's comment; volatile, as a device may be behind it.
            unsafe { (addr as *mut $type).write_volatile(value) }
        }
    };
}

accessors!(read8, write8, u8);
accessors!(read16, write16, u16);
accessors!(read32, write32, u32);
accessors!(read64, write64, u64);

/// 32 bits at any address, little-endian, of memory that does not change.
pub fn le32(addr: Addr) -> u32 {
    // SAFETY: see the module's comment.
    u32::from_le(unsafe { (addr as *const u32).read_unaligned() })
}

/// 64 bits at any address, little-endian, of memory that does not change.
pub fn le64(addr: Addr) -> u64 {
    // SAFETY: see the module's comment.
    u64::from_le(unsafe { (addr as *const u64).read_unaligned() })
}

/// Sets `len` bytes from `addr` to `value`.
pub fn fill(addr: Addr, value: u8, len: usize) {
    // SAFETY: see the module's comment.
    unsafe { core::ptr::write_bytes(addr as *mut u8, value, len) }
}

/// Copies `len` bytes; the areas do not overlap.
pub fn copy(from: Addr, to: Addr, len: usize) {
    // SAFETY: see the module's comment.
    unsafe { core::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, len) }
}

/// The words of `[addr, addr + 8 * len)`, while no device writes there.
pub fn words<'a>(addr: Addr, len: usize) -> &'a mut [u64] {
    // SAFETY: see the module's comment; the caller holds one such slice at a time.
    unsafe { core::slice::from_raw_parts_mut(addr as *mut u64, len) }
}

/// The bytes of `[addr, addr + len)`, while nobody writes there.
pub fn bytes<'a>(addr: Addr, len: usize) -> &'a [u8] {
    // SAFETY: see the module's comment.
    unsafe { core::slice::from_raw_parts(addr as *const u8, len) }
}

/// Orders all memory accesses before it against all after it, as a device sees them.
#[inline(always)]
pub fn fence() {
    core::sync::atomic::fence(core::sync::atomic::Ordering::SeqCst);
}

/// A static that several CPUs may touch; who does when is said where it is declared.
#[repr(transparent)]
pub struct Shared<T>(UnsafeCell<T>);

// SAFETY: every user of a `Shared` says at its declaration which CPU has it when.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub const fn new(value: T) -> Shared<T> {
        Shared(UnsafeCell::new(value))
    }

    pub fn as_ptr(&self) -> *mut T {
        self.0.get()
    }

    /// The value, for the CPU that has it now. References are not held across a hand-over.
    #[allow(clippy::mut_from_ref)]
    pub fn get(&self) -> &mut T {
        // SAFETY: by the rule at the declaration, nobody else has it.
        unsafe { &mut *self.0.get() }
    }
}
