//! What installs filters elsewhere is made for little-endian processors alone, and there are no lists for
//! others: nothing here is ever called.

pub use libc::sock_filter;

/// Why a filter is not installed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is empty.
    #[error("the filter is empty")]
    EmptyFilter,
}

/// For the calling thread.
///
/// # Errors
/// Always.
pub fn apply_filter(_: &[sock_filter]) -> Result<(), Error> {
    Err(Error::EmptyFilter)
}

/// For all threads.
///
/// # Errors
/// Always.
pub fn apply_filter_all_threads(_: &[sock_filter]) -> Result<(), Error> {
    Err(Error::EmptyFilter)
}
