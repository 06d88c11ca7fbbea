//! The loop's end of a recording, and the ring behind it.
//!
//! The ring is the `rtrb` crate's: wait-free, one writer, one reader. An entry goes in whole or not
//! at all; what has no room is counted, and the next entry that has room tells of it.

use std::cell::{Cell, RefCell};
use std::os::fd::RawFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use iothread::trace::codec::{Entry, encode};
use iothread::trace::{TraceEvent, TraceSink};
use iothread::{PollSettings, now_ns};
use rtrb::{Consumer, Producer, RingBuffer};

/// Bytes of a loop's ring: some 90,000 entries.
pub const RING_BYTES: usize = 1 << 20;
/// Room that only names and settings may use: without them the rest means little.
const RESERVE_BYTES: usize = 8 << 10;

/// The loop's end.
pub struct Sink {
    ring: RefCell<Producer<u8>>,
    /// An entry on its way.
    scratch: RefCell<Vec<u8>>,
    /// The time of the last entry that went in.
    last_ns: Cell<i64>,
    /// Entries lost since then.
    untold: Cell<u64>,
    mask: Arc<AtomicU32>,
    lost: Arc<AtomicU64>,
}

/// The recorder's end.
#[derive(Debug)]
pub struct Source {
    ring: Consumer<u8>,
    lost: Arc<AtomicU64>,
    /// The time that the first entry counts from.
    pub base_ns: i64,
}

/// A sink that takes the events in `mask`, and its source, with a ring of `bytes` between them.
pub fn pair(mask: Arc<AtomicU32>, bytes: usize) -> (Sink, Source) {
    let (producer, consumer) = RingBuffer::new(bytes);
    let lost = Arc::new(AtomicU64::new(0));
    let base_ns = now_ns();
    let sink = Sink {
        ring: RefCell::new(producer),
        scratch: RefCell::default(),
        last_ns: Cell::new(base_ns),
        untold: Cell::new(0),
        mask,
        lost: Arc::clone(&lost),
    };
    let source = Source {
        ring: consumer,
        lost,
        base_ns,
    };
    (sink, source)
}

impl Sink {
    /// As loops take it.
    pub fn into_rc(self) -> Rc<dyn TraceSink> {
        Rc::new(self)
    }

    fn put(&self, entry: &Entry<'_>, reserve_bytes: usize) {
        let time_ns = now_ns();
        let (mut ring, mut scratch) = (self.ring.borrow_mut(), self.scratch.borrow_mut());
        scratch.clear();
        let mut since_ns = self.last_ns.get();
        if self.untold.get() != 0 {
            encode(
                &mut scratch,
                since_ns,
                time_ns,
                &Entry::Lost(self.untold.get()),
            );
            since_ns = time_ns;
        }
        encode(&mut scratch, since_ns, time_ns, entry);
        let fits = ring.slots() >= scratch.len() + reserve_bytes;
        if fits && ring.push_entire_slice(&scratch).is_ok() {
            self.last_ns.set(time_ns);
            self.untold.set(0);
        } else {
            self.untold.set(self.untold.get() + 1);
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl TraceSink for Sink {
    fn event(&self, event: &TraceEvent<'_>) {
        if self.mask.load(Ordering::Relaxed) & 1 << event.index() != 0 {
            self.put(&Entry::Event(*event), RESERVE_BYTES);
        }
    }

    fn handler(&self, node: u64, fd: RawFd, name: &str) {
        self.put(&Entry::Handler { node, fd, name }, 0);
    }

    fn settings(&self, settings: &PollSettings) {
        let (settings, again) = (*settings, false);
        self.put(&Entry::Settings { settings, again }, 0);
    }
}

impl Source {
    /// Moves what is in the ring to `bytes`: whole entries, as they went in.
    pub fn take(&mut self, bytes: &mut Vec<u8>) {
        bytes.clear();
        let many = self.ring.slots();
        if let Ok(chunk) = self.ring.read_chunk(many) {
            let (front, back) = chunk.as_slices();
            bytes.extend_from_slice(front);
            bytes.extend_from_slice(back);
            chunk.commit_all();
        }
    }

    /// Entries lost so far.
    pub fn lost(&self) -> u64 {
        self.lost.load(Ordering::Relaxed)
    }

    /// Whether the sink is gone. What is in the ring then is all there will be.
    pub fn has_ended(&self) -> bool {
        self.ring.is_abandoned()
    }
}

#[cfg(test)]
mod tests {
    use iothread::trace::codec::Decoder;

    use super::*;

    fn read(source: &mut Source, seen: &mut Vec<i64>) -> u64 {
        let mut bytes = Vec::new();
        source.take(&mut bytes);
        let mut decoder = Decoder::new(&bytes, 1, source.base_ns);
        let mut lost = 0;
        while let Some((_, entry)) = decoder.next().unwrap() {
            match entry {
                Entry::Event(TraceEvent::PollHandler { ns, .. }) => seen.push(ns),
                Entry::Lost(count) => {
                    lost += count;
                    // Where they were lost.
                    seen.extend(std::iter::repeat_n(-1, count as usize));
                }
                Entry::Handler { name, .. } => assert_eq!(name, "late"),
                other => panic!("{other:?}"),
            }
        }
        let end_ns = decoder.time_ns();
        source.base_ns = end_ns;
        lost
    }

    fn event(ns: i64) -> TraceEvent<'static> {
        TraceEvent::PollHandler {
            ctx: 1,
            node: 0,
            ns,
        }
    }

    #[test]
    fn a_full_ring_loses_events_counts_them_and_tells_where() {
        let (sink, mut source) = pair(Arc::new(AtomicU32::new(u32::MAX)), RESERVE_BYTES + 300);
        let mut seen = Vec::new();
        let mut lost = 0;
        let mut sent = 0;
        for round in 0..50 {
            for _ in 0..20 * round {
                sink.event(&event(sent));
                sent += 1;
            }
            // Names still have room.
            sink.handler(3, 4, "late");
            lost += read(&mut source, &mut seen);
        }
        sink.event(&event(sent));
        lost += read(&mut source, &mut seen);
        assert!(lost > 1000 && lost < sent as u64, "{lost} of {sent}");
        assert_eq!(source.lost(), lost);
        // Nothing is out of order or missing without being counted at its place.
        assert_eq!(seen.len() as i64, sent + 1);
        for (place, ns) in seen.iter().enumerate() {
            assert!(*ns == -1 || *ns == place as i64, "{ns} at {place}");
        }
    }

    #[test]
    fn two_threads_lose_nothing_uncounted() {
        const EVENTS: i64 = 200_000;
        let (sink, mut source) = pair(Arc::new(AtomicU32::new(u32::MAX)), RESERVE_BYTES + 4096);
        let writer = std::thread::spawn(move || {
            for ns in 0..EVENTS {
                sink.event(&event(ns));
                if ns % 64 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        let mut seen = Vec::new();
        loop {
            let ended = source.has_ended();
            read(&mut source, &mut seen);
            if ended {
                break;
            }
            std::thread::yield_now();
        }
        writer.join().unwrap();
        let got = seen.iter().filter(|ns| **ns >= 0).count() as u64;
        assert_eq!(got + source.lost(), EVENTS as u64);
        for (place, ns) in seen.iter().enumerate() {
            assert!(*ns == -1 || *ns == place as i64, "{ns} at {place}");
        }
    }

    #[test]
    fn only_selected_events_go_in() {
        let (sink, mut source) = pair(Arc::new(AtomicU32::new(0)), RING_BYTES);
        let mut seen = Vec::new();
        sink.event(&event(1));
        sink.mask.store(1 << event(0).index(), Ordering::Relaxed);
        sink.event(&event(2));
        sink.event(&TraceEvent::PollGrow {
            ctx: 1,
            old: 0,
            new: 1,
        });
        read(&mut source, &mut seen);
        assert_eq!((seen, source.lost()), (vec![2], 0));
    }
}
