//! The local APIC at start.

use kvm_bindings::kvm_lapic_state;
use kvm_ioctls::VcpuFd;

use crate::x86_64::error::{Error, Result};

/// Offsets of the local vector table's entries (Intel SDM volume 3, 11.5.1).
const LVT_LINT0: usize = 0x350;
const LVT_LINT1: usize = 0x360;
/// Delivery modes, in bits 8 to 10.
const MODE_NMI: u32 = 4;
const MODE_EXTINT: u32 = 7;

/// Wires LINT0 to the legacy interrupt controller and LINT1 to NMI, as firmware leaves them.
pub(crate) fn set_local_interrupts(vcpu: &VcpuFd) -> Result<()> {
    let mut lapic = vcpu.get_lapic().map_err(Error::kvm("KVM_GET_LAPIC"))?;
    set_delivery_mode(&mut lapic, LVT_LINT0, MODE_EXTINT);
    set_delivery_mode(&mut lapic, LVT_LINT1, MODE_NMI);
    vcpu.set_lapic(&lapic).map_err(Error::kvm("KVM_SET_LAPIC"))
}

fn set_delivery_mode(lapic: &mut kvm_lapic_state, offset: usize, mode: u32) {
    let mut bytes = [0; 4];
    for (byte, reg) in bytes.iter_mut().zip(&lapic.regs[offset..]) {
        *byte = *reg as u8;
    }
    let value = u32::from_le_bytes(bytes) & !0x700 | mode << 8;
    for (reg, byte) in lapic.regs[offset..].iter_mut().zip(value.to_le_bytes()) {
        *reg = byte as std::ffi::c_char;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delivery_mode_leaves_the_other_bits() {
        let mut lapic = kvm_lapic_state::default();
        for (reg, byte) in lapic.regs[LVT_LINT0..].iter_mut().zip([0xff_u8; 4]) {
            *reg = byte as std::ffi::c_char;
        }
        set_delivery_mode(&mut lapic, LVT_LINT0, MODE_NMI);
        let got: Vec<u8> = lapic.regs[LVT_LINT0..][..5]
            .iter()
            .map(|r| *r as u8)
            .collect();
        assert_eq!(got, [0xff, 0xfc, 0xff, 0xff, 0]);
    }
}
