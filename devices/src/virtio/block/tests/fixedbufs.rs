//! Registered buffers: which requests go by them, and what they do when memory, threads and disks
//! come and go. The data they transfer is compared in `model` and `cutting`.

use std::sync::Arc;

use tempfile::NamedTempFile;
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestRegionMmap};

use super::rig::*;
use crate::GuestMemory;
use crate::virtio::block::engine::io_uring::FIXED_OPS;
use crate::virtio::block::image::{Alignment, DEMANDED};
use crate::virtio::block::*;

/// Operations of one segment and of several that went by registered buffers in thread `at`.
fn fixed_ops(rig: &Rig, at: usize) -> (u64, u64) {
    rig.threads[at].remote().call(|_| FIXED_OPS.get()).unwrap()
}

/// Whether the host can do this at all; if not, a line that says so.
fn possible(rig: &Rig, test: &str) -> bool {
    let possible = rig.threads[0].remote().call(|ctx| {
        let mut page = vec![0u8; 4096];
        // SAFETY: the page is there until it was unregistered.
        let slot = unsafe { ctx.register_buffer(page.as_mut_ptr(), page.len()) };
        slot.map(|slot| ctx.unregister_buffer(slot)).is_ok()
    });
    let possible = possible.unwrap();
    if !possible {
        println!("skipped: {test} needs io_uring of Linux 5.19 and memory that may be locked");
    }
    possible
}

/// Slots taken in the ring of thread `at`.
fn slots_taken(rig: &Rig, at: usize) -> u32 {
    let first_free = rig.threads[at].remote().call(|ctx| {
        let mut page = vec![0u8; 4096];
        // SAFETY: the page is there until it was unregistered.
        let slot = unsafe { ctx.register_buffer(page.as_mut_ptr(), page.len()) }.unwrap();
        ctx.unregister_buffer(slot);
        slot
    });
    first_free.unwrap()
}

/// A write and a read back with the data in `pieces`: guest addresses and lengths.
fn transfer(rig: &mut Rig, pieces: &[(u64, u32)], seed: u64) {
    let bytes: u32 = pieces.iter().map(|piece| piece.1).sum();
    let data = pattern(seed, bytes as usize);
    let guest = rig.guest();
    for request in [OUT, IN] {
        guest.recycle();
        let header = guest.put(&Guest::header(request, 8), 0);
        let mut buffers = vec![(header, 16, false)];
        let mut from = 0;
        for &(at, len) in pieces {
            let piece = &data[from..from + len as usize];
            let content = if request == OUT {
                piece.to_vec()
            } else {
                vec![0; piece.len()]
            };
            guest
                .ring
                .mem
                .write_slice(&content, GuestAddress(at))
                .unwrap();
            buffers.push((at, len, request == IN));
            from += len as usize;
        }
        buffers.push((guest.alloc(1, 0), 1, true));
        let head = guest.offer(&buffers);
        guest.kick();
        let reply = guest.wait(head);
        assert_eq!(reply.status, OK);
        if request == IN {
            assert!(reply.data == data, "{pieces:?}");
        }
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn requests_go_by_registered_buffers_where_they_can() {
    for direct in [None, Some(false)] {
        let file = image(1 << 20);
        let mut rig = Rig::new(
            Options::new(file.path())
                .fixedbufs()
                .with(|d| d.direct = direct),
        );
        if !possible(&rig, "requests_go_by_registered_buffers_where_they_can") {
            return;
        }
        let vectored = rig.threads[0]
            .remote()
            .call(|ctx| ctx.supports(&[iothread::io_uring::opcode::ReadvFixed::CODE]));
        let many = if vectored.unwrap() { 2 } else { 0 };
        assert_eq!(fixed_ops(&rig, 0), (0, 0));
        transfer(&mut rig, &[(40 * MIB, 4096)], 1);
        assert_eq!(fixed_ops(&rig, 0), (2, 0), "a write and a read");
        // To the very end of the memory, and two in one piece of it.
        transfer(&mut rig, &[(48 * MIB - 4096, 4096)], 2);
        transfer(&mut rig, &[(40 * MIB, 4096), (40 * MIB + 8192, 512)], 3);
        assert_eq!(fixed_ops(&rig, 0), (4, many));
        // Over a bound of what is registered as one, in one segment and in two.
        transfer(&mut rig, &[(41 * MIB - 512, 1024)], 4);
        transfer(&mut rig, &[(40 * MIB, 512), (41 * MIB, 512)], 5);
        // Zeroes are written from memory that is not the guest's.
        let zeroes = Guest::range(8, 8, 0);
        assert_eq!(rig.guest().ask(WRITE_ZEROES, 0, &zeroes, 0).status, OK);
        assert_eq!(fixed_ops(&rig, 0), (4, many));
    }
}

#[test]
fn bounced_requests_go_by_their_own_buffers() {
    let file = image(1 << 20);
    DEMANDED.set(Some(Alignment {
        memory: 512,
        offset: 4096,
    }));
    let mut rig = Rig::new(Options::new(file.path()).fixedbufs());
    DEMANDED.set(None);
    transfer(&mut rig, &[(40 * MIB, 512)], 1);
    assert!(rig.handle.stats().bounced >= 2);
    assert_eq!(fixed_ops(&rig, 0), (0, 0));
}

#[test]
fn queues_of_one_ring_share_the_slots_and_the_last_frees_them() {
    let file = image(1 << 20);
    let mut options = Options::new(file.path()).fixedbufs();
    options.disk.queues = 2;
    options.ram_bytes = 64 << 20;
    let mut rig = Rig::on(options, vec![iothread("t0", 32768), iothread("t1", 0)]);
    if !possible(
        &rig,
        "queues_of_one_ring_share_the_slots_and_the_last_frees_them",
    ) {
        return;
    }
    // The memory's MiB, each a slot.
    let taken = |rig: &Rig| (slots_taken(rig, 0), slots_taken(rig, 1));
    assert_eq!(taken(&rig), (64, 64));
    for homes in [[0, 0], [1, 1], [1, 0], [0, 0], [0, 1], [1, 1]] {
        let remotes = homes.map(|at: usize| Some(rig.threads[at].remote().clone()));
        let placement = Placement::new(rig.threads[0].remote(), remotes);
        rig.handle.change_placement(placement).unwrap();
        let before = fixed_ops(&rig, homes[0]).0;
        transfer(&mut rig, &[(20 * MIB, 4096)], before);
        assert_eq!(fixed_ops(&rig, homes[0]).0, before + 2);
        let there = |at| if homes.contains(&at) { 64 } else { 0 };
        assert_eq!(taken(&rig), (there(0), there(1)), "{homes:?}");
    }
    rig.reset();
    assert_eq!(taken(&rig), (0, 0), "nobody's memory stays pinned");
    rig.activate();
    transfer(&mut rig, &[(20 * MIB, 4096)], 7);
}

#[test]
fn new_memory_at_the_same_addresses_is_what_requests_see() {
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()).fixedbufs());
    for round in 0..8 {
        transfer(&mut rig, &[(40 * MIB, 4096)], round);
        // As a front end of vhost-user changes its table: the queues stop, the old memory goes, and
        // the new is mapped where it was.
        rig.reset();
        rig.guests.clear();
        rig.mem = GuestMemory::new();
        rig.mem = crate::virtio::testing::ram(48 << 20);
        rig.activate();
    }
    transfer(&mut rig, &[(40 * MIB, 4096)], 9);
}

#[test]
fn memory_that_cannot_be_pinned_is_served_by_plain_operations() {
    // A shared mapping of a file on a disk: refused by kernels since 6.5.
    let backing =
        NamedTempFile::new_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap();
    backing.as_file().set_len(48 << 20).unwrap();
    let region = vm_memory::MmapRegion::from_file(
        FileOffset::from_arc(Arc::new(backing.reopen().unwrap()), 0),
        48 << 20,
    );
    let region = GuestRegionMmap::new(region.unwrap(), GuestAddress(0)).unwrap();
    let mem = GuestMemory::from_regions(vec![region]).unwrap();
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()).fixedbufs());
    let start = mem.iter().next().unwrap().as_ptr().addr();
    let refused = rig.threads[0].remote().call(move |ctx| {
        let start = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: the memory is there until it was unregistered.
        let slot = unsafe { ctx.register_buffer(start, 4096) };
        slot.map(|slot| ctx.unregister_buffer(slot)).is_err()
    });
    rig.reset();
    rig.guests.clear();
    rig.mem = mem;
    rig.activate();
    transfer(&mut rig, &[(40 * MIB, 4096)], 1);
    let expected = if refused.unwrap() { (0, 0) } else { (2, 0) };
    assert_eq!(fixed_ops(&rig, 0), expected);
    if expected.0 == 0 {
        assert_eq!(slots_taken(&rig, 0), 0, "nothing is left half registered");
    }
}
