//! What the guest's processors say they are.
//!
//! The start is what KVM supports on this host (KVM_GET_SUPPORTED_CPUID). The topology is replaced
//! by the guest's own, features are taken away as `--cpu` says, and KVM's own leaves are completed.

mod features;
mod leaves;
mod model;
mod topology;

pub use features::Register;
pub use model::{CpuModel, CpuModelError};

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Cap, Kvm};

use crate::x86_64::error::{Error, Result};
use crate::x86_64::layout::MAX_CPUS;
use features::{bits, with_dependants};
use leaves::{Leaves, Vendor};

/// KVM's signature leaf and the leaf of its features.
const KVM_SIGNATURE: u32 = 0x4000_0000;
const KVM_FEATURES: u32 = 0x4000_0001;
/// Frequencies of the TSC (EAX) and of the APIC timer (EBX), in kHz: a convention of VMware that
/// QEMU follows and Linux and FreeBSD read.
const FREQUENCIES: u32 = 0x4000_0010;
/// KVM's local APIC timer counts at 1 GHz, unless told otherwise.
const APIC_BUS_KHZ: u32 = 1_000_000;
/// Where Intel processors give the TSC's frequency.
const TSC_LEAF: u32 = 0x15;

/// What each state component of XSAVE belongs to (bits of leaf 0xd, EAX).
const XSAVE_COMPONENTS: &[(u32, &str)] = &[
    (1 << 2, "avx"),
    (1 << 3 | 1 << 4, "mpx"),
    (1 << 5 | 1 << 6 | 1 << 7, "avx512f"),
    (1 << 9, "pku"),
    (1 << 17 | 1 << 18, "amx-tile"),
];

/// The CPUID tables of a VM: one template, completed for each vCPU.
#[derive(Clone, Debug)]
pub struct Cpuid {
    leaves: Leaves,
    vendor: Vendor,
    cpus: u8,
    /// Features taken away by name.
    without: Vec<&'static str>,
}

impl Cpuid {
    /// The tables for `cpus` vCPUs of `model` on this host.
    ///
    /// # Errors
    /// [`Error::CpuModel`] for a `+feature` that the host lacks; [`Error::CpuCount`];
    /// [`Error::Kvm`].
    pub fn new(kvm: &Kvm, model: &CpuModel, cpus: u8) -> Result<Cpuid> {
        let supported = kvm
            .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
            .map_err(Error::kvm("KVM_GET_SUPPORTED_CPUID"))?;
        // Reported by a capability because it needs the in-kernel local APIC, which is always
        // there here.
        let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        Cpuid::from_supported(&supported, tsc_deadline, model, cpus)
    }

    /// [`Cpuid::new`] from what KVM said.
    pub fn from_supported(
        supported: &CpuId,
        tsc_deadline: bool,
        model: &CpuModel,
        cpus: u8,
    ) -> Result<Cpuid> {
        if cpus == 0 || cpus > MAX_CPUS {
            return Err(Error::CpuCount {
                given: cpus.into(),
                max: MAX_CPUS.into(),
            });
        }
        let mut leaves = Leaves::new(supported);
        let vendor = leaves.vendor();
        set_feature(&mut leaves, "hypervisor");
        if tsc_deadline {
            set_feature(&mut leaves, "tsc-deadline");
        }
        topology::describe(&mut leaves, vendor, cpus);
        if let Some(missing) = model.with().iter().find(|n| !has_feature(&mut leaves, n)) {
            return Err(CpuModelError::NotOnHost(missing).into());
        }
        for name in model.without() {
            clear_feature(&mut leaves, name);
        }
        drop_state_of_missing_features(&mut leaves);
        sign(&mut leaves);
        Ok(Cpuid {
            leaves,
            vendor,
            cpus,
            without: model.without().to_vec(),
        })
    }

    /// Number of vCPUs that the tables describe.
    pub fn cpus(&self) -> u8 {
        self.cpus
    }

    /// Width of the guest's physical addresses, in bits.
    pub fn physical_address_bits(&self) -> u32 {
        let bits = self.leaves.get(0x8000_0008, 0).map_or(0, |e| e.eax & 0xff);
        if bits == 0 { 36 } else { bits }
    }

    /// The table of vCPU `index`, for KVM_SET_CPUID2. `tsc_khz` is what KVM_GET_TSC_KHZ says, where
    /// it does.
    pub fn for_vcpu(&self, index: u8, tsc_khz: Option<u32>) -> Result<CpuId> {
        let mut leaves = self.leaves.clone();
        topology::identify(&mut leaves, index);
        if let Some(khz) = tsc_khz {
            give_frequencies(&mut leaves, self.vendor, khz);
        }
        leaves.to_kvm()
    }

    /// Features that were taken away, but that the guest sees all the same in `effective`, the
    /// table that KVM_GET_CPUID2 returns: a KVM without hardware virtualization adds what the
    /// processor shows to every program.
    pub fn shown_nevertheless(&self, effective: &CpuId) -> Vec<&'static str> {
        let mut leaves = Leaves::new(effective);
        self.without
            .iter()
            .copied()
            .filter(|name| has_feature(&mut leaves, name))
            .collect()
    }
}

fn has_feature(leaves: &mut Leaves, name: &str) -> bool {
    bits(name).any(|(group, bit)| leaves.register_mut(group).is_some_and(|r| *r & bit != 0))
}

fn set_feature(leaves: &mut Leaves, name: &str) {
    for (group, bit) in bits(name) {
        if let Some(register) = leaves.register_mut(group) {
            *register |= bit;
        }
    }
}

fn clear_feature(leaves: &mut Leaves, name: &'static str) {
    for name in with_dependants(name) {
        for (group, bit) in bits(name) {
            if let Some(register) = leaves.register_mut(group) {
                *register &= !bit;
            }
        }
    }
}

/// Takes away what only describes features that are not there: XSAVE state, AMX tiles, nested
/// virtualization.
fn drop_state_of_missing_features(leaves: &mut Leaves) {
    if !has_feature(leaves, "xsave") {
        leaves.remove(0xd);
    }
    let mut gone = 0;
    for (components, name) in XSAVE_COMPONENTS {
        if !has_feature(leaves, name) {
            gone |= components;
        }
    }
    if let Some(leaf) = leaves.get_mut(0xd, 0) {
        leaf.eax &= !gone;
    }
    leaves.remove_where(|function, index| {
        function == 0xd && (2..32).contains(&index) && gone & 1 << index != 0
    });
    if !has_feature(leaves, "xsaves")
        && let Some(leaf) = leaves.get_mut(0xd, 1)
    {
        (leaf.ebx, leaf.ecx, leaf.edx) = (0, 0, 0);
    }
    if !has_feature(leaves, "amx-tile") {
        leaves.remove(0x1d);
        leaves.remove(0x1e);
    }
    if !has_feature(leaves, "svm") {
        leaves.remove(0x8000_000a);
    }
}

/// Completes the leaves by which a guest recognises KVM.
fn sign(leaves: &mut Leaves) {
    leaves.insert_plain(KVM_FEATURES);
    let leaf = leaves.insert_plain(KVM_SIGNATURE);
    leaf.eax = leaf.eax.max(KVM_FEATURES);
    leaf.ebx = u32::from_le_bytes(*b"KVMK");
    leaf.ecx = u32::from_le_bytes(*b"VMKV");
    leaf.edx = u32::from_le_bytes(*b"M\0\0\0");
}

fn give_frequencies(leaves: &mut Leaves, vendor: Vendor, tsc_khz: u32) {
    let leaf = leaves.insert_plain(FREQUENCIES);
    leaf.eax = tsc_khz;
    leaf.ebx = APIC_BUS_KHZ;
    if let Some(leaf) = leaves.get_mut(KVM_SIGNATURE, 0) {
        leaf.eax = leaf.eax.max(FREQUENCIES);
    }
    if vendor == Vendor::Intel && leaves.max_basic() >= TSC_LEAF {
        // TSC = crystal * EBX / EAX. The crystal is given as the APIC timer's frequency because
        // Linux takes it for that.
        let leaf = leaves.insert_plain(TSC_LEAF);
        leaf.eax = APIC_BUS_KHZ;
        leaf.ebx = tsc_khz;
        leaf.ecx = APIC_BUS_KHZ * 1000;
        leaf.edx = 0;
    }
}

#[cfg(test)]
mod tests;
