//! What the user says about a disk, and what is wrong with it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::virtio::queue::MAX_SIZE;

/// Bytes of a sector, the unit of the virtio block protocol whatever the block sizes are.
pub const SECTOR_BYTES: u64 = 512;
/// Most bytes of a disk's serial: the length of GET_ID's answer (VIRTIO 1.2, section 5.2.6).
pub const SERIAL_BYTES: usize = 20;

macro_rules! named_enum {
    ($(#[$doc:meta])* $name:ident, $option:literal: $($(#[$vdoc:meta])* $variant:ident = $text:literal),+ $(,)?) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$vdoc])* #[serde(rename = $text)] $variant,)+
        }

        impl $name {
            /// All values, as the user writes them.
            pub const NAMES: &'static [&'static str] = &[$($text),+];

            /// The value as the user writes it.
            pub fn name(self) -> &'static str {
                match self { $($name::$variant => $text,)+ }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $name {
            type Err = ConfigError;
            fn from_str(text: &str) -> Result<$name, ConfigError> {
                match text {
                    $($text => Ok($name::$variant),)+
                    _ => Err(ConfigError::Choice {
                        option: $option,
                        value: text.into(),
                        choices: Self::NAMES.join("|"),
                    }),
                }
            }
        }
    };
}

named_enum! {
    /// How requests reach the host's kernel.
    EngineKind, "engine":
    /// The iothread's own ring.
    IoUring = "io_uring",
    /// Linux AIO.
    Native = "native",
    /// A pool of threads.
    Threads = "threads",
}

named_enum! {
    /// When a completed write is on the medium.
    CacheMode, "cache":
    /// After the guest's flush; the guest may switch to writethrough.
    Writeback = "writeback",
    /// At its completion; the guest may switch to writeback.
    Writethrough = "writethrough",
    /// Whenever the host likes: flushes are ignored. For throw-away disks.
    Unsafe = "unsafe",
}

named_enum! {
    /// What happens when the host fails a request.
    ErrorPolicy, "rerror/werror":
    /// The guest gets an I/O error.
    Report = "report",
    /// The guest gets success.
    Ignore = "ignore",
    /// The request is kept, the VM pauses; continuing resubmits it.
    Stop = "stop",
    /// As `stop` when the host has no space left, else as `report`. For writes.
    Enospc = "enospc",
}

/// Whether guest memory is registered with the ring (fio's `fixedbufs`). The pages are populated
/// and pinned as long as the driver runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FixedBufs {
    /// No.
    Off,
    /// If the disk uses O_DIRECT and nothing forbids it: for memory that is populated anyway.
    Direct,
    /// Yes; a host that refuses is told of.
    On,
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskConfig {
    /// Image file or block device.
    pub path: PathBuf,
    /// Name of the disk in messages and on the control socket.
    pub id: String,
    /// The guest may not write.
    pub readonly: bool,
    /// O_DIRECT; None takes it where the file allows it.
    pub direct: Option<bool>,
    /// The engine; None takes the best one that works.
    pub engine: Option<EngineKind>,
    /// Registered buffers.
    pub fixedbufs: FixedBufs,
    /// When writes are on the medium.
    pub cache: CacheMode,
    /// What the guest sees as serial number, at most [`SERIAL_BYTES`] bytes.
    pub serial: String,
    /// Number of queues.
    pub queues: u16,
    /// Descriptors in each queue: a power of two.
    pub queue_size: u16,
    /// Smallest request in bytes that the guest may make.
    pub logical_block_size: u32,
    /// Request size in bytes that needs no read-modify-write; None takes the backend's.
    pub physical_block_size: Option<u32>,
    /// Pass the guest's discards on.
    pub discard: bool,
    /// On failed reads.
    pub rerror: ErrorPolicy,
    /// On failed writes, flushes, discards.
    pub werror: ErrorPolicy,
    /// Refuse an image that another process uses.
    pub locking: bool,
    /// Refuse an image whose first bytes are those of another format than raw.
    pub check_format: bool,
}

impl DiskConfig {
    /// The disk at `path` with every option at its default, called `id`.
    pub fn new(id: impl Into<String>, path: impl Into<PathBuf>) -> DiskConfig {
        DiskConfig {
            path: path.into(),
            id: id.into(),
            readonly: false,
            direct: None,
            engine: None,
            fixedbufs: FixedBufs::Off,
            cache: CacheMode::Writeback,
            serial: String::new(),
            queues: 1,
            queue_size: 256,
            logical_block_size: 512,
            physical_block_size: None,
            discard: true,
            rerror: ErrorPolicy::Report,
            werror: ErrorPolicy::Enospc,
            locking: true,
            check_format: true,
        }
    }

    /// Checks what can be checked without the file.
    ///
    /// # Errors
    /// The first option whose value cannot be.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.queues == 0 || self.queues > MAX_QUEUES {
            return Err(ConfigError::Queues(self.queues));
        }
        if !self.queue_size.is_power_of_two() || !(4..=MAX_SIZE).contains(&self.queue_size) {
            return Err(ConfigError::QueueSize(self.queue_size));
        }
        if self.serial.len() > SERIAL_BYTES {
            return Err(ConfigError::Serial {
                serial: self.serial.clone(),
                bytes: self.serial.len(),
            });
        }
        let logical = self.logical_block_size;
        if !logical.is_power_of_two() || !(512..=4096).contains(&logical) {
            return Err(ConfigError::LogicalBlock(logical));
        }
        if let Some(physical) = self.physical_block_size
            && (!physical.is_power_of_two() || physical < logical || physical > 32768)
        {
            return Err(ConfigError::PhysicalBlock { physical, logical });
        }
        if self.rerror == ErrorPolicy::Enospc {
            return Err(ConfigError::ReadEnospc);
        }
        if self.fixedbufs == FixedBufs::On
            && let Some(engine @ (EngineKind::Native | EngineKind::Threads)) = self.engine
        {
            return Err(ConfigError::FixedBufs(engine));
        }
        Ok(())
    }
}

/// Most queues of a disk: what MSI-X has vectors for, with room for the configuration vector.
pub const MAX_QUEUES: u16 = 256;

/// An option's value that cannot be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ConfigError {
    /// Not one of the words that the option knows.
    #[error("{option}={value}: must be one of {choices}")]
    Choice {
        /// The option.
        option: &'static str,
        /// What was given.
        value: String,
        /// What could be.
        choices: String,
    },
    /// Number of queues.
    #[error("queues={0}: must be in range [1, {MAX_QUEUES}]")]
    Queues(u16),
    /// Queue size.
    #[error("queue-size={0}: must be a power of two in range [4, {MAX_SIZE}]")]
    QueueSize(u16),
    /// Serial too long.
    #[error("serial={serial}: {bytes} bytes are too long, {SERIAL_BYTES} is the most")]
    Serial {
        /// What was given.
        serial: String,
        /// Its length.
        bytes: usize,
    },
    /// Logical block size.
    #[error("logical-block-size={0}: must be 512, 1024, 2048 or 4096")]
    LogicalBlock(u32),
    /// Physical block size.
    #[error(
        "physical-block-size={physical}: must be a power of two from logical-block-size={logical} to 32768"
    )]
    PhysicalBlock {
        /// What was given.
        physical: u32,
        /// The logical block size beside it.
        logical: u32,
    },
    /// `rerror=enospc`.
    #[error("rerror=enospc: a read needs no space; must be one of report|ignore|stop")]
    ReadEnospc,
    /// `fixedbufs=on` with an engine that has no such thing.
    #[error(
        "fixedbufs=on: engine={0} has no registered buffers; give engine=io_uring or fixedbufs=off"
    )]
    FixedBufs(EngineKind),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(change: impl FnOnce(&mut DiskConfig)) -> String {
        let mut config = DiskConfig::new("d0", "x.img");
        assert_eq!(config.validate(), Ok(()));
        change(&mut config);
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn every_bad_value_is_named_with_its_option() {
        assert!(error(|c| c.queues = 0).starts_with("queues=0:"));
        assert!(error(|c| c.queues = 1000).starts_with("queues=1000:"));
        for size in [0, 1, 2, 3, 100, 2048] {
            assert!(error(|c| c.queue_size = size).starts_with(&format!("queue-size={size}:")));
        }
        assert!(error(|c| c.serial = "x".repeat(21)).contains("21 bytes"));
        for size in [0, 256, 520, 8192] {
            assert!(error(|c| c.logical_block_size = size).starts_with("logical-block-size="));
        }
        assert!(
            error(|c| {
                c.logical_block_size = 4096;
                c.physical_block_size = Some(512);
            })
            .starts_with("physical-block-size=512:")
        );
        assert!(error(|c| c.rerror = ErrorPolicy::Enospc).starts_with("rerror=enospc:"));
        for engine in [EngineKind::Native, EngineKind::Threads] {
            let wrong = error(|c| (c.engine, c.fixedbufs) = (Some(engine), FixedBufs::On));
            assert!(
                wrong.starts_with(&format!("fixedbufs=on: engine={engine} ")),
                "{wrong}"
            );
        }
    }

    #[test]
    fn a_serial_of_twenty_bytes_fits() {
        let mut config = DiskConfig::new("d0", "x.img");
        config.serial = "12345678901234567890".into();
        assert_eq!(config.validate(), Ok(()));
    }

    #[test]
    fn words_are_parsed_and_printed() {
        for name in EngineKind::NAMES {
            assert_eq!(name.parse::<EngineKind>().unwrap().name(), *name);
        }
        let error = "aio".parse::<EngineKind>().unwrap_err().to_string();
        assert_eq!(error, "engine=aio: must be one of io_uring|native|threads");
        assert_eq!("unsafe".parse(), Ok(CacheMode::Unsafe));
        assert_eq!("enospc".parse(), Ok(ErrorPolicy::Enospc));
    }
}
