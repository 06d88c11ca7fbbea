//! Segment descriptors for the entry states (Intel SDM volume 3, 3.4.5).

use kvm_bindings::kvm_segment;

/// Read and write data, accessed.
const DATA: u8 = 0x3;
/// Execute and read code, accessed.
const CODE: u8 = 0xb;
/// Busy 32-bit TSS; in long mode, busy 64-bit TSS.
const BUSY_TSS: u8 = 0xb;

/// Selectors of the boot GDT. The PVH protocol leaves them open; Linux's 64-bit protocol wants
/// `__BOOT_CS` (0x10) and `__BOOT_DS` (0x18).
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const TSS_SELECTOR: u16 = 0x20;

/// Flat segments for one entry state.
pub(crate) struct Segments {
    pub code: kvm_segment,
    pub data: kvm_segment,
    pub tss: kvm_segment,
}

impl Segments {
    /// 64-bit code.
    pub(crate) fn long_mode() -> Segments {
        Segments::new(1, 0)
    }

    /// 32-bit code.
    pub(crate) fn protected_mode() -> Segments {
        Segments::new(0, 1)
    }

    fn new(long: u8, default_32bit: u8) -> Segments {
        let flat = |selector, type_, l, db| kvm_segment {
            base: 0,
            limit: u32::MAX,
            selector,
            type_,
            present: 1,
            dpl: 0,
            db,
            s: 1,
            l,
            g: 1,
            ..Default::default()
        };
        Segments {
            code: flat(CODE_SELECTOR, CODE, long, default_32bit),
            data: flat(DATA_SELECTOR, DATA, 0, 1),
            tss: kvm_segment {
                base: 0,
                limit: 0x67,
                selector: TSS_SELECTOR,
                type_: BUSY_TSS,
                present: 1,
                ..Default::default()
            },
        }
    }

    /// The table in guest memory that the selectors refer to: a guest that reloads a segment
    /// before it has its own table finds what it already has.
    pub(crate) fn table(&self) -> [u64; 6] {
        [
            0,
            0,
            descriptor(&self.code),
            descriptor(&self.data),
            // In long mode a TSS descriptor takes two entries, the second for the high half of
            // its base.
            descriptor(&self.tss),
            0,
        ]
    }
}

/// A segment as an entry of a descriptor table.
fn descriptor(s: &kvm_segment) -> u64 {
    let limit = u64::from(if s.g == 1 { s.limit >> 12 } else { s.limit });
    let bit = |value: u8, at: u32| u64::from(value & 1) << at;
    (limit & 0xffff)
        | (s.base & 0xff_ffff) << 16
        | u64::from(s.type_ & 0xf) << 40
        | bit(s.s, 44)
        | u64::from(s.dpl & 3) << 45
        | bit(s.present, 47)
        | (limit >> 16 & 0xf) << 48
        | bit(s.avl, 52)
        | bit(s.l, 53)
        | bit(s.db, 54)
        | bit(s.g, 55)
        | (s.base >> 24 & 0xff) << 56
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_the_well_known_ones() {
        let long = Segments::long_mode().table();
        assert_eq!(long[2], 0x00af_9b00_0000_ffff);
        assert_eq!(long[3], 0x00cf_9300_0000_ffff);
        assert_eq!(long[4], 0x0000_8b00_0000_0067);
        let protected = Segments::protected_mode().table();
        assert_eq!(protected[2], 0x00cf_9b00_0000_ffff);
    }

    #[test]
    fn a_base_is_spread_over_the_descriptor() {
        let segment = kvm_segment {
            base: 0x1234_5678,
            limit: 0xf_ffff,
            ..Segments::protected_mode().tss
        };
        assert_eq!(descriptor(&segment), 0x120f_8b34_5678_ffff);
    }
}
