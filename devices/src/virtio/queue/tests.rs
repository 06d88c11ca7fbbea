use super::*;
use crate::virtio::features::{EVENT_IDX, INDIRECT_DESC};
use crate::virtio::testing::{DriverQueue, INDIRECT, NEXT, WRITE, ram};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

const RAM: usize = 1 << 20;
const TABLE: u64 = 0x4_0000;

fn pair(size: u16, features: u64) -> (DriverQueue, Queue) {
    let mem = ram(RAM);
    let driver = DriverQueue::new(&mem, 0x1000, size);
    let queue = Queue::new(&mem, driver.layout, MAX_SIZE, features, 0).unwrap();
    (driver, queue)
}

fn walk(queue: &Queue, head: u16) -> Result<Vec<Descriptor>, Error> {
    queue.chain(head).collect()
}

#[test]
fn chains_come_out_in_order_and_used_elements_go_back() {
    let (mut driver, mut queue) = pair(8, 0);
    assert!(!queue.has_avail());
    assert_eq!(queue.pop(), Ok(None));
    driver.chain(0, &[(0x2000, 16, false), (0x3000, 1, true)]);
    driver.chain(5, &[(0x5000, 512, true)]);
    driver.offer(5);
    driver.offer(0);
    assert!(queue.has_avail());
    assert_eq!(queue.pop(), Ok(Some(5)));
    assert_eq!(queue.pop(), Ok(Some(0)));
    assert_eq!(queue.pop(), Ok(None));
    let expected = [
        Descriptor {
            addr: 0x2000,
            len: 16,
            writable: false,
        },
        Descriptor {
            addr: 0x3000,
            len: 1,
            writable: true,
        },
    ];
    assert_eq!(walk(&queue, 0).unwrap(), expected);
    queue.push_used(0, 1);
    assert_eq!(driver.take_used(), None, "not before it is published");
    queue.push_used(5, 513);
    assert!(queue.publish());
    assert_eq!(driver.take_used(), Some((0, 1)));
    assert_eq!(driver.take_used(), Some((5, 513)));
    assert_eq!(driver.take_used(), None);
    assert!(!queue.publish(), "nothing new, no interrupt");
}

#[test]
fn set_up_refuses_what_no_driver_does() {
    let mem = ram(RAM);
    let good = DriverQueue::new(&mem, 0x1000, 16).layout;
    let make = |layout: Layout, features| Queue::new(&mem, layout, 256, features, 0).map(|_| ());
    assert_eq!(make(good, EVENT_IDX), Ok(()));
    for size in [0, 3, 255, 512, 1024, 0x8000, 0xffff] {
        assert_eq!(make(Layout { size, ..good }, 0), Err(Error::Size(size)));
    }
    let misaligned = [
        Layout {
            desc: 0x1008,
            ..good
        },
        Layout {
            avail: good.avail + 1,
            ..good
        },
        Layout {
            used: good.used + 2,
            ..good
        },
    ];
    for layout in misaligned {
        assert!(matches!(make(layout, 0), Err(Error::Alignment { .. })));
    }
    let end = RAM as u64;
    for addr in [end, end - 16, u64::MAX - 15, 1 << 63] {
        for layout in [
            Layout { desc: addr, ..good },
            Layout {
                avail: addr,
                ..good
            },
            Layout { used: addr, ..good },
        ] {
            assert!(
                matches!(make(layout, 0), Err(Error::Outside { .. })),
                "{layout:x?}"
            );
        }
    }
    // The rings end exactly with RAM, with and without the event field behind them.
    let tight = Layout {
        used: end - 4 - 8 * 16,
        ..good
    };
    assert_eq!(make(tight, 0), Ok(()));
    assert!(matches!(make(tight, EVENT_IDX), Err(Error::Outside { .. })));
}

#[test]
fn available_index_jump_breaks_the_queue_for_good() {
    for idx in [9, 100, 0x8000, 0xffff] {
        let (driver, mut queue) = pair(8, EVENT_IDX);
        driver.set_avail_idx(idx);
        assert!(queue.has_avail());
        assert_eq!(queue.pop(), Err(Error::AvailJump { from: 0, to: idx }));
        assert!(queue.is_broken());
        assert!(!queue.has_avail(), "a poller sees no work");
        assert_eq!(queue.pop(), Ok(None));
        assert!(!queue.enable_notifications());
        queue.push_used(0, 0);
        assert!(!queue.publish());
        assert_eq!(driver.device_used_idx(), 0);
    }
    // All of the queue at once is no jump.
    let (mut driver, mut queue) = pair(8, 0);
    for head in 0..8 {
        driver.offer(head);
    }
    for head in 0..8 {
        assert_eq!(queue.pop(), Ok(Some(head)));
    }
}

#[test]
fn a_head_outside_the_table_breaks_the_queue() {
    let (mut driver, mut queue) = pair(8, 0);
    driver.offer(8);
    assert_eq!(queue.pop(), Err(Error::Index { index: 8, len: 8 }));
    assert!(queue.is_broken());
}

#[test]
fn loops_end() {
    let (driver, queue) = pair(8, INDIRECT_DESC);
    driver.desc(0, 0x2000, 16, NEXT, 0);
    assert_eq!(walk(&queue, 0), Err(Error::Loop));
    driver.desc(1, 0x2000, 16, NEXT, 2);
    driver.desc(2, 0x2000, 16, NEXT, 1);
    assert_eq!(walk(&queue, 1), Err(Error::Loop));
    driver.desc(3, 0x2000, 16, NEXT, 8);
    assert_eq!(walk(&queue, 3), Err(Error::Index { index: 8, len: 8 }));
    driver.desc(4, TABLE, 32, INDIRECT, 0);
    driver.desc_at(TABLE, 0, 0x2000, 16, NEXT, 1);
    driver.desc_at(TABLE, 1, 0x2000, 16, NEXT, 0);
    assert_eq!(walk(&queue, 4), Err(Error::Loop));
    // A table longer than any request may be.
    for i in 0..2000 {
        driver.desc_at(TABLE, i, 0x2000, 1, NEXT, i + 1);
    }
    driver.desc(5, TABLE, 2000 * 16, INDIRECT, 0);
    assert_eq!(walk(&queue, 5), Err(Error::Loop));
}

#[test]
fn a_chain_of_the_whole_queue_is_none_too_long() {
    let (driver, queue) = pair(8, 0);
    driver.chain(0, &[(0x2000, 1, false); 8]);
    assert_eq!(walk(&queue, 0).unwrap().len(), 8);
}

#[test]
fn indirect_tables() {
    let (driver, queue) = pair(8, INDIRECT_DESC);
    let buffers = [(0x2000, 16, false), (0x3000, 512, true), (0x4000, 1, true)];
    // Anywhere in RAM, aligned or not, and behind direct descriptors.
    for table in [TABLE, TABLE + 1, TABLE + 8] {
        driver.chain_at(table, 0, &buffers);
        driver.desc(0, table, 48, INDIRECT | WRITE, 0);
        assert_eq!(walk(&queue, 0).unwrap().len(), 3, "WRITE is ignored");
        driver.desc(1, 0x6000, 7, NEXT, 2);
        driver.desc(2, table, 48, INDIRECT, 0);
        let all = walk(&queue, 1).unwrap();
        assert_eq!(all.len(), 4);
        assert_eq!(all[0].addr, 0x6000);
        assert_eq!((all[3].addr, all[3].len, all[3].writable), buffers[2]);
    }
    let refused = |addr, len, flags| {
        driver.desc(3, addr, len, INDIRECT | flags, 0);
        matches!(walk(&queue, 3), Err(Error::Indirect(_)))
    };
    assert!(refused(TABLE, 0, 0));
    assert!(refused(TABLE, 47, 0));
    assert!(refused(TABLE, 48, NEXT));
    assert!(refused(RAM as u64 - 16, 32, 0));
    assert!(refused(u64::MAX - 15, 32, 0));
    assert!(refused(TABLE, !15, 0));
    driver.desc_at(TABLE, 0, TABLE, 48, INDIRECT, 0);
    assert!(refused(TABLE, 48, 0), "indirect inside indirect");
    let (driver, queue) = pair(8, 0);
    driver.desc(0, TABLE, 48, INDIRECT, 0);
    assert_eq!(
        walk(&queue, 0),
        Err(Error::Indirect("not negotiated")),
        "only negotiated features are acted on"
    );
}

#[test]
fn notifications_by_flag() {
    let (mut driver, mut queue) = pair(8, 0);
    queue.disable_notifications();
    assert_eq!(driver.used_flags(), 1);
    driver.offer(0);
    assert!(queue.enable_notifications(), "work that came meanwhile");
    assert_eq!(driver.used_flags(), 0);
    queue.pop().unwrap();
    assert!(!queue.enable_notifications());
    assert_eq!(driver.avail_event(), 0, "not negotiated, not touched");
}

#[test]
fn notifications_by_event_index() {
    let (mut driver, mut queue) = pair(8, EVENT_IDX);
    driver.offer(0);
    queue.pop().unwrap();
    queue.disable_notifications();
    assert_eq!(driver.avail_event(), 0, "left behind");
    assert_eq!(driver.used_flags(), 0, "not touched with EVENT_IDX");
    assert!(!queue.enable_notifications());
    assert_eq!(driver.avail_event(), 1);
    driver.offer(1);
    assert!(queue.enable_notifications());
}

#[test]
fn interrupts_by_flag() {
    let (driver, mut queue) = pair(8, 0);
    driver.set_used_event(100);
    queue.push_used(0, 0);
    assert!(queue.publish(), "used_event means nothing");
    driver.set_avail_flags(1);
    queue.push_used(0, 0);
    assert!(!queue.publish());
    assert_eq!(driver.device_used_idx(), 2);
}

#[test]
fn case_14_interrupt_decision_by_used_event_over_the_wrap() {
    let mem = ram(RAM);
    let driver = DriverQueue::new(&mem, 0x1000, 8);
    // Start shortly before the index wraps at 65536.
    let base = 0xfffc;
    let mut queue = Queue::new(&mem, driver.layout, 8, EVENT_IDX, base).unwrap();
    driver.set_avail_flags(1); // must be ignored
    let mut steps = |event: u16, count: u16| {
        driver.set_used_event(event);
        for _ in 0..count {
            queue.push_used(0, 0);
        }
        queue.publish()
    };
    assert!(steps(0xfffc, 1), "the element at the event index");
    assert!(!steps(0xfffc, 1), "passed already");
    assert!(steps(1, 4), "the batch 0xfffe..2 crosses the wrap and 1");
    assert!(!steps(5, 2));
    assert!(steps(5, 2));
}

#[test]
fn case_15_a_driver_without_event_idx_is_served_by_flags_alone() {
    let (mut driver, mut queue) = pair(4, 0);
    for round in 0..100_000u32 {
        driver.offer((round % 4) as u16);
        let head = queue.pop().unwrap().unwrap();
        queue.push_used(head, 1);
        assert!(queue.publish());
        assert_eq!(driver.take_used(), Some((round % 4, 1)));
    }
}

#[test]
fn nothing_is_lost_between_threads() {
    const ROUNDS: u32 = 20_000;
    for features in [0, EVENT_IDX] {
        let (mut driver, mut queue) = pair(16, features);
        let (kick, kicked) = std::sync::mpsc::channel::<()>();
        let (irq, interrupted) = std::sync::mpsc::channel::<()>();
        let device = std::thread::spawn(move || {
            let mut seen = 0;
            while seen < ROUNDS {
                // Sleeps only when notifications are on and nothing is there.
                queue.disable_notifications();
                while let Some(head) = queue.pop().unwrap() {
                    queue.push_used(head, seen);
                    seen += 1;
                }
                if queue.publish() {
                    let _ = irq.send(());
                }
                if !queue.enable_notifications() && seen < ROUNDS {
                    kicked
                        .recv_timeout(std::time::Duration::from_secs(60))
                        .expect("a kick was lost");
                }
            }
        });
        let mut sent = 0;
        let mut done = 0;
        while done < ROUNDS {
            while sent < ROUNDS && sent - done < 16 {
                let old = driver.avail_idx;
                driver.offer((sent % 16) as u16);
                sent += 1;
                fence(Ordering::SeqCst);
                let wanted = if features == 0 {
                    driver.used_flags() == 0
                } else {
                    let new = driver.avail_idx;
                    new.wrapping_sub(driver.avail_event()).wrapping_sub(1) < new.wrapping_sub(old)
                };
                if wanted {
                    kick.send(()).unwrap_or(());
                }
            }
            driver.set_used_event(driver.used_idx);
            fence(Ordering::SeqCst);
            let mut progress = false;
            while let Some((_, order)) = driver.take_used() {
                assert_eq!(order, done);
                done += 1;
                progress = true;
            }
            if !progress && done < ROUNDS {
                interrupted
                    .recv_timeout(std::time::Duration::from_secs(60))
                    .expect("an interrupt was lost");
            }
        }
        device.join().unwrap();
    }
}

/// The rule of section 2.7.7.2 by counting: does any element from `old` up to `new` sit at `event`?
fn crosses(event: u16, old: u16, new: u16) -> bool {
    let mut idx = old;
    while idx != new {
        if idx == event {
            return true;
        }
        idx = idx.wrapping_add(1);
    }
    false
}

proptest! {
    #[test]
    fn interrupt_decision_matches_counting(
        base in any::<u16>(),
        batches in prop::collection::vec((0u16..8, any::<bool>(), any::<i8>()), 1..40),
    ) {
        let mem = ram(0x4000);
        let driver = DriverQueue::new(&mem, 0x1000, 8);
        let mut queue = Queue::new(&mem, driver.layout, 8, EVENT_IDX, base).unwrap();
        let mut idx = base;
        for (count, near, distance) in batches {
            let event = if near { idx.wrapping_add_signed(distance.into()) } else { base };
            driver.set_used_event(event);
            let old = idx;
            for _ in 0..count {
                queue.push_used(0, 0);
                idx = idx.wrapping_add(1);
            }
            prop_assert_eq!(queue.publish(), crosses(event, old, idx));
            if count > 0 {
                prop_assert_eq!(driver.device_used_idx(), idx);
            }
        }
    }

    /// virtio-queue is the oracle: any table whose chain we accept gives the same buffers there.
    #[test]
    fn accepted_chains_match_virtio_queue(
        direct in prop::collection::vec((0u64..0x20, 0u32..5, 0u16..8, 0u16..9), 8),
        indirect in prop::collection::vec((0u64..0x20, 0u32..5, 0u16..4, 0u16..9), 8),
        head in 0u16..8,
    ) {
        use virtio_queue::{Queue as Oracle, QueueOwnedT, QueueT};
        let (mut driver, queue) = pair(8, INDIRECT_DESC);
        for (i, &(addr, len, flags, next)) in (0..).zip(&direct) {
            if flags & INDIRECT != 0 {
                driver.desc(i, TABLE, len * 32, flags & !NEXT, next);
            } else {
                driver.desc(i, addr * 0x100, len, flags, next);
            }
        }
        for (i, &(addr, len, flags, next)) in (0..).zip(&indirect) {
            driver.desc_at(TABLE, i, addr * 0x100, len, flags, next);
        }
        driver.offer(head);
        if let Ok(ours) = walk(&queue, head) {
            let mut oracle = Oracle::new(8).unwrap();
            oracle.set_desc_table_address(Some(driver.layout.desc as u32), Some(0));
            oracle.set_avail_ring_address(Some(driver.layout.avail as u32), Some(0));
            oracle.set_used_ring_address(Some(driver.layout.used as u32), Some(0));
            oracle.set_ready(true);
            let theirs: Vec<Descriptor> = oracle
                .iter(&driver.mem)
                .unwrap()
                .next()
                .unwrap()
                .map(|d| Descriptor {
                    addr: d.addr().0,
                    len: d.len(),
                    writable: d.is_write_only(),
                })
                .collect();
            prop_assert_eq!(ours, theirs);
        }
    }

    /// Garbage in every ring and table: no panic, no endless walk, nothing outside RAM.
    #[test]
    fn garbage_is_survived(
        seed in prop::collection::vec(any::<u8>(), 0x400),
        features in prop::sample::select(vec![0, EVENT_IDX, INDIRECT_DESC, EVENT_IDX | INDIRECT_DESC]),
    ) {
        let mem = ram(0x4000);
        let driver = DriverQueue::new(&mem, 0x1000, 16);
        let mut queue = Queue::new(&mem, driver.layout, 16, features, 0).unwrap();
        mem.write_slice(&seed, GuestAddress(0x1000)).unwrap();
        let mut heads = 0;
        loop {
            match queue.pop() {
                Ok(Some(head)) => {
                    heads += 1;
                    prop_assert!(queue.chain(head).count() <= usize::from(MAX_SIZE) + 1);
                    queue.push_used(head, 0);
                    queue.publish();
                }
                Ok(None) => break,
                Err(_) => {
                    prop_assert!(queue.is_broken());
                    break;
                }
            }
        }
        prop_assert!(heads <= 16);
    }
}
