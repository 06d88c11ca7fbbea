//! The hot path costs no allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use super::rig::*;
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

/// Allocations in the iothread while `rounds` times `depth` requests are served.
fn measure(rig: &mut Rig, rounds: u32, depth: u64, segments: u32) -> u64 {
    let before = allocations(rig);
    for round in 0..rounds {
        let request = if round % 2 == 0 { OUT } else { IN };
        let guest = rig.guest();
        guest.recycle();
        let heads: Vec<u16> = (0..depth)
            .map(|i| {
                let header = guest.put(&Guest::header(request, i * 64), 0);
                let mut buffers = vec![(header, 16, false)];
                for _ in 0..segments {
                    let at = guest.alloc(512, 0);
                    buffers.push((at, 512, request == IN));
                }
                buffers.push((guest.alloc(1, 0), 1, true));
                guest.offer(&buffers)
            })
            .collect();
        guest.kick();
        for head in heads {
            assert_eq!(guest.wait(head).status, OK);
        }
    }
    allocations(rig) - before
}

#[test]
fn no_allocation_per_request() {
    for engine in [EngineKind::IoUring, EngineKind::Native] {
        for poll_max_ns in [0, 32768] {
            for segments in [1, 3, 32] {
                let file = image(4 << 20);
                let mut options = Options::new(file.path()).engine(engine);
                options.poll_max_ns = poll_max_ns;
                let mut rig = Rig::new(options);
                // Whatever is made once is made now.
                measure(&mut rig, 40, 32, segments);
                let few = measure(&mut rig, 10, 32, segments);
                let many = measure(&mut rig, 100, 32, segments);
                // Asking for the count is a call, which allocates the same each time; the number of
                // requests must not matter.
                assert!(
                    many <= few + 4,
                    "{engine} segments={segments}: {few} for 320 requests, {many} for 3200"
                );
            }
        }
    }
}
