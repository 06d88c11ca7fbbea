use super::*;
use crate::GuestMemory;
use crate::virtio::features::INDIRECT_DESC;
use crate::virtio::queue::MAX_SIZE;
use crate::virtio::testing::{DriverQueue, INDIRECT, NEXT, ram};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

/// Address, length, writable.
type Buffers = Vec<(u64, u32, bool)>;

const RAM: usize = 4 << 20;
const TABLE: u64 = 0x4_0000;
const BUFFERS: u64 = 0x10_0000;

fn parts(size: u16) -> (GuestMemory, DriverQueue, Queue, Requests) {
    let mem = ram(RAM);
    let driver = DriverQueue::new(&mem, 0x1000, size);
    let queue = Queue::new(&mem, driver.layout, MAX_SIZE, INDIRECT_DESC, 0).unwrap();
    (mem, driver, queue, Requests::new(size))
}

enum Outcome {
    Parsed { readable: u64, writable: u64 },
    IoErr,
    Broken(queue::Error),
}

fn outcome(requests: &mut Requests, queue: &mut Queue, head: u16) -> Outcome {
    let free = requests.take().unwrap();
    match requests.parse(free, queue, head) {
        Ok(parsed) => {
            let (readable, writable) = (parsed.readable, parsed.writable);
            requests.abandon(parsed);
            Outcome::Parsed { readable, writable }
        }
        Err(Rejected::Answer(finished)) => {
            assert_eq!(finished.status, Status::IoErr);
            requests.retire(finished, queue);
            Outcome::IoErr
        }
        Err(Rejected::Broken(error, free)) => {
            requests.put_back(free);
            Outcome::Broken(error)
        }
    }
}

#[test]
fn malformed_requests_are_answered_where_there_is_a_status_byte() {
    let (mem, driver, mut queue, mut requests) = parts(16);
    let end = RAM as u64;
    let status = (BUFFERS, 1, true);
    let header = (BUFFERS + 0x1000, 16, false);
    let io_errors: [(&str, Buffers); 9] = [
        ("header too short", vec![(BUFFERS, 15, false), status]),
        ("no header", vec![status]),
        ("header outside", vec![(end, 16, false), status]),
        ("data outside", vec![header, (end + 5, 512, false), status]),
        (
            "data ends outside",
            vec![header, (end - 511, 512, true), status],
        ),
        (
            "data wraps",
            vec![header, (u64::MAX - 5, 512, true), status],
        ),
        ("header wraps", vec![(u64::MAX, 16, false), status]),
        (
            "2^32 bytes",
            vec![header, (0, u32::MAX, true), (0, u32::MAX, true), status],
        ),
        (
            "readable after writable",
            vec![header, (BUFFERS, 512, true), (BUFFERS, 512, false), status],
        ),
    ];
    for (what, buffers) in io_errors {
        mem.write_obj(0xffu8, GuestAddress(BUFFERS)).unwrap();
        driver.chain(0, &buffers);
        let result = outcome(&mut requests, &mut queue, 0);
        assert!(matches!(result, Outcome::IoErr), "{what}");
        let byte: u8 = mem.read_obj(GuestAddress(BUFFERS)).unwrap();
        assert_eq!(byte, 1, "{what}");
    }
    let broken: [(&str, Buffers); 6] = [
        ("no status", vec![header]),
        ("status not writable", vec![header, (BUFFERS, 1, false)]),
        ("status outside", vec![header, (end, 1, true)]),
        ("status of no length", vec![header, (BUFFERS, 0, true)]),
        (
            "last writable outside",
            vec![header, status, (end, 4, true)],
        ),
        ("status wraps", vec![header, (u64::MAX, 2, true)]),
    ];
    for (what, buffers) in broken {
        driver.chain(0, &buffers);
        let result = outcome(&mut requests, &mut queue, 0);
        assert!(matches!(result, Outcome::Broken(_)), "{what}");
    }
    assert_eq!(requests.in_flight(), 0);
}

#[test]
fn case_12_loops_and_nested_tables_end_the_queue() {
    let (_mem, driver, mut queue, mut requests) = parts(16);
    driver.desc(0, BUFFERS, 16, NEXT, 0);
    let Outcome::Broken(error) = outcome(&mut requests, &mut queue, 0) else {
        panic!("a loop was parsed");
    };
    assert_eq!(error, queue::Error::Loop);
    driver.desc(1, TABLE, 32, INDIRECT, 0);
    driver.desc_at(TABLE, 0, TABLE, 32, INDIRECT, 0);
    let Outcome::Broken(error) = outcome(&mut requests, &mut queue, 1) else {
        panic!("a nested table was parsed");
    };
    assert!(matches!(error, queue::Error::Indirect(_)));
}

#[test]
fn more_segments_than_announced_are_taken_up_to_what_the_host_can() {
    let (_mem, driver, mut queue, mut requests) = parts(16);
    for (pieces, fits) in [(14u16, true), (30, true), (1000, true), (1024, false)] {
        let mut buffers = vec![(BUFFERS, 16, false)];
        for i in 0..pieces {
            buffers.push((BUFFERS + 0x1000 + u64::from(i), 1, true));
        }
        buffers.push((BUFFERS + 0x800, 1, true));
        driver.chain_at(TABLE, 0, &buffers);
        driver.desc(0, TABLE, 16 * buffers.len() as u32, INDIRECT, 0);
        match outcome(&mut requests, &mut queue, 0) {
            Outcome::Parsed { readable, writable } => {
                assert!(fits, "{pieces}");
                assert_eq!((readable, writable), (0, pieces.into()));
            }
            _ => assert!(!fits, "{pieces}"),
        }
    }
}

#[test]
fn a_buffer_over_two_regions_is_two_segments() {
    let mem = GuestMemory::from_ranges(&[
        (GuestAddress(0), 0x10_0000),
        (GuestAddress(0x10_0000), 0x10_0000),
    ])
    .unwrap();
    let driver = DriverQueue::new(&mem, 0x1000, 16);
    let queue = Queue::new(&mem, driver.layout, MAX_SIZE, 0, 0).unwrap();
    let mut requests = Requests::new(16);
    let data: Vec<u8> = (0..=255).collect();
    mem.write_slice(&[0; 16], GuestAddress(0x8000)).unwrap();
    mem.write_slice(&data, GuestAddress(0x10_0000 - 100))
        .unwrap();
    driver.chain(
        0,
        &[
            (0x8000, 16, false),
            (0x10_0000 - 100, 256, false),
            (0x9000, 1, true),
        ],
    );
    let free = requests.take().unwrap();
    let Ok(parsed) = requests.parse(free, &queue, 0) else {
        panic!("refused");
    };
    assert_eq!(parsed.readable, 256);
    assert_eq!(requests.payload::<256>(&parsed)[..], data[..]);
    let pending = requests.begin(parsed, Kind::Out, 0, 256);
    let lengths: Vec<usize> = requests
        .segments(&pending)
        .iter()
        .map(|s| s.iov_len)
        .collect();
    assert_eq!(lengths, [100, 156]);
}

/// Lengths that sum up to `total`, some of them zero.
fn cuts(total: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..=total, 0..40).prop_map(move |mut at| {
        at.push(0);
        at.push(total);
        at.sort_unstable();
        at.windows(2).map(|w| w[1] - w[0]).collect()
    })
}

proptest! {
    /// Any cutting of header, data and status over descriptors gives the same request.
    #[test]
    fn cutting_makes_no_difference(
        out_cuts in cuts(16 + 600),
        in_cuts in cuts(700 + 1),
        indirect in any::<bool>(),
        sector in any::<u64>(),
        request_type in any::<u32>(),
    ) {
        let (mem, driver, mut queue, mut requests) = parts(256);
        let mut output = vec![0; 16 + 600];
        output[..4].copy_from_slice(&request_type.to_le_bytes());
        output[8..16].copy_from_slice(&sector.to_le_bytes());
        for (i, byte) in output[16..].iter_mut().enumerate() {
            *byte = (i * 31) as u8;
        }
        let mut buffers = Vec::new();
        let mut at = BUFFERS;
        let mut done = 0;
        for len in out_cuts {
            // Scattered: a gap after every piece.
            mem.write_slice(&output[done..done + len], GuestAddress(at)).unwrap();
            buffers.push((at, len as u32, false));
            done += len;
            at += len as u64 + 3;
        }
        let mut writable = Vec::new();
        for len in in_cuts {
            buffers.push((at, len as u32, true));
            writable.extend((0..len as u64).map(|i| at + i));
            at += len as u64 + 5;
        }
        if indirect {
            driver.chain_at(TABLE + 1, 0, &buffers);
            driver.desc(0, TABLE + 1, 16 * buffers.len() as u32, INDIRECT, 0);
        } else {
            driver.chain(0, &buffers);
        }
        let free = requests.take().unwrap();
        let Ok(parsed) = requests.parse(free, &queue, 0) else {
            return Err(TestCaseError::fail("refused"));
        };
        prop_assert_eq!(parsed.request_type, request_type);
        prop_assert_eq!(parsed.sector, sector);
        prop_assert_eq!((parsed.readable, parsed.writable), (600, 700));
        prop_assert_eq!(&requests.payload::<600>(&parsed)[..], &output[16..]);
        let reply: Vec<u8> = (0..700).map(|i| (i * 7) as u8).collect();
        prop_assert_eq!(requests.reply(&parsed, &reply), 700);
        let finished = requests.answer(parsed, Status::Unsupp, 700);
        requests.retire(finished, &mut queue);
        for (addr, expected) in writable[..700].iter().zip(&reply) {
            prop_assert_eq!(mem.read_obj::<u8>(GuestAddress(*addr)).unwrap(), *expected);
        }
        prop_assert_eq!(mem.read_obj::<u8>(GuestAddress(writable[700])).unwrap(), 2);
    }
}
