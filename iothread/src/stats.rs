//! What a loop counts, readable from any thread while it runs.
//!
//! Each number is an atomic that only the loop's thread writes, by a load and a store: no
//! read-modify-write and no lock on its side, and readers never make it wait. Numbers read
//! together need not belong to the same iteration.

use std::collections::BTreeMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A number with one writer.
#[derive(Debug)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    fn new() -> Self {
        Counter(AtomicU64::new(0))
    }

    #[inline]
    pub(crate) fn add(&self, n: u64) {
        self.0.store(
            self.0.load(Ordering::Relaxed).wrapping_add(n),
            Ordering::Relaxed,
        );
    }

    #[inline]
    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Buckets a power of two is divided into.
const STEPS: u64 = 4;
const STEPS_LOG2: u32 = 2;
/// Values from here on (about 73 minutes in nanoseconds) share the last bucket.
const MAX_LOG2: u32 = 42;
/// Number of buckets of a [`Histogram`].
pub const BUCKETS: usize = ((MAX_LOG2 - STEPS_LOG2 + 1) as usize + 1) * STEPS as usize;

/// The bucket of a value: 0, 1, 2, 3 have their own, then four to each power of two.
#[inline]
fn bucket_of(value: u64) -> usize {
    if value < STEPS {
        return value as usize;
    }
    let log2 = value.ilog2();
    if log2 > MAX_LOG2 {
        return BUCKETS - 1;
    }
    let step = (value >> (log2 - STEPS_LOG2)) & (STEPS - 1);
    ((log2 - STEPS_LOG2 + 1) as usize) * STEPS as usize + step as usize
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
        LiveHistogram(Box::new(std::array::from_fn(|_| Counter::new())))
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
            hdr.saturating_record_n(value, count);
        }
        hdr
    }
}

/// Counters of the loop itself.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct LoopCounters {
    pub(crate) iterations: Counter,
    pub(crate) poll_hits: Counter,
    pub(crate) poll_misses: Counter,
    pub(crate) poll_ns: Counter,
    pub(crate) vain_ns: Counter,
    pub(crate) window_ns: Counter,
    pub(crate) blocks: Counter,
    pub(crate) completions: Counter,
    pub(crate) submissions: Counter,
    pub(crate) enters: Counter,
    pub(crate) bottom_halves: Counter,
    pub(crate) timers: Counter,
    pub(crate) errors: Counter,
    pub(crate) block_histogram: LiveHistogram,
    pub(crate) window_histogram: LiveHistogram,
    /// Written by the threads that kick, not by the loop.
    pub(crate) wakeups: AtomicU64,
}

impl LoopCounters {
    pub(crate) fn new() -> Self {
        LoopCounters {
            iterations: Counter::new(),
            poll_hits: Counter::new(),
            poll_misses: Counter::new(),
            poll_ns: Counter::new(),
            vain_ns: Counter::new(),
            window_ns: Counter::new(),
            blocks: Counter::new(),
            completions: Counter::new(),
            submissions: Counter::new(),
            enters: Counter::new(),
            bottom_halves: Counter::new(),
            timers: Counter::new(),
            errors: Counter::new(),
            block_histogram: LiveHistogram::new(),
            window_histogram: LiveHistogram::new(),
            wakeups: AtomicU64::new(0),
        }
    }
}

/// Longest handler name that statistics keep, in bytes.
const NAME_BYTES: usize = 48;
const NAME_WORDS: usize = NAME_BYTES / 8;

/// What is counted for one handler. The name is guarded by a sequence number, because a slot is
/// used again when its handler has gone.
#[derive(Debug)]
pub struct HandlerCounters {
    /// Odd while the name changes; 0 and every second even number after a removal mean "unused".
    sequence: AtomicU32,
    live: AtomicU32,
    name_len: AtomicU32,
    name: [AtomicU64; NAME_WORDS],
    pub(crate) events: Counter,
    pub(crate) hits: Counter,
    pub(crate) ns: Counter,
    pub(crate) polled: Counter,
}

impl Default for HandlerCounters {
    fn default() -> Self {
        Self::new()
    }
}

impl HandlerCounters {
    /// An unused slot.
    #[must_use]
    pub fn new() -> Self {
        HandlerCounters {
            sequence: AtomicU32::new(0),
            live: AtomicU32::new(0),
            name_len: AtomicU32::new(0),
            name: std::array::from_fn(|_| AtomicU64::new(0)),
            events: Counter::new(),
            hits: Counter::new(),
            ns: Counter::new(),
            polled: Counter::new(),
        }
    }

    /// The loop: the slot serves a handler of this name from now on, or none.
    pub fn assign(&self, name: Option<&str>) {
        let sequence = self.sequence.load(Ordering::Relaxed);
        // The stores below may not be seen before the odd number (Release fence by AcqRel swap
        // order: a reader that sees one of them, through its Acquire fence, sees this too).
        self.sequence
            .store(sequence.wrapping_add(1), Ordering::Relaxed);
        crate::sync::fence(Ordering::Release);
        let text = name.unwrap_or("");
        let mut len = text.len().min(NAME_BYTES);
        while !text.is_char_boundary(len) {
            len -= 1;
        }
        let mut bytes = [0; NAME_BYTES];
        bytes[..len].copy_from_slice(&text.as_bytes()[..len]);
        for (word, chunk) in self.name.iter().zip(bytes.chunks_exact(8)) {
            let chunk: [u8; 8] = chunk.try_into().unwrap_or_default();
            word.store(u64::from_le_bytes(chunk), Ordering::Relaxed);
        }
        // At most NAME_BYTES.
        self.name_len
            .store(u32::try_from(len).unwrap_or(0), Ordering::Relaxed);
        self.live
            .store(u32::from(name.is_some()), Ordering::Relaxed);
        for counter in [&self.events, &self.hits, &self.ns, &self.polled] {
            counter.set(0);
        }
        // Release: the even number comes with all of the above.
        self.sequence
            .store(sequence.wrapping_add(2), Ordering::Release);
    }

    /// Any thread: what the slot holds, if it serves a handler.
    pub fn read(&self) -> Option<HandlerStats> {
        loop {
            let before = self.sequence.load(Ordering::Acquire);
            if before & 1 == 0 {
                let live = self.live.load(Ordering::Relaxed) != 0;
                let len = self.name_len.load(Ordering::Relaxed) as usize;
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
                // Acquire fence: if any load above saw a newer assignment, the load below sees
                // its number.
                crate::sync::fence(Ordering::Acquire);
                if self.sequence.load(Ordering::Relaxed) == before {
                    let name = String::from_utf8_lossy(&bytes[..len.min(NAME_BYTES)]);
                    return live.then(|| HandlerStats {
                        name: name.into_owned(),
                        ..stats
                    });
                }
            }
            #[cfg(loom)]
            loom::thread::yield_now();
            #[cfg(not(loom))]
            std::hint::spin_loop();
        }
    }
}

/// Slots of the first chunk; each further chunk is twice as large.
const FIRST_CHUNK_LOG2: u32 = 6;
const CHUNKS: usize = 20;

/// Most names of removed handlers whose counts are kept.
const DEPARTED: usize = 4096;

/// The slots of all handlers. Chunks are added and never moved, so readers need no lock on them.
#[derive(Debug)]
pub(crate) struct HandlerTable {
    chunks: [OnceLock<Box<[HandlerCounters]>>; CHUNKS],
    /// Events and poll hits of removed handlers, by name: a disk whose driver resets it, or that
    /// moves, does not lose what it has done. Locked only when a handler is removed, and to read.
    departed: Mutex<BTreeMap<String, (u64, u64)>>,
}

impl HandlerTable {
    pub(crate) fn new() -> Self {
        HandlerTable {
            chunks: std::array::from_fn(|_| OnceLock::new()),
            departed: Mutex::default(),
        }
    }

    /// The handler of slot `index` is gone; its counts stay under its name.
    pub(crate) fn retire(&self, index: u32) {
        let slot = self.slot(index);
        if let Some(last) = slot.read().filter(|last| last.events != 0) {
            let mut departed = self.departed.lock().unwrap_or_else(PoisonError::into_inner);
            if departed.len() < DEPARTED || departed.contains_key(&last.name) {
                let (events, hits) = departed.entry(last.name).or_default();
                *events += last.events;
                *hits += last.poll_hits;
            }
        }
        slot.assign(None);
    }

    /// The slot of handler `index`, made if need be.
    pub(crate) fn slot(&self, index: u32) -> &HandlerCounters {
        let place = index + (1 << FIRST_CHUNK_LOG2);
        let chunk = place.ilog2() - FIRST_CHUNK_LOG2;
        let size = 1u32 << (chunk + FIRST_CHUNK_LOG2);
        let slots = self.chunks[chunk as usize]
            .get_or_init(|| (0..size).map(|_| HandlerCounters::new()).collect());
        &slots[(place - size) as usize]
    }

    fn read(&self) -> Vec<HandlerStats> {
        let slots = self.chunks.iter().filter_map(OnceLock::get).flatten();
        let mut handlers: Vec<_> = slots.filter_map(HandlerCounters::read).collect();
        let departed = self.departed.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, (events, poll_hits)) in departed.iter() {
            match handlers.iter_mut().find(|handler| handler.name == *name) {
                Some(handler) => {
                    handler.events += events;
                    handler.poll_hits += poll_hits;
                }
                None => handlers.push(HandlerStats {
                    name: name.clone(),
                    events: *events,
                    poll_hits: *poll_hits,
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

#[cfg(all(test, not(loom)))]
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
        let counters = HandlerCounters::new();
        counters.assign(Some(&"ü".repeat(40)));
        assert_eq!(counters.read().unwrap().name, "ü".repeat(24));
    }
}
