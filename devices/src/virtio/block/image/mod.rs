//! The file or block device behind a disk: what it is, how large, how it wants its I/O.

mod alignment;
mod format;
mod lock;

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

pub use alignment::Alignment;
#[cfg(test)]
pub(super) use alignment::DEMANDED;
pub use format::Format;
pub use lock::Holder;

use super::config::{DiskConfig, SECTOR_BYTES};

/// Why an image cannot be a disk. Each message names the option, its value and what to do.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// Nothing there.
    #[error("path={path}: no such file; make an empty disk with: truncate -s 1G {path}")]
    Missing {
        /// The option's value.
        path: String,
    },
    /// A directory, a pipe, a terminal.
    #[error("path={path}: is a {kind}; give a raw image file or a block device")]
    Kind {
        /// The option's value.
        path: String,
        /// What it is.
        kind: &'static str,
    },
    /// Not allowed to write.
    #[error(
        "path={path}: cannot be opened for writing ({error}); give readonly=on or make it writable"
    )]
    NotWritable {
        /// The option's value.
        path: String,
        /// What the kernel said.
        error: io::Error,
    },
    /// Any other refusal by the kernel.
    #[error("path={path}: cannot {what}: {error}")]
    Io {
        /// The option's value.
        path: String,
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        error: io::Error,
    },
    /// No bytes.
    #[error("path={path}: is empty; give it a size with: truncate -s 1G {path}")]
    Empty {
        /// The option's value.
        path: String,
    },
    /// Less than one block.
    #[error(
        "path={path}: {bytes} bytes are less than one block of {block}; enlarge it with: truncate -s 1G {path}"
    )]
    TooSmall {
        /// The option's value.
        path: String,
        /// Its size.
        bytes: u64,
        /// The logical block size.
        block: u32,
    },
    /// Another format than raw.
    #[error("path={path}: is a {} image, not a raw one; convert it with: {}", .format.name(), .format.conversion(.path))]
    Format {
        /// The option's value.
        path: String,
        /// What it is.
        format: Format,
    },
    /// In use.
    #[error(
        "path={path}: is in use by {holder}; stop that, or give readonly=on to all of its users, or locking=off"
    )]
    Locked {
        /// The option's value.
        path: String,
        /// By whom.
        holder: Holder,
    },
    /// `direct=on` where it does not work.
    #[error(
        "direct=on: the filesystem of {path} does not allow O_DIRECT; give direct=off or leave it out"
    )]
    NoDirect {
        /// The disk's path.
        path: String,
    },
    /// A logical block that the backend cannot do atomically is harmless; one that is smaller than
    /// what a resize leaves is not.
    #[error("size={bytes}: {reason}")]
    Resize {
        /// The size asked for.
        bytes: u64,
        /// Why not.
        reason: String,
    },
}

/// What discarding and zeroing the backend can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscardAbility {
    /// Discards free space on the backend.
    pub discard: bool,
    /// The unit in bytes in which the backend frees space; 512 at least.
    pub granularity_bytes: u32,
}

/// An opened image.
pub struct Image {
    file: File,
    path: PathBuf,
    is_block_device: bool,
    readonly: bool,
    direct: bool,
    alignment: Alignment,
    physical_block_size: u32,
    discard: DiscardAbility,
    logical_block_size: u32,
    size_bytes: u64,
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

impl Image {
    /// Opens and locks the image of `config`.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn open(config: &DiskConfig) -> Result<Image, ImageError> {
        let path = || shown(&config.path);
        let io_error = |what| {
            move |error| ImageError::Io {
                path: path(),
                what,
                error,
            }
        };
        let metadata = std::fs::metadata(&config.path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ImageError::Missing { path: path() },
            _ => io_error("find out what it is")(error),
        })?;
        let kind = metadata.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            let kind = match () {
                () if kind.is_dir() => "directory",
                () if kind.is_fifo() => "pipe",
                () if kind.is_socket() => "socket",
                () => "character device",
            };
            return Err(ImageError::Kind { path: path(), kind });
        }
        let is_block_device = kind.is_block_device();

        let file = open(config, 0).map_err(|error| match error.raw_os_error() {
            Some(libc::EACCES | libc::EROFS | libc::EPERM | libc::ETXTBSY) if !config.readonly => {
                ImageError::NotWritable {
                    path: path(),
                    error,
                }
            }
            _ => io_error("open it")(error),
        })?;
        let size_bytes = file_size(&file).map_err(io_error("find its size"))?;
        if size_bytes == 0 {
            return Err(ImageError::Empty { path: path() });
        }
        if size_bytes < u64::from(config.logical_block_size) {
            return Err(ImageError::TooSmall {
                path: path(),
                bytes: size_bytes,
                block: config.logical_block_size,
            });
        }
        if config.check_format
            && let Some(format) = format::recognise(&file, size_bytes)
        {
            return Err(ImageError::Format {
                path: path(),
                format,
            });
        }
        let (file, alignment) = open_direct(config, file)?;
        if config.locking {
            take_lock(config, &file)?;
        }
        let backend = if is_block_device {
            rustix::fs::ioctl_blkpbszget(&file).unwrap_or(512)
        } else {
            512
        };
        let direct = alignment.is_some();
        let alignment = alignment.unwrap_or(Alignment::NONE);
        let physical_block_size = config
            .physical_block_size
            .unwrap_or_else(|| backend.max(alignment.offset).next_power_of_two().min(32768))
            .max(config.logical_block_size);
        let discard = if is_block_device {
            device_discard(&metadata)
        } else {
            file_discard(&file, size_bytes, config.readonly)
        };
        let image = Image {
            file,
            path: config.path.clone(),
            is_block_device,
            readonly: config.readonly,
            direct,
            alignment,
            physical_block_size,
            discard,
            logical_block_size: config.logical_block_size,
            size_bytes,
        };
        let tail = size_bytes - image.exposed(size_bytes) * SECTOR_BYTES;
        if tail != 0 {
            tracing::warn!(
                "disk {}: the last {tail} bytes of {} are no whole block of {} and not exposed",
                config.id,
                path(),
                config.logical_block_size
            );
        }
        Ok(image)
    }

    /// Whole logical blocks in `bytes`, in sectors.
    fn exposed(&self, bytes: u64) -> u64 {
        let block = u64::from(self.logical_block_size);
        bytes / block * (block / SECTOR_BYTES)
    }

    /// The descriptor that I/O goes to.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it is a block device; else a file.
    pub fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// Whether it was opened for reading only.
    pub fn readonly(&self) -> bool {
        self.readonly
    }

    /// Whether it was opened with O_DIRECT.
    pub fn direct(&self) -> bool {
        self.direct
    }

    /// What its I/O must be aligned to.
    pub fn alignment(&self) -> Alignment {
        self.alignment
    }

    /// What the guest is told as physical block size, in bytes.
    pub fn physical_block_size(&self) -> u32 {
        self.physical_block_size
    }

    /// What discards do here.
    pub fn discard(&self) -> DiscardAbility {
        self.discard
    }

    /// Its size when it was opened, in whole logical blocks, counted in sectors.
    pub fn capacity_sectors(&self) -> u64 {
        self.exposed(self.size_bytes)
    }

    /// The size it has now, in sectors: it may have been changed from outside.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn current_capacity_sectors(&self) -> io::Result<u64> {
        Ok(self.exposed(file_size(&self.file)?))
    }

    /// Gives the file a size; a block device must have at least that. The new capacity in sectors.
    ///
    /// # Errors
    /// No whole block, more than the device has, or the kernel's refusal.
    pub fn resize(&self, bytes: u64) -> Result<u64, ImageError> {
        let block = u64::from(self.logical_block_size);
        let refuse = |reason: String| Err(ImageError::Resize { bytes, reason });
        if bytes == 0 || !bytes.is_multiple_of(block) {
            return refuse(format!(
                "must be a multiple of the block size of {block} and not 0"
            ));
        }
        if i64::try_from(bytes).is_err() {
            return refuse("is beyond what a file can have".into());
        }
        let io_error = |what| {
            move |error| ImageError::Io {
                path: shown(&self.path),
                what,
                error,
            }
        };
        let now = file_size(&self.file).map_err(io_error("find its size"))?;
        if self.is_block_device || self.readonly {
            if bytes > now {
                return refuse(format!("{} has only {now} bytes", shown(&self.path)));
            }
        } else if bytes != now {
            self.file
                .set_len(bytes)
                .map_err(io_error("change its size"))?;
        }
        Ok(self.exposed(bytes))
    }
}

fn open(config: &DiskConfig, flags: i32) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(!config.readonly)
        // Non-blocking, so that a pipe put in the file's place meanwhile cannot hold us up.
        .custom_flags(flags | libc::O_NONBLOCK)
        .open(&config.path)?;
    // It means nothing to most files and block devices, but to io_uring: where the filesystem or a
    // device-mapper target cannot do without waiting, a request fails with EAGAIN for ever instead of
    // being handed to a thread that waits.
    let status = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, status - OFlags::NONBLOCK)?;
    Ok(file)
}

/// The same file with O_DIRECT if that is wanted and works, and its alignment then.
fn open_direct(
    config: &DiskConfig,
    buffered: File,
) -> Result<(File, Option<Alignment>), ImageError> {
    if config.direct == Some(false) {
        return Ok((buffered, None));
    }
    let direct = open(config, libc::O_DIRECT)
        .ok()
        .and_then(|file| Some((alignment::probe(&file)?, file)));
    match direct {
        Some((alignment, file)) => Ok((file, Some(alignment))),
        None if config.direct == Some(true) => Err(ImageError::NoDirect {
            path: shown(&config.path),
        }),
        None => {
            tracing::warn!(
                "disk {}: the filesystem of {} does not allow O_DIRECT, so the host's page cache is used; direct=off says the same without this line",
                config.id,
                shown(&config.path)
            );
            Ok((buffered, None))
        }
    }
}

fn take_lock(config: &DiskConfig, file: &File) -> Result<(), ImageError> {
    let path = || shown(&config.path);
    match lock::lock_patiently(file, config.readonly) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(holder)) => Err(ImageError::Locked {
            path: path(),
            holder,
        }),
        Err(error) => {
            tracing::warn!(
                "disk {}: {} cannot be locked against other users: {error}",
                config.id,
                path()
            );
            Ok(())
        }
    }
}

/// The size in bytes of a file or block device.
fn file_size(file: &File) -> io::Result<u64> {
    let mut file = file;
    file.seek(SeekFrom::End(0))
}

/// Whether punching holes works on this file: tried behind its end, where there is nothing to lose.
fn file_discard(file: &File, size_bytes: u64, readonly: bool) -> DiscardAbility {
    let granularity_bytes = file
        .metadata()
        .map_or(4096, |m| m.blksize().clamp(512, 1 << 20) as u32)
        .next_power_of_two();
    let end = size_bytes.next_multiple_of(1 << 20);
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    let discard = !readonly && rustix::fs::fallocate(file, flags, end, 4096).is_ok();
    DiscardAbility {
        discard,
        granularity_bytes,
    }
}

/// What the kernel says about a block device's discards (`Documentation/ABI/stable/sysfs-block`).
fn device_discard(metadata: &std::fs::Metadata) -> DiscardAbility {
    let (major, minor) = (
        rustix::fs::major(metadata.rdev()),
        rustix::fs::minor(metadata.rdev()),
    );
    let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    // A partition's queue is its disk's.
    let limit = |name: &str| {
        [device.join("queue"), device.join("../queue")]
            .iter()
            .find_map(|queue| std::fs::read_to_string(queue.join(name)).ok())
            .and_then(|text| text.trim().parse::<u64>().ok())
            .unwrap_or(0)
    };
    let granularity = u32::try_from(limit("discard_granularity")).unwrap_or(0);
    DiscardAbility {
        discard: limit("discard_max_bytes") > 0,
        granularity_bytes: granularity.max(512),
    }
}

#[cfg(test)]
mod tests;
