//! The PC's reset vector, as the last resort of a guest that reboots.
//!
//! x86 Linux on hardware-reduced ACPI without EFI does not use the reset register that the FADT
//! names, unless its command line has some `reboot=`: it takes EFI for granted, falls back to the
//! BIOS and jumps to F000:FFF0 in real mode (Linux `arch/x86/kernel/reboot.c`). So there is code
//! there that writes the reset register.

/// Physical address of F000:FFF0.
pub(crate) const ADDRESS: u64 = 0xf_fff0;

/// Real-mode code that writes `value` to the I/O port `reset`, and waits.
pub(super) fn code(reset: u16, value: u8) -> [u8; 9] {
    let [low, high] = reset.to_le_bytes();
    [
        0xba, low, high, // mov dx, reset
        0xb0, value, // mov al, value
        0xee,  // out dx, al
        0xf4,  // hlt
        0xeb, 0xfd, // jmp to the hlt
    ]
}
