//! What can go wrong when a loop is made or a handler added.

use std::io;

/// Failure to create or use a [`Context`](crate::Context) or an [`IoThread`](crate::IoThread).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is out of its range.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// The monitor that was asked for by name cannot be had on this host.
    #[error("monitor={name} is not available: {reason}; use monitor=auto to fall back")]
    Monitor {
        /// Value of `monitor=`.
        name: &'static str,
        /// Why, naming the limit or switch that forbids it.
        reason: String,
    },
    /// A system call failed while the loop was set up.
    #[error("cannot set up the event loop: {what}: {source}")]
    Setup {
        /// The call.
        what: &'static str,
        /// Its error.
        source: io::Error,
    },
    /// A file descriptor cannot be watched.
    #[error("cannot watch file descriptor {fd} of handler {name}: {source}")]
    Watch {
        /// The descriptor.
        fd: i32,
        /// The handler's name.
        name: String,
        /// The error of the kernel, or `EEXIST` when the descriptor already has a handler here.
        source: io::Error,
    },
    /// The thread could not be started.
    #[error("cannot start iothread {id}: {source}")]
    Thread {
        /// The iothread's id.
        id: String,
        /// The error of the system.
        source: io::Error,
    },
    /// The thread could not be bound to the CPUs that were asked for.
    #[error("cannot bind iothread {id} to cpus={cpus}: {source}")]
    Affinity {
        /// The iothread's id.
        id: String,
        /// The CPUs, as a list.
        cpus: String,
        /// The error of the system.
        source: io::Error,
    },
}

/// A setting of an iothread that is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettingError {
    /// The value is out of range.
    #[error("{name} value must be in range [{min}, {max}], not {value}")]
    Range {
        /// Name of the setting as users write it.
        name: &'static str,
        /// The value given.
        value: i64,
        /// Smallest value allowed.
        min: i64,
        /// Largest value allowed.
        max: i64,
    },
    /// `poll-alpha` is out of range, or no number.
    #[error("poll-alpha value must be in range [0, 10], not {value}")]
    Alpha {
        /// The value given.
        value: String,
    },
    /// There is no setting of this name.
    #[error(
        "no iothread setting is called {name}; there are poll-max-ns, poll-grow, poll-shrink, poll-weight, poll-alpha and aio-max-batch"
    )]
    Unknown {
        /// The name given.
        name: String,
    },
}

/// Why [`Remote::call`](crate::Remote::call) brought no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The loop has ended, or ended before the call was run.
    #[error("the event loop has ended")]
    Closed,
    /// The closure panicked; the panic stays in the loop's thread.
    #[error("the call panicked in the event loop's thread")]
    Panicked,
}
