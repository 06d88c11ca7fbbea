//! /dev/kvm, as it is on every processor.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// KVM_GET_API_VERSION: `_IO(KVMIO, 0x00)`.
const GET_API_VERSION: u64 = 0xae00;

/// Why KVM cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No device.
    #[error(
        "/dev/kvm is missing: load the module (modprobe kvm_intel or kvm_amd), and switch virtualization on in the firmware, or nested virtualization on in the outer VM"
    )]
    Missing,
    /// Not for this user.
    #[error(
        "/dev/kvm: permission denied; add this user to its group (usermod -aG kvm USER, then log in again), or run as root"
    )]
    Permission,
    /// Anything else.
    #[error("/dev/kvm cannot be opened: {0}; see the host's kernel log")]
    Open(Errno),
    /// Not the API that there has been since 2007.
    #[error("/dev/kvm has API version {0}, version 12 is needed; this is not KVM")]
    Version(i32),
}

/// Opens /dev/kvm.
///
/// # Errors
/// See [`Error`].
pub fn open() -> Result<OwnedFd, Error> {
    let fd = rustix::fs::open("/dev/kvm", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(
        |error| match error {
            Errno::NOENT | Errno::NXIO | Errno::NODEV => Error::Missing,
            Errno::ACCESS | Errno::PERM => Error::Permission,
            _ => Error::Open(error),
        },
    )?;
    // SAFETY: the ioctl touches no memory of this process. KVM insists on an argument of 0.
    match unsafe { libc::ioctl(fd.as_raw_fd(), GET_API_VERSION as libc::c_ulong, 0) } {
        12 => Ok(fd),
        other => Err(Error::Version(other)),
    }
}
