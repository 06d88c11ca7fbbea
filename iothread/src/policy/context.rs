//! The rule of QEMU 9.x: one window for the whole context, adjusted in every iteration.

use super::{Iteration, Policy, adjust_by_table};
use crate::settings::PollSettings;

/// See the module.
#[derive(Debug)]
pub struct ContextWide {
    settings: PollSettings,
    window_ns: i64,
}

impl ContextWide {
    /// The rule under `settings`.
    #[must_use]
    pub fn new(settings: &PollSettings) -> Self {
        ContextWide {
            settings: *settings,
            window_ns: 0,
        }
    }
}

impl Policy for ContextWide {
    fn reset(&mut self, settings: &PollSettings) {
        self.settings = *settings;
        self.window_ns = 0;
    }

    fn list(&mut self, _slot: u32) {}

    fn unlist(&mut self, _slot: u32) {}

    fn observe(&mut self, iteration: &Iteration<'_>) {
        if self.settings.poll_max_ns != 0 {
            let block_ns = iteration.block_ns.max(0);
            self.window_ns = adjust_by_table(self.window_ns, block_ns, &self.settings);
        }
    }

    fn window_ns(&self) -> i64 {
        self.window_ns
    }

    fn handler_ns(&self, _slot: u32) -> i64 {
        0
    }
}
