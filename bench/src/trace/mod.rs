//! Reading what `pollux --trace` wrote.
//!
//! The data's path: [`files`] finds the parts of a recording and puts them in order; [`read`] goes
//! through their entries; [`summary`] counts and [`csv`] writes them.

pub mod csv;
pub mod files;
pub mod read;
pub mod summary;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

/// Why a recording cannot be read to its end. One line for the user.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that is missing, is something else, or is damaged.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        source: iothread::trace::file::ReadError,
    },
    /// Files of several recordings.
    #[error(
        "{} and {} are of different recordings; give the files of one",
        a.display(),
        b.display()
    )]
    Mixed {
        /// A file of one.
        a: PathBuf,
        /// A file of the other.
        b: PathBuf,
    },
    /// The result cannot be written.
    #[error("{}: {source}; name a file that can be written", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}
