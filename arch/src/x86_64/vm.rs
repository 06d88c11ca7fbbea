//! The virtual machine before it has vCPUs: what KVM must offer, and its interrupt controllers.

use kvm_bindings::{KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Cap, Kvm, VmFd};

use crate::x86_64::error::{Error, Result};
use crate::x86_64::layout::{KVM_IDENTITY_MAP, KVM_TSS, MAX_CPUS};

/// Capabilities without which no VM is started here, with their names in KVM's documentation.
pub const REQUIRED_CAPABILITIES: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::IrqRouting, "KVM_CAP_IRQ_ROUTING"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
];

/// Checks that KVM has what is needed.
///
/// # Errors
/// [`Error::MissingCapability`] for the first that it lacks.
pub fn check_capabilities(kvm: &Kvm) -> Result<()> {
    match REQUIRED_CAPABILITIES
        .iter()
        .find(|(cap, _)| !kvm.check_extension(*cap))
    {
        Some((_, name)) => Err(Error::MissingCapability { name }),
        None => Ok(()),
    }
}

/// Checks a number of vCPUs against what this crate and KVM support.
///
/// # Errors
/// [`Error::CpuCount`].
pub fn check_cpu_count(kvm: &Kvm, cpus: usize) -> Result<u8> {
    let max = kvm.get_max_vcpus().min(MAX_CPUS.into());
    match u8::try_from(cpus) {
        Ok(count) if (1..=max).contains(&cpus) => Ok(count),
        _ => Err(Error::CpuCount { given: cpus, max }),
    }
}

/// Gives the VM KVM's own pages, the in-kernel interrupt controllers and the timer chip. Call it
/// before the first vCPU is created.
pub fn setup_vm(vm: &VmFd) -> Result<()> {
    vm.set_identity_map_address(KVM_IDENTITY_MAP)
        .map_err(Error::kvm("KVM_SET_IDENTITY_MAP_ADDR"))?;
    vm.set_tss_address(KVM_TSS as usize)
        .map_err(Error::kvm("KVM_SET_TSS_ADDR"))?;
    vm.create_irq_chip()
        .map_err(Error::kvm("KVM_CREATE_IRQCHIP"))?;
    // Only a kernel without ACPI uses it: hardware-reduced ACPI promises no such timer.
    vm.create_pit2(kvm_pit_config {
        flags: KVM_PIT_SPEAKER_DUMMY,
        ..Default::default()
    })
    .map_err(Error::kvm("KVM_CREATE_PIT2"))
}
