//! Keeping two processes off one image: open file description locks (fcntl(2), F_OFD_SETLK), which
//! unlike POSIX locks survive another descriptor of ours being closed.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

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

/// Between two attempts.
const STEP: Duration = Duration::from_millis(10);
/// How long a process that is found to hold the image is waited for. It may be about to end, or a
/// child of the holder that was forked and has not executed its program yet.
pub(super) const HELD: Duration = Duration::from_millis(300);
/// How long the image is waited for while no living process holds it. The kernel frees an io_uring
/// after the end of its process, with the files it uses and their locks: a VM that was killed and
/// is started again at once meets its own lock.
const FREED: Duration = Duration::from_secs(2);

/// Like [`lock()`], but waits a moment for a holder to go.
pub(super) fn lock_patiently(file: &File, readonly: bool) -> io::Result<Result<(), Holder>> {
    let started = Instant::now();
    loop {
        let refused = match lock(file, readonly) {
            Ok(Err(holder)) => holder,
            result => return result,
        };
        let patience = match refused.process {
            Some(_) => HELD,
            None => FREED,
        };
        if started.elapsed() >= patience {
            return Ok(Err(refused));
        }
        std::thread::sleep(STEP);
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
