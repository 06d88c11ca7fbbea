//! What differs by processor: how a kernel is loaded and entered, the tables that describe the
//! machine, the state a vCPU starts with, and the layout of guest memory.
//!
//! This crate knows no devices. It is handed what to announce (addresses, interrupts) and writes it
//! down in the form the processor's guests expect. `cfg(target_arch)` lives here so that the other
//! crates rarely need it.

pub mod image;

pub mod s390x;
#[cfg(target_arch = "s390x")]
pub use s390x::*;
#[cfg(target_arch = "x86_64")]
pub mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

/// Guest memory as every crate of this workspace uses it.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
