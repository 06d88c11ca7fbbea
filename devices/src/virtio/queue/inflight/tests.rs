use std::cell::UnsafeCell;

use proptest::prelude::*;

use super::super::Queue;
use super::*;
use crate::virtio::features::EVENT_IDX;
use crate::virtio::testing::{DriverQueue, ram};

const SIZE: u16 = 8;

/// Memory for one record, as the front end keeps it.
struct Memory(UnsafeCell<[u64; Inflight::bytes(SIZE) / 8]>);

// SAFETY: tests reach it through atomics alone.
unsafe impl Sync for Memory {}

fn memory() -> Arc<Memory> {
    Arc::new(Memory(UnsafeCell::new([0; Inflight::bytes(SIZE) / 8])))
}

fn record(memory: &Arc<Memory>) -> Inflight {
    // SAFETY: aligned to 8, of that many bytes, and kept alive by the clone.
    unsafe { Inflight::new(memory.0.get().cast(), SIZE, memory.clone()) }
}

/// A back end's start: with the rings and the record as a predecessor left them.
fn start(driver: &DriverQueue, memory: &Arc<Memory>) -> Queue {
    let mut queue = Queue::new(&driver.mem, driver.layout, SIZE, EVENT_IDX, 0).unwrap();
    queue.continue_used();
    queue.track(record(memory)).unwrap();
    queue
}

#[test]
fn chains_taken_and_not_answered_come_again_in_their_order() {
    let mem = ram(0x4000);
    let mut driver = DriverQueue::new(&mem, 0x1000, SIZE);
    let memory = memory();
    let mut queue = start(&driver, &memory);
    for head in [3, 1, 7, 5] {
        driver.offer(head);
    }
    for _ in 0..3 {
        queue.pop().unwrap();
    }
    queue.push_used(1, 0);
    queue.publish();
    // Answered but not published: not answered as far as the driver can tell.
    queue.push_used(7, 0);
    drop(queue);
    let mut queue = start(&driver, &memory);
    let order: Vec<u16> = std::iter::from_fn(|| queue.pop().unwrap()).collect();
    assert_eq!(order, [3, 7, 5]);
    for head in order {
        queue.push_used(head, 0);
    }
    queue.publish();
    assert_eq!(queue.next_avail(), 4);
    let used: Vec<u32> = std::iter::from_fn(|| driver.take_used())
        .map(|(head, _)| head)
        .collect();
    assert_eq!(used, [1, 3, 7, 5]);
    // Nothing is left for a third.
    drop(queue);
    assert_eq!(start(&driver, &memory).pop(), Ok(None));
}

#[test]
fn a_batch_that_was_published_and_not_noted_is_not_done_again() {
    for cleared in 0..=3 {
        let mem = ram(0x4000);
        let mut driver = DriverQueue::new(&mem, 0x1000, SIZE);
        let memory = memory();
        let mut queue = start(&driver, &memory);
        for head in 0..4 {
            driver.offer(head);
            queue.pop().unwrap();
        }
        for head in [2, 0, 3] {
            queue.push_used(head, 0);
        }
        // Killed within `published`: the index is out, some flags are cleared.
        queue.inflight.as_mut().unwrap().batch.truncate(cleared);
        queue.publish();
        record(&memory).header(USED_IDX).store(0, Ordering::Relaxed);
        drop(queue);
        let mut queue = start(&driver, &memory);
        assert_eq!(queue.pop(), Ok(Some(1)), "{cleared} flags cleared");
        assert_eq!(queue.pop(), Ok(None));
    }
}

#[test]
fn a_fresh_record_takes_over_a_used_ring_that_has_moved() {
    let mem = ram(0x4000);
    let mut driver = DriverQueue::new(&mem, 0x1000, SIZE);
    for _ in 0..20 {
        let mut queue = start(&driver, &memory());
        driver.offer(6);
        assert_eq!(queue.pop(), Ok(Some(6)));
        queue.push_used(6, 0);
        queue.publish();
        assert_eq!(driver.take_used(), Some((6, 0)));
    }
}

#[test]
fn what_no_back_end_wrote_is_refused() {
    let mem = ram(0x4000);
    let driver = DriverQueue::new(&mem, 0x1000, SIZE);
    let refused = |offset: usize, value: u16| {
        let memory = memory();
        drop(start(&driver, &memory));
        record(&memory)
            .header(offset)
            .store(value, Ordering::Relaxed);
        let mut queue = Queue::new(&driver.mem, driver.layout, SIZE, 0, 0).unwrap();
        queue.track(record(&memory)).unwrap_err()
    };
    assert_eq!(refused(VERSION, 2), Error::Version(2));
    let other = Error::Size {
        recorded: 16,
        size: SIZE,
    };
    assert_eq!(refused(DESC_NUM, 16), other);
    assert_eq!(refused(USED_IDX, 0xfff0), Error::Batch(16));
    // A batch that leads out of the table.
    let memory = memory();
    drop(start(&driver, &memory));
    let inflight = record(&memory);
    inflight.header(LAST_BATCH_HEAD).store(9, Ordering::Relaxed);
    inflight.header(USED_IDX).store(0xfffe, Ordering::Relaxed);
    let mut queue = Queue::new(&driver.mem, driver.layout, SIZE, 0, 0).unwrap();
    assert_eq!(queue.track(inflight).unwrap_err(), Error::Batch(2));
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Offer,
    Take,
    Answer(usize),
    Publish,
    Kill,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => Just(Step::Offer),
        3 => Just(Step::Take),
        3 => any::<usize>().prop_map(Step::Answer),
        2 => Just(Step::Publish),
        1 => Just(Step::Kill),
    ];
    prop::collection::vec(step, 1..200)
}

proptest! {
    /// Whatever is done and whenever the back end dies: each chain is answered exactly once.
    #[test]
    fn every_chain_is_answered_once(steps in steps()) {
        let mem = ram(0x4000);
        let mut driver = DriverQueue::new(&mem, 0x1000, SIZE);
        let memory = memory();
        let mut queue = start(&driver, &memory);
        let mut free: Vec<u16> = (0..SIZE).collect();
        let mut taken: Vec<u16> = Vec::new();
        let seen = |driver: &mut DriverQueue, free: &mut Vec<u16>| {
            while let Some((head, _)) = driver.take_used() {
                let head = head as u16;
                prop_assert!(!free.contains(&head), "{head} answered twice");
                free.push(head);
            }
            Ok(())
        };
        for step in steps {
            match step {
                Step::Offer => {
                    if let Some(head) = free.pop() {
                        driver.offer(head);
                    }
                }
                Step::Take => taken.extend(queue.pop().unwrap()),
                Step::Answer(which) if !taken.is_empty() => {
                    let head = taken.swap_remove(which % taken.len());
                    queue.push_used(head, 0);
                }
                Step::Answer(_) => {}
                Step::Publish => {
                    queue.publish();
                    seen(&mut driver, &mut free)?;
                }
                Step::Kill => {
                    taken.clear();
                    drop(queue);
                    queue = start(&driver, &memory);
                }
            }
        }
        drop(queue);
        let mut queue = start(&driver, &memory);
        while let Some(head) = queue.pop().unwrap() {
            queue.push_used(head, 0);
        }
        queue.publish();
        seen(&mut driver, &mut free)?;
        free.sort_unstable();
        prop_assert_eq!(free, (0..SIZE).collect::<Vec<u16>>());
    }
}
