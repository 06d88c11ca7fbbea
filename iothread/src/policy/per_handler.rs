//! The rule of QEMU 10.0: a window for each handler, the longest one counts.

use super::{Iteration, Policy, adjust_by_table};
use crate::settings::PollSettings;

#[derive(Debug, Clone, Copy, Default)]
struct Window {
    ns: i64,
    listed: bool,
}

/// See the module.
#[derive(Debug)]
pub struct PerHandler {
    settings: PollSettings,
    windows: Vec<Window>,
    longest_ns: i64,
}

impl PerHandler {
    /// The rule under `settings`, with no handler listed.
    #[must_use]
    pub fn new(settings: &PollSettings) -> Self {
        PerHandler {
            settings: *settings,
            windows: Vec::new(),
            longest_ns: 0,
        }
    }

    fn window_mut(&mut self, slot: u32) -> &mut Window {
        let slot = slot as usize;
        if slot >= self.windows.len() {
            self.windows.resize(slot + 1, Window::default());
        }
        &mut self.windows[slot]
    }

    fn find_longest(&mut self) {
        self.longest_ns = self
            .windows
            .iter()
            .filter(|window| window.listed)
            .map(|window| window.ns)
            .max()
            .unwrap_or(0);
    }
}

impl Policy for PerHandler {
    fn reset(&mut self, settings: &PollSettings) {
        self.settings = *settings;
        for window in &mut self.windows {
            window.ns = 0;
        }
        self.longest_ns = 0;
    }

    fn list(&mut self, slot: u32) {
        self.window_mut(slot).listed = true;
    }

    fn unlist(&mut self, slot: u32) {
        *self.window_mut(slot) = Window::default();
        self.find_longest();
    }

    fn observe(&mut self, iteration: &Iteration<'_>) {
        if self.settings.poll_max_ns == 0 {
            return;
        }
        let mut shortened = false;
        for &slot in iteration.active {
            let settings = self.settings;
            let longest_ns = self.longest_ns;
            let window = self.window_mut(slot);
            if !window.listed {
                continue;
            }
            let old_ns = window.ns;
            window.ns = adjust_by_table(old_ns, iteration.block_ns.max(0), &settings);
            // Only when the longest one shrinks must all of them be looked at.
            shortened |= window.ns < old_ns && old_ns == longest_ns;
            let ns = window.ns;
            self.longest_ns = self.longest_ns.max(ns);
        }
        if shortened {
            self.find_longest();
        }
    }

    fn window_ns(&self) -> i64 {
        self.longest_ns
    }

    fn handler_ns(&self, slot: u32) -> i64 {
        self.windows
            .get(slot as usize)
            .map_or(0, |window| window.ns)
    }
}
