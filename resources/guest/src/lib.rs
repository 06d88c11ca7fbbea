//! The embedded guest: a small x86_64 program that boots without firmware or operating system, drives
//! virtio-blk disks as its command line says, and prints one line of JSON a job.
//!
//! The image is built from `guest/` by this package's build script; `guest/options.rs` describes the
//! command line. [`pattern`] is what it writes when told to verify, for those who look at a disk from
//! outside; [`pvh`] makes even smaller guests for tests.

mod bzimage;
pub mod pattern;
pub mod pvh;

#[cfg(has_guest)]
static ELF: Option<&[u8]> = Some(include_bytes!(env!("GUEST_ELF")));
#[cfg(not(has_guest))]
static ELF: Option<&[u8]> = None;

/// The guest as an ELF executable with a PVH entry note, its ELF entry being that of Linux' 64-bit
/// boot protocol. `None` on processors that the guest is not written for.
pub fn elf() -> Option<&'static [u8]> {
    ELF
}

/// The guest wrapped as a Linux bzImage (the "Linux/x86 boot protocol", version 2.12), for loaders of
/// those. It has the 64-bit entry only; its real-mode part is a header without code.
pub fn bzimage() -> Option<Vec<u8>> {
    elf().map(bzimage::wrap)
}

/// The guest without its PVH note, so that a loader takes the ELF entry and Linux' 64-bit protocol.
pub fn elf_without_note() -> Option<Vec<u8>> {
    elf().map(bzimage::without_note)
}

/// What the guest's command line may hold: the comment of the module that reads it.
pub fn command_line_help() -> String {
    include_str!("../guest/options.rs")
        .lines()
        .map_while(|line| line.strip_prefix("//!"))
        .map(|line| line.strip_prefix(' ').unwrap_or(line).to_owned() + "\n")
        .collect()
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
