//! How a run ends, and who says so first.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// How a run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The guest powered off.
    PowerOff,
    /// The guest rebooted; this VMM ends instead of starting it again.
    Reboot,
    /// The guest's kernel panicked.
    GuestPanic,
    /// A vCPU met a fault while handling faults, and nobody asked for that. The text tells all.
    TripleFault(String),
    /// The user or a signal ended the run. The text tells who.
    Stopped(String),
    /// A vCPU cannot go on: KVM's reasons and the state of the vCPU.
    VcpuFailed(String),
    /// A thread of the VMM is gone. The text tells which and why.
    ThreadDied(String),
}

impl Outcome {
    /// Whether the guest ended well: exit status 0.
    pub fn is_good(&self) -> bool {
        matches!(self, Self::PowerOff | Self::Reboot | Self::Stopped(_))
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PowerOff => f.write_str("the guest powered off"),
            Self::Reboot => f.write_str("the guest rebooted; not starting it again"),
            Self::GuestPanic => {
                f.write_str("the guest's kernel panicked; its last messages are on its console")
            }
            Self::TripleFault(report) => f.write_str(report),
            Self::Stopped(by) => write!(f, "stopped by {by}"),
            Self::VcpuFailed(why) => f.write_str(why),
            Self::ThreadDied(which) => write!(f, "internal error: {which}"),
        }
    }
}

/// The end of a run: set once by any thread, waited for by the main loop.
#[derive(Debug)]
pub struct Lifecycle {
    outcome: Mutex<Option<Outcome>>,
    ended: AtomicBool,
    panic_reported: AtomicBool,
    event: EventFd,
}

impl Lifecycle {
    /// A run that has not ended.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            outcome: Mutex::new(None),
            ended: AtomicBool::new(false),
            panic_reported: AtomicBool::new(false),
            event: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Ends the run. Only the first call counts: what comes later is a consequence.
    pub fn end(&self, outcome: Outcome) {
        self.outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert(outcome);
        self.ended.store(true, Ordering::Release);
        self.wake();
    }

    /// The guest reports a panic. It may still write its last messages and reset itself.
    pub fn report_panic(&self) {
        self.panic_reported.store(true, Ordering::Release);
        self.wake();
    }

    /// Whether the guest has reported a panic.
    pub fn panic_reported(&self) -> bool {
        self.panic_reported.load(Ordering::Acquire)
    }

    /// Whether the run has ended.
    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// How it ended.
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Readable when something of the above has changed.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    fn wake(&self) {
        // It can only fail when the counter is full, and then it is readable.
        let _ = self.event.write(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_end_counts() {
        let lifecycle = Lifecycle::new().unwrap();
        assert!(!lifecycle.has_ended());
        lifecycle.end(Outcome::PowerOff);
        lifecycle.end(Outcome::VcpuFailed("later".to_owned()));
        assert!(lifecycle.has_ended());
        assert_eq!(lifecycle.outcome(), Some(Outcome::PowerOff));
        assert_eq!(lifecycle.event().read().unwrap(), 2);
    }

    #[test]
    fn a_reported_panic_does_not_end_the_run_by_itself() {
        let lifecycle = Lifecycle::new().unwrap();
        lifecycle.report_panic();
        assert!(lifecycle.panic_reported() && !lifecycle.has_ended());
        assert_eq!(lifecycle.event().read().unwrap(), 1);
    }
}
