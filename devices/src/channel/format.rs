//! What the guest and the channel subsystem exchange in memory, all of it big-endian (Principles of Operation, chapters 14
//! to 16; the bit numbers in comments are the book's).

use super::{Outcome, ProgramInterruption};

/// Length of an ORB that this subsystem reads, in bytes: all of a command-mode ORB that matters.
pub const ORB_BYTES: usize = 12;
/// Length of a SCHIB in bytes.
pub const SCHIB_BYTES: usize = 52;
/// Length of an IRB without the extended-measurement word's block, in bytes.
pub const IRB_BYTES: usize = 64;
/// Sense bytes of a device.
pub const SENSE_BYTES: usize = 32;

/// Channel report word: reports before this one were lost.
pub const CRW_OVERFLOW: u32 = 1 << 29;

/// Device status (SCSW word 2, bits 0-7).
pub mod device_status {
    /// Channel end.
    pub const CHANNEL_END: u8 = 0x08;
    /// Device end.
    pub const DEVICE_END: u8 = 0x04;
    /// Unit check: sense bytes tell more.
    pub const UNIT_CHECK: u8 = 0x02;
}

/// Subchannel status (SCSW word 2, bits 8-15).
pub mod subchannel_status {
    /// Program-controlled interruption.
    pub const PROGRAM_CONTROLLED: u8 = 0x80;
    /// Incorrect length.
    pub const INCORRECT_LENGTH: u8 = 0x40;
    /// The channel program has an error.
    pub const PROGRAM_CHECK: u8 = 0x20;
}

/// Sense byte 0.
pub mod sense {
    /// Command reject.
    pub const COMMAND_REJECT: u8 = 0x80;
    /// Equipment check.
    pub const EQUIPMENT_CHECK: u8 = 0x10;
}

/// Bits of an SCSW's control halfword (word 0, bits 16-31).
pub mod control {
    /// Function: start.
    pub const START: u16 = 0x4000;
    /// Function: halt.
    pub const HALT: u16 = 0x2000;
    /// Function: clear.
    pub const CLEAR: u16 = 0x1000;
    /// All functions.
    pub const FUNCTIONS: u16 = 0x7000;
    /// Activity: resume pending.
    pub const RESUME_PENDING: u16 = 0x0800;
    /// Activity: start pending.
    pub const START_PENDING: u16 = 0x0400;
    /// Activity: suspended.
    pub const SUSPENDED: u16 = 0x0020;
    /// All activities.
    pub const ACTIVITY: u16 = 0x0fe0;
    /// Status: alert.
    pub const ALERT: u16 = 0x0010;
    /// Status: intermediate.
    pub const INTERMEDIATE: u16 = 0x0008;
    /// Status: primary.
    pub const PRIMARY: u16 = 0x0004;
    /// Status: secondary.
    pub const SECONDARY: u16 = 0x0002;
    /// Status pending.
    pub const PENDING: u16 = 0x0001;
    /// All of status control.
    pub const STATUS: u16 = 0x001f;
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    bytes
        .get(at..at + 2)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u16::from_be_bytes)
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    bytes
        .get(at..at + 4)
        .and_then(|b| b.try_into().ok())
        .map_or(0, u32::from_be_bytes)
}

/// An operation-request block of command mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Orb {
    /// Interruption parameter.
    pub parameter: u32,
    /// Key and flags (word 1, bits 0-15).
    pub flags: u16,
    /// Logical-path mask.
    pub path_mask: u8,
    /// Absolute address of the first CCW.
    pub program: u32,
}

impl Orb {
    /// The program may suspend itself.
    pub const SUSPEND: u16 = 0x0800;
    /// CCWs have format 1.
    pub const FORMAT_1: u16 = 0x0080;
    /// Initial-status interruption: not offered, and without consequence for devices that answer at once.
    pub const SUPPRESS_SUSPENDED: u16 = 0x0008;
    /// Transport mode, which no subchannel here has.
    const TRANSPORT: u16 = 0x0004;
    /// Format-2 IDAWs.
    pub const FORMAT_2_IDAW: u16 = 0x0002;
    /// Format-2 IDAWs address blocks of 2 KiB.
    pub const IDAW_2K: u16 = 0x0001;

    /// Reads an ORB.
    ///
    /// # Errors
    /// An operand exception for one that is not valid.
    pub fn parse(bytes: &[u8; ORB_BYTES]) -> Outcome<Self> {
        let orb = Self {
            parameter: be32(bytes, 0),
            flags: be16(bytes, 4),
            path_mask: bytes[6],
            program: be32(bytes, 8),
        };
        // Bits 26-30 of word 1 are zero, and so is the first of the address.
        let reserved = bytes[7] & 0x3e != 0 || orb.program & 1 << 31 != 0;
        if reserved || orb.flags & Self::TRANSPORT != 0 {
            return Err(ProgramInterruption::Operand);
        }
        Ok(orb)
    }

    /// Whether a flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// The path-management-control word.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pmcw {
    /// Interruption parameter.
    pub parameter: u32,
    /// Word 1, bits 0-15.
    pub flags: u16,
    /// Device number.
    pub device: u16,
    /// Logical-path mask.
    pub logical_paths: u8,
    /// Path not operational.
    pub not_operational: u8,
    /// Last path used.
    pub last_path_used: u8,
    /// Paths installed.
    pub paths_installed: u8,
    /// Index of the measurement block.
    pub measurement_index: u16,
    /// Path-operational mask.
    pub paths_operational: u8,
    /// Paths available.
    pub paths_available: u8,
    /// Channel-path IDs.
    pub path_ids: [u8; 8],
    /// Word 6.
    pub characteristics: u32,
}

impl Pmcw {
    /// The subchannel is enabled.
    pub const ENABLED: u16 = 0x0080;
    /// Measurement block update.
    pub const MEASURE: u16 = 0x0010;
    /// The device number is valid.
    pub const VALID: u16 = 0x0001;
    /// Interruption subclass.
    const ISC: u16 = 0x3800;
    /// What MODIFY SUBCHANNEL changes: subclass, enabled, limit mode, measurement mode.
    const MODIFIABLE: u16 = Self::ISC | 0x0080 | 0x0060 | 0x0018;
    /// Must be zero: bits 5-7, and QDIO's bit 0, which no device here has.
    const RESERVED: u16 = 0x0700;
    /// Concurrent sense.
    pub const CONCURRENT_SENSE: u32 = 1;
    /// Measurement-block format 1.
    pub const MEASURE_FORMAT_1: u32 = 4;
    const MODIFIABLE_CHARACTERISTICS: u32 = 7;
    /// Must be zero in word 6.
    const RESERVED_CHARACTERISTICS: u32 = 0xff1f_fff8;

    /// The interruption subclass, 0 to 7.
    pub fn isc(&self) -> u8 {
        ((self.flags & Self::ISC) >> 11) as u8
    }

    /// Whether a flag is set.
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    fn parse(bytes: &[u8]) -> Self {
        let mut path_ids = [0; 8];
        if let Some(ids) = bytes.get(16..24) {
            path_ids.copy_from_slice(ids);
        }
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
        Self {
            parameter: be32(bytes, 0),
            flags: be16(bytes, 4),
            device: be16(bytes, 6),
            logical_paths: byte(8),
            not_operational: byte(9),
            last_path_used: byte(10),
            paths_installed: byte(11),
            measurement_index: be16(bytes, 12),
            paths_operational: byte(14),
            paths_available: byte(15),
            path_ids,
            characteristics: be32(bytes, 24),
        }
    }

    fn bytes(&self) -> [u8; 28] {
        let mut bytes = [0; 28];
        bytes[0..4].copy_from_slice(&self.parameter.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.device.to_be_bytes());
        bytes[8] = self.logical_paths;
        bytes[9] = self.not_operational;
        bytes[10] = self.last_path_used;
        bytes[11] = self.paths_installed;
        bytes[12..14].copy_from_slice(&self.measurement_index.to_be_bytes());
        bytes[14] = self.paths_operational;
        bytes[15] = self.paths_available;
        bytes[16..24].copy_from_slice(&self.path_ids);
        bytes[24..28].copy_from_slice(&self.characteristics.to_be_bytes());
        bytes
    }

    /// Takes what a guest may change from `new`.
    pub(super) fn modify(&mut self, new: &Self) {
        self.parameter = new.parameter;
        self.flags = self.flags & !Self::MODIFIABLE | new.flags & Self::MODIFIABLE;
        self.logical_paths = new.logical_paths;
        self.paths_operational = new.paths_operational;
        self.measurement_index = new.measurement_index;
        self.characteristics = self.characteristics & !Self::MODIFIABLE_CHARACTERISTICS
            | new.characteristics & Self::MODIFIABLE_CHARACTERISTICS;
    }
}

/// The subchannel-status word of command mode.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Scsw {
    /// Key and flags (word 0, bits 0-15).
    pub flags: u16,
    /// Function, activity and status control: see [`control`].
    pub control: u16,
    /// Absolute address, 8 above the last CCW.
    pub program: u32,
    /// See [`device_status`].
    pub device: u8,
    /// See [`subchannel_status`].
    pub subchannel: u8,
    /// Bytes not transferred.
    pub residual: u16,
}

impl Scsw {
    /// Extended-status word format.
    pub const EXTENDED_STATUS: u16 = 0x0400;
    /// Extended control: the IRB has sense bytes.
    pub const EXTENDED_CONTROL: u16 = 0x0002;
    /// What an ORB's flags leave in an SCSW: key, suspend, format, prefetch, initial status, address limit, suppress.
    pub(super) const FROM_ORB: u16 = 0xf8f8;

    fn bytes(&self) -> [u8; 12] {
        let mut bytes = [0; 12];
        bytes[0..2].copy_from_slice(&self.flags.to_be_bytes());
        bytes[2..4].copy_from_slice(&self.control.to_be_bytes());
        bytes[4..8].copy_from_slice(&self.program.to_be_bytes());
        bytes[8] = self.device;
        bytes[9] = self.subchannel;
        bytes[10..12].copy_from_slice(&self.residual.to_be_bytes());
        bytes
    }

    /// Whether any of `bits` of the control halfword is set.
    pub fn has(&self, bits: u16) -> bool {
        self.control & bits != 0
    }
}

/// A subchannel-information block as a guest sees it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Schib {
    /// Path management.
    pub pmcw: Pmcw,
    /// Status.
    pub scsw: Scsw,
    /// Address of the measurement block of format 1.
    pub measurement_block: u64,
}

impl Schib {
    /// Reads what MODIFY SUBCHANNEL gives: the status is not part of it.
    ///
    /// # Errors
    /// An operand exception where bits are set that must be zero.
    pub fn parse(bytes: &[u8; SCHIB_BYTES]) -> Outcome<Self> {
        let pmcw = Pmcw::parse(bytes);
        if pmcw.flags & Pmcw::RESERVED != 0
            || pmcw.characteristics & Pmcw::RESERVED_CHARACTERISTICS != 0
        {
            return Err(ProgramInterruption::Operand);
        }
        let measurement_block = u64::from(be32(bytes, 40)) << 32 | u64::from(be32(bytes, 44));
        Ok(Self {
            pmcw,
            scsw: Scsw::default(),
            measurement_block,
        })
    }

    /// The block as STORE SUBCHANNEL writes it.
    pub fn bytes(&self) -> [u8; SCHIB_BYTES] {
        let mut bytes = [0; SCHIB_BYTES];
        bytes[0..28].copy_from_slice(&self.pmcw.bytes());
        bytes[28..40].copy_from_slice(&self.scsw.bytes());
        bytes[40..48].copy_from_slice(&self.measurement_block.to_be_bytes());
        bytes
    }
}

/// An interruption-response block: status, what the channel found, sense bytes.
pub(super) fn irb(scsw: &Scsw, sense: &[u8; SENSE_BYTES]) -> [u8; IRB_BYTES] {
    let mut bytes = [0; IRB_BYTES];
    bytes[0..12].copy_from_slice(&scsw.bytes());
    if scsw.has(control::PENDING) {
        // Format-0 extended status, last path used: the first.
        bytes[13] = 0x80;
    }
    if scsw.flags & Scsw::EXTENDED_CONTROL != 0 {
        // Extended-report word: concurrent sense, and how many bytes of it.
        bytes[16] = 0x01;
        bytes[18] = SENSE_BYTES as u8;
        bytes[32..].copy_from_slice(sense);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schib_is_what_it_was_and_its_reserved_bits_are_refused() {
        let mut schib = Schib::default();
        schib.pmcw.parameter = 0x0102_0304;
        schib.pmcw.flags = Pmcw::ENABLED | Pmcw::VALID | 3 << 11;
        schib.pmcw.device = 0xabcd;
        schib.pmcw.path_ids = [1, 2, 3, 4, 5, 6, 7, 8];
        schib.pmcw.characteristics = Pmcw::CONCURRENT_SENSE;
        schib.measurement_block = 0x1122_3344_5566_7788;
        let bytes = schib.bytes();
        assert_eq!(&bytes[..8], [1, 2, 3, 4, 0x18, 0x81, 0xab, 0xcd]);
        assert_eq!(Schib::parse(&bytes), Ok(schib));
        assert_eq!(schib.pmcw.isc(), 3);
        for (at, bit) in [(4, 0x01), (4, 0x02), (4, 0x04), (24, 0x80), (27, 0x08)] {
            let mut bytes = bytes;
            bytes[at] |= bit;
            assert_eq!(Schib::parse(&bytes), Err(ProgramInterruption::Operand));
        }
    }

    #[test]
    fn orbs_that_are_not_valid_are_refused() {
        let mut good = [0; ORB_BYTES];
        good[3] = 7;
        good[4..8].copy_from_slice(&[0x08, 0x80, 0xff, 0x80]);
        good[10] = 0x20;
        let orb = Orb::parse(&good).unwrap();
        assert_eq!(
            (orb.parameter, orb.path_mask, orb.program),
            (7, 0xff, 0x2000)
        );
        assert!(orb.has(Orb::FORMAT_1) && orb.has(Orb::SUSPEND) && !orb.has(Orb::IDAW_2K));
        for (at, bit) in [(5, 0x04), (7, 0x02), (7, 0x20), (8, 0x80)] {
            let mut bytes = good;
            bytes[at] |= bit;
            let refused = Orb::parse(&bytes);
            assert_eq!(refused, Err(ProgramInterruption::Operand), "byte {at}");
        }
    }
}
