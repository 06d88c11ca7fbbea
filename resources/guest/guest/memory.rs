//! The memory map, page tables for all of it, and an allocator that only goes forward.

use crate::boot::{PROTOCOL_LINUX64, PROTOCOL_PVH};
use crate::phys::{self, Addr, Shared};

/// Everything the boot protocol said, copied so that low memory is free.
pub struct BootInfo {
    pub protocol: u32,
    pub command_line: &'static [u8],
    /// ACPI's root pointer, 0 if none was given.
    pub rsdp: Addr,
    /// RAM as (start, end).
    pub ram: &'static [(Addr, Addr)],
}

const MAX_RAM: usize = 32;
const COMMAND_LINE_BYTES: usize = 16 << 10;
/// Page directories of 1 GiB each, and the PDPTs above them.
const TABLES: usize = 80;
const LARGE_PAGE: u64 = 2 << 20;
const GIB: u64 = 1 << 30;
const FOUR_GIB: Addr = 1 << 32;

#[repr(C, align(4096))]
struct Tables([[u64; 512]; TABLES]);

// All of these are the first CPU's, the others only read what the page tables map.
static PAGE_TABLES: Shared<Tables> = Shared::new(Tables([[0; 512]; TABLES]));
static TABLES_USED: Shared<usize> = Shared::new(0);
static RAM: Shared<[(Addr, Addr); MAX_RAM]> = Shared::new([(0, 0); MAX_RAM]);
static RAM_LEN: Shared<usize> = Shared::new(0);
static COMMAND_LINE: Shared<[u8; COMMAND_LINE_BYTES]> = Shared::new([0; COMMAND_LINE_BYTES]);
/// Next free address in the RAM below 4 GiB and above.
static FREE: Shared<[Addr; 2]> = Shared::new([0; 2]);

unsafe extern "C" {
    static mut pml4: [u64; 512];
    static memory_end: u8;
}

/// Reads what the boot protocol left at `info`, and maps the memory.
pub fn init(info: Addr, protocol: u32) -> BootInfo {
    let (command_line, rsdp) = match protocol {
        PROTOCOL_PVH => read_start_info(info),
        _ => read_boot_params(info),
    };
    // Past the image and its zeroed memory. The rest below 1 MiB stays unused.
    FREE.get()[0] = (&raw const memory_end).addr() as u64;
    FREE.get()[1] = FOUR_GIB;
    let text = COMMAND_LINE.get();
    let mut len = 0;
    while command_line != 0 && len < COMMAND_LINE_BYTES {
        text[len] = phys::read8(command_line + len as u64);
        if text[len] == 0 {
            break;
        }
        len += 1;
    }
    let ram = &RAM.get()[..*RAM_LEN.get()];
    for &(start, end) in ram {
        map(start, end);
    }
    map(3 * GIB, FOUR_GIB);
    BootInfo {
        protocol,
        command_line: &COMMAND_LINE.get()[..len],
        rsdp,
        ram,
    }
}

/// PVH: `hvm_start_info` of the Xen ABI. Returns the command line's and the RSDP's address.
fn read_start_info(info: Addr) -> (Addr, Addr) {
    const MAGIC: u32 = 0x336e_c578;
    if phys::read32(info) != MAGIC {
        panic!("PVH start info without its magic number");
    }
    let version = phys::read32(info + 4);
    let (command_line, rsdp) = (phys::read64(info + 24), phys::read64(info + 32));
    if version >= 1 {
        let (map, entries) = (phys::read64(info + 40), phys::read32(info + 48));
        for entry in (0..u64::from(entries)).map(|i| map + 24 * i) {
            add_ram(
                phys::read64(entry),
                phys::read64(entry + 8),
                phys::read32(entry + 16),
            );
        }
    }
    (command_line, rsdp)
}

/// Linux: `boot_params`.
fn read_boot_params(info: Addr) -> (Addr, Addr) {
    let entries = phys::read8(info + 0x1e8);
    for entry in (0..u64::from(entries)).map(|i| info + 0x2d0 + 20 * i) {
        add_ram(
            phys::le64(entry),
            phys::le64(entry + 8),
            phys::le32(entry + 16),
        );
    }
    let command_line =
        u64::from(phys::read32(info + 0x228)) | u64::from(phys::read32(info + 0xc8)) << 32;
    (command_line, phys::le64(info + 0x70))
}

fn add_ram(start: Addr, len: u64, kind: u32) {
    const RAM_TYPE: u32 = 1;
    let count = RAM_LEN.get();
    if kind == RAM_TYPE && len > 0 && *count < MAX_RAM {
        RAM.get()[*count] = (start, start + len);
        *count += 1;
    }
}

/// Maps `[start, end)`, rounded outwards to 2 MiB, one to one, for CPL 3. New pages only: nothing
/// that was mapped changes, so no TLB entry goes stale.
pub fn map(start: Addr, end: Addr) {
    let mut page = start & !(LARGE_PAGE - 1);
    while page < end {
        // SAFETY: the first CPU alone changes the tables, one entry at a time.
        let root = unsafe { &raw mut pml4[(page >> 39) as usize & 511] };
        let pdpt = next_table(root);
        let pd = next_table(table_entry(pdpt, page >> 30));
        // Fill the directory to the end of this GiB or of the range.
        let stop = end.min((page | (GIB - 1)) + 1);
        while page < stop {
            let entry = table_entry(pd, page >> 21);
            // SAFETY: as above.
            unsafe {
                if entry.read_volatile() == 0 {
                    // Present, writable, user, large.
                    entry.write_volatile(page | 0x87);
                }
            }
            page += LARGE_PAGE;
        }
    }
}

fn table_entry(table: Addr, index: u64) -> *mut u64 {
    (table as *mut u64).wrapping_add(index as usize & 511)
}

/// The table that `entry` points to; a new one if there is none.
fn next_table(entry: *mut u64) -> Addr {
    // SAFETY: `entry` is in the root table or one of PAGE_TABLES, which the first CPU alone changes.
    unsafe {
        let old = entry.read_volatile();
        if old != 0 {
            return old & 0x000f_ffff_ffff_f000;
        }
        let used = TABLES_USED.get();
        if *used == TABLES {
            panic!("more memory than there are page tables for");
        }
        let table = (&raw const (*PAGE_TABLES.as_ptr()).0[*used]).addr() as u64;
        *used += 1;
        entry.write_volatile(table | 7);
        table
    }
}

/// `len` bytes aligned to `align`, zeroed: below 4 GiB, or above when `high`. `None` when there are no
/// more.
pub fn alloc(len: u64, align: u64, high: bool) -> Option<Addr> {
    let free = &mut FREE.get()[usize::from(high)];
    let limit = if high { u64::MAX } else { FOUR_GIB };
    let ram = &RAM.get()[..*RAM_LEN.get()];
    for &(start, end) in ram {
        let at = (*free).max(start).next_multiple_of(align);
        if at >= *free && at + len <= end.min(limit) && end > *free {
            *free = at + len;
            phys::fill(at, 0, len as usize);
            return Some(at);
        }
    }
    None
}

/// The first address after the piece of RAM that `addr` is in.
pub fn end_of_ram_at(addr: Addr) -> Addr {
    let ram = &RAM.get()[..*RAM_LEN.get()];
    ram.iter()
        .find(|(start, end)| (*start..*end).contains(&addr))
        .map_or(0, |&(_, end)| end)
}

/// The state of the allocator, to go back to.
pub fn mark() -> [Addr; 2] {
    *FREE.get()
}

/// Frees everything that was allocated since the [`mark`].
pub fn release(mark: [Addr; 2]) {
    *FREE.get() = mark;
}

/// The protocol's name.
pub fn protocol_name(protocol: u32) -> &'static [u8] {
    match protocol {
        PROTOCOL_PVH => b"pvh",
        PROTOCOL_LINUX64 => b"linux64",
        _ => b"unknown",
    }
}
