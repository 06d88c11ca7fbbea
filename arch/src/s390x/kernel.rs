//! Loading a kernel: a flat image that is loaded at address 0, or an ELF file. Everything is checked first, then written.
//!
//! A Linux kernel has the letters `S390EP` behind a branch at its entry, 0x10000, and a parameter area at 0x10400
//! (arch/s390/include/asm/setup.h).

use std::fmt;
use std::ops::Range;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _};

use super::error::{Error, Result};
use crate::GuestMemory;
use crate::image::{FileRole, Image};

/// Where a Linux kernel is entered.
pub const LINUX_ENTRY: u64 = 0x1_0000;
const MAGIC_AT: u64 = 0x1_0008;
const MAGIC: &[u8; 6] = b"S390EP";
const INITRD_START_AT: u64 = 0x1_0408;
const INITRD_SIZE_AT: u64 = 0x1_0410;
const CMDLINE_ROOM_AT: u64 = 0x1_0430;
const CMDLINE_AT: u64 = 0x1_0480;
/// Room for the command line of a kernel that does not tell, with its terminating zero.
const CMDLINE_ROOM_BYTES: u64 = 896;
/// No kernel's room is larger, whatever it says.
const MAX_CMDLINE_ROOM_BYTES: u64 = 64 << 10;
/// The lowest address of an initrd, and its distance from the kernel.
const INITRD_MIN: u64 = 8 << 20;
const INITRD_GAP: u64 = 1 << 20;
const PAGE: u64 = 4096;

/// What kind of kernel a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A flat image.
    Flat,
    /// ELF.
    Elf,
}

/// A kernel in guest memory, ready to be entered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Boot {
    /// What the file was.
    pub format: Format,
    /// Absolute address of the first instruction.
    pub entry: u64,
    /// Address behind the kernel.
    pub end: u64,
    /// Where the initrd is.
    pub initrd: Option<Range<u64>>,
}

impl fmt::Display for Boot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = match self.format {
            Format::Flat => "a flat image",
            Format::Elf => "an ELF kernel",
        };
        write!(f, "{format} up to {:#x}, entry {:#x}", self.end, self.entry)?;
        match &self.initrd {
            Some(initrd) => write!(f, ", initrd at {initrd:#x?}"),
            None => Ok(()),
        }
    }
}

struct Segment {
    offset: u64,
    address: u64,
    file_bytes: u64,
    memory_bytes: u64,
}

struct Loadable {
    format: Format,
    entry: u64,
    end: u64,
    segments: Vec<Segment>,
}

/// Loads `kernel`, `initrd` and `cmdline` into `mem`, which is one piece from address 0 on.
///
/// # Errors
/// What is wrong with a file or the command line; each error names the option that it is about ([`Error::option`]).
pub fn load_images<K: Image + ?Sized, I: Image + ?Sized>(
    mem: &GuestMemory,
    kernel: &K,
    initrd: Option<&I>,
    cmdline: &[u8],
) -> Result<Boot> {
    let memory_bytes = mem.last_addr().0.saturating_add(1);
    let mut loadable = inspect(kernel)?;
    if loadable.end > memory_bytes {
        return Err(Error::KernelDoesNotFit {
            end: loadable.end,
            memory_bytes,
        });
    }
    if let Some(at) = cmdline.iter().position(|&byte| byte == 0) {
        return Err(Error::CommandLineNul(at));
    }
    let initrd_range = match initrd {
        Some(image) => Some(place_initrd(image, loadable.end, memory_bytes)?),
        None => None,
    };
    for segment in &loadable.segments {
        load_segment(mem, kernel, segment)?;
    }
    let is_linux = mem.read_obj::<[u8; 6]>(GuestAddress(MAGIC_AT)).ok() == Some(*MAGIC);
    if is_linux {
        // Whatever an ELF file says: that is where the kernel decides how it was started.
        loadable.entry = LINUX_ENTRY;
        write_parameters(mem, cmdline, initrd_range.as_ref())?;
    } else if !cmdline.is_empty() || initrd_range.is_some() {
        return Err(Error::NoParameters);
    }
    if let (Some(image), Some(range)) = (initrd, &initrd_range) {
        let len = (range.end - range.start) as usize;
        image
            .copy_to(0, mem, range.start, len)
            .map_err(read_error(FileRole::Initrd))?;
    }
    Ok(Boot {
        format: loadable.format,
        entry: loadable.entry,
        end: loadable.end,
        initrd: initrd_range,
    })
}

fn read_error(file: FileRole) -> impl Fn(std::io::Error) -> Error {
    move |source| Error::Read { file, source }
}

fn inspect<K: Image + ?Sized>(kernel: &K) -> Result<Loadable> {
    let mut magic = [0; 4];
    let read = kernel
        .read_at(&mut magic, 0)
        .map_err(read_error(FileRole::Kernel))?;
    if read == 4 && &magic == b"\x7fELF" {
        return inspect_elf(kernel);
    }
    let len = kernel.len_bytes().map_err(read_error(FileRole::Kernel))?;
    let mut magic = [0; 6];
    let read = kernel
        .read_at(&mut magic, MAGIC_AT)
        .map_err(read_error(FileRole::Kernel))?;
    if read < magic.len() || &magic != MAGIC {
        return Err(Error::NotAKernel(
            "it has neither S390EP at offset 0x10008 nor an ELF header; give a kernel for s390x",
        ));
    }
    Ok(Loadable {
        format: Format::Flat,
        entry: LINUX_ENTRY,
        end: len,
        segments: vec![Segment {
            offset: 0,
            address: 0,
            file_bytes: len,
            memory_bytes: len,
        }],
    })
}

fn inspect_elf<K: Image + ?Sized>(kernel: &K) -> Result<Loadable> {
    const HEADER_BYTES: usize = 64;
    const PROGRAM_HEADER_BYTES: u16 = 56;
    const MAX_PROGRAM_HEADERS: u16 = 128;
    const PT_LOAD: u32 = 1;
    let mut header = [0; HEADER_BYTES];
    kernel
        .read_exact_at(&mut header, 0)
        .map_err(|_| Error::NotAKernel("its ELF header is cut off"))?;
    // 64 bits, big-endian, EM_S390.
    if header[4] != 2 || header[5] != 2 || be16(&header, 18) != 22 {
        return Err(Error::NotAKernel(
            "its ELF header is not that of a 64-bit s390 file",
        ));
    }
    let (count, size) = (be16(&header, 56), be16(&header, 54));
    if size != PROGRAM_HEADER_BYTES || count > MAX_PROGRAM_HEADERS {
        return Err(Error::NotAKernel("its ELF program headers are damaged"));
    }
    let file_bytes = kernel.len_bytes().map_err(read_error(FileRole::Kernel))?;
    let mut segments = Vec::new();
    let mut end = 0;
    for index in 0..u64::from(count) {
        let damaged = Error::NotAKernel("its ELF program headers are cut off");
        let mut entry = [0; PROGRAM_HEADER_BYTES as usize];
        let Some(at) = be64(&header, 32).checked_add(index * u64::from(size)) else {
            return Err(damaged);
        };
        if kernel.read_exact_at(&mut entry, at).is_err() {
            return Err(damaged);
        }
        if be32(&entry, 0) != PT_LOAD {
            continue;
        }
        let segment = Segment {
            offset: be64(&entry, 8),
            address: be64(&entry, 24),
            file_bytes: be64(&entry, 32),
            memory_bytes: be64(&entry, 40),
        };
        let in_file = segment.offset.checked_add(segment.file_bytes);
        let in_memory = segment.address.checked_add(segment.memory_bytes);
        match (in_file, in_memory) {
            (Some(last), Some(behind))
                if last <= file_bytes && segment.file_bytes <= segment.memory_bytes =>
            {
                end = end.max(behind);
            }
            _ => return Err(Error::NotAKernel("an ELF segment lies outside the file")),
        }
        segments.push(segment);
    }
    if segments.is_empty() {
        return Err(Error::NotAKernel("it has no ELF segment to load"));
    }
    Ok(Loadable {
        format: Format::Elf,
        entry: be64(&header, 24),
        end,
        segments,
    })
}

fn place_initrd<I: Image + ?Sized>(image: &I, end: u64, memory_bytes: u64) -> Result<Range<u64>> {
    let size = image.len_bytes().map_err(read_error(FileRole::Initrd))?;
    if size == 0 {
        return Err(Error::EmptyInitrd);
    }
    // The kernel ends within memory: no overflow here.
    let start = INITRD_MIN.max((end + INITRD_GAP).next_multiple_of(PAGE));
    let end = start.saturating_add(size);
    match end <= memory_bytes {
        true => Ok(start..end),
        false => Err(Error::InitrdDoesNotFit {
            start,
            end,
            memory_bytes,
        }),
    }
}

fn load_segment<K: Image + ?Sized>(mem: &GuestMemory, kernel: &K, segment: &Segment) -> Result<()> {
    kernel
        .copy_to(
            segment.offset,
            mem,
            segment.address,
            segment.file_bytes as usize,
        )
        .map_err(read_error(FileRole::Kernel))?;
    const ZEROES: [u8; 4096] = [0; 4096];
    let mut address = segment.address + segment.file_bytes;
    let end = segment.address + segment.memory_bytes;
    while address < end {
        let len = (end - address).min(ZEROES.len() as u64);
        mem.write_slice(&ZEROES[..len as usize], GuestAddress(address))
            .map_err(write_error("zeroes behind a segment", address))?;
        address += len;
    }
    Ok(())
}

fn write_error(
    what: &'static str,
    address: u64,
) -> impl FnOnce(vm_memory::GuestMemoryError) -> Error {
    move |source| Error::WriteMemory {
        what,
        address,
        source,
    }
}

fn write_parameters(mem: &GuestMemory, cmdline: &[u8], initrd: Option<&Range<u64>>) -> Result<()> {
    let room: [u8; 8] = mem
        .read_obj(GuestAddress(CMDLINE_ROOM_AT))
        .map_err(|_| Error::NoParameters)?;
    let room = match u64::from_be_bytes(room) {
        0 => CMDLINE_ROOM_BYTES,
        room => room.min(MAX_CMDLINE_ROOM_BYTES),
    };
    let limit_bytes = room as usize - 1;
    if cmdline.len() > limit_bytes {
        return Err(Error::CommandLineTooLong {
            length_bytes: cmdline.len(),
            limit_bytes,
        });
    }
    let mut text = cmdline.to_vec();
    text.push(0);
    mem.write_slice(&text, GuestAddress(CMDLINE_AT))
        .map_err(write_error("the command line", CMDLINE_AT))?;
    if let Some(initrd) = initrd {
        for (at, value) in [
            (INITRD_START_AT, initrd.start),
            (INITRD_SIZE_AT, initrd.end - initrd.start),
        ] {
            mem.write_obj(value.to_be_bytes(), GuestAddress(at))
                .map_err(write_error("the initrd's place", at))?;
        }
    }
    Ok(())
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

#[cfg(test)]
mod tests;
