//! The program-status word, and what interruptions leave in the lowcore (Principles of Operation, chapters 4 and 6).

/// Bits of the PSW's mask half.
pub mod mask {
    /// I/O interruptions.
    pub const IO: u64 = 1 << 57;
    /// External interruptions.
    pub const EXTERNAL: u64 = 1 << 56;
    /// Machine checks.
    pub const MACHINE_CHECK: u64 = 1 << 50;
    /// The CPU waits.
    pub const WAIT: u64 = 1 << 49;
    /// Problem state.
    pub const PROBLEM: u64 = 1 << 48;
    /// Where the condition code is.
    pub const CONDITION_CODE_SHIFT: u32 = 44;
    /// Addresses of 64 bits: both the extended and the basic addressing mode.
    pub const AMODE_64: u64 = 1 << 32 | 1 << 31;
}

/// `psw`'s mask half with condition code `code`.
pub fn with_condition_code(psw: u64, code: u8) -> u64 {
    psw & !(3 << mask::CONDITION_CODE_SHIFT) | u64::from(code & 3) << mask::CONDITION_CODE_SHIFT
}

/// Offsets in the lowcore, from the prefix on.
pub mod lowcore {
    #![allow(missing_docs)] // What is stored there is in the name.
    pub const EXTERNAL_PARAMETER: u64 = 0x80;
    pub const EXTERNAL_CPU: u64 = 0x84;
    pub const EXTERNAL_CODE: u64 = 0x86;
    pub const PROGRAM_ILC: u64 = 0x8c;
    pub const PROGRAM_CODE: u64 = 0x8e;
    pub const SUBCHANNEL: u64 = 0xb8;
    pub const IO_PARAMETER: u64 = 0xbc;
    pub const IO_IDENTIFICATION: u64 = 0xc0;
    pub const EXTERNAL_OLD: u64 = 0x130;
    pub const PROGRAM_OLD: u64 = 0x150;
    pub const IO_OLD: u64 = 0x170;
    pub const EXTERNAL_NEW: u64 = 0x1b0;
    pub const PROGRAM_NEW: u64 = 0x1d0;
    pub const IO_NEW: u64 = 0x1f0;
}

/// External-interruption code of the service processor.
pub const SERVICE_SIGNAL: u16 = 0x2401;
/// Control register 0: service signals come through.
pub const CR0_SERVICE_SIGNAL: u64 = 1 << 9;

/// Whether control register 6 lets interruption subclass `isc` through.
pub fn isc_enabled(control_register_6: u64, isc: u8) -> bool {
    control_register_6 & 0x8000_0000 >> (isc & 7) != 0
}

/// The I/O-interruption-identification word of a subchannel of subclass `isc`.
pub fn subchannel_identification(isc: u8) -> u32 {
    u32::from(isc & 7) << 27
}

/// The same of an adapter.
pub fn adapter_identification(isc: u8) -> u32 {
    1 << 31 | subchannel_identification(isc)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn condition_codes_replace_one_another() {
        let psw = mask::IO | mask::AMODE_64;
        assert_eq!(with_condition_code(psw, 3), psw | 3 << 44);
        assert_eq!(with_condition_code(psw | 3 << 44, 1), psw | 1 << 44);
    }

    #[test]
    fn subclasses() {
        assert!(isc_enabled(0x8000_0000, 0) && isc_enabled(0x0100_0000, 7));
        assert!(!isc_enabled(0x7fff_ffff, 0));
        assert_eq!(subchannel_identification(3), 0x1800_0000);
        assert_eq!(adapter_identification(1), 0x8800_0000);
    }
}
