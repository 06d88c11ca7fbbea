//! The guest's power events as outcomes of the run.

use std::sync::Arc;

use devices::reset::{PowerCallback, PowerEvent};

use super::reset_flag::{self, ResetFlag};
use crate::vm::lifecycle::{Lifecycle, Outcome};
use crate::vm::memory::GuestMemory;

/// What the power registers call, in the vCPU thread that wrote them.
pub fn callback(lifecycle: Arc<Lifecycle>, memory: GuestMemory) -> PowerCallback {
    Arc::new(move |event| match event {
        PowerEvent::PowerOff => lifecycle.end(Outcome::PowerOff),
        PowerEvent::Reset => lifecycle.end(match reset_flag::read(&memory) {
            ResetFlag::Warm => Outcome::GuestPanic,
            ResetFlag::Cold | ResetFlag::Untouched => Outcome::Reboot,
        }),
        PowerEvent::Panicked => lifecycle.report_panic(),
        // The crash kernel runs next and ends the guest its own way.
        PowerEvent::CrashLoaded => {
            tracing::warn!("the guest's kernel panicked and loads its crash kernel")
        }
    })
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, GuestAddress};

    use super::*;

    #[test]
    fn resets_are_told_apart_by_the_reset_flag() {
        for (flag, outcome) in [
            (None, Outcome::Reboot),
            (Some(0u16), Outcome::Reboot),
            (Some(0x1234), Outcome::GuestPanic),
        ] {
            let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
            reset_flag::arm(&memory).unwrap();
            if let Some(flag) = flag {
                memory.write_obj(flag, GuestAddress(0x472)).unwrap();
            }
            let lifecycle = Arc::new(Lifecycle::new().unwrap());
            callback(lifecycle.clone(), memory)(PowerEvent::Reset);
            assert_eq!(lifecycle.outcome(), Some(outcome));
        }
    }

    #[test]
    fn power_off_ends_and_a_panic_is_only_reported() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 4096)]).unwrap();
        let lifecycle = Arc::new(Lifecycle::new().unwrap());
        let callback = callback(lifecycle.clone(), memory);
        callback(PowerEvent::CrashLoaded);
        assert!(!lifecycle.panic_reported());
        callback(PowerEvent::Panicked);
        assert!(lifecycle.panic_reported() && !lifecycle.has_ended());
        callback(PowerEvent::PowerOff);
        assert_eq!(lifecycle.outcome(), Some(Outcome::PowerOff));
    }
}
