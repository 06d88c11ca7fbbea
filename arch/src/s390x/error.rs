//! Errors of this processor's part. Each message is one line that says what is wrong, with the value, and what to do about
//! it; [`Error::option`] tells which command line option it is about.

use crate::image::{FileRole, OpenError};

/// Result with this module's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong between a configuration and a vCPU that runs.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A boot file that cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A read error of the kernel or the initrd.
    #[error("reading the {file}: {source}")]
    Read {
        /// Which file.
        file: FileRole,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The file is no kernel that can be booted here.
    #[error("not a kernel that can be booted: {0}")]
    NotAKernel(&'static str),
    /// Memory ends before the kernel does.
    #[error(
        "the kernel needs memory up to {end:#x}, but there are {memory_bytes} bytes: give at least --memory {mib}M", mib = end.div_ceil(1 << 20)
    )]
    KernelDoesNotFit {
        /// Address behind the kernel.
        end: u64,
        /// Guest memory.
        memory_bytes: u64,
    },
    /// The initrd does not fit behind the kernel.
    #[error(
        "the initrd needs memory from {start:#x} to {end:#x}, but there are {memory_bytes} bytes: give at least --memory {mib}M", mib = end.div_ceil(1 << 20)
    )]
    InitrdDoesNotFit {
        /// Its address.
        start: u64,
        /// Address behind it.
        end: u64,
        /// Guest memory.
        memory_bytes: u64,
    },
    /// The initrd is an empty file.
    #[error("the initrd is empty: give a cpio archive, or leave the option out")]
    EmptyInitrd,
    /// The command line is longer than the kernel's room.
    #[error(
        "the kernel command line is {length_bytes} bytes long, this kernel takes at most {limit_bytes}: shorten it"
    )]
    CommandLineTooLong {
        /// Length given.
        length_bytes: usize,
        /// Longest that the kernel takes.
        limit_bytes: usize,
    },
    /// The command line has a NUL byte, where the guest would cut it.
    #[error("the kernel command line has a NUL byte at offset {0}: remove it")]
    CommandLineNul(usize),
    /// The kernel has no parameter area.
    #[error(
        "this kernel is no Linux kernel with a parameter area and takes neither command line nor initrd: leave them out"
    )]
    NoParameters,
    /// Boot data could not be written: guest memory is not laid out as `layout` says.
    #[error("writing {what} to guest memory at {address:#x}: {source}")]
    WriteMemory {
        /// What was written.
        what: &'static str,
        /// Where.
        address: u64,
        /// Why not.
        source: vm_memory::GuestMemoryError,
    },
}

impl Error {
    /// The command line option that the error is about, if it is one's fault.
    pub fn option(&self) -> Option<&'static str> {
        match self {
            Error::Open(OpenError { file, .. }) | Error::Read { file, .. } => Some(file.option()),
            Error::NotAKernel(_) => Some("--kernel"),
            Error::KernelDoesNotFit { .. } | Error::InitrdDoesNotFit { .. } => Some("--memory"),
            Error::EmptyInitrd => Some("--initrd"),
            Error::CommandLineTooLong { .. } | Error::CommandLineNul(_) | Error::NoParameters => {
                Some("--cmdline")
            }
            Error::WriteMemory { .. } => None,
        }
    }
}
