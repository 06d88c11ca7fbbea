//! A CPUID table that can be looked up and changed.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use crate::x86_64::cpuid::features::{Group, Register};
use crate::x86_64::error::{Error, Result};

/// Whose processor it is, as far as it matters for the meaning of leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Vendor {
    Intel,
    /// AMD or Hygon.
    Amd,
    Other,
}

/// The entries of a CPUID table.
#[derive(Clone, Debug)]
pub(crate) struct Leaves(Vec<kvm_cpuid_entry2>);

impl Leaves {
    pub(crate) fn new(cpuid: &CpuId) -> Leaves {
        Leaves(cpuid.as_slice().to_vec())
    }

    pub(crate) fn to_kvm(&self) -> Result<CpuId> {
        CpuId::from_entries(&self.0).map_err(|_| Error::Kvm {
            what: "KVM_SET_CPUID2",
            source: kvm_ioctls::Error::new(libc::E2BIG),
        })
    }

    pub(crate) fn get(&self, function: u32, index: u32) -> Option<&kvm_cpuid_entry2> {
        self.0
            .iter()
            .find(|e| e.function == function && e.index == index)
    }

    pub(crate) fn get_mut(&mut self, function: u32, index: u32) -> Option<&mut kvm_cpuid_entry2> {
        self.0
            .iter_mut()
            .find(|e| e.function == function && e.index == index)
    }

    /// All sub-leaves of a leaf.
    pub(crate) fn all_mut(&mut self, function: u32) -> impl Iterator<Item = &mut kvm_cpuid_entry2> {
        self.0.iter_mut().filter(move |e| e.function == function)
    }

    pub(crate) fn remove(&mut self, function: u32) {
        self.0.retain(|e| e.function != function);
    }

    pub(crate) fn remove_where(&mut self, gone: impl Fn(u32, u32) -> bool) {
        self.0.retain(|e| !gone(e.function, e.index));
    }

    /// The entry of a leaf with sub-leaves, new and zero if there was none.
    pub(crate) fn insert(&mut self, function: u32, index: u32) -> &mut kvm_cpuid_entry2 {
        self.entry(function, index, KVM_CPUID_FLAG_SIGNIFCANT_INDEX)
    }

    /// The entry of a leaf without sub-leaves, new and zero if there was none.
    pub(crate) fn insert_plain(&mut self, function: u32) -> &mut kvm_cpuid_entry2 {
        self.entry(function, 0, 0)
    }

    fn entry(&mut self, function: u32, index: u32, flags: u32) -> &mut kvm_cpuid_entry2 {
        let same = |e: &kvm_cpuid_entry2| e.function == function && e.index == index;
        let at = self.0.iter().position(same).unwrap_or_else(|| {
            self.0.push(kvm_cpuid_entry2 {
                function,
                index,
                flags,
                ..Default::default()
            });
            self.0.len() - 1
        });
        &mut self.0[at]
    }

    /// Highest basic leaf.
    pub(crate) fn max_basic(&self) -> u32 {
        self.get(0, 0).map_or(0, |e| e.eax)
    }

    pub(crate) fn vendor(&self) -> Vendor {
        let Some(leaf) = self.get(0, 0) else {
            return Vendor::Other;
        };
        let mut name = [0; 12];
        for (bytes, register) in name.chunks_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            bytes.copy_from_slice(&register.to_le_bytes());
        }
        match &name {
            b"GenuineIntel" => Vendor::Intel,
            b"AuthenticAMD" | b"HygonGenuine" => Vendor::Amd,
            _ => Vendor::Other,
        }
    }

    /// The register that a group of features is in.
    pub(crate) fn register_mut(&mut self, group: &Group) -> Option<&mut u32> {
        let entry = self.get_mut(group.function, group.index)?;
        Some(match group.register {
            Register::Eax => &mut entry.eax,
            Register::Ebx => &mut entry.ebx,
            Register::Ecx => &mut entry.ecx,
            Register::Edx => &mut entry.edx,
        })
    }
}
