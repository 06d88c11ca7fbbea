//! What a well-behaved front end gets.

use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;

use serde_json::json;

use crate::common::{run, wait_for};
use crate::driver::{BLOCK, Driver, Wait, all_features, blocks, check_image, pattern};
use crate::front::{Front, GET_INFLIGHT_FD, SET_VRING_CALL, words};
use crate::served::{DISK_BYTES, Served};

/// Two queues each, written and read by two threads, verified by content from both sides.
fn verified_load(options: &str, more: &[&str], wait: Wait, features: u64) {
    let disk = format!("{options}queues=2");
    let mut served = Served::with(&[&disk], more);
    let mut driver = Driver::connect(&served.socket(0), 2, wait, features);
    let queues = std::mem::take(&mut driver.queues);
    std::thread::scope(|scope| {
        for (at, mut queue) in queues.into_iter().enumerate() {
            scope.spawn(move || {
                let mine = blocks(at, 2);
                for generation in 0..2 {
                    queue.write_and_verify(&mine, generation);
                }
                queue.queue.flush(0).unwrap();
                queue.succeed(1);
            });
        }
    });
    drop(driver);
    check_image(&served.image(0), &blocks(0, 1), 1);
    let end = served.terminate();
    assert_eq!(end.code(), Some(0), "{}", end.stderr);
    assert_eq!(end.stderr, "");
}

const IO0: [&str; 2] = ["--iothread", "id=io0"];

#[test]
fn io_uring_polled() {
    verified_load(
        "iothread=io0,engine=io_uring,",
        &IO0,
        Wait::Poll,
        all_features(),
    );
}

#[test]
fn io_uring_by_events() {
    verified_load(
        "iothread=io0,engine=io_uring,direct=on,",
        &["--iothread", "id=io0,poll-max-ns=0"],
        Wait::Event,
        all_features(),
    );
}

#[test]
fn linux_aio() {
    verified_load(
        "iothread=io0,engine=native,direct=on,",
        &IO0,
        Wait::Event,
        all_features(),
    );
}

#[test]
fn a_pool_of_threads_on_an_epoll_loop() {
    verified_load(
        "iothread=io0,engine=threads,",
        &["--iothread", "id=io0,monitor=epoll"],
        Wait::Event,
        all_features(),
    );
}

#[test]
fn two_iothreads_for_one_disk() {
    let more = ["--iothread", "id=io0", "--iothread", "id=io1,monitor=ppoll"];
    verified_load("iothreads=io0:io1,", &more, Wait::Event, all_features());
}

#[test]
fn the_main_loop_without_event_idx() {
    // VERSION_1, flush, queues: no EVENT_IDX, no WCE.
    let features = 1 << 32 | 1 << 9 | 1 << 12;
    verified_load("", &[], Wait::Event, features);
}

#[test]
fn the_configuration_space_and_the_other_requests() {
    let served = Served::with(&["iothread=io0,queues=3"], &IO0);
    let mut driver = Driver::connect(&served.socket(0), 3, Wait::Event, all_features());
    let config = driver.transport.get_config().unwrap();
    assert_eq!({ config.capacity }.to_native(), DISK_BYTES / 512);
    assert_eq!({ config.num_queues }.to_native(), 3);
    assert_eq!({ config.seg_max }.to_native(), 126, "a ring of 128");
    assert_eq!({ config.blk_size }.to_native(), 512);
    assert_eq!(config.writeback, 1);
    let queue = &mut driver.queues[2];
    let all: Vec<u64> = (0..16).collect();
    queue.write_and_verify(&all, 3);
    let block = BLOCK as u64;
    queue
        .queue
        .write_zeroes(2 * block, 2 * block, false, 0)
        .unwrap();
    queue.queue.write_zeroes(6 * block, block, true, 0).unwrap();
    queue.queue.discard(8 * block, block, 0).unwrap();
    queue.queue.flush(0).unwrap();
    queue.succeed(4);
    for index in [2, 3, 6] {
        queue.read(index, 0);
        queue.succeed(1);
        assert!(queue.content(0).iter().all(|byte| *byte == 0), "{index}");
    }
    queue.verify(&[0, 1, 4, 5, 7, 9, 15], 3);
    // Beyond the end.
    queue.read(DISK_BYTES / block, 0);
    assert_eq!(queue.complete(1), [(0, -libc::EIO)]);
}

#[test]
fn a_readonly_disk_is_not_written() {
    let served = Served::with(&["iothread=io0,readonly=on"], &IO0);
    // Read-only is not accepted, so the driver may believe that it can write.
    let features = all_features() & !(1 << 5);
    let mut driver = Driver::connect(&served.socket(0), 1, Wait::Event, features);
    let queue = &mut driver.queues[0];
    queue.write(0, &pattern(0, 1), 0);
    assert_eq!(queue.complete(1), [(0, -libc::EIO)]);
    queue.read(0, 1);
    queue.succeed(1);
    assert!(queue.content(1).iter().all(|byte| *byte == 0));
}

#[test]
fn front_ends_come_and_go() {
    let served = Served::with(
        &["iothread=io0,queues=2"],
        &["--iothread", "id=io0", "--log", "off"],
    );
    // The first connection makes what stays.
    drop(Driver::connect(
        &served.socket(0),
        1,
        Wait::Event,
        all_features(),
    ));
    for round in 0..20 {
        let wait = [Wait::Event, Wait::Poll][round % 2];
        let mut driver = Driver::connect(&served.socket(0), 2, wait, all_features());
        let queue = &mut driver.queues[round % 2];
        queue.write_and_verify(&blocks(0, 64), round as u64);
        // It goes with requests under way.
        for at in 0..32 {
            queue.write(at, &pattern(at, 99), at as usize);
        }
        queue.kick();
    }
    let mut driver = Driver::connect(&served.socket(0), 1, Wait::Event, all_features());
    let queue = &mut driver.queues[0];
    queue.write_and_verify(&blocks(0, 1), 1000);
    let with_one = served.descriptors();
    drop(driver);
    wait_for("the descriptors of front ends that went", || {
        served.descriptors() < with_one
    });
    let without = served.descriptors();
    for _ in 0..5 {
        drop(Driver::connect(
            &served.socket(0),
            2,
            Wait::Event,
            all_features(),
        ));
    }
    wait_for("no descriptor to be left behind", || {
        served.descriptors() <= without
    });
}

#[test]
fn several_disks_in_one_process_and_a_move_under_load() {
    let dir = tempfile::tempdir().unwrap();
    let monitor = format!("unix:{}", dir.path().join("qmp").display());
    let more = [
        "--iothread",
        "id=io0",
        "--iothread",
        "id=io1",
        "--stats",
        "--qmp",
        &monitor,
    ];
    let mut served = Served::with(
        &[
            "iothread=io0,fixedbufs=on",
            "iothread=io0,fixedbufs=on",
            "",
            "iothread=io1",
        ],
        &more,
    );
    std::os::unix::fs::symlink(dir.path().join("qmp"), served.dir.path().join("qmp")).unwrap();
    let drivers: Vec<Driver> = (0..4)
        .map(|at| Driver::connect(&served.socket(at), 1, Wait::Event, all_features()))
        .collect();
    std::thread::scope(|scope| {
        let load = drivers.into_iter().enumerate().map(|(at, mut driver)| {
            scope.spawn(move || {
                // The whole of it, not its queues alone.
                let driver = &mut driver;
                for generation in 0..3 {
                    let which = at as u64 * 100 + generation;
                    driver.queues[0].write_and_verify(&blocks(0, 1), which);
                }
            })
        });
        let load: Vec<_> = load.collect();
        let mut moves = 0;
        while moves < 20 || load.iter().any(|thread| !thread.is_finished()) {
            let to = [json!("io1"), json!(null), json!("io0")][moves % 3].clone();
            let arguments = json!({"device": "d0", "iothread": to});
            served.ask("blockdev-change-iothread", arguments);
            moves += 1;
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    });
    for at in 0..4 {
        check_image(&served.image(at), &blocks(0, 1), at as u64 * 100 + 2);
        let stats = served.stats(&format!("d{at}"));
        assert_eq!(stats["wr_operations"], json!(3 * DISK_BYTES / BLOCK as u64));
    }
    let iothreads = served.ask("query-iothreads", json!({}));
    assert_eq!(iothreads.as_array().unwrap().len(), 2);
    let commands = served.ask("query-commands", json!({})).to_string();
    assert!(commands.contains("qom-set") && !commands.contains("block_resize"));
    served.ask(
        "qom-set",
        json!({"path": "/objects/io0", "property": "poll-max-ns", "value": 4096}),
    );
    served.ask("quit", json!({}));
    let end = served.terminate();
    assert_eq!(end.code(), Some(0));
    for word in ["iothread io0:", "main loop:", "disk d3: 6144 reads"] {
        assert!(end.stderr.contains(word), "{word} in {}", end.stderr);
    }
}

#[test]
fn sockets_are_private_replaced_when_stale_and_removed_at_the_end() {
    let mut served = Served::with(&["iothread=io0"], &IO0);
    let socket = served.socket(0);
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    // A second process cannot take it: the image is locked first, so it has another one.
    let other = served.dir.path().join("other.img");
    std::fs::write(&other, [0; 4096]).unwrap();
    let mut command = crate::common::pollux();
    command.args(["vhost-user-blk", "--disk"]);
    command.arg(&other).arg("--socket").arg(&socket);
    let second = run(&mut command);
    assert_eq!(second.code(), Some(2));
    assert!(second.stderr.contains("a running process answers"));
    served.kill();
    assert!(socket.exists());
    served.launch();
    let mut driver = Driver::connect(&socket, 1, Wait::Event, all_features());
    for at in 0..32 {
        driver.queues[0].write(at, &pattern(at, 7), at as usize);
    }
    driver.queues[0].kick();
    let end = served.terminate();
    assert_eq!((end.code(), end.stderr.as_str()), (Some(0), ""));
    assert!(!socket.exists());
    // What was under way was finished.
    driver.queues[0].succeed(32);
    check_image(&served.image(0), &(0..32).collect::<Vec<_>>(), 7);
}

#[test]
fn wrong_usage_is_told_in_a_line() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::write(&image, [0; 4096]).unwrap();
    let image = image.to_str().unwrap();
    let path = |more: &str| format!("path={image},{more}");
    let cases = [
        (path("transport=pci"), "1", "the front end chooses it"),
        (path("werror=stop"), "1", "no VM to stop"),
        (path("rerror=enospc"), "1", "no VM to stop"),
        (path("iothread=io9"), "1", "io9"),
        (path("queues=0"), "1", "queues"),
        (path("quues=1"), "1", "queues"),
        (image.to_owned(), "2", "2 sockets for 1 disks"),
        (format!("{image}.missing"), "1", "no such file"),
    ];
    for (disk, sockets, word) in cases {
        let mut command = crate::common::pollux();
        command.args(["vhost-user-blk", "--disk", &disk]);
        for at in 0..sockets.parse::<u32>().unwrap() {
            command.arg("--socket").arg(dir.path().join(at.to_string()));
        }
        let end = run(&mut command);
        assert_eq!(end.code(), Some(2), "{disk}: {}", end.stderr);
        assert_eq!(end.stderr.lines().count(), 1, "{}", end.stderr);
        assert!(end.stderr.contains(word), "{word}: {}", end.stderr);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

/// What a front end needs works in the sandbox as well: memory, interrupts of both kinds, the record of requests, the
/// monitor, the trace; and the sockets are removed at the end.
#[test]
fn a_back_end_runs_in_the_sandbox() {
    let root = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let trace = other.path().join("trace").display().to_string();
    let mut more = vec!["--sandbox", "on", "--iothread", "io0", "--trace", &trace];
    let chroot = root.path().display().to_string();
    if rustix::process::geteuid().is_root() {
        more.extend(["--user", "65534:65534", "--chroot", &chroot]);
    }
    let mut served = Served::with(&["iothread=io0"], &more);
    // Another user removes the sockets.
    let open = std::fs::Permissions::from_mode(0o777);
    std::fs::set_permissions(served.dir.path(), open).unwrap();
    let pid = served.pid();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in ["NoNewPrivs:\t1", "CapEff:\t0000000000000000", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    for _ in 0..2 {
        let mut front = Front::ready(&served.socket(0));
        front.works();
        // An eventfd that may block is signalled in another way.
        let blocking = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap();
        assert!(front.order(SET_VRING_CALL, &words(&[0]), &[blocking.as_raw_fd()]));
        front.works();
        let payload = [words(&[0, 0]), vec![1, 0, 128, 0, 0, 0, 0, 0]].concat();
        assert!(front.send(GET_INFLIGHT_FD, 0, &payload, &[]));
        assert!(
            front.receive().unwrap().1.is_some(),
            "no memory for the record"
        );
    }
    let end = served.terminate();
    assert_eq!(end.code(), Some(0), "{end:?}");
    assert!(!served.socket(0).exists(), "the socket is left behind");
    assert!(std::fs::metadata(&trace).unwrap().len() > 0);
}
