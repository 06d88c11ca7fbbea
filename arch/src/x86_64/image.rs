//! The bytes of a kernel or an initrd: a file, or a slice in tests and fuzzing.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemory;
use crate::x86_64::error::{Error, FileRole, Result};

/// Something of known length that can be read at any offset and copied into guest memory.
pub trait Image {
    /// Length in bytes.
    fn len_bytes(&self) -> std::io::Result<u64>;

    /// Reads as much of `buf` as there is from `offset` on; returns how much that was.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize>;

    /// Copies `len_bytes` from `offset` into guest memory at `address`. The range must lie in one
    /// stretch of guest memory: the caller has checked it.
    fn copy_to(
        &self,
        offset: u64,
        mem: &GuestMemory,
        address: u64,
        len_bytes: usize,
    ) -> std::io::Result<()>;

    /// Reads exactly `buf` from `offset` on.
    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            match self.read_at(&mut buf[done..], offset + done as u64)? {
                0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                n => done += n,
            }
        }
        Ok(())
    }
}

impl Image for File {
    fn len_bytes(&self) -> std::io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        FileExt::read_at(self, buf, offset)
    }

    fn copy_to(
        &self,
        offset: u64,
        mem: &GuestMemory,
        address: u64,
        len_bytes: usize,
    ) -> std::io::Result<()> {
        let mut file = self;
        file.seek(SeekFrom::Start(offset))?;
        mem.read_exact_volatile_from(GuestAddress(address), &mut file, len_bytes)
            .map_err(into_io)
    }
}

impl Image for [u8] {
    fn len_bytes(&self) -> std::io::Result<u64> {
        Ok(self.len() as u64)
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let rest = usize::try_from(offset)
            .ok()
            .and_then(|offset| self.get(offset..))
            .unwrap_or_default();
        let n = rest.len().min(buf.len());
        buf[..n].copy_from_slice(&rest[..n]);
        Ok(n)
    }

    fn copy_to(
        &self,
        offset: u64,
        mem: &GuestMemory,
        address: u64,
        len_bytes: usize,
    ) -> std::io::Result<()> {
        let bytes = usize::try_from(offset)
            .ok()
            .and_then(|offset| self.get(offset..)?.get(..len_bytes))
            .ok_or(std::io::ErrorKind::UnexpectedEof)?;
        mem.write_slice(bytes, GuestAddress(address))
            .map_err(into_io)
    }
}

fn into_io(error: vm_memory::GuestMemoryError) -> std::io::Error {
    match error {
        vm_memory::GuestMemoryError::IOError(error) => error,
        other => std::io::Error::other(other),
    }
}

/// Opens a boot file for reading. Refuses, with the path and a remedy, what is missing, unreadable
/// or not a regular file.
pub fn open(role: FileRole, path: &Path) -> Result<File> {
    let fail = |reason: String| Error::Open {
        file: role,
        path: path.display().to_string(),
        reason,
    };
    // Looked at before it is opened, because opening a FIFO would wait for its writer.
    let kind = std::fs::metadata(path)
        .map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => fail("no such file: check the path".into()),
            _ => fail(e.to_string()),
        })?
        .file_type();
    let special = [
        (kind.is_dir(), "directory"),
        (kind.is_fifo(), "FIFO"),
        (kind.is_socket(), "socket"),
        (kind.is_char_device(), "character device"),
        (kind.is_block_device(), "block device"),
    ];
    if let Some((_, name)) = special.iter().find(|(is, _)| *is) {
        return Err(fail(format!("is a {name}: give a {role} file")));
    }
    File::open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::PermissionDenied => {
            fail("permission denied: make it readable for this user".into())
        }
        _ => fail(e.to_string()),
    })
}
