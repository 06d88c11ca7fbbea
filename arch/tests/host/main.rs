//! Tests that need something of the machine they run on. Where it is missing, they are listed with
//! what they need and counted as ignored.

// The allowance of clippy.toml reaches only functions that are marked as tests.
#![allow(clippy::unwrap_used)]

use libtest_mimic::{Arguments, Trial};

#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "x86_64")]
use x86_64::trials;

/// On other processors there are none.
#[cfg(not(target_arch = "x86_64"))]
fn trials() -> Vec<Trial> {
    Vec::new()
}

fn main() {
    let args = Arguments::from_args();
    let trials: Vec<Trial> = trials();
    libtest_mimic::run(&args, trials).exit();
}
