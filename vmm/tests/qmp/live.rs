//! Changing a VM while its guest verifies what it reads and writes.

use std::collections::HashMap;
use std::fs::File;
use std::time::Instant;

use iothread::policy::{Iteration, Policy, PolicyKind};
use iothread::trace::TraceEvent;
use iothread::trace::codec::{Decoder, Entry};
use iothread::trace::file::{Block, End, Reader};

use serde_json::{Value, json};
use vmm::qmp::session::Session;

use crate::Held;
use crate::vm::{Options, Vm, execute, operations, reports};

/// How often.
const TIMES: usize = 1000;

/// Jobs of a second each that write, read and verify; more than any test needs, as each test ends the VM when it is done.
fn verifying_jobs() -> String {
    let jobs: String = (0..40).map(|number| format!(" job=j{number}")).collect();
    format!("rw=randrw verify=track iodepth=8 bs=4k runtime=1s timeout=30s{jobs}")
}

/// Ends the VM; every job that has reported must have been fine, and there is one.
fn end_well(vm: Vm, session: &mut Session, what: &str) {
    let before = operations(session);
    let begun = Instant::now();
    // One more job begins and ends after the last change.
    let mut seen = 0;
    crate::common::wait_for("the guest goes on", || {
        seen = operations(session);
        seen > before + 1000 && begun.elapsed().as_secs() >= 2
    });
    execute(session, "quit", json!({}));
    let end = vm.finish();
    assert_eq!(end.code(), Some(0), "{end:?}");
    let reports = reports(&end.stdout);
    assert!(reports.len() >= 2, "{end:?}");
    for report in &reports {
        assert!(
            report["ok"] == true && report["faults"] == 0,
            "{what}: {report}"
        );
        assert!(
            report["verified_sectors"].as_u64() > Some(0),
            "{what}: {report}"
        );
    }
    let longest = reports
        .iter()
        .filter_map(|report| report["lat_ns"]["max"].as_u64());
    let ios = reports.iter().filter_map(|report| report["ios"].as_u64());
    eprintln!(
        "{what}: {} jobs, {} requests, the slowest {} ms",
        reports.len(),
        ios.sum::<u64>(),
        longest.max().unwrap_or(0) / 1_000_000
    );
}

fn set(session: &mut Session, id: &str, property: &str, value: i64) {
    let arguments = json!({"path": format!("/objects/{id}"), "property": property, "value": value});
    execute(session, "qom-set", arguments);
}

fn polling(session: &mut Session, id: &str) -> Value {
    execute(session, "x-query-polling", json!({"id": id}))[0].clone()
}

fn number(report: &Value, key: &str) -> u64 {
    report[key]
        .as_u64()
        .unwrap_or_else(|| panic!("{key}: {report}"))
}

pub fn settings() -> Held {
    let vm = Vm::start(&verifying_jobs())?;
    let mut session = vm.connect_at_work();
    // Polling off: from the next iteration on no window is polled.
    set(&mut session, "io0", "poll-max-ns", 0);
    crate::common::wait_for("polling is off", || {
        number(&polling(&mut session, "io0"), "window-ns") == 0
    });
    let off = polling(&mut session, "io0");
    let wait = |session: &mut Session, more: u64| {
        let before = operations(session);
        crate::common::wait_for("the guest goes on", || operations(session) > before + more);
    };
    wait(&mut session, 200);
    let still_off = polling(&mut session, "io0");
    assert_eq!(
        number(&still_off, "windows"),
        number(&off, "windows"),
        "{still_off}"
    );
    assert!(
        number(&still_off, "blocks") > number(&off, "blocks"),
        "{still_off}"
    );
    // On again, with a window that finds nearly everything.
    set(&mut session, "io0", "poll-max-ns", 10_000_000);
    wait(&mut session, 200);
    let on = polling(&mut session, "io0");
    assert!(number(&on, "hits") > number(&still_off, "hits"), "{on}");
    let handlers = on["handlers"].as_array().unwrap();
    let completions = handlers.iter().find(|one| one["name"] == "completions");
    assert!(number(completions.unwrap(), "hits") > 0, "{on}");
    // All of them, many times, in every order, while the guest verifies.
    let properties = [
        ("poll-max-ns", [0, 1, 32_768, 200_000, i64::MAX]),
        ("poll-grow", [0, 1, 2, 8, i64::MAX]),
        ("poll-shrink", [0, 1, 2, 8, i64::MAX]),
        ("poll-weight", [0, 1, 3, 62, 63]),
        ("aio-max-batch", [0, 1, 2, 32, i64::MAX]),
    ];
    for step in 0..TIMES {
        let (property, values) = properties[step % properties.len()];
        let value = values[step / properties.len() % values.len()];
        set(&mut session, "io0", property, value);
        if value != 0 {
            let path = json!({"path": "/objects/io0", "property": property});
            assert_eq!(execute(&mut session, "qom-get", path), json!(value));
        }
    }
    set(&mut session, "io0", "poll-max-ns", 32_768);
    end_well(vm, &mut session, "settings");
    Ok(())
}

pub fn moves() -> Held {
    let vm = Vm::start(&verifying_jobs())?;
    let mut session = vm.connect_at_work();
    let homes = [json!("io1"), json!(null), json!("io0"), json!("io0")];
    let begun = Instant::now();
    for step in 0..TIMES {
        let home = &homes[step % homes.len()];
        let arguments = json!({"device": "d0", "iothread": home});
        execute(&mut session, "blockdev-change-iothread", arguments);
        let disks = execute(&mut session, "query-block", json!({}));
        let told = &disks[0]["iothread-vq-mapping"][0]["iothread"];
        assert_eq!(told, home);
    }
    eprintln!("{TIMES} moves took {} ms", begun.elapsed().as_millis());
    end_well(vm, &mut session, "moves");
    Ok(())
}

pub fn stops() -> Held {
    let vm = Vm::start(&verifying_jobs())?;
    let mut session = vm.connect_at_work();
    // Polling off, short windows, and windows that never end by themselves.
    for (state, poll_max_ns) in [
        ("off", 0),
        ("short", 4000),
        ("default", 32_768),
        ("long", 100_000_000),
    ] {
        set(&mut session, "io0", "poll-max-ns", poll_max_ns);
        let begun = Instant::now();
        for step in 0..TIMES / 4 {
            execute(&mut session, "stop", json!({}));
            let status = execute(&mut session, "query-status", json!({}));
            assert_eq!(status, json!({"running": false, "status": "paused"}));
            if step % 50 == 0 {
                // Nothing is under way any more.
                let before = operations(&mut session);
                std::thread::sleep(std::time::Duration::from_millis(20));
                assert_eq!(operations(&mut session), before);
            }
            execute(&mut session, "cont", json!({}));
            if step % 10 == 0 {
                let before = operations(&mut session);
                crate::common::wait_for("the guest goes on", || operations(&mut session) > before);
            }
        }
        eprintln!(
            "polling {state}: {} stops took {} ms",
            TIMES / 4,
            begun.elapsed().as_millis()
        );
    }
    end_well(vm, &mut session, "stops");
    Ok(())
}

pub fn iothreads() -> Held {
    let vm = Vm::start(&verifying_jobs())?;
    let mut session = vm.connect_at_work();
    for step in 0..TIMES / 10 {
        let id = format!("new{step}");
        let monitor = ["auto", "io_uring", "epoll", "ppoll"][step % 4];
        let policy = ["weighted", "per-handler", "context", "off", "always"][step % 5];
        let add =
            json!({"qom-type": "iothread", "id": id, "poll-policy": policy, "monitor": monitor});
        match session.execute("object-add", add) {
            Ok(_) => {}
            // A host without io_uring says so; the others must work.
            Err(error) if monitor == "io_uring" && error.to_string().contains("io_uring") => {
                continue;
            }
            Err(error) => panic!("{error}"),
        }
        let change = |home: Value| json!({"device": "d0", "iothread": home});
        execute(&mut session, "blockdev-change-iothread", change(json!(id)));
        let refused = session
            .execute("object-del", json!({"id": id}))
            .unwrap_err();
        assert!(
            refused.to_string().contains("in use by disk 'd0'"),
            "{refused}"
        );
        let before = operations(&mut session);
        crate::common::wait_for("the guest goes on there", || {
            operations(&mut session) > before
        });
        execute(
            &mut session,
            "blockdev-change-iothread",
            change(json!("io0")),
        );
        execute(&mut session, "object-del", json!({"id": id}));
    }
    let left = execute(&mut session, "query-iothreads", json!({}));
    assert_eq!(left.as_array().map(Vec::len), Some(2), "{left}");
    end_well(vm, &mut session, "iothreads");
    Ok(())
}

/// Follows the recorded rule through a trace file and compares every interval and window. Returns how many events each
/// name has.
fn follow(path: &std::path::Path) -> HashMap<&'static str, u64> {
    let mut counts = HashMap::new();
    let mut rules: HashMap<u16, Box<dyn Policy>> = HashMap::new();
    let mut kinds: HashMap<u16, PolicyKind> = HashMap::new();
    let mut reader = Reader::new(File::open(path).unwrap()).unwrap();
    let mut end = None;
    let slot = |node: u64| u32::try_from(node).unwrap();
    while let Some(block) = reader.next_block().unwrap() {
        match block {
            Block::Thread(number, thread) => {
                kinds.insert(number, thread.policy.parse().unwrap());
            }
            Block::Totals(_, totals) => assert_eq!(totals.lost, 0),
            Block::End(how) => end = Some(how),
            Block::Events {
                thread,
                base_ns,
                entries,
            } => {
                let mut decoder = Decoder::new(&entries, 0, base_ns);
                while let Some((_, entry)) = decoder.next().unwrap() {
                    let event = match entry {
                        Entry::Settings { settings, .. } => {
                            let fresh = || kinds[&thread].build(&settings);
                            rules.entry(thread).or_insert_with(fresh).reset(&settings);
                            continue;
                        }
                        Entry::Event(event) => event,
                        _ => continue,
                    };
                    *counts.entry(event.name()).or_default() += 1;
                    let rule = rules.get_mut(&thread).expect("settings come first");
                    match event {
                        TraceEvent::PollAdd { node, .. } => rule.list(slot(node)),
                        TraceEvent::PollRemove { node, .. } => rule.unlist(slot(node)),
                        TraceEvent::PollObserve {
                            block_ns,
                            dispatch_ns,
                            active,
                            ..
                        } => rule.observe(&Iteration::new(block_ns, dispatch_ns, active)),
                        TraceEvent::PollHandler { node, ns, .. } => {
                            assert_eq!(rule.handler_ns(slot(node)), ns);
                        }
                        TraceEvent::PollGrow { new, .. } | TraceEvent::PollShrink { new, .. } => {
                            assert_eq!(rule.window_ns(), new);
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    assert_eq!(end, Some(End::Closed));
    counts
}

pub fn traces() -> Held {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let option = format!("file={},events=poll_*", path.display());
    let vm = Vm::with(&Options {
        jobs: &verifying_jobs(),
        more: &["--trace", &option],
    })?;
    let mut session = vm.connect_at_work();
    let switch = |session: &mut Session, name: &str, enable: bool| {
        let arguments = json!({"name": name, "enable": enable});
        execute(session, "trace-event-set-state", arguments);
    };
    // From the start on, with changes of settings and homes, everything that the rule did can be followed.
    for step in 0..50 {
        set(&mut session, "io0", "poll-weight", 1 + step % 5);
        let home = ["io1", "io0"][usize::try_from(step).unwrap() % 2];
        let arguments = json!({"device": "d0", "iothread": home});
        execute(&mut session, "blockdev-change-iothread", arguments);
        switch(&mut session, "run_*", step % 2 == 0);
    }
    let before = operations(&mut session);
    crate::common::wait_for("the guest goes on", || {
        operations(&mut session) > before + 200
    });
    switch(&mut session, "*", false);
    let states = execute(&mut session, "trace-event-get-state", json!({"name": "*"}));
    let states = states.as_array().unwrap();
    assert!(states.iter().all(|event| event["state"] == "disabled"));
    end_well(vm, &mut session, "traces");
    let counts = follow(&path);
    for name in ["poll_add", "poll_observe", "poll_handler", "poll_dispatch"] {
        assert!(counts.get(name) > Some(&0), "{name}: {counts:?}");
    }
    Ok(())
}
