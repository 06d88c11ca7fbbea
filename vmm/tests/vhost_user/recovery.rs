//! A back end that is killed with requests under way, and one that is stopped and started queue by queue.

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use crate::driver::{check_image, pattern};
use crate::front::{
    BLOCK, Front, GET_INFLIGHT_FD, GET_VRING_BASE, QUEUE_SIZE, REQUESTS, RESET_DEVICE, SET_CONFIG,
    SET_INFLIGHT_FD, SET_MEM_TABLE, SET_VRING_KICK, table, words,
};
use crate::front::{RAM_BYTES, USER};
use crate::served::Served;

/// The record of requests, as its first back end made it.
struct Record {
    fd: OwnedFd,
    /// What the message says of it.
    payload: Vec<u8>,
}

fn shape(size: u64, queue_size: u16) -> Vec<u8> {
    let mut payload = words(&[size, 0]);
    payload.extend(1u16.to_ne_bytes());
    payload.extend(queue_size.to_ne_bytes());
    // The structure's size is a multiple of 8.
    payload.extend([0; 4]);
    payload
}

impl Record {
    fn make(front: &Front) -> Record {
        assert!(front.send(GET_INFLIGHT_FD, 0, &shape(0, QUEUE_SIZE), &[]));
        let (payload, fd) = front.receive().unwrap();
        Record {
            fd: fd.unwrap(),
            payload,
        }
    }

    fn give(&self, front: &Front) {
        assert!(front.order(SET_INFLIGHT_FD, &self.payload, &[self.fd.as_raw_fd()]));
    }
}

/// Killed again and again in the middle of writes: each request is answered once, and everything
/// that was written is in the image.
fn killed_in_mid_flight(options: &str) {
    let mut served = Served::with(&[options], &["--iothread", "id=io0", "--log", "off"]);
    let mut front = Front::connect(&served.socket(0));
    front.negotiate();
    let record = Record::make(&front);
    record.give(&front);
    front.share_memory();
    front.start_queue(0);
    let mut done = 0;
    let mut caught = 0;
    for round in 0..12u64 {
        let mut waiting: Vec<u16> = (0..REQUESTS).collect();
        for &slot in &waiting {
            let block = round * u64::from(REQUESTS) + u64::from(slot);
            front.put(Front::data(slot), &pattern(block, 5));
            front.offer(slot, 1, block);
        }
        front.kick();
        // Some rounds die before the back end has looked, some with half of it done.
        std::thread::sleep(Duration::from_micros(150 * round));
        served.kill();
        caught += usize::from(front.device_used_idx() != front.avail_idx);
        served.launch();
        let ram = front.ram.clone();
        front = Front::with_ram(&served.socket(0), ram, front.avail_idx, front.used_idx);
        front.negotiate();
        record.give(&front);
        front.share_memory();
        // A front end whose back end died cannot know how far that was.
        front.start_queue(front.device_used_idx());
        for slot in front.answered(waiting.len()) {
            let at = waiting.iter().position(|w| *w == slot);
            waiting.swap_remove(at.expect("answered twice"));
            assert_eq!(front.status(slot), 0);
        }
        done += u64::from(REQUESTS);
        front.works();
        front.works();
    }
    assert!(caught > 0, "no round was cut in the middle");
    check_image(&served.image(0), &(0..done).collect::<Vec<_>>(), 5);
}

#[test]
fn killed_in_mid_flight_on_io_uring() {
    killed_in_mid_flight("iothread=io0");
}

#[test]
fn killed_in_mid_flight_with_registered_buffers() {
    killed_in_mid_flight("iothread=io0,fixedbufs=on");
}

#[test]
fn killed_in_mid_flight_on_threads() {
    killed_in_mid_flight("iothread=io0,engine=threads");
}

#[test]
fn killed_in_mid_flight_on_linux_aio() {
    killed_in_mid_flight("iothread=io0,engine=native,direct=on");
}

#[test]
fn a_queue_is_stopped_and_goes_on_where_it_was() {
    let served = Served::with(&["iothread=io0"], &["--iothread", "id=io0"]);
    let mut front = Front::ready(&served.socket(0));
    for round in 0..30u16 {
        front.works();
        for slot in 1..20 {
            front.offer(slot, 1, slot.into());
        }
        front.kick();
        // Answered before the index is told.
        assert!(front.send(GET_VRING_BASE, 0, &words(&[0]), &[]));
        let (reply, _) = front.receive().unwrap();
        let base = u64::from_ne_bytes(reply.try_into().unwrap()) >> 32;
        assert_eq!(base, u64::from(20 * (round + 1)));
        assert_eq!(front.device_used_idx(), base as u16);
        front.answered(19);
        // It does not run: a kick does nothing.
        front.offer(0, 0, 0);
        front.kick();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(front.device_used_idx(), base as u16);
        front.set_avail_idx(base as u16);
        assert!(front.order(SET_VRING_KICK, &words(&[0]), &[front.kick.as_raw_fd()]));
    }
}

#[test]
fn memory_changes_under_a_running_queue() {
    memory_changes("iothread=io0");
}

#[test]
fn registered_memory_changes_under_a_running_queue() {
    memory_changes("iothread=io0,fixedbufs=on");
}

fn memory_changes(options: &str) {
    let served = Served::with(&[options], &["--iothread", "id=io0"]);
    let mut front = Front::ready(&served.socket(0));
    for round in 0..20 {
        front.works();
        // The same memory cut in two, or whole again.
        let half = RAM_BYTES / 2;
        let regions = match round % 2 {
            0 => vec![[half, half, USER + half, half], [0, half, USER, 0]],
            _ => vec![[0, RAM_BYTES, USER, 0]],
        };
        for slot in 0..REQUESTS {
            front.offer(slot, 1, slot.into());
        }
        front.kick();
        let fds = vec![front.ram_fd(); regions.len()];
        assert!(front.order(SET_MEM_TABLE, &table(&regions), &fds));
        front.answered(REQUESTS.into());
    }
}

#[test]
fn the_cache_mode_is_switched_and_restored_by_a_reset() {
    let served = Served::with(&["iothread=io0"], &["--iothread", "id=io0"]);
    let front = Front::ready(&served.socket(0));
    let set = |value: u8| {
        let mut payload = [32u32, 1, 0].map(u32::to_ne_bytes).concat();
        payload.push(value);
        front.order(SET_CONFIG, &payload, &[])
    };
    assert_eq!(front.config_byte(32), 1);
    assert!(set(0));
    assert_eq!(front.config_byte(32), 0);
    assert!(front.order(RESET_DEVICE, &[], &[]));
    assert_eq!(front.config_byte(32), 1);
    assert_eq!(front.config_byte(255), 0, "nothing is there");
}

#[test]
fn requests_of_one_block_are_the_patterns_size() {
    // The two front ends of these tests share the pattern.
    assert_eq!(BLOCK, crate::driver::BLOCK);
}
