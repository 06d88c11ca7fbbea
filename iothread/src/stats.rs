//! What a loop counts, readable from any thread while it runs.
//!
//! Each number is an atomic that only the loop's thread writes, by a load and a store: no
//! read-modify-write and no lock on its side, and readers never make it wait. Numbers read
//! together need not belong to the same iteration. What changes in every iteration is counted in
//! the loop's own memory and shown once a millisecond and before every sleep.

use std::cell::Cell;
use std::sync::OnceLock;

use crate::sequence::{Counter, Sequence};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Buckets a power of two is divided into.
const STEPS: u64 = 4;
const STEPS_LOG2: u32 = 2;
/// Values from twice this power on (about 146 minutes in nanoseconds) share the last bucket.
const MAX_LOG2: u32 = 42;
/// Number of buckets of a [`Histogram`].
pub const BUCKETS: usize = ((MAX_LOG2 - STEPS_LOG2 + 1) as usize + 1) * STEPS as usize + 1;

/// The bucket of a value: 0, 1, 2, 3 have their own, then four to each power of two.
///
/// The conversion to floating point does the work: exponent and first two bits of the fraction, as
/// one number, count the buckets from 1.0 on (values below 2^52 convert exactly).
#[inline]
fn bucket_of(value: u64) -> usize {
    let value = value.min(1 << (MAX_LOG2 + 1));
    if value < STEPS {
        return value as usize;
    }
    #[allow(clippy::cast_precision_loss)]
    let bits = (value.cast_signed() as f64).to_bits() >> (f64::MANTISSA_DIGITS - 1 - STEPS_LOG2);
    // The first bucket of the values from 4 on is number 4.
    const BIAS: u64 = ((1023 + STEPS_LOG2 as u64) << STEPS_LOG2) - STEPS;
    (bits - BIAS) as usize
}

/// The smallest value of a bucket.
#[must_use]
pub fn bucket_start(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < STEPS {
        return bucket;
    }
    let (octave, step) = (bucket / STEPS, bucket % STEPS);
    (STEPS + step) << (octave - 1)
}

/// A histogram that the loop writes: fixed log-linear buckets, at most 25 % wide.
#[derive(Debug)]
pub(crate) struct LiveHistogram(Box<[Counter; BUCKETS]>);

impl LiveHistogram {
    fn new() -> Self {
        LiveHistogram(Box::new(std::array::from_fn(|_| Counter::default())))
    }

    #[inline]
    pub(crate) fn add(&self, value: u64, n: u64) {
        self.0[bucket_of(value)].add(n);
    }

    fn read(&self) -> Histogram {
        Histogram {
            counts: self.0.iter().map(Counter::get).collect(),
        }
    }
}

/// A histogram as read: counts by log-linear bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    counts: Vec<u64>,
}

impl Histogram {
    /// Number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The buckets that hold something: smallest value, and count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        let counted = self.counts.iter().enumerate();
        counted
            .filter(|(_, count)| **count != 0)
            .map(|(bucket, count)| (bucket_start(bucket), *count))
    }

    /// The value below or at which `percent` of the values lie, to the width of a bucket: the
    /// bucket's smallest value. 0 when empty.
    #[must_use]
    pub fn percentile(&self, percent: f64) -> u64 {
        let total = self.count();
        // Counts are far below 2^52; the fraction is clamped to the range.
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss
        )]
        let rank = ((percent.clamp(0.0, 100.0) / 100.0) * total as f64).ceil() as u64;
        let mut seen = 0;
        for (value, count) in self.buckets() {
            seen += count;
            if seen >= rank {
                return value;
            }
        }
        0
    }

    /// The same in the form of the hdrhistogram crate, for merging and printing.
    #[must_use]
    pub fn to_hdr(&self) -> hdrhistogram::Histogram<u64> {
        let mut hdr = hdrhistogram::Histogram::new(2).expect("two significant digits are valid");
        for (value, count) in self.buckets() {
            // Grows as needed, which saturating_record_n does not.
            let _ = hdr.record_n(value, count);
        }
        hdr
    }
}

/// What the loop counts for itself, in memory of its own: one instruction each. Other threads see
/// it as of the last [`Tally::publish`].
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) iterations: Cell<u64>,
    pub(crate) poll_hits: Cell<u64>,
    pub(crate) poll_misses: Cell<u64>,
    pub(crate) poll_ns: Cell<u64>,
    pub(crate) vain_ns: Cell<u64>,
    pub(crate) blocks: Cell<u64>,
    pub(crate) completions: Cell<u64>,
    pub(crate) submissions: Cell<u64>,
    pub(crate) enters: Cell<u64>,
    pub(crate) bottom_halves: Cell<u64>,
    pub(crate) timers: Cell<u64>,
    pub(crate) errors: Cell<u64>,
}

/// Adds to a number of a [`Tally`].
#[inline]
pub(crate) fn count(cell: &Cell<u64>, n: u64) {
    #[cfg(not(iothread_no_stats))]
    cell.set(cell.get().wrapping_add(n));
    #[cfg(iothread_no_stats)]
    let _ = (cell, n);
}

impl Tally {
    /// Shows the numbers to other threads.
    pub(crate) fn publish(&self, counters: &LoopCounters) {
        let pairs = [
            (&self.iterations, &counters.iterations),
            (&self.poll_hits, &counters.poll_hits),
            (&self.poll_misses, &counters.poll_misses),
            (&self.poll_ns, &counters.poll_ns),
            (&self.vain_ns, &counters.vain_ns),
            (&self.blocks, &counters.blocks),
            (&self.completions, &counters.completions),
            (&self.submissions, &counters.submissions),
            (&self.enters, &counters.enters),
            (&self.bottom_halves, &counters.bottom_halves),
            (&self.timers, &counters.timers),
            (&self.errors, &counters.errors),
        ];
        for (own, shared) in pairs {
            shared.set(own.get());
        }
    }
}

/// Counters of the loop itself.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct LoopCounters {
    iterations: Counter,
    poll_hits: Counter,
    poll_misses: Counter,
    poll_ns: Counter,
    vain_ns: Counter,
    blocks: Counter,
    completions: Counter,
    submissions: Counter,
    enters: Counter,
    bottom_halves: Counter,
    timers: Counter,
    errors: Counter,
    pub(crate) window_ns: Counter,
    pub(crate) block_histogram: LiveHistogram,
    pub(crate) window_histogram: LiveHistogram,
    /// Written by the threads that kick, not by the loop.
    pub(crate) wakeups: AtomicU64,
}

impl LoopCounters {
    pub(crate) fn new() -> Self {
        LoopCounters {
            iterations: Counter::default(),
            poll_hits: Counter::default(),
            poll_misses: Counter::default(),
            poll_ns: Counter::default(),
            vain_ns: Counter::default(),
            blocks: Counter::default(),
            completions: Counter::default(),
            submissions: Counter::default(),
            enters: Counter::default(),
            bottom_halves: Counter::default(),
            timers: Counter::default(),
            errors: Counter::default(),
            window_ns: Counter::default(),
            block_histogram: LiveHistogram::new(),
            window_histogram: LiveHistogram::new(),
            wakeups: AtomicU64::new(0),
        }
    }
}

/// Longest handler name that statistics keep, in bytes.
const NAME_BYTES: usize = 48;
const NAME_WORDS: usize = NAME_BYTES / 8;

/// What is counted for one handler. A slot is used again when its handler has gone: name and
/// counts change together.
#[derive(Debug, Default)]
pub struct HandlerCounters {
    sequence: Sequence,
    live: AtomicU32,
    name_len: AtomicU32,
    name: [AtomicU64; NAME_WORDS],
    pub(crate) events: Counter,
    pub(crate) hits: Counter,
    pub(crate) ns: Counter,
    pub(crate) polled: Counter,
}

impl HandlerCounters {
    /// The loop: the slot serves a handler of this name from now on, or none.
    pub fn assign(&self, name: Option<&str>) {
        let text = name.unwrap_or("");
        let mut len = text.len().min(NAME_BYTES);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        let mut bytes = [0; NAME_BYTES];
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        self.sequence.change(|| {
            for (word, chunk) in self.name.iter().zip(bytes.chunks_exact(8)) {
                let chunk: [u8; 8] = chunk.try_into().unwrap_or_default();
                word.store(u64::from_le_bytes(chunk), Ordering::Relaxed);
            }
            // At most NAME_BYTES.
            let len = u32::try_from(len).unwrap_or(0);
            self.name_len.store(len, Ordering::Relaxed);
            let live = u32::from(name.is_some());
            self.live.store(live, Ordering::Relaxed);
            for counter in [&self.events, &self.hits, &self.ns, &self.polled] {
                counter.set(0);
            }
        });
    }

    /// Any thread: what the slot holds, if it serves a handler.
    pub fn read(&self) -> Option<HandlerStats> {
        let (live, len, bytes, stats) = self.sequence.read(|| {
            let mut bytes = [0; NAME_BYTES];
            for (chunk, word) in bytes.chunks_exact_mut(8).zip(&self.name) {
                chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
            }
            let stats = HandlerStats {
                name: String::new(),
                events: self.events.get(),
                poll_hits: self.hits.get(),
                ns: self.ns.get(),
                polled: self.polled.get() != 0,
            };
            let len = self.name_len.load(Ordering::Relaxed) as usize;
            (self.live.load(Ordering::Relaxed) != 0, len, bytes, stats)
        });
        live.then(|| HandlerStats {
            name: String::from_utf8_lossy(&bytes[..len.min(NAME_BYTES)]).into_owned(),
            ..stats
        })
    }
}

/// Slots of the first chunk; each further chunk is twice as large.
const FIRST_CHUNK_LOG2: u32 = 6;
const CHUNKS: usize = 20;

/// Most names of removed handlers whose counts are kept.
const DEPARTED: u32 = 4096;

/// Numbered places that are made when needed and never moved, so that readers need no lock.
#[derive(Debug)]
struct Chunks<T>([OnceLock<Box<[T]>>; CHUNKS]);

impl<T: Default> Chunks<T> {
    fn new() -> Self {
        Chunks(std::array::from_fn(|_| OnceLock::new()))
    }

    /// The place `index`, made if need be.
    fn at(&self, index: u32) -> &T {
        let place = index + (1 << FIRST_CHUNK_LOG2);
        let chunk = place.ilog2() - FIRST_CHUNK_LOG2;
        let size = 1u32 << (chunk + FIRST_CHUNK_LOG2);
        let slots =
            self.0[chunk as usize].get_or_init(|| (0..size).map(|_| T::default()).collect());
        &slots[(place - size) as usize]
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.iter().filter_map(OnceLock::get).flatten()
    }
}

/// What handlers of one name did that have been removed.
#[derive(Debug)]
struct Departed {
    name: String,
    events: Counter,
    hits: Counter,
}

/// The slots of all handlers.
#[derive(Debug)]
pub(crate) struct HandlerTable {
    slots: Chunks<HandlerCounters>,
    /// Events and poll hits of removed handlers, by name: a disk whose driver resets it, or that
    /// moves, does not lose what it has done. Written by the loop's thread only.
    departed: Chunks<OnceLock<Departed>>,
}

impl HandlerTable {
    pub(crate) fn new() -> Self {
        HandlerTable {
            slots: Chunks::new(),
            departed: Chunks::new(),
        }
    }

    /// The loop: the handler of slot `index` is gone; its counts stay under its name.
    pub(crate) fn retire(&self, index: u32) {
        let slot = self.slot(index);
        if let Some(last) = slot.read().filter(|last| last.events != 0)
            && let Some(departed) = self.departed(last.name)
        {
            departed.events.add(last.events);
            departed.hits.add(last.poll_hits);
        }
        slot.assign(None);
    }

    /// The place of a name, a new one if it has none; None when all are taken.
    fn departed(&self, name: String) -> Option<&Departed> {
        for index in 0..DEPARTED {
            let place = self.departed.at(index);
            match place.get() {
                Some(departed) if departed.name != name => {}
                Some(departed) => return Some(departed),
                None => {
                    return Some(place.get_or_init(|| Departed {
                        name,
                        events: Counter::default(),
                        hits: Counter::default(),
                    }));
                }
            }
        }
        None
    }

    /// The slot of handler `index`, made if need be.
    pub(crate) fn slot(&self, index: u32) -> &HandlerCounters {
        self.slots.at(index)
    }

    fn read(&self) -> Vec<HandlerStats> {
        let mut handlers: Vec<_> = self
            .slots
            .iter()
            .filter_map(HandlerCounters::read)
            .collect();
        for departed in self.departed.iter().map_while(OnceLock::get) {
            let (events, poll_hits) = (departed.events.get(), departed.hits.get());
            match handlers.iter_mut().find(|h| h.name == departed.name) {
                Some(handler) => {
                    handler.events += events;
                    handler.poll_hits += poll_hits;
                }
                None => handlers.push(HandlerStats {
                    name: departed.name.clone(),
                    events,
                    poll_hits,
                    ns: 0,
                    polled: false,
                }),
            }
        }
        handlers
    }
}

/// A handler's counters as its loop holds them: a pointer into the table of `Shared`.
#[derive(Debug, Clone)]
pub(crate) struct HandlerSlot {
    counters: *const HandlerCounters,
    /// Keeps the table.
    _shared: std::sync::Arc<crate::remote::Shared>,
}

impl HandlerSlot {
    pub(crate) fn new(shared: &std::sync::Arc<crate::remote::Shared>, index: u32) -> Self {
        HandlerSlot {
            counters: shared.handlers.slot(index),
            _shared: std::sync::Arc::clone(shared),
        }
    }

    #[inline]
    pub(crate) fn get(&self) -> &HandlerCounters {
        // SAFETY: the table's chunks are boxed and live as long as `_shared`, which we hold.
        unsafe { &*self.counters }
    }
}

/// One handler's numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandlerStats {
    /// Its name, at most 48 bytes of it.
    pub name: String,
    /// Times it was dispatched.
    pub events: u64,
    /// Of these, times that polling found it.
    pub poll_hits: u64,
    /// Its interval (weighted) or window (per-handler) as last published, in nanoseconds.
    pub ns: u64,
    /// Whether it is on the poll list.
    pub polled: bool,
}

/// A loop's numbers at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Iterations of the loop.
    pub iterations: u64,
    /// Iterations that slept in the kernel.
    pub blocks: u64,
    /// Times that polling found work.
    pub poll_hits: u64,
    /// Times that polling ended without work.
    pub poll_misses: u64,
    /// Time spent polling, in nanoseconds.
    pub poll_ns: u64,
    /// Part of it that found nothing.
    pub poll_vain_ns: u64,
    /// The window now, in nanoseconds.
    pub window_ns: u64,
    /// Times that another thread had to kick the sleeping loop.
    pub wakeups: u64,
    /// Requests put on the ring by `add_sqe`.
    pub submissions: u64,
    /// Their completions.
    pub completions: u64,
    /// Calls of io_uring_enter.
    pub enters: u64,
    /// Bottom halves run.
    pub bottom_halves: u64,
    /// Timers fired.
    pub timers: u64,
    /// Watches that failed, and system calls of the monitor that did.
    pub errors: u64,
    /// Time polled and waited, by iteration; only while polling is on.
    pub block_histogram: Histogram,
    /// Window in effect, by iteration; only while polling is on.
    pub window_histogram: Histogram,
    /// One entry a handler, with the counts of removed ones of the same name; and one for each other
    /// name whose handlers have all been removed.
    pub handlers: Vec<HandlerStats>,
}

impl Stats {
    pub(crate) fn read(counters: &LoopCounters, handlers: &HandlerTable) -> Stats {
        Stats {
            iterations: counters.iterations.get(),
            blocks: counters.blocks.get(),
            poll_hits: counters.poll_hits.get(),
            poll_misses: counters.poll_misses.get(),
            poll_ns: counters.poll_ns.get(),
            poll_vain_ns: counters.vain_ns.get(),
            window_ns: counters.window_ns.get(),
            wakeups: counters.wakeups.load(Ordering::Relaxed),
            submissions: counters.submissions.get(),
            completions: counters.completions.get(),
            enters: counters.enters.get(),
            bottom_halves: counters.bottom_halves.get(),
            timers: counters.timers.get(),
            errors: counters.errors.get(),
            block_histogram: counters.block_histogram.read(),
            window_histogram: counters.window_histogram.read(),
            handlers: handlers.read(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_at_most_a_quarter_wide() {
        for bucket in 0..BUCKETS - 1 {
            let (start, next) = (bucket_start(bucket), bucket_start(bucket + 1));
            assert!(next > start);
            assert_eq!(bucket_of(start), bucket);
            assert_eq!(bucket_of(next - 1), bucket);
            assert!(next - start <= (start / 4).max(1), "{start}..{next}");
        }
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
        assert_eq!(bucket_start(BUCKETS - 1), 1 << (MAX_LOG2 + 1));
    }

    #[test]
    fn percentiles_come_from_the_right_bucket() {
        let live = LiveHistogram::new();
        live.add(1000, 90);
        live.add(50_000, 10);
        let read = live.read();
        assert_eq!(read.count(), 100);
        assert_eq!(read.percentile(50.0), bucket_start(bucket_of(1000)));
        assert_eq!(read.percentile(99.0), bucket_start(bucket_of(50_000)));
        assert_eq!(read.to_hdr().len(), 100);
        assert!(read.to_hdr().max() >= read.percentile(100.0));
    }

    #[test]
    fn table_grows_without_moving() {
        let table = HandlerTable::new();
        let first: *const HandlerCounters = table.slot(0);
        for index in 0..1000 {
            table.slot(index).assign(Some(&format!("handler {index}")));
        }
        assert!(std::ptr::eq(first, table.slot(0)));
        assert_eq!(table.read().len(), 1000);
        table.slot(5).assign(None);
        assert_eq!(table.read().len(), 999);
        assert_eq!(table.read()[5].name, "handler 6");
    }

    #[test]
    fn removed_handlers_keep_their_counts_under_their_name() {
        let table = HandlerTable::new();
        for round in 1..=2 {
            table.slot(round).assign(Some("disk0/0"));
            table.slot(round).events.add(10);
            table.slot(round).hits.add(3);
            table.retire(round);
        }
        table.slot(7).assign(Some("never dispatched"));
        table.retire(7);
        let gone = table.read();
        assert_eq!((gone.len(), gone[0].events, gone[0].poll_hits), (1, 20, 6));
        assert!(!gone[0].polled);
        table.slot(1).assign(Some("disk0/0"));
        table.slot(1).events.add(1);
        let back = table.read();
        assert_eq!((back.len(), back[0].events, back[0].poll_hits), (1, 21, 6));
    }

    #[test]
    fn long_names_are_cut_at_a_character() {
        let counters = HandlerCounters::default();
        counters.assign(Some(&"ü".repeat(40)));
        assert_eq!(counters.read().unwrap().name, "ü".repeat(24));
    }
}
