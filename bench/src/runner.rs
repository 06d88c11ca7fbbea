//! Takes the runs in turns: round after round, A B A B, so that a drift of the machine meets all
//! alike.
//!
//! What is measured is kept at once, so that Ctrl-C, or a VM that fails, loses only the turn it
//! strikes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::matrix::Run;
use crate::record::{Measurement, Results};

/// Set by Ctrl-C; whoever waits looks at it.
#[derive(Clone, Debug, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Is set by SIGINT and SIGTERM from now on. A second signal ends the program at once.
    pub fn on_signals() -> std::io::Result<Stop> {
        let stop = Stop::default();
        for signal in [libc::SIGINT, libc::SIGTERM] {
            signal_hook::flag::register_conditional_default(signal, stop.0.clone())?;
            signal_hook::flag::register(signal, stop.0.clone())?;
        }
        Ok(stop)
    }

    /// Whether to stop.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Asks to stop.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Why a turn gave no measurement.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// Nothing of this kind can succeed: end the whole measurement.
    #[error("{0}")]
    Fatal(String),
    /// This run failed; others may succeed.
    #[error("{0}")]
    Run(String),
}

/// What measures: a guest on a VMM.
pub trait Bed {
    /// Measures `runs` in one VM, which all of them can share ([`Run::same_vm`]), calling `each`
    /// with the result of each run in order. An error is that of the run whose turn it is; the
    /// runs after it are not measured in this turn.
    fn turn(
        &mut self,
        runs: &[&Run],
        stop: &Stop,
        each: &mut dyn FnMut(Measurement),
    ) -> Result<(), Failure>;

    /// How many runs may share a VM's life. 1 interleaves most finely.
    fn runs_a_turn(&self) -> usize {
        1
    }
}

/// Is told how far it went.
pub trait Progress {
    /// A turn begins with this run, the `done`-th of `all` measurements.
    fn begin(&mut self, round: Round, run: &Run, done: usize, all: usize);
    /// A run was measured.
    fn measured(&mut self, run: &Run, measurement: &Measurement);
    /// A run failed.
    fn failed(&mut self, run: &Run, message: &str);
    /// Nothing more comes.
    fn end(&mut self);
}

/// A round, for progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Round {
    /// Not counted.
    WarmUp,
    /// Counted, from 0.
    Measured(usize),
}

/// How it ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything was measured, or failed by itself.
    Complete,
    /// Ctrl-C.
    Interrupted,
    /// Measuring makes no sense any more.
    Fatal(String),
}

/// A run that fails this often in a row is given up.
const GIVE_UP: usize = 2;

/// Measures what `results` still lacks. After each measurement `keep` is called, to save it.
///
/// `warm_up` rounds come first and are not kept; a result that has measurements already, from a
/// run that was interrupted, gets them too.
pub fn execute(
    bed: &mut dyn Bed,
    results: &mut Results,
    warm_up: usize,
    stop: &Stop,
    progress: &mut dyn Progress,
    keep: &mut dyn FnMut(&Results),
) -> Outcome {
    let mut turns = Turns::of(results, bed.runs_a_turn());
    let rounds = results.rounds;
    let missing =
        |results: &Results, round: usize, run: usize| results.runs[run].rounds.len() <= round;
    let first =
        (0..rounds).find(|round| (0..results.runs.len()).any(|i| missing(results, *round, i)));
    let Some(first) = first else {
        progress.end();
        results.complete = true;
        return Outcome::Complete;
    };
    let count = |results: &Results| -> usize {
        results
            .runs
            .iter()
            .map(|r| rounds.saturating_sub(r.rounds.len()))
            .sum()
    };
    let all = count(results) + warm_up * results.runs.len();
    let mut done = 0;
    let order = std::iter::repeat_n(Round::WarmUp, warm_up)
        .chain((first..rounds).map(Round::Measured))
        .collect::<Vec<_>>();
    for round in order {
        for turn in turns.list.clone() {
            let mut left: Vec<usize> = turn
                .into_iter()
                .filter(|&i| !turns.given_up(i))
                .filter(|&i| match round {
                    Round::WarmUp => true,
                    Round::Measured(number) => missing(results, number, i),
                })
                .collect();
            // A run that fails ends its VM; those behind it get another.
            while let Some(&head) = left.first() {
                if stop.is_set() {
                    progress.end();
                    return Outcome::Interrupted;
                }
                progress.begin(round, &results.runs[head].run, done, all);
                let runs: Vec<Run> = left.iter().map(|&i| results.runs[i].run.clone()).collect();
                let mut finished = 0;
                let ended = bed.turn(&runs.iter().collect::<Vec<_>>(), stop, &mut |measurement| {
                    let Some(&index) = left.get(finished) else {
                        return;
                    };
                    finished += 1;
                    done += 1;
                    turns.failures[index] = 0;
                    progress.measured(&results.runs[index].run, &measurement);
                    if round != Round::WarmUp {
                        results.runs[index].rounds.push(Some(measurement));
                        keep(results);
                    }
                });
                left.drain(..finished);
                let message = match ended {
                    Ok(()) => "the guest ended before this job".to_string(),
                    Err(Failure::Run(message)) => message,
                    Err(Failure::Interrupted) => {
                        progress.end();
                        return Outcome::Interrupted;
                    }
                    Err(Failure::Fatal(message)) => {
                        progress.end();
                        return Outcome::Fatal(message);
                    }
                };
                if left.is_empty() {
                    break;
                }
                let index = left.remove(0);
                done += 1;
                turns.failures[index] += 1;
                progress.failed(&results.runs[index].run, &message);
                if let Round::Measured(number) = round {
                    results.runs[index].rounds.push(None);
                    results.runs[index]
                        .failures
                        .push(format!("round {}: {message}", number + 1));
                    keep(results);
                }
            }
        }
    }
    progress.end();
    results.complete = true;
    keep(results);
    Outcome::Complete
}

/// The turns of a round and how often each run failed in a row.
struct Turns {
    list: Vec<Vec<usize>>,
    failures: Vec<usize>,
}

impl Turns {
    fn of(results: &Results, runs_a_turn: usize) -> Turns {
        let mut list: Vec<Vec<usize>> = Vec::new();
        for (index, record) in results.runs.iter().enumerate() {
            let fits = list.iter_mut().find(|turn| {
                turn.len() < runs_a_turn.max(1) && results.runs[turn[0]].run.same_vm(&record.run)
            });
            match fits {
                Some(turn) => turn.push(index),
                None => list.push(vec![index]),
            }
        }
        Turns {
            list,
            failures: vec![0; results.runs.len()],
        }
    }

    fn given_up(&self, index: usize) -> bool {
        self.failures[index] >= GIVE_UP
    }
}

/// A folder for what a turn leaves lying about; it goes with it.
///
/// # Errors
/// There is none to be had, now or later.
pub fn scratch() -> Result<tempfile::TempDir, Failure> {
    tempfile::Builder::new()
        .prefix("pollux-bench-")
        .tempdir()
        .map_err(|e| Failure::Fatal(format!("no temporary directory: {e}; set TMPDIR")))
}

/// Sleeps until `deadline` in steps short enough for Ctrl-C.
pub fn sleep_until(deadline: Instant, stop: &Stop) -> Result<(), Failure> {
    loop {
        if stop.is_set() {
            return Err(Failure::Interrupted);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(Duration::from_millis(100)));
    }
}

#[cfg(test)]
mod tests;
