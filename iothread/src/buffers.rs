//! Memory registered with a ring: requests into it (READ_FIXED, WRITE_FIXED and their vectored kin)
//! spare the kernel looking its pages up each time. The pages stay pinned meanwhile.

use std::io;

use io_uring::Probe;

use crate::context::Context;

/// Slots for registered buffers on each ring.
pub const BUFFER_SLOTS: u32 = 2048;

/// Most bytes of one registered buffer (`io_uring_register(2)`).
pub const BUFFER_MAX_BYTES: usize = 1 << 30;

/// A piece of memory that a slot stands for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BufferSlot {
    start: usize,
    bytes: usize,
    /// Registrations that share the slot; with none it is free.
    users: u32,
}

impl Context {
    /// Registers `bytes` bytes of memory at `start`, [`BUFFER_MAX_BYTES`] at most, for READ_FIXED
    /// and WRITE_FIXED. The slot it got is their `buf_index`. All of its pages are populated and
    /// pinned, which takes its time. Memory that is registered already is not registered again: it
    /// has one slot, until it has been unregistered as often.
    ///
    /// # Errors
    /// `ENOSYS` without a ring; `ENFILE` when all [`BUFFER_SLOTS`] are taken; `ENOMEM` when
    /// RLIMIT_MEMLOCK does not allow it; `EOPNOTSUPP` for memory that cannot be pinned, which is
    /// that of most files; `EINVAL` before Linux 5.19.
    ///
    /// # Safety
    /// The memory stays mapped, as the same pages, until [`Self::unregister_buffer`] or the
    /// context's end.
    pub unsafe fn register_buffer(&self, start: *mut u8, bytes: usize) -> io::Result<u32> {
        let ring = self.ring_or_enosys()?;
        let mut slots = self.state().requests.buffer_slots.borrow_mut();
        if slots.is_empty() {
            ring.submitter().register_buffers_sparse(BUFFER_SLOTS)?;
            slots.resize(BUFFER_SLOTS as usize, BufferSlot::default());
        }
        let address = start.addr();
        let same = |s: &BufferSlot| s.users != 0 && (s.start, s.bytes) == (address, bytes);
        let found = slots.iter().position(same);
        let found = found.or_else(|| slots.iter().position(|s| s.users == 0));
        let index = found.ok_or_else(|| io::Error::from_raw_os_error(libc::ENFILE))?;
        let slot = u32::try_from(index).unwrap_or(u32::MAX);
        if slots[index].users == 0 {
            let piece = libc::iovec {
                iov_base: start.cast(),
                iov_len: bytes,
            };
            // SAFETY: the caller's promise.
            unsafe {
                ring.submitter()
                    .register_buffers_update(slot, &[piece], None)
            }?;
            slots[index] = BufferSlot {
                start: address,
                bytes,
                users: 0,
            };
        }
        slots[index].users += 1;
        Ok(slot)
    }

    /// Ends one registration of [`Self::register_buffer`]; with the last one of its slot the memory
    /// is no longer pinned, once requests in flight into it have completed.
    pub fn unregister_buffer(&self, slot: u32) {
        let mut slots = self.state().requests.buffer_slots.borrow_mut();
        let Some(entry) = slots.get_mut(slot as usize).filter(|s| s.users != 0) else {
            return;
        };
        entry.users -= 1;
        if entry.users == 0
            && let Some(ring) = &self.state().ring
        {
            let nothing = libc::iovec {
                iov_base: std::ptr::null_mut(),
                iov_len: 0,
            };
            // SAFETY: an empty buffer points nowhere.
            let emptied = unsafe {
                ring.submitter()
                    .register_buffers_update(slot, &[nothing], None)
            };
            // That cannot fail for a slot in the table. If it did, the memory stayed pinned, and the
            // next user of the slot would replace it.
            if let Err(error) = emptied {
                tracing::debug!(%error, slot, "a registered buffer is not let go");
            }
        }
    }

    /// Whether the kernel knows all of the operations `opcodes` (`IORING_REGISTER_PROBE`). A system
    /// call.
    #[must_use]
    pub fn supports(&self, opcodes: &[u8]) -> bool {
        let Ok(ring) = self.ring_or_enosys() else {
            return false;
        };
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).is_ok()
            && opcodes.iter().all(|&opcode| probe.is_supported(opcode))
    }
}
