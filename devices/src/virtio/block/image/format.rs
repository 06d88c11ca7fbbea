//! Telling an image that is not raw by its magic, and how to make it raw.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// A format that we do not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A disk image format: its name, and what `qemu-img` calls it.
    Image(&'static str, &'static str),
    /// A compressed file: its name, and the command that unpacks it to standard output.
    Compressed(&'static str, &'static str),
}

const HEAD_BYTES: usize = 512;

/// Magic bytes at the start of a file. Contents that a guest may well want raw (LUKS, ISO 9660, a
/// partition table) are not among them.
const HEAD: &[(usize, &[u8], Format)] = &[
    (0, b"QFI\xfb", Format::Image("qcow2", "qcow2")),
    (0, b"QED\0", Format::Image("QED", "qed")),
    (0, b"KDMV", Format::Image("VMDK", "vmdk")),
    (0, b"COWD", Format::Image("VMDK", "vmdk")),
    (0, b"# Disk DescriptorFile", Format::Image("VMDK", "vmdk")),
    (0, b"vhdxfile", Format::Image("VHDX", "vhdx")),
    (0, b"conectix", Format::Image("VHD", "vpc")),
    (0x40, b"\x7f\x10\xda\xbe", Format::Image("VDI", "vdi")),
    (
        0,
        b"WithoutFreeSpace",
        Format::Image("Parallels", "parallels"),
    ),
    (
        0,
        b"WithouFreSpacExt",
        Format::Image("Parallels", "parallels"),
    ),
    (0, b"\x1f\x8b\x08", Format::Compressed("gzip", "gzip -dc")),
    (0, b"\xfd7zXZ\0", Format::Compressed("xz", "xz -dc")),
    (
        0,
        b"\x28\xb5\x2f\xfd",
        Format::Compressed("zstd", "zstd -dc"),
    ),
    (0, b"\x04\x22\x4d\x18", Format::Compressed("lz4", "lz4 -dc")),
    (0, b"PK\x03\x04", Format::Compressed("zip", "unzip -p")),
];
/// Magic bytes in the last sector: images that are raw data with a trailer.
const TAIL: &[(&[u8], Format)] = &[
    (b"conectix", Format::Image("VHD", "vpc")),
    (b"koly", Format::Image("DMG", "dmg")),
];

fn is_bzip2(head: &[u8]) -> bool {
    // "BZh", level, and the first block's magic: three bytes alone are too common.
    head.len() >= 10 && &head[..3] == b"BZh" && &head[4..10] == b"1AY&SY"
}

/// What `file` of `size` bytes is, if it is not raw. Errors count as raw: reading it will tell.
pub(super) fn recognise(file: &File, size: u64) -> Option<Format> {
    let mut head = [0; HEAD_BYTES];
    let count = file.read_at(&mut head, 0).unwrap_or(0);
    let head = &head[..count];
    let found = HEAD
        .iter()
        .find(|(at, magic, _)| head.get(*at..*at + magic.len()) == Some(magic));
    if let Some((_, _, format)) = found {
        return Some(*format);
    }
    if is_bzip2(head) {
        return Some(Format::Compressed("bzip2", "bzip2 -dc"));
    }
    let mut tail = [0; 8];
    file.read_exact_at(&mut tail, size.checked_sub(512)?).ok()?;
    TAIL.iter()
        .find(|(magic, _)| tail.starts_with(magic))
        .map(|(_, format)| *format)
}

impl Format {
    /// The format's name.
    pub fn name(self) -> &'static str {
        match self {
            Format::Image(name, _) | Format::Compressed(name, _) => name,
        }
    }

    /// The command that makes a raw image of `path`.
    pub fn conversion(self, path: &str) -> String {
        match self {
            Format::Image(_, format) => {
                format!("qemu-img convert -f {format} -O raw {path} {path}.raw")
            }
            Format::Compressed(_, command) => format!("{command} {path} > {path}.raw"),
        }
    }
}
