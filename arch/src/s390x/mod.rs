//! s390x: what of it is not a device. It is compiled for every host, so that its tests run on every host; only the KVM
//! ioctls need the processor itself.

pub mod cpu_model;
pub mod error;
pub mod layout;

pub use cpu_model::CpuModel;
pub use error::{Error, Result};
pub use layout::memory_regions;
