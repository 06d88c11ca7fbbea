//! Drivers that break the rules: the disk says so, is quiet, and works again after a reset; the
//! others on its iothread do not notice.

use std::sync::atomic::Ordering;

use super::rig::*;
use crate::virtio::block::*;
use crate::virtio::device::VirtioDevice;
use crate::virtio::features::{EVENT_IDX, VERSION_1};
use crate::virtio::testing::{INDIRECT, NEXT, WRITE};

/// What a hostile driver does to its queue, and what it is called.
type Attack = (&'static str, fn(&mut Guest));

const ATTACKS: [Attack; 9] = [
    ("case 10: the available index jumps", |g| {
        g.ring.set_avail_idx(g.ring.avail_idx.wrapping_add(300));
    }),
    ("a head outside the table", |g| g.ring.offer(0xfff0)),
    ("case 12: a descriptor loop", |g| {
        g.ring.desc(0, 0x200_0000, 16, NEXT, 1);
        g.ring.desc(1, 0x200_0000, 16, NEXT, 0);
        g.ring.offer(0);
    }),
    ("indirect inside indirect", |g| {
        g.ring.desc(0, 0x20_0000, 32, INDIRECT, 0);
        g.ring.desc_at(0x20_0000, 0, 0x20_0000, 32, INDIRECT, 0);
        g.ring.offer(0);
    }),
    ("an indirect table outside RAM", |g| {
        g.ring.desc(0, u64::MAX - 31, 32, INDIRECT, 0);
        g.ring.offer(0);
    }),
    ("next outside the table", |g| {
        g.ring.desc(0, 0x200_0000, 16, NEXT, 0xffff);
        g.ring.offer(0);
    }),
    ("no writable status", |g| {
        let at = g.put(&Guest::header(IN, 0), 0);
        g.ring.chain(0, &[(at, 16, false), (at, 512, false)]);
        g.ring.offer(0);
    }),
    ("status outside RAM", |g| {
        let at = g.put(&Guest::header(IN, 0), 0);
        g.ring.desc(0, at, 16, NEXT, 1);
        g.ring.desc(1, RAM_BYTES as u64, 1, WRITE, 0);
        g.ring.offer(0);
    }),
    ("a discard's payload cut short", |g| {
        let at = g.put(&Guest::header(DISCARD, 0), 0);
        g.ring.chain(0, &[(at, 24, false), (0x300_0000, 1, true)]);
        g.ring.offer(0);
    }),
];

#[test]
fn case_10_11_12_a_broken_queue_needs_a_reset_and_the_other_disks_go_on() {
    attack_all(iothread("shared", 32768));
}

#[test]
fn case_12_broken_queues_are_noticed_and_left_alone_while_polling() {
    // Found by polling, with poll mode on all the time.
    attack_all(always_polling());
}

fn attack_all(thread: iothread::IoThread) {
    let other_file = image(1 << 20);
    let mut other = Rig::on(Options::new(other_file.path()), vec![thread]);
    for (what, attack) in ATTACKS {
        let file = image(1 << 20);
        let home = other.threads[0].remote().clone();
        let options = Options::new(file.path());
        let block = Block::new(options.disk, Placement::single(&home, 1)).unwrap();
        let mut rig = Rig::of(block, options.features, Vec::new());
        rig.guest().write(0, &pattern(7, 512));
        let line = rig.line.clone();
        let interrupts = line.count();
        attack(rig.guest());
        rig.guest().kick();
        eventually(what, || line.needs_reset.load(Ordering::SeqCst));
        assert!(rig.handle.is_broken(), "{what}");
        // Quiet from then on, however much the driver kicks.
        for _ in 0..10 {
            rig.guest().kick();
        }
        other.guest().write(8, &pattern(9, 4096));
        assert_eq!(other.guest().read(8, 4096), pattern(9, 4096), "{what}");
        assert_eq!(line.count(), interrupts, "{what}: no more interrupts");
        assert_eq!(line.config.load(Ordering::SeqCst), 1, "{what}: one event");
        // And it works again.
        rig.reset();
        rig.activate();
        assert_eq!(rig.guest().read(0, 512), pattern(7, 512), "{what}");
    }
}

#[test]
fn a_broken_queue_stops_its_siblings() {
    let file = image(1 << 20);
    let mut options = Options::new(file.path()).with(|d| d.queues = 2);
    options.threads = 2;
    let mut rig = Rig::new(options);
    rig.guests[1].write(0, &pattern(1, 512));
    rig.guests[0].ring.offer(0xffff);
    rig.guests[0].kick();
    let line = rig.line.clone();
    eventually("broken", || line.needs_reset.load(Ordering::SeqCst));
    let interrupts = line.count();
    let head = rig.guests[1].send(IN, 0, &[], 512);
    rig.guests[1].kick();
    std::thread::sleep(std::time::Duration::from_millis(50));
    rig.guests[1].collect();
    assert!(!rig.guests[1].is_answered(head));
    assert_eq!(line.count(), interrupts);
    rig.reset();
    rig.activate();
    assert_eq!(rig.guests[1].read(0, 512), pattern(1, 512));
}

#[test]
fn bad_requests_with_a_status_byte_are_errors_and_nothing_more() {
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()));
    let guest = rig.guest();
    for data in [(RAM_BYTES as u64, 512, true), (u64::MAX - 100, 512, true)] {
        guest.recycle();
        let header = guest.put(&Guest::header(IN, 0), 0);
        let status = guest.alloc(1, 0);
        let head = guest.ring_chain(&[(header, 16, false), data, (status, 1, true)], status);
        guest.kick();
        assert_eq!(guest.wait(head).status, IOERR);
    }
    assert!(!rig.line.needs_reset.load(Ordering::SeqCst));
    assert_eq!(rig.guest().read(0, 512), vec![0; 512]);
}

#[test]
fn a_driver_that_never_takes_its_answers_costs_no_memory_and_no_hang() {
    // The same head offered again and again while it is in flight: at most as many requests as
    // there are slots.
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()).with(|d| d.queue_size = 16));
    let line = rig.line.clone();
    let guest = rig.guest();
    let header = guest.put(&Guest::header(IN, 0), 0);
    let data = guest.alloc(512, 0);
    let status = guest.alloc(1, 0);
    guest.ring.chain(
        0,
        &[(header, 16, false), (data, 512, true), (status, 1, true)],
    );
    let mut offered = 0u64;
    let mut used = 0u64;
    while offered < 20_000 {
        let taken = guest.ring.device_used_idx().wrapping_sub(used as u16);
        used += u64::from(taken);
        if offered - used < 16 {
            guest.ring.offer(0);
            offered += 1;
            guest.kick();
        }
    }
    eventually("all are answered", || {
        used += u64::from(guest.ring.device_used_idx().wrapping_sub(used as u16));
        used == offered
    });
    assert!(!line.needs_reset.load(Ordering::SeqCst));
}

#[test]
fn case_1_a_driver_that_did_not_accept_read_only_cannot_write_all_the_same() {
    let file = image(1 << 20);
    let mut options = Options::new(file.path()).with(|d| d.readonly = true);
    options.features &= !features::RO;
    let mut rig = Rig::new(options);
    assert_ne!(rig.block.features() & features::RO, 0, "it was offered");
    for request in [OUT, DISCARD, WRITE_ZEROES] {
        let payload = if request == OUT {
            vec![1; 512]
        } else {
            Guest::range(0, 8, 0)
        };
        let status = rig.guest().ask(request, 0, &payload, 0).status;
        assert_ne!(status, OK);
    }
    // Not because the host refused it.
    let stats = rig.handle.stats();
    assert_eq!(
        (stats.failed_wr_operations, stats.invalid_operations),
        (0, 3)
    );
    // Case 2: the disk lives on.
    assert_eq!(rig.guest().read(0, 512), vec![0; 512]);
    assert_eq!(rig.guest().ask(FLUSH, 0, &[], 0).status, OK);
    assert_eq!(rig.guest().ask(GET_ID, 0, &[], 20).status, OK);
}

#[test]
fn only_negotiated_features_are_acted_on() {
    let file = image(1 << 20);
    let mut options = Options::new(file.path());
    options.features = VERSION_1;
    let mut rig = Rig::new(options);
    let guest = rig.guest();
    // Without INDIRECT_DESC and EVENT_IDX: direct chains, flags.
    let ask = |guest: &mut Guest, request, payload: &[u8]| {
        guest.recycle();
        let mut header = Guest::header(request, 0).to_vec();
        header.extend(payload);
        let at = guest.put(&header, 0);
        let status = guest.alloc(1, 0);
        let buffers = [(at, header.len() as u32, false), (status, 1, true)];
        let head = guest.ring_chain(&buffers, status);
        guest.kick();
        guest.wait(head).status
    };
    assert_eq!(ask(guest, OUT, &[7; 512]), OK);
    assert_eq!(ask(guest, FLUSH, &[]), UNSUPP);
    assert_eq!(ask(guest, DISCARD, &Guest::range(0, 8, 0)), UNSUPP);
    assert_eq!(ask(guest, WRITE_ZEROES, &Guest::range(0, 8, 0)), UNSUPP);
    assert_eq!(file_bytes(&file, 0, 512), vec![7; 512]);
    // A driver that cannot flush gets its writes synced.
    assert!(!rig.handle.writeback());
    assert_eq!(rig.handle.stats().syncs, 1);
    let _ = EVENT_IDX;
}

#[test]
fn a_sibling_that_is_kicked_while_it_polls_stops_quietly() {
    let file = image(1 << 20);
    let options = Options::new(file.path()).with(|d| d.queues = 2);
    let mut rig = Rig::on(options, vec![always_polling(), always_polling()]);
    rig.guests[0].write(0, &[1; 512]);
    rig.guests[1].write(0, &[2; 512]);
    rig.guests[0].ring.offer(0xffff);
    let line = rig.line.clone();
    eventually("broken", || line.needs_reset.load(Ordering::SeqCst));
    // Nothing is available here: only the kick tells, with poll mode on.
    rig.guests[1].kick();
    std::thread::sleep(std::time::Duration::from_millis(50));
    for thread in &rig.threads {
        thread.remote().call(|_| ()).unwrap();
        assert_eq!(thread.panicked(), None);
    }
    rig.reset();
    rig.activate();
    assert_eq!(rig.guests[1].read(0, 512), [2; 512]);
}
