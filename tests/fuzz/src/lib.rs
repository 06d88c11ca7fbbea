//! Fuzz targets: functions that take any bytes and panic when something is wrong.
//!
//! libFuzzer drives them (`tests/fuzz/libfuzzer`, `tests/fuzz/run`); the test `short` runs each on its
//! corpus and on inputs made from a fixed seed, so that they are tried in every run of the tests.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)] // A panic is how a target reports.

mod disk;
#[cfg(target_arch = "x86_64")]
mod kernel;
mod machine;
mod options;
mod qmp;
mod registers;
mod vhost_user;

/// A target.
pub struct Target {
    /// Its name, and that of its corpus' folder.
    pub name: &'static str,
    /// Tries one input.
    pub run: fn(&[u8]),
    /// Inputs that the short test makes besides the corpus.
    pub short_inputs: u32,
}

/// All targets.
pub const TARGETS: &[Target] = &[
    Target {
        name: "disk",
        run: disk::requests,
        short_inputs: 1500,
    },
    Target {
        name: "geometry",
        run: registers::geometry,
        short_inputs: 1500,
    },
    Target {
        name: "mmio",
        run: registers::mmio,
        short_inputs: 1500,
    },
    Target {
        name: "pci",
        run: registers::pci,
        short_inputs: 300,
    },
    #[cfg(target_arch = "x86_64")]
    Target {
        name: "kernel",
        run: kernel::load,
        short_inputs: 3000,
    },
    Target {
        name: "qmp",
        run: qmp::client,
        short_inputs: 500,
    },
    Target {
        name: "options",
        run: options::parse,
        short_inputs: 3000,
    },
    Target {
        name: "vhost_user",
        run: vhost_user::front_end,
        short_inputs: 1500,
    },
];

/// Tries `input` on the target called `name`.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    (target.expect("a target's name").run)(input);
}
