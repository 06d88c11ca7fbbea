//! Everything a vCPU needs before its first KVM_RUN.

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::VcpuFd;

use crate::GuestMemory;
use crate::x86_64::cpuid::Cpuid;
use crate::x86_64::error::{Error, Result};
use crate::x86_64::kernel::Boot;
use crate::x86_64::{lapic, msr, regs};

/// Configures vCPU `index`, whose KVM vcpu id (and so APIC id) is the same number. vCPU 0 is the
/// boot processor and starts at `boot`'s entry; the others wait for the guest's start-up IPI, as
/// KVM's in-kernel interrupt controller provides.
///
/// # Errors
/// [`Error::Kvm`] names the ioctl that failed. MSRs that KVM refuses are left out, and features
/// that it shows against `--cpu` are put up with, each with one log line.
pub fn configure_vcpu(
    vcpu: &VcpuFd,
    index: u8,
    cpuid: &Cpuid,
    mem: &GuestMemory,
    boot: &Boot,
) -> Result<()> {
    // Unknown on a KVM without a stable TSC: then the guest measures it itself.
    let tsc_khz = vcpu.get_tsc_khz().ok().filter(|khz| *khz > 0);
    vcpu.set_cpuid2(&cpuid.for_vcpu(index, tsc_khz)?)
        .map_err(Error::kvm("KVM_SET_CPUID2"))?;
    let refused = msr::set_boot_msrs(vcpu)?;
    if index == 0 {
        if !refused.is_empty() {
            tracing::debug!("this KVM refuses these MSRs, the guest does without: {refused:#x?}");
        }
        warn_of_features_shown(vcpu, cpuid);
    }
    regs::set_fpu(vcpu)?;
    lapic::set_local_interrupts(vcpu)?;
    if index == 0 {
        regs::set_boot_registers(vcpu, mem, boot)?;
    }
    Ok(())
}

fn warn_of_features_shown(vcpu: &VcpuFd, cpuid: &Cpuid) {
    let Ok(effective) = vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES) else {
        return;
    };
    let shown = cpuid.shown_nevertheless(&effective);
    if !shown.is_empty() {
        tracing::warn!(
            "--cpu: this host's KVM cannot hide {} from the guest",
            shown.join(", ")
        );
    }
}
