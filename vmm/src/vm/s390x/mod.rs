//! The machine of an s390x guest: channel I/O, a service processor, and what is left to the VMM of the instructions.
//!
//! [`board`] and [`instructions`] know neither KVM nor the host's processor: they are compiled and tested everywhere, and
//! whatever can run a CPU can use them. What runs the CPU by KVM ([`machine`]) compiles everywhere too, needs an s390x host
//! to run, and was never run.

pub mod board;
pub mod instructions;
pub mod machine;
mod routes;
mod vcpu;

pub use machine::{AttachError, Machine, probe};
