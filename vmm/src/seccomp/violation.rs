//! The end of a thread that made a call outside its list: a message that names both, and the process ends.

use std::ffi::CStr;

use syscalls::Sysno;

use crate::vm::terminal;

/// `si_code` of a signal that a filter sent (`asm-generic/siginfo.h`).
const SYS_SECCOMP: i32 = 1;
/// Where `_sigsys._syscall` lies in `siginfo_t` on a 64-bit machine: behind three integers, their padding and a pointer.
const SYSCALL_NUMBER_AT: usize = 24;
/// The process' status.
const EXIT_STATUS: i32 = 1;

/// Makes SIGSYS end the process with a message.
pub(super) fn install_handler() {
    // SAFETY: an all-zero sigaction is a valid one: default handling, no flags.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_violation as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler takes three arguments, as SA_SIGINFO says, and is async-signal-safe.
    unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) };
}

/// Uses only what is async-signal-safe, and only calls that every filter allows: prctl(2) with PR_GET_NAME, ioctl(2) in
/// tcsetattr(3), write(2), exit_group(2).
extern "C" fn on_violation(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    terminal::restore();
    // SAFETY: SA_SIGINFO guarantees the pointer, and siginfo_t is larger than what is read of it.
    let (code, number) = unsafe {
        let number = info.cast::<u8>().add(SYSCALL_NUMBER_AT).cast::<i32>();
        ((*info).si_code, number.read_unaligned())
    };
    let mut message = Message::default();
    message.add("pollux: ");
    if code == SYS_SECCOMP {
        let mut name = [0; 16];
        // SAFETY: PR_GET_NAME writes at most 16 bytes, with a zero at the end (prctl(2)).
        unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
        let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
        message.add("thread ");
        message.add(name.to_str().unwrap_or("?"));
        message.add(" called ");
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        match Sysno::new(number) {
            Some(call) => message.add(call.name()),
            None => {
                message.add("system call ");
                message.number(number);
            }
        }
        message.add(", which its seccomp filter does not allow; the VM ends. ");
        message.add("--seccomp log lets it go on and shows what it does\n");
    } else {
        message.add("ended by signal SIGSYS\n");
    }
    message.write();
    // SAFETY: _exit(2) has no preconditions; no other code of this process is to run.
    unsafe { libc::_exit(EXIT_STATUS) };
}

/// A line that is put together without allocating.
struct Message {
    bytes: [u8; 256],
    len: usize,
}

impl Default for Message {
    fn default() -> Self {
        Self {
            bytes: [0; 256],
            len: 0,
        }
    }
}

impl Message {
    /// Appends what there is room for.
    fn add(&mut self, text: &str) {
        for (byte, slot) in text.bytes().zip(&mut self.bytes[self.len..]) {
            *slot = byte;
            self.len += 1;
        }
    }

    fn number(&mut self, number: usize) {
        let mut scale = 1;
        while number / scale >= 10 {
            scale *= 10;
        }
        while scale > 0 {
            let digit = b'0' + (number / scale % 10) as u8;
            self.add(std::str::from_utf8(&[digit]).unwrap_or_default());
            scale /= 10;
        }
    }

    fn write(&self) {
        // SAFETY: the bytes up to `len` are there. A short or failed write cannot be helped.
        unsafe { libc::write(libc::STDERR_FILENO, self.bytes.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_cut_where_the_room_ends() {
        let mut message = Message::default();
        for number in [0, 7, 10, 999, 4096] {
            message.number(number);
            message.add(" ");
        }
        assert_eq!(&message.bytes[..message.len], b"0 7 10 999 4096 ");
        for _ in 0..100 {
            message.add("more ");
        }
        assert_eq!(message.len, 256);
    }
}
