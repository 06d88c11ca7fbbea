//! When vCPU threads run, stand still and end.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What the vCPU threads should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// Wait.
    Hold,
    /// Run the guest.
    Run,
    /// End, whatever is said later.
    Stop,
}

/// What a vCPU thread may do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Run the guest.
    Go,
    /// Run the guest, which has been held up.
    GoAfterHold,
    /// End.
    End,
}

/// Holds, releases and ends the vCPU threads.
#[derive(Debug)]
pub struct RunGate {
    shared: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    wanted: RunState,
    /// Threads that have been started and have not ended.
    alive: usize,
    /// Of these, those that wait at the gate.
    held: usize,
}

impl Default for RunGate {
    fn default() -> Self {
        Self {
            shared: Mutex::new(GateState {
                wanted: RunState::Hold,
                alive: 0,
                held: 0,
            }),
            changed: Condvar::new(),
        }
    }
}

impl RunGate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says what the threads should do from now on. [`RunState::Stop`] is for good.
    pub fn set(&self, wanted: RunState) {
        let mut state = self.lock();
        if state.wanted != RunState::Stop {
            state.wanted = wanted;
        }
        self.changed.notify_all();
    }

    /// A thread: blocks while the state is [`RunState::Hold`].
    pub fn pass(&self) -> Pass {
        let mut state = self.lock();
        let held = state.wanted == RunState::Hold;
        if held {
            state.held += 1;
            self.changed.notify_all();
            state = self
                .changed
                .wait_while(state, |state| state.wanted == RunState::Hold)
                .unwrap_or_else(PoisonError::into_inner);
            state.held -= 1;
        }
        match (state.wanted, held) {
            (RunState::Stop, _) => Pass::End,
            (_, true) => Pass::GoAfterHold,
            (_, false) => Pass::Go,
        }
    }

    /// A thread is started.
    pub fn enter(&self) {
        self.lock().alive += 1;
    }

    /// A thread has ended.
    pub fn leave(&self) {
        self.lock().alive -= 1;
        self.changed.notify_all();
    }

    /// Waits until no thread is left; false if `patience` runs out first.
    pub fn wait_empty(&self, patience: Duration) -> bool {
        self.wait(patience, |state| state.alive == 0)
    }

    /// Waits until all threads that are left wait at the gate; false if `patience` runs out first.
    pub fn wait_held(&self, patience: Duration) -> bool {
        self.wait(patience, |state| state.held == state.alive)
    }

    fn wait(&self, patience: Duration, condition: impl Fn(&GateState) -> bool) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), patience, |state| !condition(state))
            .unwrap_or_else(PoisonError::into_inner);
        condition(&state)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn held_threads_do_nothing_and_go_on_where_they_were() {
        let gate = Arc::new(RunGate::default());
        let steps = Arc::new(AtomicU64::new(0));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                gate.enter();
                let (gate, steps) = (gate.clone(), steps.clone());
                std::thread::spawn(move || {
                    while gate.pass() != Pass::End {
                        steps.fetch_add(1, Ordering::SeqCst);
                        std::thread::yield_now();
                    }
                    gate.leave();
                })
            })
            .collect();
        assert!(gate.wait_held(PATIENCE));
        assert_eq!(steps.load(Ordering::SeqCst), 0);
        for _ in 0..200 {
            let before = steps.load(Ordering::SeqCst);
            gate.set(RunState::Run);
            while steps.load(Ordering::SeqCst) == before {
                std::thread::yield_now();
            }
            gate.set(RunState::Hold);
            assert!(gate.wait_held(PATIENCE));
            let still = steps.load(Ordering::SeqCst);
            std::thread::yield_now();
            assert_eq!(steps.load(Ordering::SeqCst), still);
        }
        gate.set(RunState::Stop);
        gate.set(RunState::Run);
        assert!(gate.wait_empty(PATIENCE));
        assert_eq!(gate.pass(), Pass::End);
        for thread in threads {
            thread.join().unwrap();
        }
    }

    #[test]
    fn a_thread_that_was_held_is_told() {
        let gate = RunGate::default();
        gate.set(RunState::Run);
        assert_eq!(gate.pass(), Pass::Go);
        gate.set(RunState::Hold);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| gate.pass());
            gate.enter();
            assert!(gate.wait_held(PATIENCE));
            gate.set(RunState::Run);
            assert_eq!(waiting.join().unwrap(), Pass::GoAfterHold);
        });
    }

    #[test]
    fn waiting_for_threads_that_do_not_come_ends() {
        let gate = RunGate::default();
        assert!(gate.wait_held(Duration::ZERO) && gate.wait_empty(Duration::ZERO));
        gate.enter();
        assert!(!gate.wait_held(Duration::from_millis(1)));
        assert!(!gate.wait_empty(Duration::from_millis(1)));
    }
}
