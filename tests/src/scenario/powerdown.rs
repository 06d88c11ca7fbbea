//! The monitor's power button reaches the guest through ACPI, and the guest powers off.

use serde_json::json;

use super::{Environment, Outcome};
use crate::machine::{Machine, Vmm};

/// Waits for the button as logind and acpid do: for an input event (24 bytes of `struct input_event`:
/// two words of time, then type, code and value) of type 1, a key, with code 116, the power key.
const SCRIPT: &str = r#"
input=
for entry in /sys/class/input/event*; do
    [ "$(cat $entry/device/name)" = "Power Button" ] && input=/dev/input/${entry##*/}
done
[ -n "$input" ] || fail "no power button; there are: $(cat /sys/class/input/*/name)"
report button "$(cat /sys/class/input/${input##*/}/device/phys)"
exec 3<$input
report ready
for press in 1 2; do
    # Pressed and released, each with an event of type 0 that ends it.
    report press $(dd bs=24 count=4 iflag=fullblock status=none <&3 | od -An -v -w24 -j0 -t u2 |
        awk '$9 == 1 { print $9, $10, $11 }')
done
report interrupts "$(awk '/ACPI:Ged/ { print $2 + $3 }' /proc/interrupts)"
"#;

pub fn powerdown(environment: &Environment) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("needs Pollux's monitor".to_owned());
    }
    let mut machine = Machine::new(SCRIPT);
    machine.monitor = true;
    let mut running = environment.start(&machine);
    running.wait_for("ready");
    let mut monitor = running.monitor();
    for press in 1..=2 {
        monitor.execute("system_powerdown", json!({}));
        monitor.wait_for_event("POWERDOWN");
        let key = running.wait_for_nth("press", press);
        assert_eq!(key, "1 116 1 1 116 0", "the power key, down and up");
    }
    let events = monitor.last_events();
    let ended = running.finish();
    ended.assert_success();
    environment.note(&format!("the button is {}", ended.value("button")));
    let last = events.last().expect("an event at the end");
    assert_eq!(last["event"], "SHUTDOWN", "{events:?}");
    let data = json!({"guest": true, "reason": "guest-shutdown"});
    assert_eq!(last["data"], data, "{events:?}");
    assert_eq!(
        ended.value("interrupts"),
        "2",
        "interrupts of the event device"
    );
    Outcome::Held
}
