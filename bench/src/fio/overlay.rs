//! Files for the guest: an archive that is appended to the initial RAM disk.
//!
//! The kernel unpacks archives that follow one another (Documentation/driver-api/early-userspace/
//! buffer-format.rst), so the guest finds these files beside those of the given one.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

/// The files as a cpio archive of the form `newc`, with the directories on their paths.
pub fn archive(files: &[(String, Vec<u8>)]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut directories: Vec<&str> = Vec::new();
    for (name, _) in files {
        for (at, _) in name.match_indices('/') {
            if !directories.contains(&&name[..at]) {
                directories.push(&name[..at]);
            }
        }
    }
    for (inode, directory) in (1u32..).zip(&directories) {
        member(&mut out, inode, 0o040_755, directory, &[]);
    }
    let first = u32::try_from(directories.len())
        .unwrap_or(u32::MAX)
        .saturating_add(1);
    for (inode, (name, content)) in (first..).zip(files) {
        member(&mut out, inode, 0o100_644, name, content);
    }
    member(&mut out, 0, 0, "TRAILER!!!", &[]);
    out
}

/// Appends one member: 6 bytes of magic, 13 fields of 8 hexadecimal digits, the name, the
/// content, both padded to 4 bytes.
fn member(out: &mut Vec<u8>, inode: u32, mode: u32, name: &str, content: &[u8]) {
    let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let links = if mode & 0o040_000 != 0 { 2 } else { 1 };
    // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor,
    // namesize with its NUL, check.
    let fields = [
        inode,
        mode,
        0,
        0,
        links,
        0,
        size(content.len()),
        0,
        0,
        0,
        0,
        size(name.len() + 1),
        0,
    ];
    let mut header = String::from("070701");
    for field in fields {
        let _ = write!(header, "{field:08x}");
    }
    out.extend_from_slice(header.as_bytes());
    out.extend_from_slice(name.as_bytes());
    out.push(0);
    pad(out);
    out.extend_from_slice(content);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

/// Writes `initrd` with `files` appended to `path`.
pub fn append(initrd: &Path, files: &[(String, Vec<u8>)], path: &Path) -> io::Result<()> {
    let mut bytes = std::fs::read(initrd)?;
    pad(&mut bytes);
    bytes.extend_from_slice(&archive(files));
    std::fs::write(path, bytes)
}
