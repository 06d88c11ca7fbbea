//! The start info of the PVH boot protocol: `hvm_start_info` with its memory map and module list
//! (Xen `docs/misc/pvh.pandoc` and `xen/include/public/arch-x86/hvm/start_info.h`).

use std::ops::Range;

use linux_loader::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::{ByteValued, Bytes, GuestAddress};

use crate::GuestMemory;
use crate::x86_64::error::{Error, Result};
use crate::x86_64::layout::{CMDLINE, PVH_MODULES, PVH_START_INFO, ZERO_PAGE};
use crate::x86_64::memory_map::Entry;

/// The memory map lies where Linux's other protocol has the zero page.
const MEMORY_MAP: u64 = ZERO_PAGE;

/// Writes the start info; the initrd is the only module.
pub(crate) fn write(
    mem: &GuestMemory,
    map: &[Entry],
    initrd: Option<&Range<u64>>,
    rsdp: Option<u64>,
) -> Result<()> {
    let mut address = MEMORY_MAP;
    for entry in map {
        let entry = hvm_memmap_table_entry {
            addr: entry.range.start,
            size: entry.range.end - entry.range.start,
            type_: entry.kind as u32,
            reserved: 0,
        };
        mem.write_slice(entry.as_slice(), GuestAddress(address))
            .map_err(Error::write("the PVH memory map", address))?;
        address += size_of::<hvm_memmap_table_entry>() as u64;
    }
    if let Some(initrd) = initrd {
        let module = hvm_modlist_entry {
            paddr: initrd.start,
            size: initrd.end - initrd.start,
            ..Default::default()
        };
        mem.write_slice(module.as_slice(), GuestAddress(PVH_MODULES))
            .map_err(Error::write("the PVH module list", PVH_MODULES))?;
    }
    let info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        // 1: the memory map is there.
        version: 1,
        flags: 0,
        nr_modules: initrd.is_some().into(),
        modlist_paddr: if initrd.is_some() { PVH_MODULES } else { 0 },
        cmdline_paddr: CMDLINE,
        rsdp_paddr: rsdp.unwrap_or(0),
        memmap_paddr: MEMORY_MAP,
        memmap_entries: map.len() as u32,
        reserved: 0,
    };
    mem.write_slice(info.as_slice(), GuestAddress(PVH_START_INFO))
        .map_err(Error::write("the PVH start info", PVH_START_INFO))
}
