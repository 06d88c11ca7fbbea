//! The rule `auto` on a real loop: it measures while there is work, and only then; what it does is
//! shown and can be replayed. How it chooses is tested where time is simulated.
#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::{Duration, Instant};

use common::{Counting, Watchdog, add_polled, context_with, each_monitor, run_until};
use iothread::policy::{Auto, Experiment, Iteration, Policy, PolicyKind};
use iothread::trace::{TraceEvent, TraceSink};
use iothread::{Context, PollSettings};

fn experiment(ctx: &Context) -> Option<Experiment> {
    ctx.remote().stats().experiment
}

/// Work without a pause for so long.
fn busy(ctx: &Context, handler: &Rc<Counting>, fd: &OwnedFd, time: Duration) {
    let until = Instant::now() + time;
    busy_until(ctx, handler, fd, || Instant::now() >= until);
}

/// Work without a pause until so many epochs more have been measured. Other work on the machine may
/// make that long: what interrupts an epoch ends it.
fn busy_epochs(ctx: &Context, handler: &Rc<Counting>, fd: &OwnedFd, epochs: u64) {
    let measured = || experiment(ctx).map_or(0, |now| now.epochs);
    let until = measured() + epochs;
    busy_until(ctx, handler, fd, || measured() >= until);
}

fn busy_until(ctx: &Context, handler: &Rc<Counting>, fd: &OwnedFd, end: impl Fn() -> bool) {
    while !end() {
        let done = || handler.readable.get() + handler.poll_ready.get();
        let before = done();
        handler.add_work(fd);
        run_until(ctx, || done() > before);
    }
}

const SHORT: Duration = Duration::from_millis(50);

#[test]
fn it_measures_while_there_is_work_and_stops_with_it() {
    let _watchdog = Watchdog::new("auto, busy and idle");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Auto, 32_768);
        assert_eq!(experiment(&ctx), None);
        let handler = Counting::new();
        let (fd, _) = add_polled(&ctx, "q", &handler);
        busy_epochs(&ctx, &handler, &fd, 4);
        let after = experiment(&ctx).unwrap();
        assert!((0..=32_768).contains(&after.incumbent_ns));
        // Three waits that timers end, each far longer than a load's.
        let ended = Rc::new(std::cell::Cell::new(0));
        let count = ended.clone();
        let timer = ctx.timer(move |_| count.set(count.get() + 1));
        for round in 1..=3 {
            timer.arm_after_ns(150_000_000);
            run_until(&ctx, || ended.get() == round);
        }
        let idle = experiment(&ctx).unwrap();
        assert!(
            idle.epochs <= after.epochs + 1,
            "{setup}: {after:?}, {idle:?}"
        );
        assert_eq!(
            ctx.remote().stats().window_ns,
            0,
            "{setup}: an idle loop polls"
        );
    });
}

#[test]
fn settings_change_under_it_and_polling_goes_off_and_on() {
    let _watchdog = Watchdog::new("auto, settings");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Auto, 1_000_000);
        let handler = Counting::new();
        let (fd, _) = add_polled(&ctx, "q", &handler);
        let remote = ctx.remote();
        busy(&ctx, &handler, &fd, SHORT);
        for (name, value) in [
            ("poll-max-ns", 5000),
            ("poll-alpha", 10_000),
            ("poll-alpha", 0),
        ] {
            remote.set(name, value).unwrap();
            busy(&ctx, &handler, &fd, SHORT);
            assert!(remote.stats().window_ns <= 5000, "{setup}");
        }
        assert!(remote.set("poll-alpha", 10_001).is_err());
        assert_eq!(remote.settings().poll_alpha_milli, 0);
        remote.set("poll-max-ns", 0).unwrap();
        busy(&ctx, &handler, &fd, SHORT);
        let off = experiment(&ctx).unwrap();
        busy(&ctx, &handler, &fd, SHORT);
        assert_eq!(experiment(&ctx).unwrap().epochs, off.epochs, "{setup}");
        assert!(!ctx.is_polling());
        remote.set("poll-max-ns", 32_768).unwrap();
        busy_epochs(&ctx, &handler, &fd, 2);
    });
}

/// A disk that moves away and back is a handler that is removed and added.
#[test]
fn handlers_come_and_go_under_it() {
    let _watchdog = Watchdog::new("auto, handlers");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Auto, 32_768);
        for round in 0..4 {
            let handler = Counting::new();
            let (fd, id) = add_polled(&ctx, "q", &handler);
            busy_epochs(&ctx, &handler, &fd, 2);
            ctx.remove_handler(id);
            let after = experiment(&ctx).unwrap();
            assert!(after.incumbent_ns <= 32_768, "{setup}: round {round}");
        }
    });
}

/// Follows the rule by the trace alone.
struct Follower {
    rule: RefCell<Option<Auto>>,
    trials: RefCell<u32>,
}

impl TraceSink for Follower {
    fn event(&self, event: &TraceEvent<'_>) {
        let mut rule = self.rule.borrow_mut();
        let rule = rule.as_mut().expect("settings come first");
        match *event {
            TraceEvent::PollObserve {
                block_ns,
                dispatch_ns,
                active,
                ..
            } => rule.observe(&Iteration::new(block_ns, dispatch_ns, active)),
            TraceEvent::PollReading { reading, .. } => rule.take(&reading),
            TraceEvent::PollTrial {
                incumbent_ns,
                window_ns,
                scanning,
                ..
            } => {
                let own = rule.experiment().unwrap();
                let tried_ns = own.trial_ns.unwrap_or(own.incumbent_ns);
                assert_eq!(
                    (own.incumbent_ns, tried_ns, own.scanning),
                    (incumbent_ns, window_ns, scanning)
                );
                *self.trials.borrow_mut() += 1;
            }
            _ => {}
        }
    }

    fn settings(&self, settings: &PollSettings) {
        let mut rule = self.rule.borrow_mut();
        match &mut *rule {
            Some(rule) => rule.reset(settings),
            None => *rule = Some(Auto::new(settings)),
        }
    }
}

#[test]
fn what_it_did_is_replayed_from_its_trace() {
    let _watchdog = Watchdog::new("auto, replay");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Auto, 32_768);
        let follower = Rc::new(Follower {
            rule: RefCell::default(),
            trials: RefCell::default(),
        });
        ctx.set_trace_sink(Some(follower.clone()));
        let handler = Counting::new();
        let (fd, _) = add_polled(&ctx, "q", &handler);
        busy_epochs(&ctx, &handler, &fd, 6);
        ctx.remote().set("poll-alpha", 1000).unwrap();
        busy_epochs(&ctx, &handler, &fd, 6);
        let trials = *follower.trials.borrow();
        assert!(trials >= 10, "{setup}: {trials} trials");
    });
}
