//! As much at once as a guest can ask for.

use super::rig::*;
use crate::virtio::block::*;

fn small_ring() -> iothread::IoThread {
    iothread::IoThread::start(iothread::IoThreadConfig {
        id: "small".into(),
        context: iothread::ContextConfig {
            submission_entries: 4,
            completion_entries: 8,
            ..iothread::ContextConfig::default()
        },
        ..iothread::IoThreadConfig::default()
    })
    .unwrap()
}

#[test]
fn case_34_128_requests_of_126_segments_at_once() {
    for engine in ENGINES {
        let file = image(16 << 20);
        let options = Options::new(file.path())
            .engine(engine)
            .with(|d| d.queue_size = 128);
        let mut rig = Rig::new(options);
        let guest = rig.guest();
        for request in [OUT, IN] {
            guest.recycle();
            // All requests share their data: 126 pieces of 512 bytes.
            let data = pattern(1, 126 * 512);
            let at = guest.put(&data, 0);
            let heads: Vec<u16> = (0..128u64)
                .map(|i| {
                    let header = guest.put(&Guest::header(request, i * 126), 0);
                    let mut buffers = vec![(header, 16, false)];
                    buffers.extend((0..126).map(|p| (at + p * 512, 512, request == IN)));
                    buffers.push((guest.alloc(1, 0), 1, true));
                    guest.offer(&buffers)
                })
                .collect();
            guest.kick();
            for head in heads {
                let reply = guest.wait(head);
                assert_eq!(reply.status, OK, "{engine}");
                assert!(request == OUT || reply.data == data);
            }
        }
        let whole = file_bytes(&file, 127 * 126 * 512, 126 * 512);
        assert_eq!(whole, pattern(1, 126 * 512));
    }
}

#[test]
fn case_32_and_8_a_small_ring_makes_requests_wait_and_loses_none() {
    let file = image(16 << 20);
    let options = Options::new(file.path())
        .engine(EngineKind::IoUring)
        .with(|d| d.queues = 4);
    let mut rig = Rig::on(options, vec![small_ring()]);
    for round in 0..5u64 {
        let mut sent = Vec::new();
        for (q, guest) in (0..).zip(&mut rig.guests) {
            for i in 0..256u64 {
                let sector = (q * 256 + i) * 8;
                let data = pattern(round + sector, 4096);
                sent.push((q, guest.send(OUT, sector, &data, 0)));
            }
            guest.kick();
        }
        for (q, head) in sent {
            assert_eq!(rig.guests[q as usize].wait(head).status, OK);
        }
        for sector in [0, 1000 * 8, 1023 * 8] {
            assert_eq!(
                rig.guest().read(sector, 4096),
                pattern(round + sector, 4096)
            );
        }
    }
}

#[test]
fn thirty_two_disks_on_one_iothread() {
    let thread = iothread("many", 32768);
    let files: Vec<_> = (0..32).map(|_| image(1 << 20)).collect();
    let mut rigs: Vec<Rig> = (0..)
        .zip(&files)
        .map(|(i, file): (usize, _)| {
            let mut options = Options::new(file.path()).engine(ENGINES[i % 3]);
            options.disk.id = format!("d{i}");
            let home = Placement::single(thread.remote(), 1);
            Rig::of(block(options.disk, home), options.features, Vec::new())
        })
        .collect();
    let mut sent = Vec::new();
    for (i, rig) in rigs.iter_mut().enumerate() {
        let guest = rig.guest();
        let heads: Vec<u16> = (0..32)
            .map(|n| guest.send(OUT, n * 8, &pattern(i as u64 + n, 4096), 0))
            .collect();
        guest.kick();
        sent.push(heads);
    }
    for (i, (rig, heads)) in rigs.iter_mut().zip(sent).enumerate() {
        let guest = rig.guest();
        for head in heads {
            assert_eq!(guest.wait(head).status, OK);
        }
        assert_eq!(guest.read(31 * 8, 4096), pattern(i as u64 + 31, 4096));
    }
}

#[test]
fn case_27_a_hundred_idle_disks_are_not_polled_beside_a_busy_one() {
    let thread = iothread::IoThread::start(iothread::IoThreadConfig {
        id: "idle".into(),
        context: iothread::ContextConfig {
            policy: iothread::PolicyKind::Always,
            idle_ns: 1_000_000,
            settings: iothread::PollSettings {
                poll_max_ns: 1_000_000,
                ..iothread::PollSettings::default()
            },
            ..iothread::ContextConfig::default()
        },
        ..iothread::IoThreadConfig::default()
    })
    .unwrap();
    let files: Vec<_> = (0..101).map(|_| image(1 << 20)).collect();
    let mut rigs: Vec<Rig> = (0..)
        .zip(&files)
        .map(|(i, file): (u32, _)| {
            let mut options = Options::new(file.path()).engine(EngineKind::IoUring);
            options.disk.id = format!("d{i}");
            let home = Placement::single(thread.remote(), 1);
            Rig::of(block(options.disk, home), options.features, Vec::new())
        })
        .collect();
    let polled = || -> Vec<String> {
        let handlers = thread.remote().stats().handlers;
        let polled = handlers.into_iter().filter(|handler| handler.polled);
        polled.map(|handler| handler.name).collect()
    };
    // Each disk was in use once.
    for rig in &mut rigs {
        rig.guest().write(0, &pattern(1, 512));
    }
    let disks = |names: &[String]| names.iter().filter(|name| name.starts_with('d')).count();
    eventually("the idle disks leave the list", || {
        for _ in 0..100 {
            rigs[0].guest().read(0, 512);
        }
        disks(&polled()) <= 1
    });
    // They cost nothing now, and are served when they are kicked: each kick is asked for.
    for rig in &mut rigs[1..] {
        let ring = &rig.guests[0].ring;
        assert_eq!(ring.avail_event(), ring.avail_idx, "notifications are on");
        assert_eq!(rig.guest().read(0, 512), pattern(1, 512));
    }
}

#[test]
fn case_29_kicks_are_suppressed_while_the_iothread_polls() {
    let file = image(1 << 20);
    let mut rig = Rig::on(Options::new(file.path()), vec![always_polling()]);
    // A driver that kicks only when asked to.
    let mut wanted = 0;
    for i in 0..2000u64 {
        let guest = rig.guest();
        let old = guest.ring.avail_idx;
        let head = guest.send(IN, i % 100, &[], 512);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let new = guest.ring.avail_idx;
        let event = guest.ring.avail_event();
        if new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old) {
            wanted += 1;
            guest.kick();
        }
        assert_eq!(guest.wait(head).status, OK);
    }
    assert!(wanted < 100, "{wanted} of 2000 kicks were asked for");
}
