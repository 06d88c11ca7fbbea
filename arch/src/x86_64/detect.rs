//! What a file given as a kernel is, by its magic.
//!
//! Two formats boot: the bzImage ("HdrS" at 0x202, Linux `Documentation/arch/x86/boot.rst`) and the
//! 64-bit x86 ELF. Everything else that is likely to be given by mistake is named, with what to do.

use std::borrow::Cow;
use std::fmt;

use crate::image::{FileRole, Image};
use crate::x86_64::error::{Error, Result};

/// A file format that can be booted, before its details are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// Compressed Linux kernel with a setup header.
    BzImage,
    /// 64-bit little-endian x86 ELF.
    Elf64,
}

/// A file that is something else.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the file is {what}: {remedy}")]
pub struct NotAKernel {
    /// What it is, with an article.
    pub what: Cow<'static, str>,
    /// What to do about it.
    pub remedy: &'static str,
}

const GIVE_KERNEL: &str = "give a bzImage (vmlinuz) or an ELF vmlinux for x86_64";
const OTHER_MACHINE: &str = "give a kernel built for x86_64";

/// Bytes from the start of the file that [`identify`] looks at: up to the ISO 9660 magic.
const HEAD_BYTES: usize = 0x8006;

/// Magic numbers at fixed offsets, in the order they are tried.
const MAGICS: &[(usize, &[u8], &str, &str)] = &[
    (
        56,
        b"ARM\x64",
        "an arm64 Linux kernel (Image)",
        OTHER_MACHINE,
    ),
    (
        56,
        b"RSC\x05",
        "a RISC-V Linux kernel (Image)",
        OTHER_MACHINE,
    ),
    (48, b"RISCV", "a RISC-V Linux kernel (Image)", OTHER_MACHINE),
    (
        0x24,
        &[0x18, 0x28, 0x6f, 0x01],
        "a 32-bit Arm Linux kernel (zImage)",
        OTHER_MACHINE,
    ),
    (
        4,
        b"zimg",
        "an EFI zboot image (a compressed arm64 or RISC-V kernel)",
        OTHER_MACHINE,
    ),
    (
        0,
        b"\x1f\x8b",
        "gzip-compressed",
        "decompress it first (gzip -dc)",
    ),
    (
        0,
        b"\xfd7zXZ\0",
        "xz-compressed",
        "decompress it first (xz -dc)",
    ),
    (
        0,
        b"\x28\xb5\x2f\xfd",
        "zstd-compressed",
        "decompress it first (zstd -dc)",
    ),
    (
        0,
        b"BZh",
        "bzip2-compressed",
        "decompress it first (bzip2 -dc)",
    ),
    (
        0,
        b"\x04\x22\x4d\x18",
        "lz4-compressed",
        "decompress it first (lz4 -dc)",
    ),
    (
        0,
        b"\x02\x21\x4c\x18",
        "lz4-compressed",
        "decompress it first (lz4 -dc)",
    ),
    (
        0,
        b"\x89LZO",
        "lzop-compressed",
        "decompress it first (lzop -dc)",
    ),
    (
        0,
        b"\x5d\0\0",
        "lzma-compressed",
        "decompress it first (xz -dc)",
    ),
    (
        0,
        b"QFI\xfb",
        "a qcow2 disk image",
        "give it as --disk, and a kernel here",
    ),
    (
        0,
        b"070701",
        "a cpio archive, as initrds are",
        "give it as --initrd",
    ),
    (
        0,
        b"070702",
        "a cpio archive, as initrds are",
        "give it as --initrd",
    ),
    (0, b"hsqs", "a squashfs filesystem", GIVE_KERNEL),
    (
        0,
        b"\x27\x05\x19\x56",
        "a U-Boot image (uImage)",
        GIVE_KERNEL,
    ),
    (
        0,
        b"\xd0\x0d\xfe\xed",
        "a device tree or a FIT image",
        GIVE_KERNEL,
    ),
    (
        0,
        b"!<arch>\n",
        "an archive (a Debian package or a library)",
        "unpack it first",
    ),
    (0, b"\xed\xab\xee\xdb", "an RPM package", "unpack it first"),
    (0, b"PK\x03\x04", "a zip archive", "unpack it first"),
    (257, b"ustar", "a tar archive", "unpack it first"),
    (
        0x438,
        b"\x53\xef",
        "an ext2, ext3 or ext4 filesystem",
        "give it as --disk",
    ),
    (0x8001, b"CD001", "an ISO 9660 image", "give it as --disk"),
    (0, b"#!", "a script", GIVE_KERNEL),
];

/// Tells which bootable format the file has.
///
/// # Errors
/// [`Error::NotAKernel`] names what it is instead; [`Error::Read`].
pub fn identify<I: Image + ?Sized>(image: &I) -> Result<Container> {
    let mut head = vec![0; HEAD_BYTES];
    let mut len = 0;
    while len < head.len() {
        match image.read_at(&mut head[len..], len as u64) {
            Ok(0) => break,
            Ok(n) => len += n,
            Err(source) => {
                return Err(Error::Read {
                    file: FileRole::Kernel,
                    source,
                });
            }
        }
    }
    Ok(identify_head(&head[..len])?)
}

/// [`identify`] for the first bytes of a file.
pub fn identify_head(head: &[u8]) -> std::result::Result<Container, NotAKernel> {
    let at = |offset: usize, magic: &[u8]| {
        head.get(offset..)
            .is_some_and(|rest| rest.starts_with(magic))
    };
    let not = |what: &'static str, remedy| {
        Err(NotAKernel {
            what: Cow::Borrowed(what),
            remedy,
        })
    };
    if head.is_empty() {
        return not("empty", GIVE_KERNEL);
    }
    if at(0, b"\x7fELF") {
        return identify_elf(head);
    }
    if at(0x202, b"HdrS") {
        return Ok(Container::BzImage);
    }
    if let Some((_, _, what, remedy)) = MAGICS.iter().find(|(offset, magic, ..)| at(*offset, magic))
    {
        return not(what, remedy);
    }
    if at(0, b"MZ") {
        return not(
            "an EFI or Windows program without a Linux setup header (perhaps a unified kernel image)",
            "extract the kernel from it (objcopy -O binary --only-section=.linux)",
        );
    }
    if head.iter().all(|&b| b == 0) {
        return not("all zeroes", GIVE_KERNEL);
    }
    let printable = |b: &u8| matches!(b, b' '..=b'~' | b'\t' | b'\r' | b'\n' | 0x80..);
    if head.iter().take(4096).all(printable) && std::str::from_utf8(first_lines(head)).is_ok() {
        return not("a text file", GIVE_KERNEL);
    }
    if at(510, b"\x55\xaa") {
        return not("a boot sector or a disk image", "give it as --disk");
    }
    Err(NotAKernel {
        what: format!("of no known format (it begins with {})", Hex(head)).into(),
        remedy: GIVE_KERNEL,
    })
}

/// Up to 4 KiB, cut at a line's end so that no UTF-8 sequence is broken.
fn first_lines(head: &[u8]) -> &[u8] {
    let head = &head[..head.len().min(4096)];
    match head.iter().rposition(|&b| b == b'\n') {
        Some(end) => &head[..end],
        None => head,
    }
}

fn identify_elf(head: &[u8]) -> std::result::Result<Container, NotAKernel> {
    let not = |what: String, remedy| {
        Err(NotAKernel {
            what: what.into(),
            remedy,
        })
    };
    let byte = |offset| head.get(offset).copied();
    let big_endian = byte(5) == Some(2);
    let half = |offset| {
        let bytes = [byte(offset)?, byte(offset + 1)?];
        Some(if big_endian {
            u16::from_be_bytes(bytes)
        } else {
            u16::from_le_bytes(bytes)
        })
    };
    let (Some(class), Some(kind), Some(machine)) = (byte(4), half(16), half(18)) else {
        return not("an ELF file cut short".into(), "copy the kernel again");
    };
    const EM_X86_64: u16 = 62;
    let bits = match class {
        1 => "32-bit",
        2 => "64-bit",
        _ => return not("an ELF file of an unknown class".into(), GIVE_KERNEL),
    };
    if machine != EM_X86_64 || class != 2 || big_endian {
        let name = machine_name(machine);
        return not(format!("a {bits} ELF for {name}"), OTHER_MACHINE);
    }
    match kind {
        // ET_EXEC, ET_DYN: whether it can be booted, its program headers tell.
        2 | 3 => Ok(Container::Elf64),
        1 => not(
            "an x86_64 ELF object file or kernel module".into(),
            GIVE_KERNEL,
        ),
        4 => not("an x86_64 ELF core dump".into(), GIVE_KERNEL),
        _ => not("an x86_64 ELF that is no executable".into(), GIVE_KERNEL),
    }
}

/// Names of `e_machine` that somebody may have a kernel for.
fn machine_name(machine: u16) -> Cow<'static, str> {
    Cow::Borrowed(match machine {
        2 | 43 => "SPARC",
        3 => "x86 (i386)",
        8 => "MIPS",
        20 | 21 => "PowerPC",
        22 => "s390",
        40 => "Arm",
        50 => "IA-64",
        62 => "x86_64",
        183 => "Arm (arm64)",
        243 => "RISC-V",
        258 => "LoongArch",
        other => return format!("machine {other}").into(),
    })
}

/// The first eight bytes, as hexadecimal.
struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().take(8).enumerate() {
            let gap = if i == 0 { "" } else { " " };
            write!(f, "{gap}{byte:02x}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
