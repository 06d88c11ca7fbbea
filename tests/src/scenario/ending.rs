//! The ways in which a guest ends are told apart by the exit status and a message. That a poweroff
//! gives status 0 is part of every other scenario.

use super::{Environment, Outcome};
use crate::machine::{Finished, Machine, Vmm};

/// Runs a guest with these words on the kernel's command line that ends by `script`.
fn end(environment: &Environment, cmdline: &'static str, script: &str) -> Finished {
    // The pause keeps what the kernel says out of the report's line.
    let mut machine = Machine::new(format!("report ending\nsleep 1\n{script}\nsleep 1000\n"));
    machine.cmdline = cmdline;
    let mut running = environment.start(&machine);
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

/// By the register that ACPI names.
pub fn reboot(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    check(&end(environment, "", "./busybox reboot -f"), 0, "rebooted")
}

/// By a triple fault, which here is what the guest wants.
pub fn reboot_by_fault(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    check(
        &end(environment, "reboot=t", "./busybox reboot -f"),
        0,
        "rebooted",
    )
}

pub fn panic(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    let ended = end(environment, "", "echo c >/proc/sysrq-trigger");
    assert!(ended.console.contains("Kernel panic"), "the guest panicked");
    check(&ended, 1, "panic")
}

pub fn init_dies(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    let mut machine = Machine::new("");
    machine.cmdline = "reboot=t init=/bin/false";
    let ended = environment.start(&machine).finish();
    assert!(
        ended.console.contains("Attempted to kill init"),
        "the guest panicked"
    );
    check(&ended, 1, "panic")
}

/// By accident: without EFER.NXE the no-execute bit of a page table's entry is a reserved one. The
/// stacks have it, so that every exception faults, and so does telling of that.
const WITHOUT_NXE: &str = r#"
efer=$((0xc0000080))
value=$(dd if=/dev/cpu/0/msr bs=8 count=1 iflag=skip_bytes skip=$efer status=none | od -An -t u8)
value=$((value & ~0x800))
for shift in 0 8 16 24 32 40 48 56; do
    printf "\\$(printf %03o $((value >> shift & 255)))"
done | dd of=/dev/cpu/0/msr bs=8 count=1 iflag=fullblock oflag=seek_bytes seek=$efer conv=notrunc status=none
"#;

pub fn triple_fault(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    check(
        &end(environment, "msr.allow_writes=on", WITHOUT_NXE),
        1,
        "triple fault",
    )
}
