//! Requests of other code on the loop's ring, and their completions.
//!
//! `user_data` carries a kind in its top byte. A request of a [`Completer`] carries the
//! completer's number (24 bits) and the owner's token (32 bits), so that a request costs no
//! allocation and no table entry.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::RawFd;
use std::rc::Rc;

use io_uring::opcode;
use io_uring::squeue::Entry;

use crate::buffers::BufferSlot;
use crate::context::{COMPLETIONS, Context, State};
use crate::trace::TraceEvent;

/// Takes the completions of requests that its owner put on the ring.
pub trait Completer {
    /// One request has completed. `token` is what was given to [`Context::add_sqe`], `result` what
    /// the system call would have returned: a count, or a negative errno.
    fn complete(&self, ctx: &Context, token: u32, result: i32);

    /// The completions at hand are done; called once after each batch that had some of ours. The
    /// place to publish a used index and raise one interrupt.
    fn batch_end(&self, _ctx: &Context) {}
}

/// Names a [`Completer`] of one context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CompleterId(u32);

/// Names a request made by [`Context::add_sqe_once`], for cancelling it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SqeId {
    index: u32,
    generation: u32,
}

/// Composition of `user_data`.
pub(crate) struct UserData;

const KIND_SHIFT: u32 = 56;
const KIND_COMPLETER: u64 = 0;
const KIND_NODE: u64 = 1;
const KIND_ONCE: u64 = 2;
const KIND_IGNORE: u64 = 3;

impl UserData {
    /// A request whose completion tells nothing.
    pub(crate) const IGNORE: u64 = KIND_IGNORE << KIND_SHIFT;

    /// The watch of a handler.
    pub(crate) fn node(index: u32) -> u64 {
        (KIND_NODE << KIND_SHIFT) | u64::from(index)
    }

    #[inline]
    fn completer(id: CompleterId, token: u32) -> u64 {
        (KIND_COMPLETER << KIND_SHIFT) | (u64::from(id.0) << 32) | u64::from(token)
    }

    /// Whether a request with this `user_data` refers to memory of ours or of a user.
    pub(crate) fn is_counted(user_data: u64) -> bool {
        user_data >> KIND_SHIFT != KIND_IGNORE
    }

    fn once(id: SqeId) -> u64 {
        // 24 bits of the generation tell one user of the entry from the next.
        let generation = u64::from(id.generation & 0xff_ffff);
        (KIND_ONCE << KIND_SHIFT) | (generation << 32) | u64::from(id.index)
    }
}

struct CompleterEntry {
    /// None after it was unregistered; the entry stays until its requests have completed.
    completer: Option<Rc<dyn Completer>>,
    in_flight: u32,
    /// On `touched`.
    touched: bool,
}

type Once = Box<dyn FnOnce(&Context, i32)>;

#[derive(Default)]
struct OnceEntry {
    generation: u32,
    done: Option<Once>,
}

/// The owners of requests in flight.
#[derive(Default)]
pub(crate) struct Requests {
    completers: RefCell<Vec<CompleterEntry>>,
    /// Completers whose `batch_end` is due.
    touched: RefCell<Vec<CompleterId>>,
    /// Changes with every registration, so that a cached completer is not used after it.
    epoch: Cell<u32>,
    onces: RefCell<Vec<OnceEntry>>,
    free_onces: RefCell<Vec<u32>>,
    in_flight: Cell<u32>,
    /// Slots of the registered files that are taken; empty before the first.
    file_slots: RefCell<Vec<bool>>,
    /// Slots of the registered buffers; empty before the first.
    pub(crate) buffer_slots: RefCell<Vec<BufferSlot>>,
}

/// Slots for registered files on each ring.
pub const FILE_SLOTS: u32 = 512;

impl Requests {
    /// Requests whose completion is still to come.
    pub(crate) fn in_flight(&self) -> u32 {
        self.in_flight.get()
    }

    /// Whether a `batch_end` is due.
    pub(crate) fn has_touched(&self) -> bool {
        !self.touched.borrow().is_empty()
    }

    fn changed(&self) {
        self.epoch.set(self.epoch.get().wrapping_add(1));
    }

    fn register(&self, completer: Rc<dyn Completer>) -> CompleterId {
        self.changed();
        let mut completers = self.completers.borrow_mut();
        let entry = CompleterEntry {
            completer: Some(completer),
            in_flight: 0,
            touched: false,
        };
        let free = completers
            .iter()
            .position(|e| e.completer.is_none() && e.in_flight == 0 && !e.touched);
        let index = match free {
            Some(index) => {
                completers[index] = entry;
                index
            }
            None => {
                completers.push(entry);
                completers.len() - 1
            }
        };
        assert!(index < 1 << 24, "too many completers");
        CompleterId(u32::try_from(index).unwrap_or(u32::MAX))
    }

    fn unregister(&self, id: CompleterId) {
        self.changed();
        let completer = self
            .completers
            .borrow_mut()
            .get_mut(id.0 as usize)
            .and_then(|entry| entry.completer.take());
        // Dropped without the borrow held: its own drop may call us.
        drop(completer);
    }

    #[inline]
    fn began(&self, id: CompleterId) {
        let mut completers = self.completers.borrow_mut();
        let entry = &mut completers[id.0 as usize];
        assert!(entry.completer.is_some(), "completer was unregistered");
        entry.in_flight += 1;
        self.in_flight.set(self.in_flight.get() + 1);
    }

    fn store_once(&self, done: Once) -> SqeId {
        self.in_flight.set(self.in_flight.get() + 1);
        let mut onces = self.onces.borrow_mut();
        let index = self.free_onces.borrow_mut().pop();
        let index = index.unwrap_or_else(|| {
            onces.push(OnceEntry::default());
            u32::try_from(onces.len() - 1).unwrap_or(u32::MAX)
        });
        let entry = &mut onces[index as usize];
        entry.generation = entry.generation.wrapping_add(1);
        entry.done = Some(done);
        SqeId {
            index,
            generation: entry.generation,
        }
    }

    fn take_once(&self, index: u32) -> Option<Once> {
        let done = self
            .onces
            .borrow_mut()
            .get_mut(index as usize)
            .and_then(|entry| entry.done.take());
        if done.is_some() {
            self.free_onces.borrow_mut().push(index);
        }
        done
    }
}

impl Context {
    /// Whether requests can be put on a ring: the loop's own, or one beside epoll or ppoll.
    #[must_use]
    pub fn has_ring(&self) -> bool {
        self.state().ring.is_some()
    }

    /// Registers who takes completions. Done once for many requests.
    pub fn register_completer(&self, completer: Rc<dyn Completer>) -> CompleterId {
        self.state().requests.register(completer)
    }

    /// Ends a registration. Requests still in flight complete without being told to anybody; the
    /// memory they point to must outlive them nevertheless.
    pub fn unregister_completer(&self, id: CompleterId) {
        self.state().requests.unregister(id);
    }

    /// Puts a request on the loop's ring. It goes to the kernel with the loop's next enter, together
    /// with all others; `completer` is told in a later iteration, never from within this call.
    /// A full queue is submitted at once, so this does not fail. Entries with IO_LINK are held
    /// until the entry that ends their chain.
    ///
    /// # Panics
    /// Without a ring (see [`Context::has_ring`]), or when `completer` is not registered.
    ///
    /// # Safety
    /// Memory and descriptors that `entry` refers to stay valid until the completion, or until
    /// the context has been dropped, which waits for it.
    #[inline]
    pub unsafe fn add_sqe(&self, entry: Entry, completer: CompleterId, token: u32) {
        let state = self.state();
        state.requests.began(completer);
        let entry = entry.user_data(UserData::completer(completer, token));
        // SAFETY: the caller's promise.
        unsafe { state.ring().push(&entry) };
        state.shared.counters.submissions.add(1);
        state.kick_outside();
    }

    /// Like [`Self::add_sqe`] for a single request: `done` gets the result. Allocates.
    ///
    /// # Panics
    /// Without a ring.
    ///
    /// # Safety
    /// As [`Self::add_sqe`].
    pub unsafe fn add_sqe_once(
        &self,
        entry: Entry,
        done: impl FnOnce(&Context, i32) + 'static,
    ) -> SqeId {
        let state = self.state();
        let ring = state.ring();
        let id = state.requests.store_once(Box::new(done));
        // SAFETY: the caller's promise.
        unsafe { ring.push(&entry.user_data(UserData::once(id))) };
        state.shared.counters.submissions.add(1);
        state.kick_outside();
        id
    }

    /// Asks the kernel to cancel a request. Its completion still comes: with `-ECANCELED` if it
    /// could be cancelled, else with its own result.
    pub fn cancel(&self, id: SqeId) {
        self.cancel_user_data(UserData::once(id));
    }

    /// Asks the kernel to cancel the requests that `completer` made with `token`.
    pub fn cancel_sqe(&self, completer: CompleterId, token: u32) {
        self.cancel_user_data(UserData::completer(completer, token));
    }

    fn cancel_user_data(&self, target: u64) {
        let state = self.state();
        if let Some(ring) = &state.ring {
            let entry = opcode::AsyncCancel::new(target).build();
            let entry = entry.user_data(UserData::IGNORE);
            // SAFETY: ASYNC_CANCEL points nowhere.
            unsafe { ring.push_own(&entry) };
            state.kick_outside();
        }
    }

    /// Registers a descriptor with the ring; the slot it got is used as
    /// [`types::Fixed`](io_uring::types::Fixed) and saves a look-up with each request.
    ///
    /// # Errors
    /// `ENOSYS` without a ring; `ENFILE` when all [`FILE_SLOTS`] are taken; else the kernel's error.
    pub fn register_file(&self, fd: RawFd) -> io::Result<u32> {
        let ring = self.ring_or_enosys()?;
        let mut slots = self.state().requests.file_slots.borrow_mut();
        if slots.is_empty() {
            ring.submitter().register_files_sparse(FILE_SLOTS)?;
            slots.resize(FILE_SLOTS as usize, false);
        }
        let free = slots.iter().position(|taken| !taken);
        let index = free.ok_or_else(|| io::Error::from_raw_os_error(libc::ENFILE))?;
        let slot = u32::try_from(index).unwrap_or(u32::MAX);
        ring.submitter().register_files_update(slot, &[fd])?;
        slots[index] = true;
        Ok(slot)
    }

    /// Gives a slot of [`Self::register_file`] back. Requests in flight keep their file.
    pub fn unregister_file(&self, slot: u32) {
        let mut slots = self.state().requests.file_slots.borrow_mut();
        if let (Some(ring), Some(taken)) = (&self.state().ring, slots.get_mut(slot as usize))
            && *taken
        {
            // -1 empties a slot; that cannot fail for one that is in the table.
            let emptied = ring.submitter().register_files_update(slot, &[-1]);
            *taken = emptied.is_err();
        }
    }

    pub(crate) fn ring_or_enosys(&self) -> io::Result<&crate::ring::Ring> {
        let ring = self.state().ring.as_deref();
        ring.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOSYS))
    }
}

impl State {
    /// Reads the completion ring: readiness goes to the ready queue, completions to their owners.
    /// True if a request of ours completed.
    pub(crate) fn reap(&self, ctx: &Context) -> bool {
        let Some(ring) = self.ring.as_deref() else {
            return false;
        };
        let requests = &self.requests;
        if !ring.has_completions() || !ring.refresh() {
            if self.depth_is_nested() {
                self.end_batch(ctx);
            }
            return false;
        }
        let mut cached: Option<(u32, u32, Rc<dyn Completer>)> = None;
        let mut completed = false;
        // What completes while we reap, because a callback runs a nested loop, is left for the
        // next iteration once this many have been seen.
        let mut budget = self.completion_entries;
        while budget != 0 {
            let Some(completion) = ring.pop() else {
                if ring.refresh() {
                    continue;
                }
                break;
            };
            budget -= 1;
            let low = completion.user_data as u32;
            match completion.user_data >> KIND_SHIFT {
                KIND_COMPLETER => {
                    completed = true;
                    self.shared.counters.completions.add(1);
                    requests.in_flight.set(requests.in_flight.get() - 1);
                    let index = (completion.user_data >> 32) as u32 & 0xff_ffff;
                    {
                        let mut completers = requests.completers.borrow_mut();
                        let entry = &mut completers[index as usize];
                        entry.in_flight -= 1;
                        let Some(completer) = &entry.completer else {
                            continue;
                        };
                        if !entry.touched {
                            entry.touched = true;
                            requests.touched.borrow_mut().push(CompleterId(index));
                        }
                        let epoch = requests.epoch.get();
                        if !matches!(&cached, Some((i, e, _)) if *i == index && *e == epoch) {
                            cached = Some((index, epoch, Rc::clone(completer)));
                        }
                    }
                    if let Some((_, _, completer)) = &cached {
                        completer.complete(ctx, low, completion.result);
                    }
                }
                KIND_NODE => self.node_completed(low, completion.result),
                KIND_ONCE => {
                    completed = true;
                    self.shared.counters.completions.add(1);
                    requests.in_flight.set(requests.in_flight.get() - 1);
                    if let Some(done) = requests.take_once(low) {
                        done(ctx, completion.result);
                    }
                }
                _ => {}
            }
        }
        if requests.has_touched() {
            self.end_batch(ctx);
        }
        if completed {
            self.completions_reaped();
        }
        completed
    }

    /// Tells everybody whose completions were seen, also those seen by an outer loop: a nested
    /// loop may wait for what they do then.
    fn end_batch(&self, ctx: &Context) {
        let requests = &self.requests;
        loop {
            let Some(id) = requests.touched.borrow_mut().pop() else {
                return;
            };
            let completer = {
                let mut completers = requests.completers.borrow_mut();
                let entry = &mut completers[id.0 as usize];
                entry.touched = false;
                entry.completer.clone()
            };
            if let Some(completer) = completer {
                completer.batch_end(ctx);
            }
        }
    }

    /// Disk completions are a polled handler of their own: it joins the list with the first one
    /// and is active in this iteration.
    fn completions_reaped(&self) {
        let polling = self.poll_completions && self.max_ns.get() != 0;
        let counters = self.completions.get();
        match polling && self.completion_revents() == 0 {
            true => counters.hits.add(1),
            false => counters.fd_events.add(1),
        }
        if !polling {
            return;
        }
        self.list_completions();
        self.mark_active(COMPLETIONS);
        self.note_completion();
        self.trace(|ctx| TraceEvent::PollDispatch {
            ctx,
            node: COMPLETIONS.into(),
            revents: self.completion_revents(),
        });
    }
}
