//! bzImage, started at its 64-bit entry (Linux `Documentation/arch/x86/boot.rst`).

use linux_loader::bootparam::{LOADED_HIGH, XLF_KERNEL_64, setup_header};
use vm_memory::ByteValued;

use crate::image::{FileRole, Image};
use crate::x86_64::error::{Error, Result};
use crate::x86_64::kernel::{Format, Loadable, Protocol, Segment};
use crate::x86_64::layout::HIMEM_START;

/// Offset of the setup header in the file, and in the zero page.
const HEADER_OFFSET: u64 = 0x1f1;
const SECTOR: u64 = 512;
/// First protocol version with `xloadflags`, and so with the 64-bit entry (2.12).
const VERSION_64BIT: u16 = 0x020c;
/// The 64-bit entry is this far into the protected-mode code.
const ENTRY_64_OFFSET: u64 = 0x200;
/// What the header of 2.12 and later has up to `init_size` and `handover_offset`; later fields may
/// be absent and are then zero.
const HEADER_MIN_END: u64 = 0x268;

/// Reads the header and says what is to be loaded where.
pub(crate) fn inspect<I: Image + ?Sized>(image: &I) -> Result<Loadable> {
    let len = image.len_bytes().map_err(read_error)?;
    let mut header = setup_header::default();
    if len < HEADER_MIN_END {
        return Err(bad("the file is cut short: copy it again"));
    }
    let header_end = (HEADER_OFFSET + size_of::<setup_header>() as u64).min(len);
    image
        .read_exact_at(
            &mut header.as_mut_slice()[..(header_end - HEADER_OFFSET) as usize],
            HEADER_OFFSET,
        )
        .map_err(read_error)?;
    // The header says how long it is: the byte at 0x201 counts from 0x202. What follows is code.
    let [_, header_len] = header.jump.to_le_bytes();
    let own = (0x202 + u64::from(header_len)).saturating_sub(HEADER_OFFSET) as usize;
    if let Some(rest) = header.as_mut_slice().get_mut(own..) {
        rest.fill(0);
    }

    let (version, flags) = (header.version, header.loadflags);
    if flags & LOADED_HIGH == 0 {
        return Err(bad(
            "it is a zImage, loaded below 1 MiB: give a bzImage for x86_64",
        ));
    }
    if version < VERSION_64BIT || header.xloadflags & XLF_KERNEL_64 == 0 {
        return Err(bad(
            "it has no 64-bit entry (32-bit, or older than Linux 3.8): give an x86_64 kernel",
        ));
    }
    let setup_sectors = match header.setup_sects {
        0 => 4,
        n => u64::from(n),
    };
    let code_offset = (setup_sectors + 1) * SECTOR;
    let payload_end = u64::from(header.payload_offset) + u64::from(header.payload_length);
    let code_len = len.saturating_sub(code_offset);
    if code_len <= ENTRY_64_OFFSET || code_len < payload_end {
        return Err(bad("the file is cut short: copy it again"));
    }

    // A relocatable kernel started below its preferred address unpacks itself to that address all
    // the same, so that one address serves both kinds.
    let alignment = u64::from(header.kernel_alignment);
    let preferred = header.pref_address;
    let start = if header.relocatable_kernel != 0 && alignment > 1 {
        preferred.checked_next_multiple_of(alignment)
    } else {
        Some(preferred)
    }
    .filter(|start| *start >= HIMEM_START)
    .ok_or_else(|| bad("its preferred address is not above 1 MiB: build the kernel anew"))?;
    let size = code_len.max(header.init_size.into());
    let end = start
        .checked_add(size)
        .ok_or_else(|| bad("its preferred address is out of range: build the kernel anew"))?;

    Ok(Loadable {
        format: Format::BzImage,
        protocol: Protocol::LinuxBoot64,
        entry: start + ENTRY_64_OFFSET,
        range: start..end,
        segments: vec![Segment {
            offset: code_offset,
            address: start,
            file_bytes: code_len,
            memory_bytes: code_len,
        }],
        cmdline_max_bytes: header.cmdline_size as usize,
        initrd_limit: u64::from(header.initrd_addr_max) + 1,
        version: kernel_version(image, &header, code_offset),
        header: Some(header),
    })
}

/// The version string that the header points to, for messages.
fn kernel_version<I: Image + ?Sized>(
    image: &I,
    header: &setup_header,
    setup_end: u64,
) -> Option<String> {
    let offset = match header.kernel_version {
        0 => return None,
        offset => u64::from(offset) + 0x200,
    };
    if offset >= setup_end {
        return None;
    }
    let mut text = [0; 80];
    let n = image.read_at(&mut text, offset).ok()?;
    let version: String = text[..n]
        .iter()
        .take_while(|b| b.is_ascii_graphic())
        .map(|b| char::from(*b))
        .collect();
    (!version.is_empty()).then_some(version)
}

fn bad(reason: &str) -> Error {
    Error::BadKernel {
        format: Format::BzImage,
        reason: reason.into(),
    }
}

fn read_error(source: std::io::Error) -> Error {
    Error::Read {
        file: FileRole::Kernel,
        source,
    }
}
