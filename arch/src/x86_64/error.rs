//! Errors of this crate. Each message is one line that says what is wrong, with the value, and what
//! to do about it; [`Error::option`] tells which command line option it is about.

use crate::image::{FileRole, OpenError};
use crate::x86_64::detect::NotAKernel;
use crate::x86_64::kernel::Format;

/// Result with this crate's [`Error`].
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
    NotAKernel(#[from] NotAKernel),
    /// The kernel's file is recognised but damaged or of a kind that cannot be booted.
    #[error("{format} that cannot be booted: {reason}")]
    BadKernel {
        /// What the file is.
        format: Format,
        /// What is wrong, with a remedy.
        reason: String,
    },
    /// Memory ends before the kernel does.
    #[error(
        "the kernel needs memory from {start:#x} to {end:#x}, but low memory ends at {low_end:#x}: \
         {remedy}"
    )]
    KernelDoesNotFit {
        /// First address needed.
        start: u64,
        /// Address after the last one needed.
        end: u64,
        /// Where RAM below the hole ends.
        low_end: u64,
        /// What to do.
        remedy: FitRemedy,
    },
    /// The initrd does not fit between the kernel and the end of usable memory.
    #[error(
        "the initrd needs {size_bytes} bytes, but only {room_bytes} are free between the kernel's end \
         at {kernel_end:#x} and {limit:#x}: {remedy}"
    )]
    InitrdDoesNotFit {
        /// Size of the initrd.
        size_bytes: u64,
        /// Room there is.
        room_bytes: u64,
        /// Address after the kernel's memory.
        kernel_end: u64,
        /// Address that the initrd must end at or below.
        limit: u64,
        /// What to do.
        remedy: FitRemedy,
    },
    /// The initrd is an empty file.
    #[error("the initrd is empty: give a cpio archive, or leave the option out")]
    EmptyInitrd,
    /// The command line is longer than the boot protocol's room.
    #[error(
        "the kernel command line is {length_bytes} bytes long, {format} takes at most {limit_bytes}: \
         shorten it"
    )]
    CommandLineTooLong {
        /// Length given.
        length_bytes: usize,
        /// Longest that the kernel or the protocol takes.
        limit_bytes: usize,
        /// Whose limit it is.
        format: Format,
    },
    /// The command line has a NUL byte, where the guest would cut it.
    #[error("the kernel command line has a NUL byte at offset {0}: remove it")]
    CommandLineNul(usize),
    /// Not even the boot data fits.
    #[error("{0} bytes of memory are too few: a kernel needs more than 2 MiB")]
    MemoryTooSmall(u64),
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
    /// The ACPI tables are longer than their area.
    #[error("the ACPI tables need {size_bytes} bytes, {room_bytes} are there: use fewer devices")]
    AcpiTooLarge {
        /// Bytes needed.
        size_bytes: usize,
        /// Bytes of the area.
        room_bytes: usize,
    },
    /// A number of vCPUs that cannot be.
    #[error("{given} vCPUs: give 1 to {max}")]
    CpuCount {
        /// Number given.
        given: usize,
        /// Most that are supported here.
        max: usize,
    },
    /// A CPU model that cannot be parsed or provided.
    #[error(transparent)]
    CpuModel(#[from] crate::x86_64::cpuid::CpuModelError),
    /// KVM refused something.
    #[error("{what}: {source}")]
    Kvm {
        /// The ioctl, or what it was for.
        what: &'static str,
        /// The system's reason.
        source: kvm_ioctls::Error,
    },
    /// KVM lacks a capability.
    #[error("this host's KVM lacks {name}: it needs a newer kernel")]
    MissingCapability {
        /// Name of the capability in KVM's documentation.
        name: &'static str,
    },
}

impl Error {
    /// The command line option that the error is about, if it is one's fault.
    pub fn option(&self) -> Option<&'static str> {
        match self {
            Error::Open(OpenError { file, .. }) | Error::Read { file, .. } => Some(file.option()),
            Error::NotAKernel(_) | Error::BadKernel { .. } => Some("--kernel"),
            Error::InitrdDoesNotFit { .. } | Error::EmptyInitrd => Some("--initrd"),
            Error::CommandLineTooLong { .. } | Error::CommandLineNul(_) => Some("--cmdline"),
            Error::KernelDoesNotFit { .. } | Error::MemoryTooSmall(_) => Some("--memory"),
            Error::CpuCount { .. } => Some("--cpus"),
            Error::CpuModel(_) => Some("--cpu"),
            Error::WriteMemory { .. }
            | Error::AcpiTooLarge { .. }
            | Error::Kvm { .. }
            | Error::MissingCapability { .. } => None,
        }
    }

    pub(crate) fn write(
        what: &'static str,
        address: u64,
    ) -> impl FnOnce(vm_memory::GuestMemoryError) -> Error {
        move |source| Error::WriteMemory {
            what,
            address,
            source,
        }
    }

    pub(crate) fn kvm(what: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Error {
        move |source| Error::Kvm { what, source }
    }
}

/// What helps when something does not fit below the hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitRemedy {
    /// This much guest memory, in bytes, is enough.
    Memory(u64),
    /// No size of memory helps: the end of low memory cannot move further.
    Smaller,
}

impl FitRemedy {
    /// The remedy for something that needs low memory up to `end`.
    pub(crate) fn for_end(end: u64) -> FitRemedy {
        match end.checked_next_multiple_of(1 << 20) {
            Some(bytes) if bytes <= crate::x86_64::layout::HOLE_START => FitRemedy::Memory(bytes),
            _ => FitRemedy::Smaller,
        }
    }
}

impl std::fmt::Display for FitRemedy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FitRemedy::Memory(bytes) => write!(f, "give at least --memory {}M", bytes >> 20),
            FitRemedy::Smaller => f.write_str("more memory does not help, use a smaller file"),
        }
    }
}
