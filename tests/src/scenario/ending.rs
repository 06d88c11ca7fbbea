//! The ways in which a guest ends are told apart by the exit status and a message. That a poweroff
//! gives status 0 is part of every other scenario. The monitor's clients are told too.

use serde_json::{Value, json};

use super::{Environment, Outcome};
use crate::machine::{Finished, Machine, Vmm};

/// Runs a guest with these words on the kernel's command line that ends by `script`, and checks that
/// the monitor tells of these events at the end.
fn end(
    environment: &Environment,
    cmdline: &'static str,
    script: &str,
    events: &[(&str, Value)],
) -> Finished {
    // The pause keeps what the kernel says out of the report's line.
    let mut machine = Machine::new(format!("report ending\nsleep 1\n{script}\nsleep 1000\n"));
    machine.cmdline = cmdline;
    machine.monitor = true;
    let mut running = environment.start(&machine);
    let monitor = running.monitor();
    running.wait_for("ending");
    let told = monitor.last_events();
    let ended = running.finish();
    let told: Vec<_> = told
        .iter()
        .map(|told| (&told["event"], &told["data"]))
        // Of the start; who connects later does not hear of it.
        .filter(|told| *told.0 != "RESUME")
        .collect();
    let same = told.len() == events.len()
        && told
            .iter()
            .zip(events)
            .all(|(told, event)| *told.0 == event.0 && *told.1 == event.1);
    if !same {
        ended.fail(&format!("events {told:?}\ninstead of {events:?}"));
    }
    ended
}

/// The guest has reset the machine, and the run ends of it.
fn reset() -> [(&'static str, Value); 2] {
    let data = json!({"guest": true, "reason": "guest-reset"});
    [("RESET", data.clone()), ("SHUTDOWN", data)]
}

/// The guest's kernel has failed, and the run ends of it.
fn panicked() -> [(&'static str, Value); 2] {
    [
        ("GUEST_PANICKED", json!({"action": "poweroff"})),
        ("SHUTDOWN", json!({"guest": true, "reason": "guest-panic"})),
    ]
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
    let ended = end(environment, "", "./busybox reboot -f", &reset());
    check(&ended, 0, "rebooted")
}

/// By a triple fault, which here is what the guest wants.
pub fn reboot_by_fault(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    let ended = end(environment, "reboot=t", "./busybox reboot -f", &reset());
    check(&ended, 0, "rebooted")
}

pub fn panic(environment: &Environment) -> Outcome {
    if let Some(skipped) = not_pollux(environment) {
        return skipped;
    }
    let crash = "echo c >/proc/sysrq-trigger";
    let ended = end(environment, "", crash, &panicked());
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
    let ended = end(environment, "msr.allow_writes=on", WITHOUT_NXE, &reset());
    check(&ended, 1, "triple fault")
}
