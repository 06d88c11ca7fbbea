//! What CPUID says about processors and caches: one package, one thread a core.

use crate::x86_64::cpuid::leaves::{Leaves, Vendor};

/// Levels of leaf 0xb, in ECX bits 8 to 15.
const LEVEL_THREAD: u32 = 1;
const LEVEL_CORE: u32 = 2;

/// EDX bit 28 of leaf 1: the package has more than one processor.
const HTT: u32 = 1 << 28;
/// ECX bit 1 of leaf 0x80000001: the same on AMD, as cores.
const CMP_LEGACY: u32 = 1 << 1;

/// Bits of the APIC id that tell `cpus` processors apart.
fn apic_id_bits(cpus: u8) -> u32 {
    u32::from(cpus).next_power_of_two().trailing_zeros()
}

/// Describes `cpus` cores in every leaf that the processor has; without the parts that differ
/// between vCPUs.
pub(crate) fn describe(leaves: &mut Leaves, vendor: Vendor, cpus: u8) {
    let count = u32::from(cpus);
    let ids = count.next_power_of_two();
    if let Some(leaf) = leaves.get_mut(1, 0) {
        leaf.ebx = leaf.ebx & 0x0000_ffff | ids << 16;
        leaf.edx = with_bit(leaf.edx, HTT, cpus > 1);
    }
    for leaf in leaves.all_mut(4) {
        // Type 0 ends the list.
        if leaf.eax & 0x1f != 0 {
            leaf.eax = leaf.eax & 0x3fff | cache_sharing(leaf.eax, ids) << 14 | (ids - 1) << 26;
        }
    }
    // Whether there are such leaves the maximum says; what the host has in them is its own
    // topology.
    leaves.remove(0xb);
    leaves.remove(0x1f);
    let max = leaves.max_basic();
    if max >= 0xb {
        add_extended_topology(leaves, 0xb, cpus);
    }
    if max >= 0x1f && vendor == Vendor::Intel {
        add_extended_topology(leaves, 0x1f, cpus);
    }
    if vendor != Vendor::Amd {
        return;
    }
    if let Some(leaf) = leaves.get_mut(0x8000_0001, 0) {
        leaf.ecx = with_bit(leaf.ecx, CMP_LEGACY, cpus > 1);
    }
    if let Some(leaf) = leaves.get_mut(0x8000_0008, 0) {
        leaf.ecx = leaf.ecx & !0xf0ff | apic_id_bits(cpus) << 12 | (count - 1);
    }
    for leaf in leaves.all_mut(0x8000_001d) {
        if leaf.eax & 0x1f != 0 {
            leaf.eax = leaf.eax & 0x3fff | cache_sharing(leaf.eax, count) << 14;
        }
    }
    if let Some(leaf) = leaves.get_mut(0x8000_001e, 0) {
        // One thread a core, one node.
        (leaf.eax, leaf.ebx, leaf.ecx, leaf.edx) = (0, 0, 0, 0);
    }
    // The host's dies and sockets: a guest falls back to leaf 0xb.
    leaves.remove(0x8000_0026);
}

/// Enters vCPU `index`'s APIC id.
pub(crate) fn identify(leaves: &mut Leaves, index: u8) {
    let id = u32::from(index);
    if let Some(leaf) = leaves.get_mut(1, 0) {
        leaf.ebx = leaf.ebx & 0x00ff_ffff | id << 24;
    }
    for function in [0xb, 0x1f] {
        for leaf in leaves.all_mut(function) {
            leaf.edx = id;
        }
    }
    if let Some(leaf) = leaves.get_mut(0x8000_001e, 0) {
        leaf.eax = id;
        leaf.ebx = leaf.ebx & !0xff | id;
    }
}

/// How many processors, less one, share the cache: the first two levels belong to a core, others
/// to the package.
fn cache_sharing(eax: u32, package: u32) -> u32 {
    let level = eax >> 5 & 7;
    if level <= 2 { 0 } else { package - 1 }
}

fn add_extended_topology(leaves: &mut Leaves, function: u32, cpus: u8) {
    // (bits to shift the APIC id by for the next level, processors at this level, level)
    let levels = [
        (0, 1, LEVEL_THREAD),
        (apic_id_bits(cpus), u32::from(cpus), LEVEL_CORE),
        (0, 0, 0),
    ];
    for (index, (shift, count, level)) in levels.into_iter().enumerate() {
        let leaf = leaves.insert(function, index as u32);
        leaf.eax = shift;
        leaf.ebx = count;
        leaf.ecx = level << 8 | index as u32;
    }
}

fn with_bit(register: u32, bit: u32, set: bool) -> u32 {
    if set { register | bit } else { register & !bit }
}
