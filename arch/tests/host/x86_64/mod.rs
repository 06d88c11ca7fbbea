//! Tests of x86_64.

use libtest_mimic::{Failed, Trial};

mod iasl;
mod kvm;

#[path = "../../../src/x86_64/testing.rs"]
#[allow(dead_code)]
mod testing;

pub fn trials() -> Vec<Trial> {
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
    trials
}
