//! Tests that need something of the machine they run on. Where it is missing, they are listed with
//! what they need and counted as ignored.

// The allowance of clippy.toml reaches only functions that are marked as tests.
#![allow(clippy::unwrap_used)]

mod iasl;
mod kvm;

#[path = "../../src/x86_64/testing.rs"]
#[allow(dead_code)]
mod testing;

use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let args = Arguments::from_args();
    let mut trials = Vec::new();
    let mut add = |need: &str, there: bool, tests: &[(&str, fn())]| {
        for &(name, test) in tests {
            let run = move || -> Result<(), Failed> {
                test();
                Ok(())
            };
            let kind = if there {
                String::new()
            } else {
                format!("skipped, needs {need}")
            };
            trials.push(
                Trial::test(name, run)
                    .with_kind(kind)
                    .with_ignored_flag(!there),
            );
        }
    };
    add("/dev/kvm", kvm::is_there(), kvm::TESTS);
    add("iasl (package acpica-tools)", iasl::is_there(), iasl::TESTS);
    libtest_mimic::run(&args, trials).exit();
}
