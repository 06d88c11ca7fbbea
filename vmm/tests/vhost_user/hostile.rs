//! Front ends that do what none should: each costs its own connection and nothing else.
//!
//! Beside each case a well-behaved driver keeps reading and writing another disk on the same iothread, and
//! afterwards the same socket serves a well-behaved front end again.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::EventfdFlags;

use crate::cases::{Files, Stage, cases};
use crate::common::wait_for;
use crate::driver::{Driver, Wait, all_features, blocks};
use crate::front::*;
use crate::served::Served;

/// Two disks on one iothread: the first for hostile front ends, with two queues.
fn two_disks() -> Served {
    two_disks_with("")
}

fn two_disks_with(options: &str) -> Served {
    Served::with(
        &[
            &format!("iothread=io0,queues=2{options}"),
            &format!("iothread=io0{options}"),
        ],
        &["--iothread", "id=io0", "--log", "off"],
    )
}

/// Runs `attack` against disk 0 while disk 1 is in use.
fn beside_a_good_one(served: &Served, attack: impl FnOnce()) {
    let mut driver = Driver::connect(&served.socket(1), 1, Wait::Event, all_features());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mine = blocks(0, 32);
            let mut generation = 0;
            while generation < 3 || !stop.load(Ordering::Relaxed) {
                driver.queues[0].write_and_verify(&mine, generation);
                generation += 1;
            }
        });
        // Also when the attack fails.
        let guard = Stop(&stop);
        attack();
        drop(guard);
        load.join().unwrap();
    });
}

/// Ends the load when it is dropped.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn at_stage(served: &Served, stage: Stage) -> Front {
    let front = Front::connect(&served.socket(0));
    if stage != Stage::Connected {
        front.negotiate();
    }
    if matches!(stage, Stage::Shared | Stage::Running) {
        front.share_memory();
    }
    if stage == Stage::Running {
        front.start_queue(0);
    }
    front
}

#[test]
fn messages_that_are_refused() {
    let served = two_disks();
    let files = Files::new();
    let cases = cases(&files);
    beside_a_good_one(&served, || {
        for (name, stage, request, payload, fds) in &cases {
            let front = at_stage(&served, *stage);
            assert!(!front.order(*request, payload, fds), "{name} was accepted");
            assert!(front.is_let_go(), "{name}");
            drop(front);
            Front::ready(&served.socket(0)).works();
        }
    });
}

/// Messages of every kind in any order, some with a byte changed. What they come to does not matter.
#[test]
fn messages_in_any_order() {
    let served = two_disks();
    let files = Files::new();
    let pool = cases(&files);
    let mut state = 0x1234_5678_9abc_def1u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    beside_a_good_one(&served, || {
        for _ in 0..300 {
            let stages = [
                Stage::Connected,
                Stage::Negotiated,
                Stage::Shared,
                Stage::Running,
            ];
            let front = at_stage(&served, stages[random(4)]);
            for _ in 0..random(6) {
                let (_, _, request, payload, fds) = &pool[random(pool.len())];
                let mut payload = payload.clone();
                if random(2) == 0 && !payload.is_empty() {
                    let at = random(payload.len());
                    payload[at] ^= 1 << random(8);
                }
                let flags = [0, NEED_REPLY][random(2)];
                if !front.send(*request, flags, &payload, fds) {
                    break;
                }
            }
        }
        Front::ready(&served.socket(0)).works();
    });
}

#[test]
fn bytes_that_are_no_message() {
    let served = two_disks();
    let header =
        |request: u32, flags: u32, size: u32| [request, flags, size].map(u32::to_ne_bytes).concat();
    let cases: [(&str, Vec<u8>); 6] = [
        ("text", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        (
            "noise",
            (0..4096u32).map(|i| (i * 167 % 251) as u8).collect(),
        ),
        ("a size of 4 GiB", header(GET_FEATURES, 1, u32::MAX)),
        ("another version", header(GET_FEATURES, 2, 0)),
        ("a reply", header(GET_FEATURES, 1 | REPLY, 0)),
        ("half a header, then the end", vec![1, 0, 0]),
    ];
    beside_a_good_one(&served, || {
        for (name, bytes) in &cases {
            let front = Front::connect(&served.socket(0));
            // It may be let go before all of it is sent.
            let _ = (&front.stream).write_all(bytes);
            let _ = front.stream.shutdown(std::net::Shutdown::Write);
            assert!(front.is_let_go(), "{name}");
            drop(front);
            Front::ready(&served.socket(0)).works();
        }
    });
}

#[test]
fn rings_that_are_not_there_cannot_be_started() {
    let served = two_disks();
    beside_a_good_one(&served, || {
        let beyond = USER + RAM_BYTES;
        for addresses in [
            [beyond, USER + 0x2000, USER + 0x1000],
            [USER, beyond - 64, USER + 0x1000],
            [USER, USER + 0x2000, beyond - 2],
            [0, 0, 0],
            [u64::MAX - 15, USER, USER],
        ] {
            let front = at_stage(&served, Stage::Shared);
            assert!(front.order(SET_VRING_NUM, &state(0, 128), &[]));
            let mut payload = state(0, 0);
            payload.extend(words(&addresses));
            payload.extend(words(&[0]));
            assert!(front.order(SET_VRING_ADDR, &payload, &[]));
            let kick = front.kick.as_raw_fd();
            assert!(front.order(SET_VRING_KICK, &words(&[0]), &[kick]));
            assert!(!front.order(SET_VRING_ENABLE, &state(0, 1), &[]));
            assert!(front.is_let_go(), "{addresses:x?}");
            drop(front);
            Front::ready(&served.socket(0)).works();
        }
    });
}

#[test]
fn half_a_message_holds_nobody_else_and_not_the_end() {
    let mut served = two_disks();
    let front = Front::connect(&served.socket(0));
    (&front.stream).write_all(&[1, 0, 0, 0, 1]).unwrap();
    beside_a_good_one(&served, || std::thread::sleep(Duration::from_millis(50)));
    let end = served.terminate();
    assert_eq!(end.code(), Some(0));
}

/// Cuts the file of the memory that the rings, the data or the record of requests are in.
#[test]
fn memory_that_is_cut_short_under_a_running_queue() {
    for options in ["", ",fixedbufs=on"] {
        memory_is_cut_short(&two_disks_with(options));
    }
}

fn memory_is_cut_short(served: &Served) {
    beside_a_good_one(served, || {
        for (len, round) in [(0, 0u32), (0x1000, 1), (0x10_0000, 2), (0, 3)] {
            let mut front = at_stage(served, Stage::Running);
            front.works();
            for slot in 0..REQUESTS {
                front.offer(slot, round % 2, slot.into());
            }
            let ram = front.ram.clone();
            let file = ram.file_offset().unwrap().file();
            if round == 3 {
                // Idle: the loop polls the ring, or looks at it after the kick.
                front.kick();
                front.answered(REQUESTS.into());
            }
            // This process must not touch the memory any more: it has no handler.
            file.set_len(len).unwrap();
            front.kick();
            let touched_by_the_kernel_alone = len == 0x10_0000;
            if !touched_by_the_kernel_alone {
                assert!(front.is_let_go());
            }

            drop(front);
            Front::ready(&served.socket(0)).works();
        }
    });
}

/// What a driver does to its ring.
type Break = fn(&mut Front);

#[test]
fn rings_that_no_driver_writes() {
    let served = two_disks();
    let breaks: [(&str, Break); 4] = [
        ("an available index that jumps", |front| {
            let idx = front.avail_idx.wrapping_add(1000);
            front.set_avail_idx(idx);
        }),
        ("a head outside the table", |front| front.offer_head(5000)),
        ("a chain without a writable byte", |front| {
            front.descriptor(0, 0x4000, 16, 0, 0);
            front.offer_head(0);
        }),
        ("a chain that loops", |front| {
            front.descriptor(0, 0x4000, 16, 1, 0);
            front.offer_head(0);
        }),
    ];
    beside_a_good_one(&served, || {
        for (name, break_it) in breaks {
            let mut front = at_stage(&served, Stage::Running);
            front.works();
            break_it(&mut front);
            front.kick();
            wait_for("the error eventfd", || {
                let mut count = [0; 8];
                rustix::io::read(&front.error, &mut count).is_ok()
            });
            // Silent, but the front end can set it up anew on the same connection.
            assert!(front.send(GET_VRING_BASE, 0, &state(0, 0), &[]), "{name}");
            front.receive().unwrap();
            let used = front.device_used_idx();
            front.set_avail_idx(used);
            front.used_idx = used;
            assert!(front.order(SET_VRING_BASE, &state(0, used.into()), &[]));
            assert!(front.order(SET_VRING_KICK, &words(&[0]), &[front.kick.as_raw_fd()]));
            front.works();
        }
        // Addresses outside memory are an error of the request alone.
        let mut front = at_stage(&served, Stage::Running);
        front.offer(0, 0, 0);
        front.descriptor(1, RAM_BYTES - 1, 4096, 1 | 2, 2);
        front.kick();
        front.answered(1);
        assert_eq!(front.status(0), 1, "IOERR");
        front.works();
    });
}

#[test]
fn an_interrupt_that_is_kept_full_holds_nobody() {
    let served = two_disks();
    beside_a_good_one(&served, || {
        for flags in [EventfdFlags::empty(), EventfdFlags::NONBLOCK] {
            let mut front = at_stage(&served, Stage::Running);
            let call = rustix::event::eventfd(0, flags).unwrap();
            rustix::io::write(&call, &(u64::MAX - 1).to_ne_bytes()).unwrap();
            assert!(front.order(SET_VRING_CALL, &words(&[0]), &[call.as_raw_fd()]));
            for _ in 0..20 {
                front.works();
            }
        }
    });
}

#[test]
fn two_hundred_bad_front_ends_leave_nothing_behind() {
    let served = two_disks();
    let ready = |served: &Served| {
        let mut front = Front::ready(&served.socket(0));
        front.works();
        served.descriptors()
    };
    let before = ready(&served);
    for round in 0..200 {
        let stage = [Stage::Negotiated, Stage::Shared, Stage::Running][round % 3];
        let front = at_stage(&served, stage);
        let fds = [front.ram_fd(); 5];
        assert!(!front.order(SET_MEM_TABLE, &table(&[[0, 0x1000, 0, 0]; 5]), &fds));
    }
    wait_for("no descriptor to be left behind", || {
        ready(&served) <= before
    });
}
