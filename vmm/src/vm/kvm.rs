//! /dev/kvm.

use kvm_ioctls::{Kvm, VmFd};

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
    Open(kvm_ioctls::Error),
    /// Not the API that there has been since 2007.
    #[error("/dev/kvm has API version {0}, version 12 is needed; this is not KVM")]
    Version(i32),
}

/// Opens /dev/kvm.
pub fn open() -> Result<Kvm, Error> {
    let kvm = Kvm::new().map_err(|error| match error.errno() {
        libc::ENOENT | libc::ENXIO | libc::ENODEV => Error::Missing,
        libc::EACCES | libc::EPERM => Error::Permission,
        _ => Error::Open(error),
    })?;
    match kvm.get_api_version() {
        12 => Ok(kvm),
        other => Err(Error::Version(other)),
    }
}

/// Makes a VM. KVM_CREATE_VM may be interrupted by a signal, which is no failure.
pub fn create_vm(kvm: &Kvm) -> Result<VmFd, kvm_ioctls::Error> {
    loop {
        match kvm.create_vm() {
            Err(error) if error.errno() == libc::EINTR => {}
            result => return result,
        }
    }
}
