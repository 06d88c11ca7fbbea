//! The zero page (`struct boot_params`) of the Linux 64-bit boot protocol
//! (Linux `Documentation/arch/x86/zero-page.rst`).

use std::ops::Range;

use linux_loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use crate::GuestMemory;
use crate::x86_64::error::{Error, Result};
use crate::x86_64::layout::{CMDLINE, ZERO_PAGE};
use crate::x86_64::memory_map::Entry;

/// A boot loader without a number of its own (`type_of_loader`).
const LOADER_UNDEFINED: u8 = 0xff;
const BOOT_FLAG: u16 = 0xaa55;
/// "HdrS".
const HEADER_MAGIC: u32 = 0x5372_6448;

/// The setup header for a vmlinux, whose file has none: what the kernel itself reads of it.
pub(crate) fn header_for_vmlinux() -> setup_header {
    setup_header {
        boot_flag: BOOT_FLAG,
        header: HEADER_MAGIC,
        // 2.12, the first with the 64-bit entry.
        version: 0x020c,
        ..Default::default()
    }
}

/// Writes the zero page; `header` is the one of the kernel's file.
pub(crate) fn write(
    mem: &GuestMemory,
    header: &setup_header,
    map: &[Entry],
    initrd: Option<&Range<u64>>,
    rsdp: Option<u64>,
) -> Result<()> {
    let mut params = boot_params {
        hdr: *header,
        acpi_rsdp_addr: rsdp.unwrap_or(0),
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = CMDLINE as u32;
    if let Some(initrd) = initrd {
        // Placed below 4 GiB, always.
        params.hdr.ramdisk_image = initrd.start as u32;
        params.hdr.ramdisk_size = (initrd.end - initrd.start) as u32;
    }
    let mut entries = 0;
    for (slot, entry) in params.e820_table.iter_mut().zip(map) {
        *slot = boot_e820_entry {
            addr: entry.range.start,
            size: entry.range.end - entry.range.start,
            r#type: entry.kind as u32,
        };
        entries += 1;
    }
    params.e820_entries = entries;
    mem.write_slice(params.as_slice(), GuestAddress(ZERO_PAGE))
        .map_err(Error::write("the zero page", ZERO_PAGE))
}
