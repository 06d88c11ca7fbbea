//! Hosts that fail requests, and how often they are tried again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::rig::*;
use crate::virtio::block::engine::faults::{Fault, set_script};
use crate::virtio::block::*;

fn faulty(
    id: &str,
    change: impl FnOnce(&mut DiskConfig),
    script: impl Fn(u64, bool) -> Fault + Send + Sync + 'static,
) -> (Rig, tempfile::NamedTempFile) {
    let file = image(1 << 20);
    set_script(id, Arc::new(script));
    let options = Options::new(file.path())
        .engine(EngineKind::IoUring)
        .with(|d| {
            d.id = id.into();
            d.direct = Some(false);
            change(d);
        });
    (Rig::new(options), file)
}

#[test]
fn retries_are_bounded() {
    for errno in [libc::EAGAIN, libc::EINTR] {
        let count = Arc::new(AtomicU64::new(0));
        let counter = count.clone();
        let (mut rig, _file) = faulty(
            &format!("again-{errno}"),
            |_| {},
            move |_, _| {
                counter.fetch_add(1, Ordering::SeqCst);
                Fault::Errno(errno)
            },
        );
        assert_eq!(rig.guest().ask(IN, 0, &[], 512).status, IOERR);
        let tries = count.load(Ordering::SeqCst);
        assert!((2..100).contains(&tries), "{tries}");
        assert_eq!(rig.guest().ask(OUT, 0, &[1; 512], 0).status, IOERR);
    }
}

#[test]
fn a_write_that_gets_nowhere_is_out_of_space() {
    // A sink that takes a little of each write and then nothing: what is left never fits.
    let (mut rig, _file) = faulty(
        "sink",
        |d| d.werror = ErrorPolicy::Report,
        |number, writes| match (writes, number) {
            (true, 0) => Fault::Short(700),
            (true, _) => Fault::Errno(libc::ENOSPC),
            _ => Fault::None,
        },
    );
    let events = Arc::new(std::sync::Mutex::new(Vec::new()));
    let sink = events.clone();
    rig.handle
        .set_event_callback(Arc::new(move |e| sink.lock().unwrap().push(e)));
    assert_eq!(rig.guest().ask(OUT, 0, &[1; 2048], 0).status, IOERR);
    assert!(events.lock().unwrap()[0].no_space);
}

#[test]
fn a_read_error_follows_rerror() {
    for (policy, status) in [(ErrorPolicy::Report, IOERR), (ErrorPolicy::Ignore, OK)] {
        let id = format!("rerror-{policy}");
        let (mut rig, _file) = faulty(
            &id,
            |d| d.rerror = policy,
            |number, _| {
                if number == 0 {
                    Fault::Errno(libc::EIO)
                } else {
                    Fault::None
                }
            },
        );
        let reply = rig.guest().ask(IN, 0, &[], 512);
        assert_eq!(reply.status, status);
        assert_eq!(rig.guest().read(0, 512), vec![0; 512]);
    }
    let (mut rig, _file) = faulty(
        "rerror-stop",
        |d| d.rerror = ErrorPolicy::Stop,
        |number, _| {
            if number < 3 {
                Fault::Errno(libc::EIO)
            } else {
                Fault::None
            }
        },
    );
    let kept = Arc::new(AtomicU64::new(0));
    let counter = kept.clone();
    rig.handle.set_event_callback(Arc::new(move |event| {
        assert!(event.is_read && event.action == ErrorPolicy::Stop);
        counter.fetch_add(1, Ordering::SeqCst);
    }));
    let heads: Vec<u16> = (0..3).map(|i| rig.guest().send(IN, i, &[], 512)).collect();
    rig.guest().kick();
    eventually("three are kept", || kept.load(Ordering::SeqCst) == 3);
    rig.handle.drain();
    rig.guest().collect();
    assert!(!heads.iter().any(|&head| rig.guest().is_answered(head)));
    rig.handle.resume();
    for head in heads {
        assert_eq!(rig.guest().wait(head).status, OK);
    }
}

#[test]
fn kept_requests_are_resubmitted_in_order() {
    const KINDS: [u32; 7] = [OUT, IN, IN, OUT, OUT, OUT, IN];
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let record = seen.clone();
    let (mut rig, _file) = faulty(
        "order",
        |d| (d.rerror, d.werror) = (ErrorPolicy::Stop, ErrorPolicy::Stop),
        move |number, writes| {
            record.lock().unwrap().push(if writes { OUT } else { IN });
            if number < KINDS.len() as u64 {
                Fault::Errno(libc::EIO)
            } else {
                Fault::None
            }
        },
    );
    let kept = Arc::new(AtomicU64::new(0));
    let counter = kept.clone();
    rig.handle.set_event_callback(Arc::new(move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
    }));
    let guest = rig.guest();
    let heads = KINDS.map(|kind| match kind {
        OUT => guest.send(OUT, 0, &[1; 512], 0),
        _ => guest.send(IN, 0, &[], 512),
    });
    guest.kick();
    eventually("all are kept", || kept.load(Ordering::SeqCst) == 7);
    rig.handle.resume();
    for head in heads {
        assert_eq!(rig.guest().wait(head).status, OK);
    }
    assert_eq!(seen.lock().unwrap()[7..], KINDS);
}

#[test]
fn nothing_is_answered_once_a_reset_has_begun() {
    use std::sync::mpsc::channel;
    // The host takes its time with a request, during which the driver resets the disk. When the
    // machine holds up the reset the answer may come first, so there are several attempts.
    let dropped = (0..10).any(|round| {
        let (under_way, told) = channel();
        let (mut rig, _file) = faulty(
            &format!("reset-{round}"),
            |_| {},
            move |_, _| {
                under_way.send(()).unwrap();
                std::thread::sleep(std::time::Duration::from_millis(100));
                Fault::Errno(libc::EIO)
            },
        );
        let guest = rig.guest();
        guest.send(IN, 0, &[], 512);
        guest.kick();
        told.recv().unwrap();
        rig.reset();
        rig.guest().ring.device_used_idx() == 0 && rig.line.count() == 0
    });
    assert!(dropped, "a request was answered during each reset");
}

#[test]
fn a_failed_flush_is_told() {
    let (mut rig, _file) = faulty(
        "flush",
        |_| {},
        |number, _| {
            if number == 0 {
                Fault::Errno(libc::EIO)
            } else {
                Fault::None
            }
        },
    );
    assert_eq!(rig.guest().ask(FLUSH, 0, &[], 0).status, IOERR);
    assert_eq!(rig.guest().ask(FLUSH, 0, &[], 0).status, OK);
    let stats = rig.handle.stats();
    assert_eq!(
        (stats.failed_flush_operations, stats.flush_operations),
        (1, 1)
    );
}

#[test]
fn discards_that_the_host_cannot_do_are_unsupported_and_zeroes_are_written() {
    let (mut rig, file) = faulty("no-fallocate", |_| {}, |_, _| Fault::None);
    rig.guest().write(0, &pattern(1, 8192));
    drop(rig);
    set_script(
        "no-fallocate",
        Arc::new(|number, _| {
            if number < 3 {
                Fault::Errno(libc::EOPNOTSUPP)
            } else {
                Fault::None
            }
        }),
    );
    let options = Options::new(file.path())
        .engine(EngineKind::IoUring)
        .with(|d| {
            d.id = "no-fallocate".into();
            d.direct = Some(false);
        });
    let mut rig = Rig::new(options);
    let range = Guest::range(0, 8, 0);
    assert_eq!(rig.guest().ask(DISCARD, 0, &range, 0).status, UNSUPP);
    // Neither a hole nor a zeroed range: written as data.
    let range = Guest::range(1, 7, 1);
    assert_eq!(rig.guest().ask(WRITE_ZEROES, 0, &range, 0).status, OK);
    let mut expected = pattern(1, 8192);
    expected[512..4096].fill(0);
    assert_eq!(rig.guest().read(0, 8192), expected);
}

/// Interrupts every thread's system calls without restarting them.
fn interrupt_thread(id: i32) {
    // SAFETY: tgkill with a signal whose handler does nothing.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), id, libc::SIGUSR2) };
}

#[test]
fn case_9_signals_during_io_are_harmless() {
    extern "C" fn nothing(_: i32) {}
    // SAFETY: installs a handler that does nothing, without SA_RESTART.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
        libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut());
    }
    for engine in ENGINES {
        let file = image(4 << 20);
        let mut rig = Rig::new(Options::new(file.path()).engine(engine));
        let id = rig.threads[0].thread_id();
        let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let stopped = stop.clone();
        let pest = std::thread::spawn(move || {
            while !stopped.load(Ordering::SeqCst) {
                interrupt_thread(id);
                std::thread::sleep(std::time::Duration::from_micros(50));
            }
        });
        let guest = rig.guest();
        for round in 0..50u64 {
            let heads: Vec<u16> = (0..32)
                .map(|i| guest.send(OUT, i * 8, &pattern(round + i, 4096), 0))
                .collect();
            guest.kick();
            for head in heads {
                assert_eq!(guest.wait(head).status, OK, "{engine}");
            }
            assert_eq!(guest.read(8, 4096), pattern(round + 1, 4096));
        }
        stop.store(true, Ordering::SeqCst);
        pest.join().unwrap();
    }
}

/// From now on io_uring is forbidden to the calling thread, as by a container's filter.
fn forbid_io_uring() {
    let setup = libc::SYS_io_uring_setup as u32;
    let op = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let filter = [
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, setup),
        op(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
        op(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_ptr().cast_mut(),
    };
    // SAFETY: the filter is a valid program; it holds for this thread and those it starts.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &program), 0);
    }
}

#[test]
fn case_30_without_io_uring_disks_run_on_what_there_is() {
    std::thread::spawn(|| {
        forbid_io_uring();
        let thread = iothread("no-ring", 32768);
        assert!(!thread.remote().call(|ctx| ctx.has_ring()).unwrap());
        let file = image(1 << 20);
        let mut config = DiskConfig::new("d0", file.path());
        config.engine = Some(EngineKind::IoUring);
        let error = Block::new(config.clone(), Placement::single(thread.remote(), 1));
        let error = error.err().unwrap().to_string();
        assert_eq!(
            error,
            "engine=io_uring: iothread no-ring has no io_uring; give another engine= or leave it out"
        );
        for (engine, direct) in [
            (None, None),
            (None, Some(false)),
            (Some(EngineKind::Native), None),
            (Some(EngineKind::Threads), None),
        ] {
            config.engine = engine;
            config.direct = direct;
            let block = block(config.clone(), Placement::single(thread.remote(), 1));
            let mut rig = Rig::of(block, Options::new(file.path()).features, Vec::new());
            rig.guest().write(8, &pattern(8, 4096));
            assert_eq!(rig.guest().read(8, 4096), pattern(8, 4096));
            let range = Guest::range(8, 8, 1);
            assert_eq!(rig.guest().ask(WRITE_ZEROES, 0, &range, 0).status, OK);
            assert_eq!(rig.guest().read(8, 4096), vec![0; 4096]);
        }
    })
    .join()
    .unwrap();
}
