//! What the compiler expects to find: memory functions and a panic handler.

use core::arch::asm;
use core::panic::PanicInfo;

use crate::exit;
use crate::text::Json;

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    let mut json = Json::new();
    json.string("panic", info.message().as_str().unwrap_or("").as_bytes());
    if let Some(place) = info.location() {
        json.string("file", place.file().as_bytes());
        json.number("line", u64::from(place.line()));
    }
    json.print();
    exit::failure()
}

/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _, inout("rsi") from => _, options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    if to.addr().wrapping_sub(from.addr()) >= len {
        // SAFETY: the caller's promise; a forward copy does not overwrite what it has yet to read.
        return unsafe { memcpy(to, from, len) };
    }
    // SAFETY: the caller's promise; backwards, as the destination begins within the source.
    unsafe {
        asm!(
            "std", "rep movsb", "cld",
            inout("rcx") len => _,
            inout("rdi") to.wrapping_add(len).wrapping_sub(1) => _,
            inout("rsi") from.wrapping_add(len).wrapping_sub(1) => _,
            options(nostack),
        );
    }
    to
}

/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, len: usize) -> *mut u8 {
    // SAFETY: the caller's promise.
    unsafe {
        asm!("rep stosb", inout("rcx") len => _, inout("rdi") to => _, in("al") value as u8, options(nostack, preserves_flags));
    }
    to
}

/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    for i in 0..len {
        // SAFETY: the caller's promise.
        let (x, y) = unsafe { (a.add(i).read_volatile(), b.add(i).read_volatile()) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
    }
    0
}

/// # Safety
/// As C's.
#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    // SAFETY: the caller's promise.
    unsafe { memcmp(a, b, len) }
}
