//! Why a VM could not be started or went wrong outside the guest.

use std::path::PathBuf;

use crate::{config, qmp, sandbox, seccomp, trace};

use super::{console, disks, iothreads, kvm, main_loop, memory, platform};

/// Any of this module's errors; its text is one line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// /dev/kvm.
    #[error(transparent)]
    Kvm(#[from] kvm::Error),
    /// Boot files, tables, processor state.
    #[error("{}{source}", option_prefix(source, value.as_deref()))]
    Arch {
        /// What `arch` says.
        source: arch::Error,
        /// The option's value, where the message does not tell it.
        value: Option<String>,
    },
    /// Guest memory.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// The event loops.
    #[error(transparent)]
    IoThreads(#[from] iothreads::Error),
    /// The disks.
    #[error(transparent)]
    Disks(#[from] disks::Error),
    /// Disks that do not fit into the machine.
    #[error(transparent)]
    Attach(#[from] platform::AttachError),
    /// The console.
    #[error(transparent)]
    Console(#[from] console::Error),
    /// The monitor's socket.
    #[error("--qmp unix:{0}")]
    Qmp(#[from] qmp::SocketError),
    /// The file of metrics.
    #[error("--metrics file={}: {error}; name a file that can be written", file.display())]
    Metrics {
        /// The file.
        file: PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// The sandbox.
    #[error(transparent)]
    Sandbox(#[from] sandbox::Error),
    /// The filters of system calls.
    #[error(transparent)]
    Seccomp(#[from] seccomp::Error),
    /// The trace.
    #[error(transparent)]
    Trace(#[from] trace::Error),
    /// The main loop.
    #[error(transparent)]
    MainLoop(#[from] main_loop::Error),
    /// Two devices at one address: a mistake of this program.
    #[error("bus: {0}")]
    Bus(#[from] devices::bus::Error),
    /// Guest memory at an address where there should be some.
    #[error("guest memory: {0}")]
    GuestMemory(#[from] vm_memory::GuestMemoryError),
    /// A KVM ioctl.
    #[error("{0}: {1}")]
    Ioctl(&'static str, vmm_sys_util::errno::Error),
    /// A machine without a kernel: a mistake of this program.
    #[error("the machine is assembled before its kernel is loaded")]
    NotLoaded,
    /// A system call.
    #[error("{0}: {1}")]
    System(&'static str, std::io::Error),
}

impl Error {
    /// Whether the user asked for something that cannot be: exit status 2. Else it is a failure.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Config(_)
            | Self::Kvm(_)
            | Self::Console(_)
            | Self::Qmp(_)
            | Self::Metrics { .. } => true,
            Self::Trace(error) => matches!(error, trace::Error::Create { .. }),
            Self::IoThreads(error) => error.is_usage(),
            Self::Disks(error) => error.is_usage(),
            Self::Attach(error) => error.is_usage(),
            Self::Sandbox(error) => error.is_usage(),
            Self::Arch { source, .. } => source.option().is_some(),
            Self::Memory(error) => {
                !matches!(error, memory::Error::Regions(_) | memory::Error::Slot(..))
            }
            _ => false,
        }
    }

    /// What `arch` found wrong with the files and sizes in `config`.
    pub fn refused_file(source: arch::Error, config: &config::Config) -> Self {
        let path = |path: &Option<std::path::PathBuf>| {
            path.as_ref().map(|path| path.display().to_string())
        };
        let value = match source.option() {
            Some("--kernel") => path(&config.kernel),
            Some("--initrd") => path(&config.initrd),
            Some("--memory") => Some(config.memory.size.to_string()),
            _ => None,
        };
        Self::Arch { source, value }
    }

    /// Maps the error of ioctl `name`.
    pub fn ioctl(name: &'static str) -> impl FnOnce(vmm_sys_util::errno::Error) -> Self {
        move |error| Self::Ioctl(name, error)
    }

    /// Maps the error of a system call made for `what`.
    pub fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::System(what, error)
    }
}

impl From<arch::image::OpenError> for Error {
    fn from(error: arch::image::OpenError) -> Self {
        arch::Error::from(error).into()
    }
}

fn option_prefix(error: &arch::Error, value: Option<&str>) -> String {
    match (error.option(), value) {
        (Some(option), Some(value)) => format!("{option} {}: ", config::one_line(value)),
        (Some(option), None) => format!("{option}: "),
        (None, _) => String::new(),
    }
}

impl From<arch::Error> for Error {
    fn from(source: arch::Error) -> Self {
        let value = match &source {
            arch::Error::Open(error) => Some(error.path.clone()),
            _ => None,
        };
        Self::Arch { source, value }
    }
}
