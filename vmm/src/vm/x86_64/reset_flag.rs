//! Tells a kernel's panic from a plain reboot, and both from an accident.
//!
//! With `panic=-1` Linux resets the machine at once, by the same register as `reboot` does, and `reboot=t` makes a triple
//! fault of either. What differs is the *reset flag*, the word at 0x472 of the PC's BIOS data area: Linux writes 0x1234
//! there for a warm and 0 for a cold reset, whichever way it then resets (arch/x86/kernel/reboot.c). The option
//! `reboot=panic_warm` (Linux 5.3 and newer) makes a panic's reset a warm one and leaves `reboot` cold. So this VMM puts a
//! word of its own there before the guest starts, adds [`CMDLINE`] in front of the kernel's command line, and looks when
//! the guest resets or shuts down: 0x1234 is a panic, another change is a reboot, no change at a triple fault is an
//! accident. It needs no driver and works from the kernel's first second.
//!
//! A guest told to reboot warm (`reboot=warm`, or /sys/kernel/reboot/mode) looks like a panicked one. Guests that load the
//! `pvpanic` driver report a panic in addition.

use vm_memory::{Bytes, GuestAddress};

use crate::vm::memory::GuestMemory;

/// Where the reset flag is.
const ADDRESS: GuestAddress = GuestAddress(0x472);
/// What no kernel writes there.
const UNTOUCHED: u16 = 0x5056;
/// The BIOS' word for a warm reset.
const WARM: u16 = 0x1234;

/// Kernel options that make a panic end the guest, and be recognised. The user's own come after and win.
pub const CMDLINE: &str = "panic=-1 reboot=panic_warm";

/// What the guest's last words were.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResetFlag {
    /// The guest never prepared a reset.
    Untouched,
    /// An ordinary reboot.
    Cold,
    /// A panic.
    Warm,
}

/// Puts the flag into its first state.
pub fn arm(memory: &GuestMemory) -> Result<(), vm_memory::GuestMemoryError> {
    memory.write_obj(UNTOUCHED, ADDRESS)
}

/// Reads the flag.
pub fn read(memory: &GuestMemory) -> ResetFlag {
    match memory.read_obj(ADDRESS) {
        Ok(UNTOUCHED) | Err(_) => ResetFlag::Untouched,
        Ok(WARM) => ResetFlag::Warm,
        Ok(_) => ResetFlag::Cold,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_three_states() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
        arm(&memory).unwrap();
        assert_eq!(read(&memory), ResetFlag::Untouched);
        memory.write_obj(0u16, ADDRESS).unwrap();
        assert_eq!(read(&memory), ResetFlag::Cold);
        memory.write_obj(0x1234u16, ADDRESS).unwrap();
        assert_eq!(read(&memory), ResetFlag::Warm);
    }
}
