//! KVM through the `kvm-ioctls` crate.

use std::os::fd::{FromRawFd, IntoRawFd};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use crate::vm::kvm::Error;
use crate::vm::memory::{self, GuestMemory};

/// Opens /dev/kvm.
///
/// # Errors
/// See [`Error`].
pub fn open() -> Result<Kvm, Error> {
    let fd = crate::vm::kvm::open()?;
    // SAFETY: the descriptor is open and owned by nobody else.
    Ok(unsafe { Kvm::from_raw_fd(fd.into_raw_fd()) })
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

/// Gives the memory to KVM, a slot for each region.
pub fn register(vm: &VmFd, memory: &GuestMemory) -> Result<(), memory::Error> {
    for (slot, region) in (0..).zip(memory.iter()) {
        let (address, bytes) = (region.start_addr().0, region.len());
        let slot = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: address,
            memory_size: bytes,
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the slots do not overlap, as the regions do not, and the mapping stays: whoever runs vCPUs holds a
        // clone of `memory`.
        unsafe { vm.set_user_memory_region(slot) }
            .map_err(|error| memory::Error::Slot(address, bytes, error))?;
    }
    Ok(())
}
