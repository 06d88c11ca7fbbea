//! The hot path costs no allocation and takes no lock.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use super::board::Wire;
use super::rig::*;
use crate::sync::LOCKINGS;
use crate::virtio::block::image::{Alignment, DEMANDED};
use crate::virtio::block::*;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting by thread.
struct Counting;

fn count() {
    // At a thread's end the counter is gone; nobody asks for it then.
    let _ = ALLOCATIONS.try_with(|a| a.set(a.get() + 1));
}

// SAFETY: hands everything to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(start, layout, size) }
    }
    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

fn allocations(rig: &Rig) -> u64 {
    rig.threads[0].remote().call(|_| ALLOCATIONS.get()).unwrap()
}

fn lockings(rig: &Rig) -> u64 {
    rig.threads[0].remote().call(|_| LOCKINGS.get()).unwrap()
}

/// A kind of request.
#[derive(Clone, Copy, Debug)]
enum Request {
    /// Writes and reads of so many segments of 512 bytes, whose buffers are off by so many bytes.
    Data(u32, u64),
    Flush,
    Id,
    Discard,
    /// With UNMAP or without.
    Zeroes(bool),
    /// One whose sector is beyond the disk.
    Refused,
}

/// What `counter` counts in the iothread while `rounds` times 32 requests are served.
fn measure(rig: &mut Rig, rounds: u64, request: Request, counter: fn(&Rig) -> u64) -> u64 {
    let before = counter(rig);
    for round in 0..rounds {
        let guest = rig.guest();
        guest.recycle();
        let expected = match request {
            Request::Refused => IOERR,
            _ => OK,
        };
        let heads: Vec<u16> = (0..32)
            .map(|i| match request {
                Request::Data(segments, shift) => {
                    let kind = if round % 2 == 0 { OUT } else { IN };
                    let header = guest.put(&Guest::header(kind, i * 64), 0);
                    let mut buffers = vec![(header, 16, false)];
                    for _ in 0..segments {
                        let at = guest.alloc(512, shift);
                        buffers.push((at, 512, kind == IN));
                    }
                    buffers.push((guest.alloc(1, 0), 1, true));
                    guest.offer(&buffers)
                }
                Request::Flush => guest.send(FLUSH, 0, &[], 0),
                Request::Id => guest.send(GET_ID, 0, &[], 20),
                Request::Discard => guest.send(DISCARD, 0, &Guest::range(i * 8, 8, 0), 0),
                Request::Zeroes(unmap) => {
                    let range = Guest::range(i * 8, 8, unmap.into());
                    guest.send(WRITE_ZEROES, 0, &range, 0)
                }
                Request::Refused => guest.send(IN, 1 << 40, &[], 512),
            })
            .collect();
        guest.kick();
        for head in heads {
            assert_eq!(guest.wait(head).status, expected, "{request:?}");
        }
    }
    counter(rig) - before
}

/// The number of requests must not matter, whatever is made once at the beginning.
fn expect_none(rig: &mut Rig, request: Request, what: &str) {
    // Those that the host's filesystem may take its time for are fewer.
    let rounds = match request {
        Request::Data(..) | Request::Id | Request::Refused => 32,
        _ => 8,
    };
    measure(rig, rounds / 2, request, allocations);
    let few = measure(rig, 2, request, allocations);
    let many = measure(rig, rounds, request, allocations);
    // Asking for the count is a call, which allocates the same each time. The pool's threads are
    // started by whoever finds too few of them, also for the requests of other tests.
    let threads = rig.handle.config().engine != Some(EngineKind::IoUring);
    let slack = if threads { 8 * rounds } else { 4 };
    assert!(
        many <= few + slack,
        "{what}, {request:?}: {few} in 2 rounds of 32, {many} in {rounds}"
    );
}

const FIXED: (EngineKind, bool) = (EngineKind::IoUring, true);

#[test]
fn no_allocation_per_request() {
    for wire in [Wire::Mmio, Wire::Pci] {
        for (engine, fixed) in ENGINES.map(|e| (e, false)).into_iter().chain([FIXED]) {
            for poll_max_ns in [0, 32768] {
                let file = image(4 << 20);
                let mut options = Options::new(file.path()).engine(engine);
                if fixed {
                    options = options.fixedbufs();
                }
                options.poll_max_ns = poll_max_ns;
                options.wire = wire;
                let mut rig = Rig::new(options);
                let what = format!("{wire:?}, {engine}, fixed={fixed}, poll-max-ns={poll_max_ns}");
                for request in [
                    Request::Data(1, 0),
                    Request::Data(3, 0),
                    Request::Data(32, 0),
                    Request::Flush,
                    Request::Id,
                    Request::Discard,
                    Request::Zeroes(false),
                    Request::Zeroes(true),
                    Request::Refused,
                ] {
                    expect_none(&mut rig, request, &what);
                }
            }
        }
    }
}

#[test]
fn no_allocation_per_request_that_is_bounced() {
    for engine in ENGINES {
        // Buffers that are not aligned, and then blocks that are not.
        for (memory, offset, shift) in [(512, 512, 1), (512, 4096, 0)] {
            let file = image(4 << 20);
            DEMANDED.set(Some(Alignment { memory, offset }));
            let mut rig = Rig::new(Options::new(file.path()).engine(engine));
            DEMANDED.set(None);
            for segments in [1, 32] {
                let request = Request::Data(segments, shift);
                expect_none(&mut rig, request, &format!("{engine}, blocks of {offset}"));
            }
            assert!(rig.handle.stats().bounced >= 2000);
        }
    }
}

#[test]
fn no_lock_per_request() {
    for wire in [Wire::Mmio, Wire::Pci] {
        for (engine, fixed) in [
            (EngineKind::Native, false),
            (EngineKind::IoUring, false),
            FIXED,
        ] {
            for poll_max_ns in [0, 32768] {
                let file = image(4 << 20);
                let mut options = Options::new(file.path()).engine(engine);
                if fixed {
                    options = options.fixedbufs();
                }
                options.poll_max_ns = poll_max_ns;
                options.wire = wire;
                let mut rig = Rig::new(options);
                let mut requests = vec![
                    Request::Data(1, 0),
                    Request::Data(32, 0),
                    Request::Id,
                    Request::Refused,
                ];
                // Linux AIO leaves these to the pool, whose jobs are behind a lock.
                if engine == EngineKind::IoUring {
                    requests.extend([Request::Flush, Request::Discard, Request::Zeroes(false)]);
                }
                for request in requests {
                    let lockings = measure(&mut rig, 8, request, lockings);
                    assert_eq!(
                        lockings, 0,
                        "{wire:?}, {engine}, fixed={fixed}, {request:?}"
                    );
                }
            }
        }
    }
    // It would be seen: the pool's jobs are behind one.
    let file = image(4 << 20);
    let mut rig = Rig::new(Options::new(file.path()).engine(EngineKind::Threads));
    assert!(measure(&mut rig, 2, Request::Data(1, 0), lockings) > 0);
}
