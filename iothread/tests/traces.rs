//! What trace events say of a loop: enough to follow its rule, and who is meant.
#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::cell::RefCell;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;

use common::{Counting, Watchdog, add_polled, context_with, each_monitor, run_until, signal};
use iothread::PollSettings;
use iothread::policy::{Iteration, Policy, PolicyKind};
use iothread::trace::{TraceEvent, TraceSink};

/// Follows a loop's rule by its trace alone, and checks what the trace says it came to.
struct Follower {
    rule: RefCell<Option<Box<dyn Policy>>>,
    kind: PolicyKind,
    window_ns: RefCell<i64>,
    seen: RefCell<Seen>,
}

#[derive(Default)]
struct Seen {
    iterations: u32,
    intervals: u32,
    windows: u32,
    by_polling: Vec<u64>,
    by_descriptor: Vec<u64>,
    handlers: Vec<(u64, RawFd, String)>,
    settings: Vec<i64>,
}

impl Follower {
    fn new(kind: PolicyKind) -> Rc<Self> {
        Rc::new(Follower {
            rule: RefCell::default(),
            kind,
            window_ns: RefCell::new(0),
            seen: RefCell::default(),
        })
    }

    fn with(&self, f: impl FnOnce(&mut dyn Policy)) {
        f(&mut **self
            .rule
            .borrow_mut()
            .as_mut()
            .expect("settings came first"));
    }
}

fn slot(node: u64) -> u32 {
    node.try_into().unwrap()
}

impl TraceSink for Follower {
    fn event(&self, event: &TraceEvent<'_>) {
        let mut seen = self.seen.borrow_mut();
        match *event {
            TraceEvent::PollAdd { node, .. } => self.with(|rule| rule.list(slot(node))),
            TraceEvent::PollRemove { node, .. } => self.with(|rule| rule.unlist(slot(node))),
            TraceEvent::PollDispatch { node, revents, .. } => match revents {
                0 => seen.by_polling.push(node),
                _ => seen.by_descriptor.push(node),
            },
            TraceEvent::PollObserve {
                block_ns,
                dispatch_ns,
                active,
                ..
            } => {
                seen.iterations += 1;
                self.with(|rule| rule.observe(&Iteration::new(block_ns, dispatch_ns, active)));
            }
            TraceEvent::PollHandler { node, ns, .. } => {
                seen.intervals += 1;
                self.with(|rule| assert_eq!(rule.handler_ns(slot(node)), ns));
            }
            TraceEvent::PollGrow { old, new, .. } | TraceEvent::PollShrink { old, new, .. } => {
                seen.windows += 1;
                assert_eq!(self.window_ns.replace(new), old);
                self.with(|rule| assert_eq!(rule.window_ns(), new));
            }
            _ => {}
        }
    }

    fn handler(&self, node: u64, fd: RawFd, name: &str) {
        let handler = (node, fd, name.to_owned());
        self.seen.borrow_mut().handlers.push(handler);
    }

    fn settings(&self, settings: &PollSettings) {
        let mut rule = self.rule.borrow_mut();
        let rule = rule.get_or_insert_with(|| self.kind.build(settings));
        rule.reset(settings);
        *self.window_ns.borrow_mut() = rule.window_ns();
        self.seen.borrow_mut().settings.push(settings.poll_max_ns);
    }
}

#[test]
fn a_trace_tells_what_the_rule_saw_and_came_to() {
    let _watchdog = Watchdog::new("traces");
    const LONG_NS: i64 = 10_000_000_000;
    each_monitor(|setup| {
        for kind in [
            PolicyKind::Weighted,
            PolicyKind::PerHandler,
            PolicyKind::Context,
        ] {
            let ctx = context_with(setup, kind, LONG_NS);
            let early = Counting::new();
            let (early_fd, _) = add_polled(&ctx, "early", &early);
            let follower = Follower::new(kind);
            ctx.set_trace_sink(Some(follower.clone()));
            let late = Counting::new();
            let (late_fd, late_id) = add_polled(&ctx, "late", &late);
            for round in 1..=40 {
                let (handler, fd) = match round % 2 {
                    0 => (&early, &early_fd),
                    _ => (&late, &late_fd),
                };
                let before = handler.readable.get() + handler.poll_ready.get();
                handler.add_work(fd);
                run_until(&ctx, || {
                    handler.readable.get() + handler.poll_ready.get() > before
                });
                if round == 20 {
                    ctx.remote().set("poll-max-ns", LONG_NS / 2).unwrap();
                }
            }
            ctx.remove_handler(late_id);
            let seen = follower.seen.take();
            assert_eq!(seen.settings, [LONG_NS, LONG_NS / 2]);
            assert!(seen.iterations >= 40 && seen.windows >= 1, "{setup} {kind}");
            assert!(seen.intervals >= 40);
            let named = |name: &str| {
                let handlers = seen.handlers.iter();
                let found: Vec<_> = handlers.filter(|handler| handler.2 == name).collect();
                assert_eq!(found.len(), 1, "{name}");
                (found[0].0, found[0].1)
            };
            let count = |list: &[u64], node| list.iter().filter(|one| **one == node).count();
            for (name, fd, handler) in [("early", &early_fd, &early), ("late", &late_fd, &late)] {
                let (node, told_fd) = named(name);
                assert_eq!(told_fd, fd.as_raw_fd());
                let hits = count(&seen.by_polling, node);
                let others = count(&seen.by_descriptor, node);
                let expected = (handler.poll_ready.get(), handler.readable.get());
                assert_eq!((hits as u32, others as u32), expected, "{setup} {name}");
            }
        }
    });
}

#[test]
fn nothing_is_told_when_the_sink_is_taken_away() {
    let _watchdog = Watchdog::new("traces");
    each_monitor(|setup| {
        let ctx = context_with(setup, PolicyKind::Always, 1_000_000);
        let follower = Follower::new(PolicyKind::Always);
        ctx.set_trace_sink(Some(follower.clone()));
        ctx.set_trace_sink(None);
        let handler = Counting::new();
        let (fd, _) = add_polled(&ctx, "q", &handler);
        signal(&fd);
        run_until(&ctx, || handler.readable.get() == 1);
        let seen = follower.seen.take();
        assert_eq!(seen.iterations, 0);
        assert!(seen.handlers.iter().all(|handler| handler.2 != "q"));
    });
}
