//! Every request type on every engine.

use super::rig::*;
use crate::virtio::block::*;
use crate::virtio::device::VirtioDevice;

#[test]
fn reads_and_writes_on_every_engine() {
    for engine in ENGINES {
        for direct in [false, true] {
            let file = image(4 << 20);
            let options = Options::new(file.path())
                .engine(engine)
                .with(|d| d.direct = direct.then_some(true).or(Some(false)));
            let mut rig = Rig::new(options);
            let guest = rig.guest();
            let data = pattern(1, 8192);
            guest.write(3, &data);
            assert_eq!(guest.read(3, 8192), data, "{engine} direct={direct}");
            assert_eq!(guest.read(0, 512), vec![0; 512]);
            assert_eq!(guest.ask(FLUSH, 0, &[], 0).status, OK);
            assert_eq!(file_bytes(&file, 3 * 512, 8192), data);
            let stats = rig.handle.stats();
            assert_eq!((stats.wr_bytes, stats.wr_operations), (8192, 1));
            assert_eq!((stats.rd_bytes, stats.rd_operations), (8704, 2));
            assert_eq!((stats.flush_operations, stats.syncs), (1, 1));
            assert_eq!(stats.wr_highest_offset, 3 * 512 + 8192);
        }
    }
}

#[test]
fn many_requests_at_once_are_answered_once_each() {
    for engine in ENGINES {
        for poll_max_ns in [0, 32768] {
            let file = image(16 << 20);
            let mut options = Options::new(file.path()).engine(engine);
            options.poll_max_ns = poll_max_ns;
            let mut rig = Rig::new(options);
            let guest = rig.guest();
            for round in 0..4u64 {
                let heads: Vec<(u64, u16)> = (0..128)
                    .map(|i| {
                        let sector = (i * 37 + round) % 4096 * 8;
                        let head = guest.send(OUT, sector, &pattern(sector, 4096), 0);
                        if i % 16 == 15 {
                            guest.kick();
                        }
                        (sector, head)
                    })
                    .collect();
                for &(_, head) in &heads {
                    assert_eq!(guest.wait(head).status, OK);
                }
                let reads: Vec<(u64, u16)> = heads
                    .iter()
                    .map(|&(sector, _)| (sector, guest.send(IN, sector, &[], 4096)))
                    .collect();
                guest.kick();
                for (sector, head) in reads {
                    assert_eq!(guest.wait(head).data, pattern(sector, 4096), "{engine}");
                }
            }
        }
    }
}

#[test]
fn get_id_and_unknown_requests() {
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()).with(|d| d.serial = "disk-7".into()));
    let reply = rig.guest().ask(GET_ID, 0, &[], 20);
    assert_eq!(&reply.data, b"disk-7\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
    assert_eq!((reply.status, reply.written), (OK, 21));
    let reply = rig.guest().ask(GET_ID, 0, &[], 4);
    assert_eq!((&reply.data[..], reply.status), (&b"disk"[..], OK));
    for unknown in [2, 3, 5, 9, 14, 16, u32::MAX] {
        assert_eq!(rig.guest().ask(unknown, 0, &[], 512).status, UNSUPP);
    }
}

#[test]
fn case_18_a_serial_of_20_bytes_has_no_terminator() {
    let file = image(1 << 20);
    let serial = "12345678901234567890";
    let mut rig = Rig::new(Options::new(file.path()).with(|d| d.serial = serial.into()));
    let reply = rig.guest().ask(GET_ID, 0, &[], 24);
    assert_eq!(&reply.data[..20], serial.as_bytes());
    assert_eq!(reply.written, 21);
}

#[test]
fn requests_outside_the_disk_are_errors_and_touch_nothing() {
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()));
    let guest = rig.guest();
    for (sector, bytes) in [(2048, 512), (2047, 1024), (u64::MAX, 512), (1 << 55, 512)] {
        let reply = guest.ask(IN, sector, &[], bytes);
        assert_eq!((reply.status, reply.written), (IOERR, 1));
        assert_eq!(
            guest.ask(OUT, sector, &vec![1; bytes as usize], 0).status,
            IOERR
        );
    }
    for bytes in [1, 511, 513] {
        assert_eq!(guest.ask(OUT, 0, &vec![1; bytes], 0).status, IOERR);
        assert_eq!(guest.ask(IN, 0, &[], bytes as u32).status, IOERR);
    }
    assert_eq!(file_bytes(&file, 0, 1 << 20), vec![0; 1 << 20]);
    assert_eq!(file.as_file().metadata().unwrap().len(), 1 << 20);
}

#[test]
fn case_13_and_the_configuration_space_say_what_the_disk_is() {
    let file = image((1 << 20) + 512);
    let rig = Rig::new(Options::new(file.path()).with(|d| {
        d.queues = 3;
        d.queue_size = 64;
        d.physical_block_size = Some(4096);
        d.direct = Some(false);
    }));
    let mut space = [0; 64];
    rig.block.read_config(0, &mut space);
    let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| space[at + i]));
    assert_eq!(u32_at(0), 2049);
    assert_eq!(u32_at(8), 0, "size_max");
    assert_eq!(u32_at(12), 62, "seg_max is the queue size less two");
    assert_eq!(u32_at(20), 512);
    assert_eq!((space[24], space[25]), (3, 0));
    assert_eq!(space[32], 1, "writeback");
    assert_eq!(u16::from_le_bytes([space[34], space[35]]), 3);
    assert_eq!((u32_at(36), u32_at(40), u32_at(44)), (4_194_303, 1, 8));
    assert_eq!((u32_at(48), u32_at(52), space[56]), (4_194_303, 1, 1));
    assert_eq!(&space[57..], [0; 7], "beyond it is zero");
    let mut capacity = [0; 4];
    rig.block.read_config(2, &mut capacity);
    assert_eq!(capacity, [0; 4], "any part of it can be read");
    let offered = rig.block.features();
    for feature in [
        features::SEG_MAX,
        features::BLK_SIZE,
        features::TOPOLOGY,
        features::FLUSH,
        features::CONFIG_WCE,
        features::MQ,
        features::DISCARD,
        features::WRITE_ZEROES,
    ] {
        assert_ne!(offered & feature, 0, "{feature:#x}");
    }
    assert_eq!(offered & features::RO, 0);
}

#[test]
fn several_queues_on_several_threads() {
    for engine in ENGINES {
        let file = image(8 << 20);
        let mut options = Options::new(file.path())
            .engine(engine)
            .with(|d| d.queues = 4);
        options.threads = 3;
        let mut rig = Rig::new(options);
        assert_eq!(rig.handle.iothreads(), ["t0", "t1", "t2", "t0"]);
        let mut sent = Vec::new();
        for round in 0..64u64 {
            for (q, guest) in (0..).zip(&mut rig.guests) {
                let sector = (round * 4 + q) * 8;
                sent.push((
                    q,
                    sector,
                    guest.send(OUT, sector, &pattern(sector, 4096), 0),
                ));
            }
        }
        rig.guests.iter().for_each(Guest::kick);
        for &(q, _, head) in &sent {
            assert_eq!(rig.guests[q as usize].wait(head).status, OK);
        }
        // Read back on another queue than it was written on.
        for (q, sector, _) in sent {
            let guest = &mut rig.guests[(q as usize + 1) % 4];
            assert_eq!(guest.read(sector, 4096), pattern(sector, 4096));
        }
    }
}
