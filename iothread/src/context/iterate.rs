//! One iteration of the loop: poll, wait, dispatch, learn.

use super::{COMPLETIONS, Context, State};
use crate::clock::{now_ns, soonest};
use crate::policy::{Iteration, Policy};
use crate::trace::TraceEvent;

/// How long the loop sleeps when only idle bottom halves are scheduled.
const IDLE_BOTTOM_HALF_NS: i64 = 10_000_000;
/// Iterations without a system call after which epoll and ppoll are asked nevertheless: polling
/// that succeeds again and again would keep unlisted descriptors from being seen.
const MAX_UNSCANNED: u32 = 32;
/// How often intervals are shown to other threads, and readings made, while the loop does not sleep.
const PUBLISH_NS: i64 = 1_000_000;

/// Counts nested iterations, also when a callback panics.
struct Depth<'a>(&'a State);

impl<'a> Depth<'a> {
    fn enter(state: &'a State) -> Self {
        state.depth.set(state.depth.get() + 1);
        Depth(state)
    }
}

impl Drop for Depth<'_> {
    fn drop(&mut self) {
        self.0.depth.set(self.0.depth.get() - 1);
    }
}

impl State {
    /// Whether the ring or the monitor needs the kernel, or has results, before the loop polls.
    #[inline]
    pub(super) fn needs_enter(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.pending()) || self.monitor.pending()
    }

    /// Whether an outer iteration has events or ends of batches in hand that it has not come to.
    /// They are served here: this loop may be waiting for what they do.
    #[cold]
    fn outer_left_work(&self) -> bool {
        !self.ready.borrow().is_empty() || self.requests.has_touched()
    }

    /// How long the loop may sleep: 0 not at all, −1 for ever.
    fn timeout_ns(&self, blocking: bool, start_ns: i64) -> i64 {
        if !blocking || self.bottom_halves.any() || !self.shared.inbox.is_empty() {
            return 0;
        }
        if self.depth_is_nested() && self.outer_left_work() {
            return 0;
        }
        let timeout = if self.timers.next_ns() == i64::MAX {
            -1
        } else if start_ns != 0 {
            self.timers.timeout_ns(start_ns)
        } else {
            self.timers.timeout_ns(now_ns())
        };
        if self.bottom_halves.any_idle() {
            soonest(timeout, IDLE_BOTTOM_HALF_NS)
        } else {
            timeout
        }
    }

    /// Takes the settings that another thread has changed.
    #[cold]
    fn reload_settings(&self, generation: u32) {
        self.settings_seen.set(generation);
        let settings = self.shared.settings.load();
        self.max_ns.set(settings.poll_max_ns);
        let mut policy = self.policy.borrow_mut();
        policy.reset(&settings);
        self.window_ns.set(policy.window_ns());
        drop(policy);
        self.show_window();
        self.publish();
        if self.tracing.get() {
            self.tell_sink(|sink| sink.settings(&settings));
        }
    }

    /// See [`Context::poll`]. The numbers are the steps of the design.
    pub(super) fn iterate(&self, ctx: &Context, blocking: bool) -> bool {
        let _depth = Depth::enter(self);
        let generation = self.shared.settings.generation();
        if generation != self.settings_seen.get() {
            self.reload_settings(generation);
        }
        let polling = self.max_ns.get() != 0;
        let active_from = self.active.borrow().len();
        let start_ns = if polling { now_ns() } else { 0 };
        self.polled.set(false);
        let mut timeout = self.timeout_ns(blocking, start_ns);
        let no_wait = timeout == 0;

        if polling {
            self.try_poll_mode(&mut timeout, start_ns);
        } else if self.poll_started.get() && self.leave_poll_mode() {
            // Polling was switched off in the middle of it.
            timeout = 0;
        }
        if no_wait {
            self.look_once();
        }
        self.wait(timeout, no_wait);
        self.shared.notify.take();

        let (dispatch_ns, block_ns) = if polling {
            let dispatch_ns = now_ns();
            let block_ns = (dispatch_ns - start_ns).max(0);
            self.dispatch_ns.set(dispatch_ns);
            (dispatch_ns, block_ns)
        } else {
            (0, 0)
        };

        let mut progress = self.reap(ctx);
        self.take_inbox();
        progress |= self.run_bottom_halves(ctx);
        // Between the fences of `take_inbox` and the next clock read, which would wait for it.
        let counters = &self.shared.counters;
        counters.iterations.add(1);
        if polling {
            counters.block_histogram.add_one(block_ns.cast_unsigned());
            if self.polled.get() {
                counters.poll_ns.add(block_ns.cast_unsigned());
            }
        }
        progress |= self.dispatch_ready(ctx, dispatch_ns);
        if polling {
            self.observe(block_ns, dispatch_ns, active_from);
        }
        if self.timers.next_ns() != i64::MAX {
            // A timer that became due during the callbacks makes the next timeout 0.
            let now = if polling { dispatch_ns } else { now_ns() };
            progress |= self.run_timers(ctx, now);
        }
        progress
    }

    /// Steps 5 to 7: announces that the loop may sleep, looks once more, and waits.
    fn wait(&self, timeout: i64, no_wait: bool) {
        let mut timeout = timeout;
        let mut announced = false;
        if timeout != 0 {
            announced = true;
            if self.shared.notify.about_to_sleep() {
                timeout = 0;
            }
        }
        if timeout != 0 {
            let timer_ns = self.timers.next_ns();
            let hit = self.poll_started.get() && self.leave_poll_mode();
            if hit || self.bottom_halves.any() {
                timeout = 0;
            } else if self.timers.next_ns() != timer_ns {
                // A callback has just armed an earlier one.
                timeout = soonest(timeout, self.timers.timeout_ns(now_ns()));
            }
        }
        if timeout != 0 {
            self.shared.counters.blocks.add(1);
            self.publish_before_sleep();
        }
        let result = if self.must_scan {
            self.wait_scanning(timeout, no_wait)
        } else if timeout != 0 || self.needs_enter() {
            self.monitor.wait(timeout, &mut |_, _| {})
        } else {
            Ok(())
        };
        if announced {
            self.shared.notify.awake();
        }
        match result {
            Ok(()) => {
                if let Some(ring) = &self.ring {
                    self.shared.counters.enters.set(ring.enters());
                }
            }
            Err(error) => self.monitor_failed(&error),
        }
    }

    /// The wait of epoll and ppoll, with the ring beside them.
    fn wait_scanning(&self, timeout: i64, no_wait: bool) -> std::io::Result<()> {
        let mut timeout = timeout;
        if let Some(ring) = &self.ring {
            if ring.has_unsubmitted() || ring.kernel_has_work() {
                ring.submit()?;
            }
            if ring.has_completions() {
                timeout = 0;
            }
        }
        let unscanned = self.unscanned.get() + 1;
        // With handlers that cannot be polled, or an iteration that may not wait, nobody else
        // looks at the descriptors.
        if timeout == 0 && !no_wait && !self.monitor.polling_starves() && unscanned < MAX_UNSCANNED
        {
            self.unscanned.set(unscanned);
            return Ok(());
        }
        self.unscanned.set(0);
        self.monitor.wait(timeout, &mut |index, revents| {
            self.fd_ready(index, revents);
        })?;
        // Completion work that the ring's descriptor told of.
        match &self.ring {
            Some(ring) if ring.kernel_has_work() => ring.submit(),
            _ => Ok(()),
        }
    }

    /// Step 10: the policy learns from the iteration.
    fn observe(&self, block_ns: i64, dispatch_ns: i64, active_from: usize) {
        let mut active = self.active.borrow_mut();
        let mut policy = self.policy.borrow_mut();
        let slots = &active[active_from..];
        policy.observe(&Iteration::new(block_ns, dispatch_ns, slots));
        self.trace(|ctx| TraceEvent::PollObserve {
            ctx,
            block_ns,
            dispatch_ns,
            active: slots,
        });
        if self.tracing.get() {
            for &slot in slots {
                let ns = policy.handler_ns(slot);
                let node = slot.into();
                self.trace(|ctx| TraceEvent::PollHandler { ctx, node, ns });
            }
        }
        let window_ns = policy.window_ns();
        active.truncate(active_from);
        drop((active, policy));
        self.set_window(window_ns);
        if dispatch_ns - self.published_ns.get() >= PUBLISH_NS {
            self.housekeeping(dispatch_ns);
            self.measure(dispatch_ns);
        }
    }

    /// What is due once a millisecond.
    #[cold]
    fn housekeeping(&self, now_ns: i64) {
        self.published_ns.set(now_ns);
        self.publish();
        self.cool_handlers(now_ns);
    }

    /// Shows intervals before the loop sleeps: other threads may look for long. Only those of
    /// handlers that had work since the last [`Self::housekeeping`]; the others have aged by less
    /// than that time.
    pub(super) fn publish_before_sleep(&self) {
        if self.max_ns.get() == 0 || cfg!(iothread_no_stats) {
            return;
        }
        let now_ns = self.dispatch_ns.get();
        if now_ns - self.published_ns.get() >= PUBLISH_NS {
            self.housekeeping(now_ns);
        } else {
            self.publish_hot();
        }
    }

    /// Shows all intervals to other threads, also those that age without an event of their own.
    /// Does nothing in the middle of what it would read, where a trace sink may call it.
    #[cold]
    pub(crate) fn publish(&self) {
        let (Ok(policy), Ok(nodes)) = (self.policy.try_borrow(), self.nodes.try_borrow()) else {
            return;
        };
        for node in nodes.iter().flatten() {
            let ns = policy.handler_ns(node.index);
            node.stats.get().ns.set(ns.cast_unsigned());
        }
        self.publish_completions(&**policy);
    }

    fn publish_completions(&self, policy: &dyn Policy) {
        let ns = policy.handler_ns(COMPLETIONS).cast_unsigned();
        self.completions.get().ns.set(ns);
    }

    fn publish_hot(&self) {
        if let (Ok(policy), Ok(list)) = (self.policy.try_borrow(), self.poll_list.try_borrow()) {
            for node in list.hot() {
                let ns = policy.handler_ns(node.index);
                node.stats.get().ns.set(ns.cast_unsigned());
            }
            self.publish_completions(&**policy);
        }
    }

    /// What a trace tells of completions: 0 if polling found them.
    pub(crate) fn completion_revents(&self) -> u32 {
        if self.polled.get() {
            0
        } else {
            u32::from(libc::POLLIN.cast_unsigned())
        }
    }

    /// A request of ours completed in this iteration.
    pub(crate) fn note_completion(&self) {
        self.last_completion_ns.set(self.dispatch_ns.get());
    }
}
