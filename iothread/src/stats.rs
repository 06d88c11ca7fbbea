//! What a loop counts, readable from any thread while it runs.
//!
//! Each number is an atomic that only the loop's thread writes, by a load and a store, which is one
//! instruction: no read-modify-write and no lock on its side, and readers never make it wait.
//! Numbers read together need not belong to the same iteration. What can be derived from other
//! numbers is derived by the reader. Intervals of handlers are shown once a millisecond and before
//! a sleep.

use std::sync::OnceLock;

use crate::histogram::{Histogram, LiveHistogram};
use crate::policy::Experiment;
use crate::sequence::{Counter, Sequence};
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Counters of the loop itself.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct LoopCounters {
    pub(crate) iterations: Counter,
    pub(crate) poll_hits: Counter,
    pub(crate) poll_misses: Counter,
    pub(crate) poll_ns: Counter,
    pub(crate) vain_ns: Counter,
    pub(crate) blocks: Counter,
    pub(crate) completions: Counter,
    pub(crate) submissions: Counter,
    pub(crate) enters: Counter,
    pub(crate) bottom_halves: Counter,
    pub(crate) timers: Counter,
    pub(crate) errors: Counter,
    /// The window and since which iteration it is in effect: [`WINDOW_OFF`] while polling is off.
    window: Sequence,
    window_ns: Counter,
    window_from: Counter,
    window_histogram: LiveHistogram,
    pub(crate) block_histogram: LiveHistogram,
    pub(crate) experiment: LiveExperiment,
    /// Written by the threads that kick, not by the loop.
    pub(crate) wakeups: AtomicU64,
}

/// Stands for a window while polling is off: the histogram leaves such iterations out.
const WINDOW_OFF: u64 = u64::MAX;

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
            window: Sequence::default(),
            window_ns: Counter::default(),
            window_from: Counter::default(),
            window_histogram: LiveHistogram::new(),
            block_histogram: LiveHistogram::new(),
            experiment: LiveExperiment::default(),
            wakeups: AtomicU64::new(0),
        }
    }

    /// The loop: from now on the window is this; None: polling is off. The iterations since the
    /// last change go into the histogram, whose last entry readers make up.
    pub(crate) fn set_window(&self, window_ns: Option<i64>) {
        if cfg!(iothread_no_stats) {
            return;
        }
        let iterations = self.iterations.get();
        let (old_ns, from) = (self.window_ns.get(), self.window_from.get());
        self.window.change(|| {
            if old_ns != WINDOW_OFF {
                self.window_histogram.add(old_ns, iterations - from);
            }
            self.window_from.set(iterations);
            self.window_ns
                .set(window_ns.map_or(WINDOW_OFF, i64::cast_unsigned));
        });
    }

    /// Any thread: the window, and its histogram up to now.
    fn read_window(&self) -> (u64, Histogram) {
        // Short, so that a loop whose window changes all the time cannot keep a reader from ending;
        // the histogram takes longer to read than such a window lasts.
        let current = || {
            self.window.read(|| {
                let more = self.iterations.get().saturating_sub(self.window_from.get());
                (self.window_ns.get(), self.window_from.get(), more)
            })
        };
        let mut left = 8;
        let (window_ns, more, mut histogram) = loop {
            let (_, before, _) = current();
            let histogram = self.window_histogram.read();
            let (window_ns, from, more) = current();
            left -= 1;
            // In the end what lacks are the iterations since the histogram was read.
            if from == before || left == 0 {
                break (window_ns, more, histogram);
            }
        };
        if window_ns == WINDOW_OFF {
            return (0, histogram);
        }
        histogram.add(window_ns, more);
        (window_ns, histogram)
    }
}

/// What the rule is about, as the loop shows it: numbers of one moment together.
#[derive(Debug, Default)]
pub(crate) struct LiveExperiment {
    sequence: Sequence,
    /// 0: the rule makes no experiments, or has made none yet.
    there: Counter,
    numbers: [Counter; 9],
}

/// Stands for "no trial".
const NO_TRIAL: u64 = u64::MAX;

impl LiveExperiment {
    pub(crate) fn show(&self, experiment: &Experiment) {
        let numbers = [
            experiment.incumbent_ns.cast_unsigned(),
            experiment.trial_ns.map_or(NO_TRIAL, i64::cast_unsigned),
            experiment.scanning.into(),
            experiment.score.to_bits(),
            experiment.advantage.to_bits(),
            experiment.epochs,
            experiment.scans,
            experiment.trials,
            experiment.switches,
        ];
        self.sequence.change(|| {
            self.there.set(1);
            let places = self.numbers.iter().zip(numbers);
            places.for_each(|(place, number)| place.set(number));
        });
    }

    fn read(&self) -> Option<Experiment> {
        let (there, numbers) = self
            .sequence
            .read(|| (self.there.get(), self.numbers.each_ref().map(Counter::get)));
        let [
            incumbent,
            trial,
            scanning,
            score,
            advantage,
            epochs,
            scans,
            trials,
            switches,
        ] = numbers;
        (there != 0).then(|| Experiment {
            incumbent_ns: incumbent.cast_signed(),
            trial_ns: (trial != NO_TRIAL).then(|| trial.cast_signed()),
            scanning: scanning != 0,
            score: f64::from_bits(score),
            advantage: f64::from_bits(advantage),
            epochs,
            scans,
            trials,
            switches,
        })
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
    /// Dispatches for events of the descriptor; the others are hits.
    pub(crate) fd_events: Counter,
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
            for counter in [&self.fd_events, &self.hits, &self.ns, &self.polled] {
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
                events: self.fd_events.get() + self.hits.get(),
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
#[derive(Debug, Clone, PartialEq)]
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
    /// What a rule that compares windows is about; None under other rules, and before it has
    /// measured.
    pub experiment: Option<Experiment>,
    /// One entry a handler, with the counts of removed ones of the same name; and one for each other
    /// name whose handlers have all been removed.
    pub handlers: Vec<HandlerStats>,
}

impl Stats {
    pub(crate) fn read(counters: &LoopCounters, handlers: &HandlerTable) -> Stats {
        let (window_ns, window_histogram) = counters.read_window();
        Stats {
            iterations: counters.iterations.get(),
            blocks: counters.blocks.get(),
            poll_hits: counters.poll_hits.get(),
            poll_misses: counters.poll_misses.get(),
            poll_ns: counters.poll_ns.get(),
            poll_vain_ns: counters.vain_ns.get(),
            window_ns,
            wakeups: counters.wakeups.load(Ordering::Relaxed),
            submissions: counters.submissions.get(),
            completions: counters.completions.get(),
            enters: counters.enters.get(),
            bottom_halves: counters.bottom_halves.get(),
            timers: counters.timers.get(),
            errors: counters.errors.get(),
            block_histogram: counters.block_histogram.read(),
            window_histogram,
            experiment: counters.experiment.read(),
            handlers: handlers.read(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The histogram of windows is exact at every moment, although the loop writes it only when the
    /// window changes.
    #[test]
    fn window_histogram_is_made_up_by_its_reader() {
        let counters = LoopCounters::new();
        let expect = |expected: &[(u64, u64)], window_ns| {
            let (now_ns, histogram) = counters.read_window();
            assert_eq!(histogram.buckets().collect::<Vec<_>>(), expected);
            assert_eq!(now_ns, window_ns);
        };
        expect(&[], 0);
        counters.iterations.add(3);
        expect(&[(0, 3)], 0);
        counters.set_window(Some(4096));
        counters.iterations.add(2);
        expect(&[(0, 3), (4096, 2)], 4096);
        counters.set_window(None);
        counters.iterations.add(100);
        expect(&[(0, 3), (4096, 2)], 0);
        counters.set_window(Some(4096));
        counters.iterations.add(1);
        expect(&[(0, 3), (4096, 3)], 4096);
    }

    /// A reader ends although the window changes all the time.
    #[test]
    fn a_window_that_never_rests_does_not_hold_its_reader() {
        let counters = LoopCounters::new();
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut window_ns = 0;
                while !stop.load(Ordering::Relaxed) {
                    counters.iterations.add(1);
                    window_ns = (window_ns + 1) % 1000;
                    counters.set_window(Some(window_ns));
                }
            });
            for _ in 0..200 {
                let (window_ns, histogram) = counters.read_window();
                assert!(window_ns < 1000);
                assert!(histogram.count() <= counters.iterations.get());
            }
            stop.store(true, Ordering::Relaxed);
        });
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
            table.slot(round).fd_events.add(7);
            table.slot(round).hits.add(3);
            table.retire(round);
        }
        table.slot(7).assign(Some("never dispatched"));
        table.retire(7);
        let gone = table.read();
        assert_eq!((gone.len(), gone[0].events, gone[0].poll_hits), (1, 20, 6));
        assert!(!gone[0].polled);
        table.slot(1).assign(Some("disk0/0"));
        table.slot(1).fd_events.add(1);
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
