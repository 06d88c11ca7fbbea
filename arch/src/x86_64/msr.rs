//! The MSRs that a vCPU starts with.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;

use crate::x86_64::error::{Error, Result};

const IA32_TSC: u32 = 0x10;
const IA32_SYSENTER_CS: u32 = 0x174;
const IA32_SYSENTER_ESP: u32 = 0x175;
const IA32_SYSENTER_EIP: u32 = 0x176;
const IA32_MISC_ENABLE: u32 = 0x1a0;
const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
const STAR: u32 = 0xc000_0081;
const LSTAR: u32 = 0xc000_0082;
const CSTAR: u32 = 0xc000_0083;
const SYSCALL_MASK: u32 = 0xc000_0084;
const KERNEL_GS_BASE: u32 = 0xc000_0102;

/// Fast string operations.
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// MTRRs on, memory is write-back unless told otherwise.
const MTRR_ENABLE_WRITE_BACK: u64 = 1 << 11 | 6;

/// MSR and value at start.
const BOOT_MSRS: &[(u32, u64)] = &[
    (IA32_SYSENTER_CS, 0),
    (IA32_SYSENTER_ESP, 0),
    (IA32_SYSENTER_EIP, 0),
    (STAR, 0),
    (LSTAR, 0),
    (CSTAR, 0),
    (SYSCALL_MASK, 0),
    (KERNEL_GS_BASE, 0),
    (IA32_TSC, 0),
    (IA32_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
    (IA32_MTRR_DEF_TYPE, MTRR_ENABLE_WRITE_BACK),
];

/// Sets the start values and returns the MSRs that this KVM refused: a guest does without them.
///
/// # Errors
/// [`Error::Kvm`] when the ioctl itself fails.
pub fn set_boot_msrs(vcpu: &VcpuFd) -> Result<Vec<u32>> {
    let entries: Vec<kvm_msr_entry> = BOOT_MSRS
        .iter()
        .map(|&(index, data)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        })
        .collect();
    let mut refused = Vec::new();
    let mut rest = &entries[..];
    // KVM_SET_MSRS stops at the first that it refuses and returns how many it set before.
    while !rest.is_empty() {
        let msrs = Msrs::from_entries(rest).map_err(|_| Error::Kvm {
            what: "KVM_SET_MSRS",
            source: kvm_ioctls::Error::new(libc::E2BIG),
        })?;
        let done = vcpu
            .set_msrs(&msrs)
            .map_err(Error::kvm("KVM_SET_MSRS"))?
            .min(rest.len());
        if let Some(entry) = rest.get(done) {
            refused.push(entry.index);
        }
        rest = rest.get(done + 1..).unwrap_or_default();
    }
    Ok(refused)
}
