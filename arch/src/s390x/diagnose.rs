//! DIAGNOSE: the hypervisor calls that a guest makes (Documentation/virt/kvm/s390/s390-diag.rst).

/// Code of the IPL functions.
pub const IPL: u16 = 0x308;
/// Code of the watchdog. There is none: as on a machine without it, a specification exception.
pub const WATCHDOG: u16 = 0x288;
/// Code of the virtio functions.
pub const VIRTIO: u16 = 0x500;
/// Function of [`VIRTIO`]: a queue's kick.
pub const VIRTIO_CCW_NOTIFY: u64 = 3;

/// What DIAGNOSE 0x308 asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ipl {
    /// Reset the machine: its memory is not loaded anew, another kernel of the guest goes on (subcodes 0 and 1).
    Reset,
    /// Reset the machine and load it anew (3 and 4): a reboot.
    Load,
    /// Set or store the parameters of a load; there are none. The return code for register R1+1.
    NoParameters(u64),
}

/// Return code: no parameters are there.
const NO_CONFIGURATION: u64 = 0x0102;

/// Decodes a subcode; `None` is a specification exception. `address` is what R1 has, `r1` its number.
pub fn ipl(subcode: u64, r1: u8, address: u64) -> Option<Ipl> {
    match subcode {
        0 | 1 => Some(Ipl::Reset),
        3 | 4 => Some(Ipl::Load),
        // An even register, and a page.
        5 | 6 if !r1.is_multiple_of(2) || !address.is_multiple_of(4096) => None,
        5 | 6 => Some(Ipl::NoParameters(NO_CONFIGURATION)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subcodes_of_the_ipl_functions() {
        for (subcode, expected) in [
            (0, Some(Ipl::Reset)),
            (1, Some(Ipl::Reset)),
            (2, None),
            (3, Some(Ipl::Load)),
            (4, Some(Ipl::Load)),
            (5, Some(Ipl::NoParameters(0x102))),
            (6, Some(Ipl::NoParameters(0x102))),
            (7, None),
            (10, None),
            (u64::MAX, None),
        ] {
            assert_eq!(ipl(subcode, 2, 0x1000), expected, "{subcode}");
        }
        assert_eq!(ipl(6, 3, 0x1000), None);
        assert_eq!(ipl(6, 2, 0x1001), None);
    }
}
