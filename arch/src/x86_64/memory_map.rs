//! What the guest is told about its memory: the e820 map of the zero page and of PVH.

use std::ops::Range;

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use crate::GuestMemory;
use crate::x86_64::layout::{ACPI, HIMEM_START, KVM_IDENTITY_MAP, LOW_RAM_END};

/// What a range of addresses is; values of e820, which PVH shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Usable memory.
    Ram = 1,
    /// Not to be used.
    Reserved = 2,
    /// ACPI tables; usable once they have been read.
    Acpi = 3,
}

/// One entry of the memory map.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Addresses, end exclusive.
    pub range: Range<u64>,
    /// What they are.
    pub kind: Kind,
}

/// KVM's identity map page and its three TSS pages.
const KVM_PAGES: Range<u64> = KVM_IDENTITY_MAP..KVM_IDENTITY_MAP + 0x4000;

/// The map for `mem`, sorted, with `reserved` ranges outside RAM (such as the ECAM, which Linux
/// uses only when it finds it reserved).
pub fn memory_map(mem: &GuestMemory, reserved: &[Range<u64>]) -> Vec<Entry> {
    let mut map = Vec::new();
    let mut add = |range: Range<u64>, kind| {
        if !range.is_empty() {
            map.push(Entry { range, kind });
        }
    };
    for region in mem.iter() {
        let start = region.start_addr().raw_value();
        let end = start + region.len();
        if start == 0 {
            add(0..end.min(LOW_RAM_END), Kind::Ram);
            add(HIMEM_START..end.max(HIMEM_START), Kind::Ram);
        } else {
            add(start..end, Kind::Ram);
        }
    }
    add(LOW_RAM_END..ACPI.start, Kind::Reserved);
    add(ACPI, Kind::Acpi);
    add(KVM_PAGES, Kind::Reserved);
    for range in reserved {
        add(range.clone(), Kind::Reserved);
    }
    map.sort_by_key(|entry| entry.range.start);
    map
}

/// Where the memory that starts at address 0 ends: the kernel and the initrd lie below.
pub fn low_memory_end(mem: &GuestMemory) -> u64 {
    mem.iter()
        .find(|region| region.start_addr().raw_value() == 0)
        .map_or(0, |region| region.len())
}

/// Address after the last byte of RAM.
pub(crate) fn ram_end(mem: &GuestMemory) -> u64 {
    mem.last_addr().raw_value().saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::x86_64::layout::{ECAM, HOLE_END, HOLE_START, memory_regions};

    fn memory(size: u64) -> GuestMemory {
        GuestMemory::from_ranges(&memory_regions(size)).unwrap()
    }

    #[test]
    fn map_covers_ram_once_and_has_the_acpi_area() {
        let size = HOLE_START + (64 << 20);
        let map = memory_map(&memory(size), &[ECAM]);
        for pair in map.windows(2) {
            assert!(pair[0].range.end <= pair[1].range.start, "{pair:x?}");
        }
        let ram: u64 = map
            .iter()
            .filter(|e| e.kind == Kind::Ram)
            .map(|e| e.range.end - e.range.start)
            .sum();
        assert_eq!(ram, size - (HIMEM_START - LOW_RAM_END));
        let of = |address: u64| {
            map.iter()
                .find(|e| e.range.contains(&address))
                .map(|e| e.kind)
        };
        assert_eq!(of(ACPI.start), Some(Kind::Acpi));
        assert_eq!(of(LOW_RAM_END), Some(Kind::Reserved));
        assert_eq!(of(ECAM.start), Some(Kind::Reserved));
        assert_eq!(of(HOLE_START - 1), Some(Kind::Ram));
        assert_eq!(of(HOLE_START), None);
        assert_eq!(of(HOLE_END), Some(Kind::Ram));
        assert_eq!(low_memory_end(&memory(64 << 20)), 64 << 20);
        assert_eq!(low_memory_end(&memory(size)), HOLE_START);
        assert_eq!(ram_end(&memory(size)), HOLE_END + (64 << 20));
    }
}
