//! The machine of an s390x guest: channel I/O, a service processor, and what is left to the VMM of the instructions.
//!
//! [`board`] and [`instructions`] know neither KVM nor the host's processor: they are compiled and tested everywhere, and
//! the test that boots Linux on an emulated CPU runs them as they are. What runs the CPUs by KVM ([`machine`]) compiles
//! everywhere too, and needs an s390x host to run.

pub mod board;
pub mod instructions;
pub mod machine;
mod routes;
mod vcpu;

pub use machine::{AttachError, Machine, probe};
