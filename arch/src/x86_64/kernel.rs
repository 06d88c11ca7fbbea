//! Loading a kernel: everything is checked first, then written.

use std::fmt;
use std::fs::File;
use std::ops::Range;

use linux_loader::bootparam::setup_header;
use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemory;
use crate::image::{FileRole, Image};
use crate::x86_64::detect::{Container, identify};
use crate::x86_64::error::{Error, FitRemedy, Result};
use crate::x86_64::layout::{
    CMDLINE, CMDLINE_ROOM_BYTES, MIN_MEMORY_BYTES, PVH_START_INFO, ZERO_PAGE,
};
use crate::x86_64::memory_map::{low_memory_end, memory_map, ram_end};
use crate::x86_64::{bzimage, elf, initrd, pvh, zero_page};

/// Longest command line of a Linux kernel without a setup header, and of every kernel started
/// through PVH: the protocol has no limit of its own, and x86 Linux cuts off what is longer
/// (`COMMAND_LINE_SIZE` is 2048 with the terminating zero).
pub const LINUX_CMDLINE_MAX_BYTES: usize = 2047;

/// How the kernel is entered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// Linux's 64-bit protocol: long mode, `rsi` points to the zero page.
    LinuxBoot64,
    /// PVH: 32-bit protected mode without paging, `ebx` points to `hvm_start_info`.
    Pvh,
}

/// What kind of kernel a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Compressed Linux kernel with a setup header.
    BzImage,
    /// ELF kernel without a PVH note.
    Vmlinux,
    /// ELF kernel with a PVH note.
    Pvh,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::BzImage => "a bzImage",
            Format::Vmlinux => "an ELF kernel",
            Format::Pvh => "a PVH kernel",
        })
    }
}

/// What the guest is told beyond its command line.
#[derive(Clone, Debug, Default)]
pub struct BootConfig {
    /// Address of the RSDP, as `acpi::write_tables` returned it.
    pub rsdp: Option<u64>,
    /// Address ranges outside RAM to mark as reserved in the memory map, such as the ECAM.
    pub reserved: Vec<Range<u64>>,
}

/// A kernel in guest memory, ready to be entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// What the file was.
    pub format: Format,
    /// How it is entered.
    pub protocol: Protocol,
    /// Physical address of the first instruction.
    pub entry: u64,
    /// Physical address of the zero page or of `hvm_start_info`.
    pub boot_data: u64,
    /// Memory that the kernel occupies until it knows its memory map.
    pub kernel: Range<u64>,
    /// Where the initrd is.
    pub initrd: Option<Range<u64>>,
    /// Version string, where the file's header has one.
    pub version: Option<String>,
}

impl fmt::Display for Boot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.format)?;
        if let Some(version) = &self.version {
            write!(f, " ({version})")?;
        }
        write!(f, " at {:#x?}, entry {:#x}", self.kernel, self.entry)?;
        match &self.initrd {
            Some(initrd) => write!(f, ", initrd at {initrd:#x?}"),
            None => Ok(()),
        }
    }
}

/// A kernel's file, inspected: what to load and how to start it.
#[derive(Debug)]
pub(crate) struct Loadable {
    pub format: Format,
    pub protocol: Protocol,
    pub entry: u64,
    /// Everything that must be RAM.
    pub range: Range<u64>,
    /// Sorted, not overlapping, within `range`.
    pub segments: Vec<Segment>,
    /// Without the terminating zero.
    pub cmdline_max_bytes: usize,
    /// Address that the initrd must end at or below.
    pub initrd_limit: u64,
    pub version: Option<String>,
    /// For the zero page.
    pub header: Option<setup_header>,
}

/// A stretch of the file and the memory it goes to; what the file does not fill is cleared.
#[derive(Debug)]
pub(crate) struct Segment {
    pub offset: u64,
    pub address: u64,
    pub file_bytes: u64,
    pub memory_bytes: u64,
}

impl Segment {
    pub(crate) fn end(&self) -> u64 {
        self.address + self.memory_bytes
    }
}

/// Loads `kernel`, `initrd` and `cmdline` into `mem`, with the boot data that the kernel's protocol
/// wants. `mem` is laid out by [`memory_regions`](crate::memory_regions).
///
/// # Errors
/// Nothing has been written when a file or the command line is refused; each error names the
/// option that it is about ([`Error::option`]).
pub fn load_kernel(
    mem: &GuestMemory,
    kernel: &File,
    initrd: Option<&File>,
    cmdline: &str,
    config: &BootConfig,
) -> Result<Boot> {
    load_images(mem, kernel, initrd, cmdline.as_bytes(), config)
}

/// [`load_kernel`] for anything that has bytes.
pub fn load_images<K: Image + ?Sized, I: Image + ?Sized>(
    mem: &GuestMemory,
    kernel: &K,
    initrd: Option<&I>,
    cmdline: &[u8],
    config: &BootConfig,
) -> Result<Boot> {
    let low_end = low_memory_end(mem);
    if low_end <= MIN_MEMORY_BYTES {
        return Err(Error::MemoryTooSmall(ram_end(mem)));
    }
    let loadable = inspect(kernel)?;
    if loadable.range.end > low_end {
        return Err(Error::KernelDoesNotFit {
            start: loadable.range.start,
            end: loadable.range.end,
            low_end,
            remedy: FitRemedy::for_end(loadable.range.end),
        });
    }
    check_cmdline(cmdline, &loadable)?;
    let initrd_range = match initrd {
        Some(image) => Some(place_initrd(image, &loadable, low_end)?),
        None => None,
    };

    for segment in &loadable.segments {
        load_segment(mem, kernel, segment)?;
    }
    if let (Some(image), Some(range)) = (initrd, &initrd_range) {
        initrd::copy(image, mem, range)?;
    }
    write_cmdline(mem, cmdline)?;
    let map = memory_map(mem, &config.reserved);
    let boot_data = match (loadable.protocol, &loadable.header) {
        (Protocol::LinuxBoot64, Some(header)) => {
            zero_page::write(mem, header, &map, initrd_range.as_ref(), config.rsdp)?;
            ZERO_PAGE
        }
        _ => {
            pvh::write(mem, &map, initrd_range.as_ref(), config.rsdp)?;
            PVH_START_INFO
        }
    };
    Ok(Boot {
        format: loadable.format,
        protocol: loadable.protocol,
        entry: loadable.entry,
        boot_data,
        kernel: loadable.range,
        initrd: initrd_range,
        version: loadable.version,
    })
}

/// Inspects a kernel's headers without loading it.
pub(crate) fn inspect<K: Image + ?Sized>(kernel: &K) -> Result<Loadable> {
    match identify(kernel)? {
        Container::BzImage => bzimage::inspect(kernel),
        Container::Elf64 => elf::inspect(kernel),
    }
}

fn check_cmdline(cmdline: &[u8], loadable: &Loadable) -> Result<()> {
    if let Some(at) = cmdline.iter().position(|&b| b == 0) {
        return Err(Error::CommandLineNul(at));
    }
    let limit_bytes = loadable.cmdline_max_bytes.min(CMDLINE_ROOM_BYTES - 1);
    if cmdline.len() > limit_bytes {
        return Err(Error::CommandLineTooLong {
            length_bytes: cmdline.len(),
            limit_bytes,
            format: loadable.format,
        });
    }
    Ok(())
}

fn place_initrd<I: Image + ?Sized>(
    image: &I,
    loadable: &Loadable,
    low_end: u64,
) -> Result<Range<u64>> {
    let size = image.len_bytes().map_err(|source| Error::Read {
        file: FileRole::Initrd,
        source,
    })?;
    initrd::place(size, loadable.range.end, low_end.min(loadable.initrd_limit))
}

fn load_segment<K: Image + ?Sized>(mem: &GuestMemory, kernel: &K, segment: &Segment) -> Result<()> {
    kernel
        .copy_to(
            segment.offset,
            mem,
            segment.address,
            segment.file_bytes as usize,
        )
        .map_err(|source| Error::Read {
            file: FileRole::Kernel,
            source,
        })?;
    const ZEROES: [u8; 4096] = [0; 4096];
    let mut address = segment.address + segment.file_bytes;
    while address < segment.end() {
        let n = (segment.end() - address).min(ZEROES.len() as u64);
        mem.write_slice(&ZEROES[..n as usize], GuestAddress(address))
            .map_err(Error::write("zeroes after the kernel's data", address))?;
        address += n;
    }
    Ok(())
}

fn write_cmdline(mem: &GuestMemory, cmdline: &[u8]) -> Result<()> {
    let mut bytes = Vec::with_capacity(cmdline.len() + 1);
    bytes.extend_from_slice(cmdline);
    bytes.push(0);
    mem.write_slice(&bytes, GuestAddress(CMDLINE))
        .map_err(Error::write("the command line", CMDLINE))
}

#[cfg(test)]
mod tests;
