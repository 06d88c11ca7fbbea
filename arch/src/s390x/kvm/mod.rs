//! KVM on s390x, by its ioctls: no crate has them for this processor. Structures and numbers are those of `linux/kvm.h` and
//! `asm/kvm.h`; [`abi`] has them, with their layouts asserted. All of it compiles on every 64-bit host; it was never run,
//! for want of one with SIE.

pub mod abi;
mod vcpu;
mod vm;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

pub use vcpu::{Exit, Vcpu};
pub use vm::{Route, Vm};

/// Capabilities without which no VM is started here, with their names in KVM's documentation.
pub const REQUIRED_CAPABILITIES: &[(u32, &str)] = &[
    (abi::CAP_IRQFD, "KVM_CAP_IRQFD"),
    (abi::CAP_IOEVENTFD, "KVM_CAP_IOEVENTFD"),
    (abi::CAP_SYNC_REGS, "KVM_CAP_SYNC_REGS"),
    (abi::CAP_S390_CSS_SUPPORT, "KVM_CAP_S390_CSS_SUPPORT"),
    (abi::CAP_DEVICE_CTRL, "KVM_CAP_DEVICE_CTRL"),
    (abi::CAP_S390_IRQCHIP, "KVM_CAP_S390_IRQCHIP"),
    (abi::CAP_S390_MEM_OP, "KVM_CAP_S390_MEM_OP"),
    (abi::CAP_IMMEDIATE_EXIT, "KVM_CAP_IMMEDIATE_EXIT"),
];

/// An ioctl that failed.
#[derive(Debug, thiserror::Error)]
#[error("{name}: {source}")]
pub struct KvmError {
    /// Its name.
    pub name: &'static str,
    /// The system's reason.
    pub source: io::Error,
}

/// Makes an ioctl that takes a number.
fn ioctl_number(
    fd: &impl AsRawFd,
    name: &'static str,
    request: u64,
    argument: u64,
) -> Result<i32, KvmError> {
    // SAFETY: the request takes a number, no address.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, argument) };
    checked(name, result)
}

/// Makes an ioctl that takes a structure.
///
/// # Safety
/// `request` takes a `T`, and what addresses in it point to is valid for what the ioctl does with them.
unsafe fn ioctl_with<T>(
    fd: &impl AsRawFd,
    name: &'static str,
    request: u64,
    argument: &mut T,
) -> Result<i32, KvmError> {
    // SAFETY: the caller's promise.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(argument)) };
    checked(name, result)
}

fn checked(name: &'static str, result: i32) -> Result<i32, KvmError> {
    match result {
        0.. => Ok(result),
        _ => Err(KvmError {
            name,
            source: io::Error::last_os_error(),
        }),
    }
}

/// Whether KVM, opened as `kvm`, has capability `capability`; the number that it says.
pub fn capability(kvm: &OwnedFd, capability: u32) -> i32 {
    ioctl_number(
        kvm,
        "KVM_CHECK_EXTENSION",
        abi::CHECK_EXTENSION,
        capability.into(),
    )
    .unwrap_or(0)
}
