//! The bytes of a kernel or an initrd: a file, or a slice in tests and fuzzing.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemory;

/// Which of the two boot files an error is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileRole {
    /// The kernel.
    Kernel,
    /// The initial RAM disk.
    Initrd,
}

impl FileRole {
    /// The command line option that names this file.
    pub fn option(self) -> &'static str {
        match self {
            FileRole::Kernel => "--kernel",
            FileRole::Initrd => "--initrd",
        }
    }
}

impl std::fmt::Display for FileRole {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            FileRole::Kernel => "kernel",
            FileRole::Initrd => "initrd",
        })
    }
}

/// A file that is missing, unreadable, or not a regular file. The text is the reason alone: whoever
/// prints it has named option and path.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct OpenError {
    /// Option that named the file.
    pub file: FileRole,
    /// Path as given.
    pub path: String,
    /// Why it cannot be used, with a remedy.
    pub reason: String,
}

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

impl<I: Image + ?Sized> Image for &I {
    fn len_bytes(&self) -> std::io::Result<u64> {
        (**self).len_bytes()
    }

    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        (**self).read_at(buf, offset)
    }

    fn copy_to(
        &self,
        offset: u64,
        mem: &GuestMemory,
        address: u64,
        len_bytes: usize,
    ) -> std::io::Result<()> {
        (**self).copy_to(offset, mem, address, len_bytes)
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
///
/// # Errors
/// [`OpenError`] says which of these it is.
pub fn open(role: FileRole, path: &Path) -> Result<File, OpenError> {
    let fail = |reason: String| OpenError {
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::os::unix::net::UnixListener;

    #[test]
    fn what_is_no_regular_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        let _socket = UnixListener::bind(path("socket")).unwrap();
        let fifo = std::process::Command::new("mkfifo")
            .arg(path("fifo"))
            .status();
        assert!(fifo.unwrap().success());
        for (path, reason) in [
            (path("absent"), "no such file: check the path"),
            (dir.path().to_owned(), "is a directory: give a kernel file"),
            (path("socket"), "is a socket: give a kernel file"),
            (path("fifo"), "is a FIFO: give a kernel file"),
            (
                "/dev/null".into(),
                "is a character device: give a kernel file",
            ),
        ] {
            let error = open(FileRole::Kernel, &path).unwrap_err();
            assert_eq!(error.to_string(), reason);
            assert_eq!(error.file.option(), "--kernel");
            assert_eq!(Path::new(&error.path), path);
        }
        std::fs::write(path("file"), b"bytes").unwrap();
        let file = open(FileRole::Initrd, &path("file")).unwrap();
        assert_eq!(file.len_bytes().unwrap(), 5);
    }

    #[test]
    fn slices_and_files_read_alike() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"0123456789").unwrap();
        let slice: &[u8] = b"0123456789";
        let images: [&dyn Image; 2] = [&file, &slice];
        let mem = GuestMemory::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
        for image in images {
            let mut buf = [0; 4];
            assert_eq!(image.read_at(&mut buf, 8).unwrap(), 2);
            assert_eq!(&buf[..2], b"89");
            assert_eq!(image.read_at(&mut buf, 11).unwrap(), 0);
            image.read_exact_at(&mut buf, 3).unwrap();
            assert_eq!(&buf, b"3456");
            let end = image.read_exact_at(&mut buf, 7).unwrap_err();
            assert_eq!(end.kind(), std::io::ErrorKind::UnexpectedEof);
            image.copy_to(2, &mem, 100, 3).unwrap();
            mem.read_slice(&mut buf, GuestAddress(100)).unwrap();
            assert_eq!(&buf, b"234\0");
            assert!(image.copy_to(8, &mem, 100, 3).is_err());
            assert!(image.copy_to(0, &mem, 4094, 3).is_err());
            assert!(image.copy_to(u64::MAX, &mem, 0, 1).is_err());
            mem.write_slice(&[0; 200], GuestAddress(0)).unwrap();
        }
    }
}
