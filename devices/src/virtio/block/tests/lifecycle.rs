//! Reset, moving between threads, resizing, cache modes.

use std::sync::atomic::Ordering;

use super::rig::*;
use crate::virtio::block::*;
use crate::virtio::device::VirtioDevice;

#[test]
fn reset_with_io_in_flight_waits_and_writes_nothing_afterwards() {
    for engine in ENGINES {
        let file = image(16 << 20);
        let mut rig = Rig::new(Options::new(file.path()).engine(engine));
        for round in 0..20 {
            let guest = rig.guest();
            for i in 0..64 {
                guest.send(IN, i * 64, &[], 32768);
            }
            guest.kick();
            if round % 2 == 0 {
                std::thread::yield_now();
            }
            rig.reset();
            // The guest has its memory back: nothing changes it now.
            let before: Vec<u8> = memory(&rig);
            let interrupts = rig.line.count();
            std::thread::sleep(std::time::Duration::from_millis(2));
            assert!(memory(&rig) == before, "{engine}");
            assert_eq!(rig.line.count(), interrupts);
            rig.activate();
            rig.guest().write(0, &pattern(round, 512));
            assert_eq!(rig.guest().read(0, 512), pattern(round, 512), "{engine}");
        }
    }
}

fn memory(rig: &Rig) -> Vec<u8> {
    use vm_memory::{Bytes, GuestAddress};
    let mut bytes = vec![0; 8 << 20];
    rig.mem.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    let mut data = vec![0; 4 << 20];
    rig.mem
        .read_slice(&mut data, GuestAddress(0x200_0000))
        .unwrap();
    bytes.extend(data);
    bytes
}

#[test]
fn resetting_what_is_not_active_does_nothing() {
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()));
    rig.reset();
    rig.reset();
    rig.activate();
    assert_eq!(rig.guest().read(0, 512), vec![0; 512]);
}

#[test]
fn queues_move_between_threads_with_io_running() {
    for engine in ENGINES {
        let file = image(16 << 20);
        let mut options = Options::new(file.path())
            .engine(engine)
            .with(|d| d.queues = 2);
        options.threads = 3;
        let mut rig = Rig::new(options);
        let mut pending = Vec::new();
        for round in 0..30u64 {
            for (q, guest) in (0..).zip(&mut rig.guests) {
                for i in 0..16u64 {
                    let sector = (q * 16 + i) * 8;
                    pending.push((
                        q,
                        guest.send(OUT, sector, &pattern(round + sector, 4096), 0),
                    ));
                }
                guest.kick();
            }
            let target = rig.threads[round as usize % 3].remote();
            let placement = Placement::single(target, 2);
            rig.handle.change_placement(placement).unwrap();
            assert_eq!(rig.handle.iothreads(), [target.name(), target.name()]);
            for (q, head) in pending.drain(..) {
                assert_eq!(rig.guests[q as usize].wait(head).status, OK);
            }
            for q in 0..2u64 {
                let sector = q * 128;
                let data = rig.guests[1 - q as usize].read(sector, 4096);
                assert_eq!(data, pattern(round + sector, 4096), "{engine}");
            }
        }
    }
}

#[test]
fn a_placement_that_does_not_fit_is_refused() {
    let file = image(1 << 20);
    let rig = Rig::new(Options::new(file.path()));
    let placement = Placement::single(rig.threads[0].remote(), 2);
    let error = rig.handle.change_placement(placement).unwrap_err();
    assert!(error.to_string().contains("has 1 queues but 2"), "{error}");
}

#[test]
fn a_thread_that_has_ended_is_reported_and_reset_still_returns() {
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()));
    rig.guest().write(0, &[1; 512]);
    for thread in rig.threads.drain(..) {
        thread.stop().unwrap();
    }
    let spare = iothread("spare", 0);
    let error = rig
        .handle
        .change_placement(Placement::single(spare.remote(), 1))
        .unwrap_err();
    assert!(
        error.to_string().contains("iothread t0 has ended"),
        "{error}"
    );
    rig.reset();
}

#[test]
fn case_19_bounds_follow_a_new_size() {
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()));
    let line = rig.line.clone();
    let capacity = |rig: &Rig| {
        let mut bytes = [0; 8];
        rig.block.read_config(0, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    assert_eq!(rig.guest().ask(IN, 2048, &[], 512).status, IOERR);
    let generation = rig.block.config_generation();
    rig.handle.resize(2 << 20).unwrap();
    assert_eq!(line.config.load(Ordering::SeqCst), 1, "the guest is told");
    assert_ne!(rig.block.config_generation(), generation);
    assert_eq!(capacity(&rig), 4096);
    rig.guest().write(4095, &pattern(5, 512));
    assert_eq!(rig.guest().read(4095, 512), pattern(5, 512));
    rig.handle.resize(512 << 10).unwrap();
    assert_eq!(rig.guest().ask(IN, 1024, &[], 512).status, IOERR);
    assert_eq!(line.config.load(Ordering::SeqCst), 2);
    rig.handle.resize(512 << 10).unwrap();
    assert_eq!(
        line.config.load(Ordering::SeqCst),
        2,
        "the same size is no change"
    );
    // Changed from outside.
    file.as_file().set_len(3 << 20).unwrap();
    rig.handle.refresh_size().unwrap();
    assert_eq!(capacity(&rig), 6144);
    assert_eq!(rig.guest().read(6143, 512), vec![0; 512]);
    assert!(rig.handle.resize(100).is_err());
    file.as_file().set_len(0).unwrap();
    assert!(rig.handle.refresh_size().is_err());
}

#[test]
fn case_7_flushes_and_writes_in_writethrough_mode_reach_the_host() {
    for engine in ENGINES {
        let file = image(1 << 20);
        let options = Options::new(file.path())
            .engine(engine)
            .with(|d| d.cache = CacheMode::Writethrough);
        let mut rig = Rig::new(options);
        rig.guest().write(0, &[1; 512]);
        assert_eq!(rig.handle.stats().syncs, 1, "{engine}: a write is synced");
        // The guest switches to writeback, and back.
        rig.block.write_config(32, &[1]);
        rig.guest().write(0, &[2; 512]);
        assert_eq!(rig.handle.stats().syncs, 1);
        assert_eq!(rig.guest().ask(FLUSH, 0, &[], 0).status, OK);
        assert_eq!(rig.handle.stats().syncs, 2, "{engine}: a flush is a sync");
        rig.block.write_config(32, &[0]);
        rig.guest().write(0, &[3; 512]);
        assert_eq!(rig.handle.stats().syncs, 3);
        // Only that byte, whatever else a write covers.
        rig.block.write_config(30, &[9, 9, 1, 9]);
        assert!(rig.handle.writeback());
        rig.block.write_config(0, &[9; 8]);
        assert_eq!(rig.handle.capacity_bytes(), 1 << 20);
        // A reset restores what the user asked for.
        rig.reset();
        assert!(!rig.handle.writeback());
    }
}

#[test]
fn the_cache_mode_follows_what_the_driver_accepted() {
    let file = image(1 << 20);
    let mut options = Options::new(file.path());
    options.features &= !features::CONFIG_WCE;
    let mut rig = Rig::new(options);
    assert!(rig.handle.writeback(), "it can flush");
    rig.block.write_config(32, &[0]);
    assert!(rig.handle.writeback(), "CONFIG_WCE was not accepted");
    rig.features &= !features::FLUSH;
    rig.reset();
    rig.activate();
    assert!(!rig.handle.writeback(), "it cannot flush");
    rig.reset();
    assert!(rig.handle.writeback());
}

#[test]
fn an_unsafe_cache_ignores_flushes() {
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()).with(|d| d.cache = CacheMode::Unsafe));
    rig.guest().write(0, &[1; 512]);
    assert_eq!(rig.guest().ask(FLUSH, 0, &[], 0).status, OK);
    let stats = rig.handle.stats();
    assert_eq!((stats.syncs, stats.flush_operations), (0, 1));
}

#[test]
fn drain_leaves_nothing_under_way() {
    let file = image(16 << 20);
    let mut rig = Rig::new(Options::new(file.path()));
    let heads: Vec<u16> = (0..100)
        .map(|i| rig.guest().send(OUT, i * 8, &[7; 4096], 0))
        .collect();
    rig.guest().kick();
    rig.handle.drain();
    rig.guest().collect();
    for &head in &heads {
        assert!(rig.guest().is_answered(head));
    }
}

#[test]
fn constructor_errors_name_option_value_and_remedy() {
    let thread = iothread("t", 0);
    let file = image(1 << 20);
    let make = |change: fn(&mut DiskConfig)| {
        let mut config = DiskConfig::new("d0", file.path());
        change(&mut config);
        let placement = Placement::single(thread.remote(), 1);
        Block::new(config, placement).err().map(|e| e.to_string())
    };
    assert_eq!(make(|_| {}), None);
    assert!(
        make(|c| c.queue_size = 100)
            .unwrap()
            .starts_with("queue-size=100:")
    );
    assert!(
        make(|c| c.path = "/nowhere".into())
            .unwrap()
            .starts_with("path=/nowhere:")
    );
    assert!(
        make(|c| c.queues = 2)
            .unwrap()
            .contains("has 2 queues but 1")
    );
    let epoll = iothread::IoThread::start(iothread::IoThreadConfig {
        id: "e".into(),
        context: iothread::ContextConfig {
            monitor: iothread::MonitorKind::Epoll,
            ..iothread::ContextConfig::default()
        },
        ..iothread::IoThreadConfig::default()
    })
    .unwrap();
    let mut config = DiskConfig::new("d0", file.path());
    config.engine = Some(EngineKind::IoUring);
    let result = Block::new(config, Placement::single(epoll.remote(), 1));
    let has_ring = epoll.remote().call(|ctx| ctx.has_ring()).unwrap();
    assert_eq!(
        result.is_ok(),
        has_ring,
        "a ring beside epoll serves as well"
    );
}

#[test]
fn disks_run_on_every_monitor() {
    for monitor in [
        iothread::MonitorKind::IoUring,
        iothread::MonitorKind::Epoll,
        iothread::MonitorKind::Ppoll,
    ] {
        for engine in ENGINES {
            let thread = iothread::IoThread::start(iothread::IoThreadConfig {
                id: "m".into(),
                context: iothread::ContextConfig {
                    monitor,
                    ..iothread::ContextConfig::default()
                },
                ..iothread::IoThreadConfig::default()
            })
            .unwrap();
            let file = image(4 << 20);
            let options = Options::new(file.path()).engine(engine);
            println!("{engine} on {monitor:?}");
            let mut rig = Rig::on(options, vec![thread]);
            let guest = rig.guest();
            let heads: Vec<u16> = (0..64)
                .map(|i| guest.send(OUT, i * 8, &pattern(i, 4096), 0))
                .collect();
            guest.kick();
            for head in heads {
                assert_eq!(guest.wait(head).status, OK);
            }
            assert_eq!(guest.read(63 * 8, 4096), pattern(63, 4096));
        }
    }
}

#[test]
fn disks_run_on_a_loop_inside_another_loop() {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = stop.clone();
    let (sender, receiver) = std::sync::mpsc::channel();
    // What the VMM's main loop does: sleep on one descriptor, let the context work.
    let main = std::thread::spawn(move || {
        let ctx = iothread::Context::new(iothread::ContextConfig::default()).unwrap();
        let fd = ctx.pollable_fd().unwrap();
        sender.send(ctx.remote()).unwrap();
        while !stopped.load(Ordering::SeqCst) {
            let mut wait = libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            // SAFETY: one pollfd.
            unsafe { libc::poll(&mut wait, 1, -1) };
            if ctx.check() {
                ctx.dispatch();
            }
        }
    });
    let home = receiver.recv().unwrap();
    for engine in ENGINES {
        println!("{engine}");
        let file = image(4 << 20);
        let options = Options::new(file.path()).engine(engine);
        let block = Block::new(options.disk, Placement::single(&home, 1)).unwrap();
        let mut rig = Rig::of(block, options.features, Vec::new());
        for round in 0..20 {
            let guest = rig.guest();
            guest.write(round * 8, &pattern(round, 4096));
            assert_eq!(guest.read(round * 8, 4096), pattern(round, 4096));
            assert_eq!(guest.ask(FLUSH, 0, &[], 0).status, OK);
        }
    }
    stop.store(true, Ordering::SeqCst);
    home.notify();
    main.join().unwrap();
}
