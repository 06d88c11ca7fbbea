//! Where things are in the guest's physical address space.
//!
//! ```text
//! 0x0000_0000  RAM: boot data (GDT, start info, zero page, page tables, command line)
//! 0x0009_fc00  reserved (where PC firmware keeps its data)
//! 0x000e_0000  ACPI tables, RSDP first
//! 0x0010_0000  RAM: kernel upwards, initrd downwards from the end of low memory
//! 0xc000_0000  hole: PCI 32-bit BARs
//! 0xd000_0000        virtio-mmio devices, 4 KiB each
//! 0xe000_0000        PCI configuration space (ECAM)
//! 0xfec0_0000        I/O APIC, 0xfee0_0000 local APIC, 0xfffb_c000 KVM's own pages
//! 0x1_0000_0000 RAM that did not fit below the hole
//! ```

use std::ops::Range;

use vm_memory::GuestAddress;

/// Where RAM below 4 GiB ends and the hole for devices begins. On a 1 GiB boundary, so that both
/// sides can be backed by huge pages.
pub const HOLE_START: u64 = 0xc000_0000;
/// End of the hole: RAM continues here.
pub const HOLE_END: u64 = 1 << 32;

/// 32-bit PCI BARs.
pub const PCI_MMIO32: Range<u64> = HOLE_START..0xd000_0000;
/// virtio-mmio devices.
pub const VIRTIO_MMIO: Range<u64> = 0xd000_0000..0xd010_0000;
/// Size of one virtio-mmio device's window.
pub const VIRTIO_MMIO_SIZE_BYTES: u64 = 0x1000;
/// PCI Express configuration space: 256 buses of 1 MiB.
pub const ECAM: Range<u64> = 0xe000_0000..0xf000_0000;
/// The I/O APIC of KVM's in-kernel interrupt controller.
pub const IOAPIC_BASE: u64 = 0xfec0_0000;
/// The local APICs of KVM's in-kernel interrupt controller.
pub const LAPIC_BASE: u64 = 0xfee0_0000;
/// One page that KVM on Intel needs for real mode (KVM_SET_IDENTITY_MAP_ADDR).
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// Three pages that KVM on Intel needs for real mode (KVM_SET_TSS_ADDR).
pub const KVM_TSS: u64 = KVM_IDENTITY_MAP + 0x1000;

/// Interrupts that devices may use: pins of the I/O APIC that no fixed device has.
pub const DEVICE_GSI: Range<u32> = 5..23;
/// Interrupt of the ACPI power button.
pub const POWER_BUTTON_GSI: u32 = 23;
/// Pins of KVM's I/O APIC (KVM_IOAPIC_NUM_PINS).
pub const IOAPIC_PINS: u32 = 24;
/// First serial port, and its interrupt, where PCs have it.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Interrupt of the first serial port.
pub const SERIAL_GSI: u32 = 4;

/// Most vCPUs that are supported (xAPIC identifiers, one entry each in the MADT).
pub const MAX_CPUS: u8 = 64;

/// Least guest memory that any kernel is loaded into: boot data, tables, and something above 1 MiB.
pub const MIN_MEMORY_BYTES: u64 = 2 << 20;

/// Boot GDT.
pub const BOOT_GDT: u64 = 0x500;
/// Boot IDT: empty, an exception before the guest has its own is a triple fault.
pub const BOOT_IDT: u64 = 0x580;
/// PVH: `hvm_start_info`.
pub const PVH_START_INFO: u64 = 0x6000;
/// PVH: module list (the initrd).
pub const PVH_MODULES: u64 = 0x6040;
/// Linux: `boot_params`, the zero page. PVH: the memory map.
pub const ZERO_PAGE: u64 = 0x7000;
/// Top of the stack at the 64-bit entry.
pub const BOOT_STACK: u64 = 0x8ff0;
/// Page tables of the 64-bit entry: PML4, PDPT, then four page directories (4 GiB of 2 MiB pages).
pub const BOOT_PML4: u64 = 0x9000;
/// See [`BOOT_PML4`].
pub const BOOT_PDPT: u64 = 0xa000;
/// See [`BOOT_PML4`].
pub const BOOT_PD: u64 = 0xb000;
/// Kernel command line.
pub const CMDLINE: u64 = 0x2_0000;
/// Room for the command line with its terminating zero.
pub const CMDLINE_ROOM_BYTES: usize = 0x1_0000;

/// End of conventional memory.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// ACPI tables: in the area where a guest without the address scans for the RSDP. The last 16 bytes
/// are the PC's reset vector.
pub const ACPI: Range<u64> = 0xe_0000..HIMEM_START;
/// First address a kernel may be loaded at: everything below is boot data and tables.
pub const HIMEM_START: u64 = 0x10_0000;

/// The regions of guest memory for `size_bytes`: one below the hole, and one from 4 GiB for what
/// does not fit there. `size_bytes` should be a multiple of the page size.
pub fn memory_regions(size_bytes: u64) -> Vec<(GuestAddress, usize)> {
    let low = size_bytes.min(HOLE_START);
    let mut regions = vec![(GuestAddress(0), low as usize)];
    if size_bytes > low {
        regions.push((GuestAddress(HOLE_END), (size_bytes - low) as usize));
    }
    regions
}

/// Address after the last byte of RAM for `size_bytes` of memory.
pub fn memory_end(size_bytes: u64) -> u64 {
    if size_bytes > HOLE_START {
        HOLE_END + (size_bytes - HOLE_START)
    } else {
        size_bytes
    }
}

/// A window for 64-bit PCI BARs above RAM: from the next multiple of 1 GiB above both RAM and
/// 4 GiB, 16 GiB long or up to the guest's last physical address. `None` if nothing is left there.
pub fn pci_mmio64(size_bytes: u64, physical_address_bits: u32) -> Option<Range<u64>> {
    const GIB: u64 = 1 << 30;
    let start = memory_end(size_bytes)
        .max(HOLE_END)
        .checked_next_multiple_of(GIB)?;
    let limit = 1u64.checked_shl(physical_address_bits).unwrap_or(u64::MAX);
    let end = start.checked_add(16 * GIB)?.min(limit);
    (end > start).then_some(start..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_whole_and_leaves_the_hole_free() {
        for size in [
            64 << 20,
            HOLE_START - 4096,
            HOLE_START,
            HOLE_START + 4096,
            8 << 30,
            1 << 40,
        ] {
            let regions = memory_regions(size);
            assert_eq!(regions.iter().map(|r| r.1 as u64).sum::<u64>(), size);
            for (start, len) in &regions {
                let end = start.0 + *len as u64;
                assert!(
                    end <= HOLE_START || start.0 >= HOLE_END,
                    "{start:?} {len:#x}"
                );
                assert!(*len > 0);
            }
            let (start, len) = regions[regions.len() - 1];
            assert_eq!(memory_end(size), start.0 + len as u64);
        }
    }

    #[test]
    fn pci_window_lies_above_memory_and_within_the_address_width() {
        assert_eq!(pci_mmio64(1 << 30, 40), Some(4 << 30..20 << 30));
        assert_eq!(pci_mmio64(4 << 30, 40), Some(5 << 30..21 << 30));
        assert_eq!(pci_mmio64(1 << 30, 33), Some(4 << 30..8 << 30));
        assert_eq!(pci_mmio64(1 << 30, 32), None);
        assert_eq!(pci_mmio64(u64::MAX - HOLE_END, 64), None);
    }

    #[test]
    fn boot_data_does_not_overlap() {
        let mut areas = [
            (BOOT_GDT, 0x80),
            (BOOT_IDT, 0x80),
            (PVH_START_INFO, 0x40),
            (PVH_MODULES, 0x20),
            (ZERO_PAGE, 0x1000),
            (BOOT_STACK - 0x7f0, 0x7f0),
            (BOOT_PML4, 0x1000),
            (BOOT_PDPT, 0x1000),
            (BOOT_PD, 0x4000),
            (CMDLINE, CMDLINE_ROOM_BYTES as u64),
            (ACPI.start, ACPI.end - ACPI.start),
        ];
        areas.sort_unstable();
        for pair in areas.windows(2) {
            assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?}");
        }
        assert!(CMDLINE + CMDLINE_ROOM_BYTES as u64 <= LOW_RAM_END);
    }
}
