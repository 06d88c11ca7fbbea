//! The two rules that learn nothing: never poll, and always poll for the whole `poll-max-ns`.

use super::{Iteration, Policy};
use crate::settings::PollSettings;

/// Never polls.
#[derive(Debug)]
pub struct Off;

impl Policy for Off {
    fn reset(&mut self, _settings: &PollSettings) {}
    fn list(&mut self, _slot: u32) {}
    fn unlist(&mut self, _slot: u32) {}
    fn observe(&mut self, _iteration: &Iteration<'_>) {}

    fn window_ns(&self) -> i64 {
        0
    }

    fn handler_ns(&self, _slot: u32) -> i64 {
        0
    }
}

/// Polls for `poll-max-ns` before every sleep.
#[derive(Debug)]
pub struct Always {
    window_ns: i64,
}

impl Always {
    /// The rule under `settings`.
    #[must_use]
    pub fn new(settings: &PollSettings) -> Self {
        Always {
            window_ns: settings.poll_max_ns,
        }
    }
}

impl Policy for Always {
    fn reset(&mut self, settings: &PollSettings) {
        self.window_ns = settings.poll_max_ns;
    }

    fn list(&mut self, _slot: u32) {}
    fn unlist(&mut self, _slot: u32) {}
    fn observe(&mut self, _iteration: &Iteration<'_>) {}

    fn window_ns(&self) -> i64 {
        self.window_ns
    }

    fn handler_ns(&self, _slot: u32) -> i64 {
        0
    }
}
