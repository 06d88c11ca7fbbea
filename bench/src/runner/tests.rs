use proptest::prelude::*;

use super::*;
use crate::matrix::{self, Tool};
use crate::record::Conditions;

/// A bed that answers from a table: what happens to the n-th attempt of a run.
#[derive(Default)]
struct Table {
    runs_a_turn: usize,
    /// Attempts by run, in the order made.
    order: Vec<Run>,
    vms: usize,
    /// Attempts, by number, that fail.
    failing: Vec<usize>,
    /// Attempt at which Ctrl-C strikes.
    interrupt: Option<usize>,
    fatal: Option<usize>,
}

impl Bed for Table {
    fn turn(
        &mut self,
        runs: &[&Run],
        stop: &Stop,
        each: &mut dyn FnMut(Measurement),
    ) -> Result<(), Failure> {
        self.vms += 1;
        for run in runs {
            let attempt = self.order.len();
            self.order.push((*run).clone());
            if self.interrupt == Some(attempt) {
                stop.set();
                return Err(Failure::Interrupted);
            }
            if self.fatal == Some(attempt) {
                return Err(Failure::Fatal("no /dev/kvm".into()));
            }
            if self.failing.contains(&attempt) {
                return Err(Failure::Run(format!("attempt {attempt} failed")));
            }
            each(Measurement {
                iops: attempt as f64 + 1.0,
                ..Measurement::default()
            });
        }
        Ok(())
    }

    fn runs_a_turn(&self) -> usize {
        self.runs_a_turn
    }
}

#[derive(Default)]
struct Silent {
    last: (usize, usize),
    ended: usize,
}

impl Progress for Silent {
    fn begin(&mut self, _: Round, _: &Run, done: usize, all: usize) {
        self.last = (done, all);
    }
    fn measured(&mut self, _: &Run, _: &Measurement) {}
    fn failed(&mut self, _: &Run, _: &str) {}
    fn end(&mut self) {
        self.ended += 1;
    }
}

fn results(matrix: &str, rounds: usize) -> Results {
    let runs = matrix::parse(&[matrix], Tool::Guest).expect("a matrix");
    Results::new(Tool::Guest, Conditions::default(), rounds, runs)
}

fn go(bed: &mut Table, results: &mut Results, warm_up: usize) -> Outcome {
    let mut silent = Silent::default();
    let stop = Stop::default();
    let outcome = execute(bed, results, warm_up, &stop, &mut silent, &mut |_| {});
    assert_eq!(silent.ended, 1);
    assert!(silent.last.0 <= silent.last.1);
    outcome
}

fn depths(bed: &Table) -> Vec<u32> {
    bed.order.iter().map(|r| r.iodepth).collect()
}

#[test]
fn turns_are_interleaved_and_warm_up_is_not_kept() {
    let mut bed = Table::default();
    let mut r = results("iodepth=1,2,3", 2);
    assert_eq!(go(&mut bed, &mut r, 1), Outcome::Complete);
    assert_eq!(depths(&bed), [1, 2, 3, 1, 2, 3, 1, 2, 3]);
    assert!(r.complete);
    let kept: Vec<Vec<f64>> = r
        .runs
        .iter()
        .map(|x| x.measurements().map(|m| m.iops).collect())
        .collect();
    assert_eq!(kept, [[4.0, 7.0], [5.0, 8.0], [6.0, 9.0]]);
}

#[test]
fn loads_share_a_vm_where_the_bed_can() {
    let mut bed = Table {
        runs_a_turn: 10,
        ..Table::default()
    };
    let mut r = results("poll-weight=2,3 iodepth=1,2", 2);
    go(&mut bed, &mut r, 0);
    assert_eq!((bed.vms, bed.order.len()), (4, 8));
}

#[test]
fn a_failure_costs_its_own_turn_only() {
    let mut bed = Table {
        runs_a_turn: 10,
        failing: vec![1],
        ..Table::default()
    };
    let mut r = results("iodepth=1,2,3", 2);
    assert_eq!(go(&mut bed, &mut r, 0), Outcome::Complete);
    assert_eq!(depths(&bed), [1, 2, 3, 1, 2, 3]);
    assert_eq!(r.runs[1].rounds[0], None);
    assert!(r.runs[1].rounds[1].is_some());
    assert_eq!(r.runs[1].failures, ["round 1: attempt 1 failed"]);
    assert!(r.runs[2].rounds.iter().all(Option::is_some));
    assert_eq!(bed.vms, 3);
}

#[test]
fn a_run_that_fails_twice_is_given_up() {
    let mut bed = Table {
        failing: vec![0, 2],
        ..Table::default()
    };
    let mut r = results("iodepth=1,2", 4);
    assert_eq!(go(&mut bed, &mut r, 0), Outcome::Complete);
    assert_eq!(depths(&bed), [1, 2, 1, 2, 2, 2]);
    assert_eq!(r.runs[0].failures.len(), 2);
}

#[test]
fn an_interruption_keeps_what_was_measured_and_can_be_resumed() {
    let mut bed = Table {
        interrupt: Some(3),
        ..Table::default()
    };
    let mut r = results("iodepth=1,2", 3);
    assert_eq!(go(&mut bed, &mut r, 0), Outcome::Interrupted);
    assert!(!r.complete);
    assert_eq!(
        r.runs.iter().map(|x| x.rounds.len()).collect::<Vec<_>>(),
        [2, 1]
    );
    let mut bed = Table::default();
    assert_eq!(go(&mut bed, &mut r, 0), Outcome::Complete);
    assert_eq!(depths(&bed), [2, 1, 2]);
    assert!(r.complete);
    let mut nothing = Table::default();
    let stop = Stop::default();
    execute(
        &mut nothing,
        &mut r,
        1,
        &stop,
        &mut Silent::default(),
        &mut |_| {},
    );
    assert_eq!(nothing.vms, 0, "a complete result is not measured again");
}

#[test]
fn what_cannot_succeed_ends_at_once() {
    let mut bed = Table {
        fatal: Some(0),
        ..Table::default()
    };
    let mut r = results("iodepth=1,2", 3);
    assert_eq!(
        go(&mut bed, &mut r, 1),
        Outcome::Fatal("no /dev/kvm".into())
    );
    assert_eq!(bed.order.len(), 1);
}

#[test]
fn a_signal_sets_the_stop() {
    let stop = Stop::on_signals().expect("handlers");
    assert!(!stop.is_set());
    // SAFETY: raise has no preconditions; the signal's handler is the one just installed.
    unsafe { libc::raise(libc::SIGINT) };
    assert!(stop.is_set());
    let deadline = Instant::now() + Duration::from_secs(60);
    assert!(matches!(
        sleep_until(deadline, &stop),
        Err(Failure::Interrupted)
    ));
}

proptest! {
    /// Whatever fails and whenever it is interrupted: resuming fills every round that has not
    /// failed, each attempt is kept once, and no two runs are more than a round apart.
    #[test]
    fn every_round_is_filled_once(
        rounds in 1usize..5,
        runs_a_turn in 1usize..5,
        failing in proptest::collection::vec(0usize..30, 0..4),
        interrupt in proptest::option::of(0usize..20),
    ) {
        let mut r = results("poll-weight=2,3 iodepth=1,2,3", rounds);
        let mut bed = Table { runs_a_turn, failing, interrupt, ..Table::default() };
        let first = go(&mut bed, &mut r, 0);
        for record in &r.runs {
            prop_assert!(record.rounds.len() <= rounds);
            let failed = record.rounds.iter().filter(|m| m.is_none()).count();
            prop_assert_eq!(failed, record.failures.len());
            let gave_up = record.failures.len() >= GIVE_UP;
            prop_assert!(gave_up || first == Outcome::Interrupted || record.rounds.len() == rounds);
        }
        let mut again = Table { runs_a_turn, ..Table::default() };
        prop_assert_eq!(go(&mut again, &mut r, 0), Outcome::Complete);
        prop_assert!(r.runs.iter().all(|x| x.rounds.len() == rounds));
        let attempts = bed.order.len() + again.order.len();
        let kept: usize = r.runs.iter().map(|x| x.rounds.len()).sum();
        prop_assert_eq!(kept + usize::from(first == Outcome::Interrupted), attempts);
    }
}
