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
}

impl Error {
    /// The command line option that the error is about, if it is one's fault.
    pub fn option(&self) -> Option<&'static str> {
        match self {
            Error::Open(OpenError { file, .. }) | Error::Read { file, .. } => Some(file.option()),
        }
    }
}
