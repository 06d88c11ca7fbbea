//! The machine of an s390x guest: channel I/O, a service processor, and what is left to the VMM of the instructions.
//!
//! [`board`] and [`instructions`] know neither KVM nor the host's processor: they are compiled and tested everywhere, and
//! the test that boots Linux on an emulated CPU runs them as they are. Only what runs the CPUs by KVM needs an s390x host.

pub mod board;
pub mod instructions;

#[cfg(target_arch = "s390x")]
mod machine;
#[cfg(target_arch = "s390x")]
pub use machine::{AttachError, Machine, probe};
