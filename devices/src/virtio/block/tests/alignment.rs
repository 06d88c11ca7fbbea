//! O_DIRECT on hosts that are stricter than the guest.

use super::rig::*;
use crate::virtio::block::image::{Alignment, DEMANDED};

fn strict(options: Options, memory: u32, offset: u32) -> Rig {
    DEMANDED.set(Some(Alignment { memory, offset }));
    let rig = Rig::new(options.with(|d| d.direct = None));
    DEMANDED.set(None);
    assert_eq!(rig.handle.image().alignment().offset, offset);
    rig
}

/// Requests at odd places, in odd buffers, over the border of blocks.
fn exercise(rig: &mut Rig, file: &tempfile::NamedTempFile, what: &str) {
    let guest = &mut rig.guests[0];
    let mut expected = file_bytes(file, 0, 1 << 20);
    for (i, (sector, sectors, shift)) in [
        (0u64, 1usize, 0u64),
        (1, 1, 1),
        (7, 2, 0),
        (9, 700, 3),
        (8, 8, 0),
        (8, 8, 2048),
        (3, 1027, 511),
        (2047, 1, 0),
    ]
    .into_iter()
    .enumerate()
    {
        let data = pattern(i as u64 + 1, sectors * 512);
        guest.recycle();
        let header = guest.put(&Guest::header(OUT, sector), 0);
        let at = guest.put(&data, shift);
        let status = guest.alloc(1, 0);
        let third = data.len() as u32 / 3;
        let head = guest.offer(&vec![
            (header, 16, false),
            (at, third, false),
            (at + u64::from(third), data.len() as u32 - third, false),
            (status, 1, true),
        ]);
        guest.kick();
        assert_eq!(guest.wait(head).status, OK, "{what}");
        let start = sector as usize * 512;
        expected[start..start + data.len()].copy_from_slice(&data);
        assert!(guest.read(0, 1 << 20) == expected, "{what}: request {i}");
        guest.recycle();
        let header = guest.put(&Guest::header(IN, sector), 0);
        let at = guest.alloc(data.len() as u64 + 1, shift);
        let head = guest.offer(&vec![
            (header, 16, false),
            (at, third, true),
            (at + u64::from(third), data.len() as u32 - third + 1, true),
        ]);
        guest.kick();
        let reply = guest.wait(head);
        assert_eq!(reply.status, OK);
        assert!(reply.data == data, "{what}: request {i}");
    }
    assert!(file_bytes(file, 0, 1 << 20) == expected, "{what}");
}

#[test]
fn case_16_small_requests_are_bounced_on_a_host_with_large_blocks() {
    for engine in ENGINES {
        let file = image(1 << 20);
        let mut rig = strict(Options::new(file.path()).engine(engine), 512, 4096);
        exercise(&mut rig, &file, engine.name());
        assert!(rig.handle.stats().bounced > 0);
        let range = Guest::range(5, 1000, 0);
        assert_eq!(rig.guest().ask(WRITE_ZEROES, 0, &range, 0).status, OK);
        assert_eq!(rig.guest().read(5, 512_000), vec![0; 512_000]);
    }
}

#[test]
fn case_16_on_a_loop_device_with_4_kib_sectors() {
    for engine in ENGINES {
        let file = image(1 << 20);
        let Some(device) = LoopDevice::new(&file, 4096) else {
            return;
        };
        let options = Options::new(&device.path)
            .engine(engine)
            .with(|d| d.direct = Some(true));
        let mut rig = Rig::new(options);
        assert_eq!(rig.handle.image().alignment().offset, 4096);
        assert_eq!(rig.handle.image().physical_block_size(), 4096);
        exercise(&mut rig, &file, engine.name());
        for unmap in [0, 1] {
            let range = Guest::range(3, 1001, unmap);
            assert_eq!(rig.guest().ask(WRITE_ZEROES, 0, &range, 0).status, OK);
            assert_eq!(rig.guest().read(3, 1001 * 512), vec![0; 1001 * 512]);
        }
    }
}

#[test]
fn misaligned_memory_alone_is_bounced_without_reading() {
    let file = image(1 << 20);
    let mut rig = strict(Options::new(file.path()), 4096, 512);
    exercise(&mut rig, &file, "memory");
}

#[test]
fn partial_writes_to_one_block_do_not_undo_one_another() {
    for engine in ENGINES {
        let file = image(1 << 20);
        let mut options = Options::new(file.path())
            .engine(engine)
            .with(|d| d.queues = 2);
        options.threads = 2;
        let mut rig = strict(options, 512, 4096);
        for round in 0..20u64 {
            let mut sent = Vec::new();
            for sector in 0..64u64 {
                let q = (sector % 2) as usize;
                let data = pattern(round * 64 + sector, 512);
                sent.push((q, rig.guests[q].send(OUT, sector, &data, 0)));
            }
            rig.guests.iter().for_each(Guest::kick);
            for (q, head) in sent {
                assert_eq!(rig.guests[q].wait(head).status, OK);
            }
            let all = rig.guest().read(0, 64 * 512);
            for sector in 0..64 {
                assert_eq!(
                    all[sector * 512..][..512],
                    pattern(round * 64 + sector as u64, 512),
                    "{engine} sector {sector}"
                );
            }
        }
    }
}

#[test]
fn more_misaligned_requests_than_bounce_buffers_take_turns() {
    for engine in ENGINES {
        let file = image(32 << 20);
        let mut rig = strict(Options::new(file.path()).engine(engine), 512, 4096);
        let guest = rig.guest();
        let heads: Vec<u16> = (0..48u64)
            .map(|i| guest.send(OUT, i * 600 + 1, &pattern(i, 300_032), 0))
            .collect();
        guest.kick();
        for head in heads {
            assert_eq!(guest.wait(head).status, OK);
        }
        for i in 0..48u64 {
            assert!(
                guest.read(i * 600 + 1, 300_032) == pattern(i, 300_032),
                "{engine}"
            );
        }
        // A reset in the middle of it.
        for i in 0..48u64 {
            guest.send(IN, i * 600 + 1, &[], 300_032);
        }
        guest.kick();
        rig.reset();
        rig.activate();
        assert!(rig.guest().read(1, 300_032) == pattern(0, 300_032));
    }
}
