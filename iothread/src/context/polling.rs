//! Poll mode: asking the handlers instead of the kernel, for as long as the policy says.

use std::os::fd::RawFd;
use std::rc::Rc;

use super::{COMPLETIONS, Context, State};
use crate::clock::{now_ns, soonest};
use crate::handler::{EventHandler, NOT_LISTED, Node};
use crate::trace::TraceEvent;

/// A handler that was not dispatched for so long leaves the poll list, unless configured otherwise.
pub(super) const IDLE_NS: i64 = 7_000_000_000;
/// Idle handlers are looked for this many times in that time.
const IDLE_CHECKS: i64 = 32;

/// A handler that was not dispatched for so long is asked less often.
const COLD_NS: i64 = 1_000_000;
/// Each pass asks this part of the cold handlers, and at least so many.
const COLD_PART: usize = 32;
const COLD_LEAST: usize = 8;

/// A place on the poll list. Holds what a pass needs, next to each other.
struct PollEntry {
    /// The handler of `node`; without the way through its `Rc`.
    handler: *const dyn EventHandler,
    node: Rc<Node>,
}

impl PollEntry {
    #[inline]
    fn handler(&self) -> &dyn EventHandler {
        // SAFETY: points into `node.handler`, which the node keeps and never changes.
        unsafe { &*self.handler }
    }
}

/// The handlers that are polled. Those before `hot` had work within the last [`COLD_NS`] and are
/// asked in every pass. The others take turns: with hundreds of idle disks beside a busy one, asking
/// each of them every time would cost more than the busy one's work. Before the loop sleeps, and
/// in iterations that do not poll, all are asked.
#[derive(Default)]
pub(super) struct PollList {
    entries: Vec<PollEntry>,
    hot: usize,
    /// Of the cold ones, who is next.
    turn: usize,
}

impl PollList {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Those that had work of late.
    pub(super) fn hot(&self) -> impl Iterator<Item = &Node> {
        self.entries[..self.hot].iter().map(|entry| &*entry.node)
    }

    fn swap(&mut self, a: usize, b: usize) {
        self.entries.swap(a, b);
        for place in [a, b] {
            let listed = &self.entries[place].node.listed;
            listed.set(u32::try_from(place).unwrap_or(NOT_LISTED));
        }
    }

    fn add(&mut self, node: &Rc<Node>) {
        let place = self.entries.len();
        node.listed.set(u32::try_from(place).unwrap_or(NOT_LISTED));
        self.entries.push(PollEntry {
            handler: Rc::as_ptr(&node.handler),
            node: Rc::clone(node),
        });
        self.heat(place);
    }

    fn remove(&mut self, node: &Node) -> Option<PollEntry> {
        let mut place = node.listed.get() as usize;
        if place >= self.entries.len() {
            return None;
        }
        if place < self.hot {
            self.hot -= 1;
            self.swap(place, self.hot);
            place = self.hot;
        }
        self.swap(place, self.entries.len() - 1);
        node.listed.set(NOT_LISTED);
        self.entries.pop()
    }

    /// The one in `place` has work: it is asked every time from now on.
    fn heat(&mut self, place: usize) {
        if place >= self.hot {
            self.swap(place, self.hot);
            self.hot += 1;
        }
    }

    /// Lets those rest that have had no work for a while.
    fn cool(&mut self, now_ns: i64) {
        let mut place = 0;
        while place < self.hot {
            let last_ns = self.entries[place].node.last_dispatch_ns.get();
            if now_ns - last_ns >= COLD_NS {
                self.hot -= 1;
                self.swap(place, self.hot);
            } else {
                place += 1;
            }
        }
    }

    /// The cold ones whose turn it is.
    fn next_cold(&mut self) -> std::ops::Range<usize> {
        let cold = self.entries.len() - self.hot;
        let many = (cold / COLD_PART).max(COLD_LEAST);
        if cold <= many {
            return self.hot..self.entries.len();
        }
        if self.turn >= cold {
            self.turn = 0;
        }
        let from = self.turn;
        let to = (from + many).min(cold);
        self.turn = to;
        self.hot + from..self.hot + to
    }
}

impl State {
    /// Puts a handler on the poll list; in poll mode its notifications go off.
    pub(super) fn list(&self, node: &Rc<Node>, revents: u32) {
        let Ok(mut list) = self.poll_list.try_borrow_mut() else {
            // In the middle of a pass; its next event lists it.
            return;
        };
        list.add(node);
        drop(list);
        self.list_slot(node.index, node.fd, revents);
        if self.poll_started.get() && !node.begun.replace(true) {
            node.handler.poll_begin();
        }
    }

    /// The policy's side of joining the list.
    fn list_slot(&self, slot: u32, fd: RawFd, revents: u32) {
        self.policy.borrow_mut().list(slot);
        self.shared.handlers.slot(slot).polled.set(1);
        self.trace(|ctx| TraceEvent::PollAdd {
            ctx,
            node: slot.into(),
            fd,
            revents,
        });
    }

    fn unlist_slot(&self, slot: u32, fd: RawFd) {
        let window_ns = {
            let mut policy = self.policy.borrow_mut();
            policy.unlist(slot);
            policy.window_ns()
        };
        let counters = self.shared.handlers.slot(slot);
        counters.polled.set(0);
        counters.ns.set(0);
        self.trace(|ctx| TraceEvent::PollRemove {
            ctx,
            node: slot.into(),
            fd,
        });
        // After the event that explains it.
        self.set_window(window_ns);
    }

    /// The completion ring joins the list, if it is not on it.
    pub(crate) fn list_completions(&self) {
        if !self.completions_listed.replace(true) {
            self.list_slot(COMPLETIONS, self.ring().fd(), 0);
        }
    }

    /// Takes the window that the policy has come to.
    #[inline]
    pub(super) fn set_window(&self, new: i64) {
        let old = self.window_ns.get();
        if new != old {
            self.window_changed(old, new);
        }
    }

    /// Shows other threads the window that is in effect.
    pub(super) fn show_window(&self) {
        let polling = self.max_ns.get() != 0;
        let window_ns = polling.then(|| self.window_ns.get());
        self.shared.counters.set_window(window_ns);
    }

    fn window_changed(&self, old: i64, new: i64) {
        self.window_ns.set(new);
        self.show_window();
        self.trace(|ctx| {
            if new > old {
                TraceEvent::PollGrow { ctx, old, new }
            } else {
                TraceEvent::PollShrink { ctx, old, new }
            }
        });
    }

    /// Takes a handler off the poll list; does not touch its notifications.
    pub(super) fn unlist(&self, node: &Rc<Node>) {
        if !node.is_listed() {
            return;
        }
        let Ok(mut list) = self.poll_list.try_borrow_mut() else {
            // A pass is walking the list; it looks again when it is done.
            self.list_stale.set(true);
            return;
        };
        let entry = list.remove(node);
        drop(list);
        self.unlist_slot(node.index, node.fd);
        drop(entry);
    }

    fn purge_deleted(&self) {
        self.list_stale.set(false);
        loop {
            let list = self.poll_list.borrow();
            let deleted = list.entries.iter().find(|entry| entry.node.deleted.get());
            let Some(node) = deleted.map(|entry| Rc::clone(&entry.node)) else {
                return;
            };
            drop(list);
            self.unlist(&node);
        }
    }

    #[inline]
    pub(crate) fn mark_active(&self, slot: u32) {
        self.active.borrow_mut().push(slot);
    }

    /// The handler has work, as its descriptor or polling found.
    #[inline]
    pub(super) fn note_work(&self, node: &Node, dispatch_ns: i64) {
        node.last_dispatch_ns.set(dispatch_ns);
        if let Ok(mut list) = self.poll_list.try_borrow_mut() {
            list.heat(node.listed.get() as usize);
        }
    }

    /// Lets handlers rest that had no work for a while.
    pub(super) fn cool_handlers(&self, now_ns: i64) {
        if let Ok(mut list) = self.poll_list.try_borrow_mut() {
            list.cool(now_ns);
        }
    }

    /// Asks the handlers in `places`. True if one has work.
    #[inline]
    fn ask(&self, entries: &[PollEntry]) -> bool {
        let nested = self.depth_is_nested();
        let mut hit = false;
        for entry in entries {
            // A handler that is in the middle of its poll_ready would be found for ever.
            if nested && entry.node.busy.get() {
                continue;
            }
            if entry.handler().poll() && !entry.node.deleted.get() {
                entry.node.poll_hit.set(true);
                self.queue_ready(&entry.node, 0);
                hit = true;
            }
        }
        hit
    }

    /// One pass over the listed handlers, of the cold ones those whose turn it is. True if one has
    /// work.
    #[inline]
    fn pass(&self) -> bool {
        let cold = self.poll_list.borrow_mut().next_cold();
        let hit = {
            let list = self.poll_list.borrow();
            // Both, in any case: a busy handler must not hide the others.
            self.ask(&list.entries[..list.hot]) | self.ask(&list.entries[cold])
        };
        if self.list_stale.get() {
            self.purge_deleted();
        }
        hit
    }

    /// One pass over all listed handlers. True if one has work.
    fn full_pass(&self) -> bool {
        let hit = {
            let list = self.poll_list.borrow();
            self.ask(&list.entries)
        };
        if self.list_stale.get() {
            self.purge_deleted();
        }
        hit
    }

    /// Calls `poll_begin` or `poll_end` of the listed handlers that need it.
    fn switch(&self, on: bool) {
        self.poll_started.set(on);
        {
            let list = self.poll_list.borrow();
            for entry in &list.entries {
                let node = &entry.node;
                if node.begun.get() == on || node.busy.get() || node.deleted.get() {
                    continue;
                }
                node.begun.set(on);
                if on {
                    entry.handler().poll_begin();
                } else {
                    entry.handler().poll_end();
                }
            }
        }
        if self.list_stale.get() {
            self.purge_deleted();
        }
    }

    /// Switches notifications on again and asks every handler once more, since its last answer
    /// may be older than the work that was not notified. True if there is work.
    pub(super) fn leave_poll_mode(&self) -> bool {
        if !self.poll_started.get() {
            return false;
        }
        self.switch(false);
        self.full_pass()
    }

    /// One pass in an iteration that neither polls nor waits: with notifications off, nothing
    /// else would see the listed handlers.
    pub(super) fn look_once(&self) -> bool {
        self.poll_started.get() && self.full_pass()
    }

    /// Polls for as long as the policy and `timeout` allow. With work found, or the monitor in
    /// need of attention, `timeout` becomes 0; otherwise it shrinks by the time spent, so that
    /// polling never delays a timer.
    pub(super) fn try_poll_mode(&self, timeout: &mut i64, start_ns: i64) {
        if self.poll_list.borrow().is_empty() && !self.completions_listed.get() {
            return;
        }
        if start_ns >= self.idle_check_ns.get() && self.remove_idle(start_ns) {
            *timeout = 0;
        }
        let window_ns = soonest(*timeout, self.window_ns.get());
        if window_ns == 0 || self.monitor.polling_starves() {
            return;
        }
        // Also when there is something to do already: a guest that is not told otherwise by now
        // notifies for every request, and a loop that always has something to do would never
        // come to poll.
        if !self.poll_started.get() {
            self.switch(true);
        }
        // Submit first, then poll for what comes of it: going to sleep with the submission would
        // leave no window for the very requests it was learned from.
        if self.needs_enter() && !self.submit_before_polling() {
            *timeout = 0;
            // With notifications off, nobody else looks at the handlers.
            if self.pass() {
                self.shared.counters.poll_hits.add(1);
            }
            return;
        }
        self.trace(|ctx| TraceEvent::RunPollHandlersBegin {
            ctx,
            max_ns: window_ns,
            timeout: *timeout,
        });
        let counters = &self.shared.counters;
        let (progress, elapsed_ns) = loop {
            if self.pass() {
                break (true, None);
            }
            if self.needs_enter() || self.shared.notify.is_notified() {
                break (true, None);
            }
            let elapsed_ns = now_ns() - start_ns;
            if elapsed_ns >= window_ns {
                break (false, Some(elapsed_ns));
            }
        };
        if progress {
            *timeout = 0;
            counters.poll_hits.add(1);
        } else {
            let elapsed_ns = elapsed_ns.unwrap_or(0);
            counters.poll_misses.add(1);
            counters.poll_ns.add(elapsed_ns.cast_unsigned());
            counters.vain_ns.add(elapsed_ns.cast_unsigned());
            if *timeout > 0 {
                *timeout = (*timeout - elapsed_ns).max(0);
            }
        }
        self.polled.set(progress);
        self.trace(|ctx| TraceEvent::RunPollHandlersEnd {
            ctx,
            progress,
            timeout: *timeout,
        });
    }

    /// Makes watches and submits requests. False if there is something to do already.
    fn submit_before_polling(&self) -> bool {
        let has_completions = || {
            self.ring
                .as_ref()
                .is_some_and(|ring| ring.has_completions())
        };
        if has_completions() {
            return false;
        }
        let result = if self.must_scan {
            self.ring.as_ref().map_or(Ok(()), |ring| ring.submit())
        } else {
            self.monitor.wait(0, &mut |_, _| {})
        };
        if let Err(error) = result {
            self.monitor_failed(&error);
            return false;
        }
        !has_completions()
    }

    /// Takes the handlers off the list that were not dispatched for [`IDLE_NS`]: they would slow
    /// the busy ones down in every pass. Their descriptors, notified again, bring them back.
    /// True if one of them has work after all.
    #[cold]
    fn remove_idle(&self, now_ns: i64) -> bool {
        self.idle_check_ns
            .set(now_ns.saturating_add(self.idle_ns / IDLE_CHECKS));
        let is_idle = |last_ns: i64| now_ns >= last_ns.saturating_add(self.idle_ns);
        let idle: Vec<Rc<Node>> = {
            let list = self.poll_list.borrow();
            let nodes = list.entries.iter().map(|entry| &entry.node);
            nodes
                .filter(|node| {
                    is_idle(node.last_dispatch_ns.get()) && !node.queued.get() && !node.busy.get()
                })
                .map(Rc::clone)
                .collect()
        };
        let mut hit = false;
        for node in idle {
            self.unlist(&node);
            if node.begun.replace(false) {
                node.handler.poll_end();
                hit |= self.ask_again(&node);
            }
        }
        if self.completions_listed.get() && is_idle(self.last_completion_ns.get()) {
            self.completions_listed.set(false);
            self.unlist_slot(COMPLETIONS, self.ring().fd());
        }
        hit
    }

    /// Asks a handler whose notifications have just been switched on.
    fn ask_again(&self, node: &Rc<Node>) -> bool {
        let hit = !node.deleted.get() && node.handler.poll();
        if hit {
            node.poll_hit.set(true);
            self.queue_ready(node, 0);
        }
        hit
    }

    /// Runs `poll_ready`. Meanwhile nested loops do not poll the handler.
    pub(super) fn run_poll_ready(&self, ctx: &Context, node: &Rc<Node>) {
        if node.busy.replace(true) {
            // A nested loop came here by a hit from before; the outer call does the work.
            return;
        }
        node.handler.poll_ready(ctx);
        node.busy.set(false);
        if node.deleted.get() {
            return;
        }
        // A nested loop may have switched poll mode without this handler.
        let on = self.poll_started.get();
        if node.is_listed() && node.begun.get() != on {
            node.begun.set(on);
            if on {
                node.handler.poll_begin();
            } else {
                node.handler.poll_end();
                self.ask_again(node);
            }
        }
    }
}
