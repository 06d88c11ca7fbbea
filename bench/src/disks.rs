//! The files that bear the load: made for the measurement, or the user's own.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// Why there are no disks.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Fewer files than disks.
    #[error(
        "--file: {given} given, but a run has {wanted} disks; give --file {wanted} times or none"
    )]
    TooFew {
        /// Files given.
        given: usize,
        /// Most disks of a run.
        wanted: usize,
    },
    /// A run writes to a file of the user's.
    #[error(
        "--file {0}: a run writes to it and would destroy what it holds; leave out writing loads \
         or allow it with --destroy-data"
    )]
    WouldDestroy(PathBuf),
    /// A file of the user's cannot be used.
    #[error("--file {path}: {why}; give a raw image or a block device of at least 1M")]
    Unusable {
        /// The file.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// No place for files.
    #[error(
        "--directory {path}: {why}; choose a directory on a disk with {needed} free, or a \
         smaller --size"
    )]
    NoRoom {
        /// The directory.
        path: PathBuf,
        /// Why.
        why: String,
        /// As text.
        needed: String,
    },
    /// Reading or writing failed.
    #[error("{path}: {error}; choose another --directory")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
}

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The user's files; if empty, files are made.
    pub files: Vec<PathBuf>,
    /// Whether they may be written.
    pub destroy_data: bool,
    /// Where files are made.
    pub directory: PathBuf,
    /// Size of a file that is made.
    pub size_bytes: u64,
    /// Most disks of a run.
    pub count: usize,
    /// Whether a run writes.
    pub writes: bool,
    /// Whether a run goes through the page cache.
    pub cached: bool,
}

/// The disks. Files that were made are removed when this is dropped.
#[derive(Debug)]
pub struct LoadDisks {
    /// In the order of use.
    pub paths: Vec<PathBuf>,
    /// What a reader of the figures has to know.
    pub remarks: Vec<String>,
    _made: Option<TempDir>,
}

impl LoadDisks {
    /// Makes or checks the disks, and warms the page cache.
    pub fn prepare(wanted: &Wanted) -> Result<LoadDisks, Error> {
        let mut remarks = Vec::new();
        if wanted.files.is_empty() {
            let made = make(wanted, &mut remarks)?;
            let paths = (0..wanted.count)
                .map(|i| made.path().join(name(i)))
                .collect();
            return Ok(LoadDisks {
                paths,
                remarks,
                _made: Some(made),
            });
        }
        if wanted.files.len() < wanted.count {
            return Err(Error::TooFew {
                given: wanted.files.len(),
                wanted: wanted.count,
            });
        }
        for path in &wanted.files {
            check(path)?;
            if wanted.writes && !wanted.destroy_data {
                return Err(Error::WouldDestroy(path.clone()));
            }
            if on_tmpfs(path) {
                remarks.push(tmpfs_remark(path));
            }
            let is_device = path
                .metadata()
                .is_ok_and(|m| m.file_type().is_block_device());
            if wanted.cached && is_device {
                remarks.push(format!(
                    "{} goes through the host's page cache; direct=on measures the device",
                    path.display()
                ));
            }
            if wanted.cached && !is_device {
                warm(path)?;
            }
        }
        Ok(LoadDisks {
            paths: wanted.files.clone(),
            remarks,
            _made: None,
        })
    }
}

fn name(index: usize) -> String {
    format!("disk{index}.raw")
}

fn make(wanted: &Wanted, remarks: &mut Vec<String>) -> Result<TempDir, Error> {
    let needed_bytes = wanted.size_bytes.saturating_mul(wanted.count as u64);
    let no_room = |why: String| Error::NoRoom {
        path: wanted.directory.clone(),
        why,
        needed: crate::matrix::size_text(needed_bytes),
    };
    let free_bytes = free_space(&wanted.directory).map_err(|e| no_room(e.to_string()))?;
    if free_bytes < needed_bytes {
        return Err(no_room(format!("only {} MiB are free", free_bytes >> 20)));
    }
    if on_tmpfs(&wanted.directory) {
        remarks.push(tmpfs_remark(&wanted.directory));
    }
    let directory = tempfile::Builder::new()
        .prefix("pollux-bench-")
        .tempdir_in(&wanted.directory)
        .map_err(|e| no_room(e.to_string()))?;
    // Not zeroes, which a device below may store as holes.
    let mut block = vec![0u8; 1 << 20];
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for index in 0..wanted.count {
        let path = directory.path().join(name(index));
        let failed = |error| Error::Io {
            path: path.clone(),
            error,
        };
        let mut file = File::create(&path).map_err(failed)?;
        let mut left = wanted.size_bytes;
        while left > 0 {
            for word in block.chunks_exact_mut(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                word.copy_from_slice(&state.to_ne_bytes());
            }
            let length = left.min(block.len() as u64);
            file.write_all(&block[..usize::try_from(length).unwrap_or(block.len())])
                .map_err(failed)?;
            left -= length;
        }
        // Written back now, or it would be while the first runs are measured.
        file.sync_all().map_err(failed)?;
    }
    Ok(directory)
}

fn check(path: &Path) -> Result<(), Error> {
    let unusable = |why: String| Error::Unusable {
        path: path.into(),
        why,
    };
    let metadata = path.metadata().map_err(|e| unusable(e.to_string()))?;
    let kind = metadata.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(unusable("neither a file nor a block device".into()));
    }
    if kind.is_file() && metadata.len() < 1 << 20 {
        return Err(unusable(format!("only {} bytes long", metadata.len())));
    }
    Ok(())
}

/// Reads a file once, so that all runs find it in the page cache.
fn warm(path: &Path) -> Result<(), Error> {
    let failed = |error| Error::Io {
        path: path.into(),
        error,
    };
    let mut file = File::open(path).map_err(failed)?;
    let mut block = vec![0u8; 1 << 20];
    while file.read(&mut block).map_err(failed)? > 0 {}
    Ok(())
}

fn statfs(path: &Path) -> io::Result<libc::statfs> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: statfs is plain data, for which zeroes are valid.
    let mut buffer: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `path` is NUL-terminated and `buffer` is writable for the call.
    match unsafe { libc::statfs(path.as_ptr(), &raw mut buffer) } {
        0 => Ok(buffer),
        _ => Err(io::Error::last_os_error()),
    }
}

fn free_space(directory: &Path) -> io::Result<u64> {
    let fs = statfs(directory)?;
    Ok(fs
        .f_bavail
        .saturating_mul(u64::try_from(fs.f_bsize).unwrap_or(0)))
}

/// Whether a path is on tmpfs, whose reads the kernel hands to worker threads.
pub fn on_tmpfs(path: &Path) -> bool {
    statfs(path).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC)
}

fn tmpfs_remark(path: &Path) -> String {
    format!(
        "{} is on tmpfs: its I/O is done by kernel worker threads, and those are measured; \
         prefer a disk's file system",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(directory: &Path) -> Wanted {
        Wanted {
            files: Vec::new(),
            destroy_data: false,
            directory: directory.into(),
            size_bytes: 3 << 20,
            count: 2,
            writes: true,
            cached: true,
        }
    }

    #[test]
    fn files_are_made_without_holes_and_removed() {
        let place = tempfile::tempdir().expect("a directory");
        let disks = LoadDisks::prepare(&wanted(place.path())).expect("disks");
        let bytes: Vec<Vec<u8>> = disks
            .paths
            .iter()
            .map(|p| std::fs::read(p).expect("readable"))
            .collect();
        assert_eq!((bytes.len(), bytes[0].len()), (2, 3 << 20));
        assert_ne!(bytes[0], bytes[1]);
        assert!(
            bytes[1]
                .chunks(4096)
                .all(|page| page.iter().any(|b| *b != 0))
        );
        drop(disks);
        assert_eq!(std::fs::read_dir(place.path()).expect("list").count(), 0);
    }

    #[test]
    fn the_users_data_is_not_written_unasked() {
        let place = tempfile::tempdir().expect("a directory");
        let file = place.path().join("mine.raw");
        std::fs::write(&file, vec![1; 2 << 20]).expect("written");
        let mut w = Wanted {
            files: vec![file.clone()],
            count: 1,
            ..wanted(place.path())
        };
        let error = LoadDisks::prepare(&w).expect_err("refused").to_string();
        assert!(
            error.contains("mine.raw") && error.contains("--destroy-data"),
            "{error}"
        );
        w.writes = false;
        assert_eq!(
            LoadDisks::prepare(&w).expect("read only").paths,
            std::slice::from_ref(&file)
        );
        w.writes = true;
        w.destroy_data = true;
        drop(LoadDisks::prepare(&w).expect("allowed"));
        assert!(file.exists(), "the user's file is not removed");
        w.count = 2;
        let error = LoadDisks::prepare(&w).expect_err("too few").to_string();
        assert!(error.contains("--file 2 times"), "{error}");
    }

    #[test]
    fn unusable_places_are_named_with_the_remedy() {
        let place = tempfile::tempdir().expect("a directory");
        let prepare = |w: Wanted| LoadDisks::prepare(&w).expect_err("unusable").to_string();
        let base = wanted(place.path());
        let huge = prepare(Wanted {
            size_bytes: 1 << 60,
            ..base.clone()
        });
        assert!(
            huge.contains("--size") && huge.contains("MiB are free"),
            "{huge}"
        );
        let none = prepare(Wanted {
            directory: "/nowhere".into(),
            ..base.clone()
        });
        assert!(none.contains("--directory /nowhere"), "{none}");
        let directory = prepare(Wanted {
            files: vec!["/proc".into()],
            count: 1,
            ..base.clone()
        });
        assert!(
            directory.contains("neither a file nor a block device"),
            "{directory}"
        );
        let small = place.path().join("small");
        std::fs::write(&small, "x").expect("written");
        let small = prepare(Wanted {
            files: vec![small],
            count: 1,
            ..base
        });
        assert!(small.contains("only 1 bytes long"), "{small}");
    }

    #[test]
    fn tmpfs_is_recognised() {
        assert!(!on_tmpfs(Path::new("/proc")));
        if let Ok(fs) = statfs(Path::new("/dev/shm")) {
            assert_eq!(
                on_tmpfs(Path::new("/dev/shm")),
                fs.f_type == libc::TMPFS_MAGIC
            );
        }
    }
}
