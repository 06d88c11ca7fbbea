//! The ways in which a guest ends are told apart by the exit status and a message. That a poweroff
//! gives status 0 is part of every other scenario.

use super::{Environment, Outcome};
use crate::machine::{Finished, Machine, Vmm};

/// Runs a guest that ends by `script`.
fn end(environment: &Environment, script: &str) -> Finished {
    let script = format!("report ending\n{script}\nsleep 1000\n");
    let mut running = environment.start(&Machine::new(script));
    running.wait_for("ending");
    running.finish()
}

/// Checks status and message of an ending.
fn check(ended: &Finished, status: i32, words: &str) -> Outcome {
    if ended.status.code() != Some(status) {
        ended.fail(&format!("expected exit status {status}"));
    }
    if !ended.messages.to_lowercase().contains(words) {
        ended.fail(&format!("expected a message with the words: {words}"));
    }
    Outcome::Held
}

/// Only Pollux tells endings apart.
fn not_pollux(environment: &Environment) -> Option<Outcome> {
    (environment.vmm() != Vmm::Pollux)
        .then(|| Outcome::Skipped("about Pollux's own messages".to_owned()))
}

pub fn reboot(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    // The kernel's command line has reboot=t; this asks for the ACPI reset register instead.
    let ended = end(
        environment,
        "echo acpi >/sys/kernel/reboot/type; ./busybox reboot -f",
    );
    check(&ended, 0, "reboot")
}

pub fn panic(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    let ended = end(environment, "echo c >/proc/sysrq-trigger");
    assert!(ended.console.contains("Kernel panic"), "the guest panicked");
    check(&ended, 1, "panic")
}

pub fn init_dies(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    let mut machine = Machine::new("");
    machine.cmdline = "init=/bin/false";
    let ended = environment.start(&machine).finish();
    assert!(
        ended.console.contains("Attempted to kill init"),
        "the guest panicked"
    );
    check(&ended, 1, "panic")
}

pub fn triple_fault(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    let ended = end(environment, "./busybox reboot -f");
    check(&ended, 1, "triple fault")
}
