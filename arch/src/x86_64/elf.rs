//! ELF vmlinux and other ELF kernels: started through PVH where they have its note, else at the
//! Linux 64-bit entry.
//!
//! The headers are read here, rather than by `linux_loader`, because every address must be checked
//! before anything is written, all note segments must be searched, and memory that the file does
//! not fill must be cleared.

use linux_loader::elf::{Elf64_Ehdr, Elf64_Phdr, PT_LOAD, PT_NOTE};
use vm_memory::ByteValued;

use crate::image::{FileRole, Image};
use crate::x86_64::error::{Error, Result};
use crate::x86_64::kernel::{Format, LINUX_CMDLINE_MAX_BYTES, Loadable, Protocol, Segment};
use crate::x86_64::layout::HIMEM_START;
use crate::x86_64::zero_page;

/// Program headers of a user program, which no kernel has.
const PT_INTERP: u32 = 3;
const PT_TLS: u32 = 7;
const PT_GNU_RELRO: u32 = 0x6474_e552;

/// More program headers than any kernel has.
const MAX_PROGRAM_HEADERS: u16 = 256;
/// Longest note segment that is searched.
const MAX_NOTES_BYTES: u64 = 1 << 20;
/// `XEN_ELFNOTE_PHYS32_ENTRY` (Xen `xen/include/public/elfnote.h`).
const PVH_NOTE_TYPE: u32 = 18;

/// Reads the headers and says what is to be loaded where.
pub(crate) fn inspect<I: Image + ?Sized>(image: &I) -> Result<Loadable> {
    let len = image.len_bytes().map_err(read_error)?;
    let programs = program_headers(image)?;
    let mut segments = Vec::new();
    let mut pvh_entry = None;
    for program in &programs {
        match program.p_type {
            PT_LOAD if program.p_memsz > 0 => segments.push(segment(program, len)?),
            PT_NOTE if pvh_entry.is_none() => pvh_entry = find_pvh_note(image, program, len)?,
            _ => {}
        }
    }
    let user_program = |p: &&Elf64_Phdr| matches!(p.p_type, PT_INTERP | PT_TLS | PT_GNU_RELRO);
    if pvh_entry.is_none() && programs.iter().any(|p| user_program(&p)) {
        return Err(bad("it is a user program: give a vmlinux or a bzImage"));
    }
    segments.sort_by_key(|s| s.address);
    let (Some(first), Some(last)) = (segments.first(), segments.last()) else {
        return Err(bad("it has nothing to load: give a vmlinux or a bzImage"));
    };
    let range = first.address..last.end();
    if range.start < HIMEM_START {
        return Err(Error::BadKernel {
            format: Format::Vmlinux,
            reason: format!(
                "it loads at {:#x}, below 1 MiB, where the boot data lies: link it at 1 MiB or above",
                range.start
            ),
        });
    }
    if segments
        .windows(2)
        .any(|pair| pair[0].end() > pair[1].address)
    {
        return Err(bad("its segments overlap: build the kernel anew"));
    }
    let (protocol, format, entry) = match pvh_entry {
        Some(entry) => (Protocol::Pvh, Format::Pvh, entry.into()),
        None => (
            Protocol::LinuxBoot64,
            Format::Vmlinux,
            elf_header(image)?.e_entry,
        ),
    };
    if !segments
        .iter()
        .any(|s| (s.address..s.end()).contains(&entry))
    {
        return Err(Error::BadKernel {
            format,
            reason: format!("its entry {entry:#x} is in no loaded segment: build the kernel anew"),
        });
    }
    Ok(Loadable {
        format,
        protocol,
        entry,
        range,
        segments,
        cmdline_max_bytes: LINUX_CMDLINE_MAX_BYTES,
        initrd_limit: u64::MAX,
        version: None,
        header: match protocol {
            Protocol::LinuxBoot64 => Some(zero_page::header_for_vmlinux()),
            Protocol::Pvh => None,
        },
    })
}

fn elf_header<I: Image + ?Sized>(image: &I) -> Result<Elf64_Ehdr> {
    let mut header = Elf64_Ehdr::default();
    read(image, header.as_mut_slice(), 0)?;
    Ok(header)
}

fn program_headers<I: Image + ?Sized>(image: &I) -> Result<Vec<Elf64_Phdr>> {
    let header = elf_header(image)?;
    if header.e_phnum == 0 {
        return Err(bad(
            "it has no program headers: give a vmlinux or a bzImage",
        ));
    }
    if usize::from(header.e_phentsize) != size_of::<Elf64_Phdr>()
        || header.e_phnum > MAX_PROGRAM_HEADERS
    {
        return Err(bad("its program headers are damaged: copy it again"));
    }
    (0..u64::from(header.e_phnum))
        .map(|i| {
            let mut program = Elf64_Phdr::default();
            let offset = header
                .e_phoff
                .checked_add(i * size_of::<Elf64_Phdr>() as u64)
                .ok_or_else(|| bad("its program headers are damaged: copy it again"))?;
            read(image, program.as_mut_slice(), offset)?;
            Ok(program)
        })
        .collect()
}

fn segment(program: &Elf64_Phdr, file_len: u64) -> Result<Segment> {
    let file_end = program.p_offset.checked_add(program.p_filesz);
    if file_end.is_none_or(|end| end > file_len) {
        return Err(bad("the file is cut short: copy it again"));
    }
    if program.p_filesz > program.p_memsz || program.p_paddr.checked_add(program.p_memsz).is_none()
    {
        return Err(bad("its program headers are damaged: copy it again"));
    }
    Ok(Segment {
        offset: program.p_offset,
        address: program.p_paddr,
        file_bytes: program.p_filesz,
        memory_bytes: program.p_memsz,
    })
}

fn find_pvh_note<I: Image + ?Sized>(
    image: &I,
    program: &Elf64_Phdr,
    file_len: u64,
) -> Result<Option<u32>> {
    let room = file_len.saturating_sub(program.p_offset);
    let len = program.p_filesz.min(MAX_NOTES_BYTES).min(room);
    let mut notes = vec![0; len as usize];
    read(image, &mut notes, program.p_offset)?;
    // Notes are aligned to 4 bytes, unless the segment says 8.
    let align = if program.p_align == 8 { 8 } else { 4 };
    Ok(pvh_entry_of(&notes, align))
}

/// The PVH entry among ELF notes: each has three words (name size, descriptor size, type), the name
/// and the descriptor, both padded to `align`.
pub(crate) fn pvh_entry_of(mut notes: &[u8], align: usize) -> Option<u32> {
    let word = |bytes: &[u8], at: usize| {
        let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(u32::from_le_bytes(bytes))
    };
    loop {
        let name_size = word(notes, 0)? as usize;
        let desc_size = word(notes, 4)? as usize;
        let kind = word(notes, 8)?;
        let desc_at = name_size.checked_add(12)?.checked_next_multiple_of(align)?;
        if kind == PVH_NOTE_TYPE && notes.get(12..16) == Some(b"Xen\0") && name_size == 4 {
            let high_is_zero = desc_size != 8 || word(notes, desc_at + 4) == Some(0);
            return word(notes, desc_at).filter(|_| matches!(desc_size, 4 | 8) && high_is_zero);
        }
        let next = desc_at
            .checked_add(desc_size)?
            .checked_next_multiple_of(align)?;
        notes = notes.get(next..)?;
    }
}

fn read<I: Image + ?Sized>(image: &I, buf: &mut [u8], offset: u64) -> Result<()> {
    image
        .read_exact_at(buf, offset)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => bad("the file is cut short: copy it again"),
            _ => read_error(e),
        })
}

fn bad(reason: &str) -> Error {
    Error::BadKernel {
        format: Format::Vmlinux,
        reason: reason.into(),
    }
}

fn read_error(source: std::io::Error) -> Error {
    Error::Read {
        file: FileRole::Kernel,
        source,
    }
}
