//! The embedded guest: a small x86_64 program that boots without firmware or operating system, drives
//! virtio-blk disks as its command line says, and prints one line of JSON a job.
//!
//! The image is built from `guest/` by this package's build script; `guest/options.rs` describes the
//! command line. [`pattern`] is what it writes when told to verify, for those who look at a disk from
//! outside.

pub mod pattern;

#[cfg(has_guest)]
static ELF: Option<&[u8]> = Some(include_bytes!(env!("GUEST_ELF")));
#[cfg(not(has_guest))]
static ELF: Option<&[u8]> = None;

/// The guest as an ELF executable with a PVH entry note, its ELF entry being that of Linux' 64-bit
/// boot protocol. `None` on processors that the guest is not written for.
pub fn elf() -> Option<&'static [u8]> {
    ELF
}

// The parts of the guest that need no machine are tested here; and this is how `cargo fmt` finds it.
#[cfg(any())]
#[path = "../guest/main.rs"]
mod guest;
#[cfg(test)]
#[path = "../guest/histogram.rs"]
mod histogram;
#[cfg(test)]
#[allow(missing_docs, dead_code)] // The guest uses all of it, the tests some.
#[path = "../guest/options.rs"]
mod options;
