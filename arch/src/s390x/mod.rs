//! s390x: what of it is not a device. It is compiled for every host, so that its tests run on every host; only the KVM
//! ioctls need the processor itself.
//!
//! [`kernel`] loads what runs, [`instruction`] decodes what comes to the VMM, [`cpu`] is how it is carried out whoever runs
//! the CPU; [`sclp`], [`diagnose`] and [`sigp`] are what the instructions do that are no channel I/O.

pub mod cpu;
pub mod cpu_model;
pub mod diagnose;
pub mod error;
pub mod instruction;
pub mod kernel;
pub mod kvm;
pub mod layout;
pub mod psw;
pub mod sclp;
pub mod sigp;

pub use cpu_model::CpuModel;
pub use error::{Error, Result};
pub use kernel::{Boot, load_images};
pub use layout::memory_regions;
