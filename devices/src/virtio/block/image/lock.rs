//! Keeping two processes off one image: open file description locks (fcntl(2), F_OFD_SETLK), which
//! unlike POSIX locks survive another descriptor of ours being closed.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

/// Who holds an image.
#[derive(Debug, PartialEq, Eq)]
pub struct Holder {
    /// Process id and name, where the kernel tells.
    pub process: Option<(u32, String)>,
}

impl std::fmt::Display for Holder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.process {
            Some((pid, name)) => write!(f, "process {pid} ({name})"),
            None => f.write_str("another process"),
        }
    }
}

/// Locks the whole file: shared if `readonly`, else exclusively. The lock ends with the last
/// descriptor of `file`'s open file description.
///
/// # Errors
/// `Ok(Err(holder))` if another process has a lock in the way; an I/O error where the filesystem
/// knows no locks.
pub(super) fn lock(file: &File, readonly: bool) -> io::Result<Result<(), Holder>> {
    // SAFETY: all fields of `flock` are integers, for which zero is a value.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = if readonly {
        libc::F_RDLCK as i16
    } else {
        libc::F_WRLCK as i16
    };
    range.l_whence = libc::SEEK_SET as i16;
    // SAFETY: the descriptor is open, and `range` is a `flock` as the command wants it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &range) };
    if result == 0 {
        return Ok(Ok(()));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(Err(Holder {
            process: find_holder(file),
        })),
        _ => Err(error),
    }
}

/// The process that has a lock on `file`'s inode. The kernel gives no process id for OFD locks,
/// but every descriptor's fdinfo lists the locks that were taken through it.
fn find_holder(file: &File) -> Option<(u32, String)> {
    let inode = file.metadata().ok()?.ino();
    let suffix = format!(":{inode} ");
    let ours = std::process::id();
    for process in std::fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse().ok()) else {
            continue;
        };
        let Ok(descriptors) = std::fs::read_dir(process.path().join("fdinfo")) else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            let info = std::fs::read_to_string(descriptor.path()).unwrap_or_default();
            let holds = info
                .lines()
                .any(|line| line.starts_with("lock:") && line.contains(&suffix));
            if holds {
                let name = std::fs::read_to_string(process.path().join("comm"));
                let name = name.unwrap_or_default().trim_end().to_owned();
                let name = if pid == ours {
                    "this one: the disk is given twice".into()
                } else {
                    name
                };
                return Some((pid, name));
            }
        }
    }
    None
}
