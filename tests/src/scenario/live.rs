//! Everything that the monitor can change, changed while fio runs and verifies: settings of iothreads,
//! disks on other iothreads, new iothreads, and the guest stopped and continued.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::storage::check_sums;
use super::{Environment, Outcome, two_iothreads};
use crate::machine::{Machine, Running, Vmm};
use crate::qmp::Qmp;

/// Rounds of fio on both disks until a line comes from the console. Of each job: name, error, and the
/// longest time that a read and a write took, in microseconds (fields of fio's terse form, version 3).
const SCRIPT: &str = r#"
export data0=$(disk data0) data1=$(disk data1)
cat >/tmp/jobs <<'END'
[global]
direct=1
rw=randwrite
bs=4k
iodepth=4
size=512k
verify=crc32c
verify_fatal=1
verify_async=0
thread=1
[data0]
filename=${data0}
ioengine=libaio
[data1-0]
filename=${data1}
ioengine=io_uring
cpus_allowed=0
[data1-1]
filename=${data1}
offset=1m
ioengine=libaio
cpus_allowed=1
END
exec 3<&0
( read -r line <&3; : >/tmp/end ) &
while [ ! -e /tmp/end ]; do
    fio --output-format=terse --terse-version=3 /tmp/jobs >/tmp/fio 2>&1 ||
        fail "fio: $(tail -n 5 /tmp/fio)"
    while IFS=';' read -r line; do report job "$line"; done <<END
$(cut -d';' -f3,5,39,80 /tmp/fio | tr ';' ' ')
END
    report round
done
for serial in data0 data1; do
    device=$(disk $serial)
    report sum.$serial "$(dd if=$device bs=512k iflag=direct status=none | sha256sum)"
done
"#;

/// As many as the issue of such changes asks for; less where the machine does not manage.
const TIMES: usize = 1000;
const LEAST: usize = 50;
const TIME: Duration = Duration::from_secs(20);

/// No request may take longer, unless requests without any change took a tenth of it. Users are promised
/// a second; an emulated processor on a busy host can itself stand still that long.
const LONGEST_US: u64 = 5_000_000;

pub fn live(environment: &Environment) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("needs Pollux's monitor".to_owned());
    }
    let mut machine = Machine::new(SCRIPT);
    machine.monitor = true;
    machine.iothreads = two_iothreads();
    machine.disks = vec![
        environment.disk("data0", 1 << 20).on("io0"),
        environment.disk("data1", 2 << 20).on("io1").with_queues(2),
    ];
    let mut running = environment.start(&machine);
    running.wait_for_nth("round", 2);
    let mut monitor = running.monitor();

    // Each with its rounds of fio, the one that was under way at its end included.
    let mut phases = vec![("undisturbed", 0..2)];
    let begin = running.count("round");
    settings(&mut running, &mut monitor);
    phases.push(("settings", begin..running.count("round") + 1));
    let begin = running.count("round");
    moves(environment, &mut monitor);
    phases.push(("moves", begin..running.count("round") + 1));
    let begin = running.count("round");
    stop_and_cont(environment, &mut monitor);
    let end = running.count("round") + 1;
    phases.push(("stop and cont", begin..end));
    phases.push(("afterwards", end..end + 1));
    running.wait_for_nth("round", end + 1);

    let polling = monitor.execute("x-query-polling", json!({}));
    for iothread in polling.as_array().expect("a list") {
        assert_eq!(iothread["errors"], 0, "{iothread}");
    }
    running.send("end");
    let ended = running.finish();
    ended.assert_success();
    check_sums(&ended, &machine.disks);

    // Three jobs a round.
    let jobs: Vec<Vec<&str>> = ended
        .all("job")
        .iter()
        .map(|job| job.split(' ').collect())
        .collect();
    let rounds: Vec<_> = jobs.chunks_exact(3).collect();
    let mut limit_us = u64::MAX;
    for (name, range) in phases {
        let count = range.len();
        let jobs = rounds[range].iter().flat_map(|round| round.iter());
        let number = |text: &str| text.parse::<f64>().expect("a number") as u64;
        let longest_us = jobs
            .map(|job| {
                assert_eq!(job[1], "0", "{}: fio's error, {name}", job[0]);
                number(job[2]).max(number(job[3]))
            })
            .max();
        let longest_us = longest_us.expect("a phase has a round");
        environment.note(&format!(
            "{name}: the longest request of {count} rounds of fio took {} ms",
            longest_us / 1000
        ));
        assert!(longest_us <= limit_us, "{name}: {longest_us} us");
        if name == "undisturbed" {
            limit_us = LONGEST_US.max(10 * longest_us);
        }
    }
    Outcome::Held
}

/// Every setting is taken, told, and seen in what the iothread does.
fn settings(running: &mut Running, monitor: &mut Qmp) {
    let mut windows_during_a_round = |monitor: &mut Qmp| {
        // Settings are in force from the next iteration on, which is long begun then.
        std::thread::sleep(Duration::from_millis(100));
        let rounds = running.count("round");
        let before = polling(monitor, "io0");
        running.wait_for_nth("round", rounds + 1);
        let after = polling(monitor, "io0");
        let grown = |name: &str| {
            let [before, after] = [&before, &after].map(|p| p[name].as_u64().unwrap_or(0));
            after - before
        };
        assert!(grown("completions") > 0, "there was I/O: {after}");
        let above_default = after["window-histogram"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|bucket| bucket["from-ns"].as_u64() > Some(65_536))
            .count();
        (grown("windows"), above_default)
    };
    let (_, large) = windows_during_a_round(monitor);
    assert_eq!(large, 0, "no window above poll-max-ns");

    for (name, value) in [
        ("poll-max-ns", 4_000_000),
        ("poll-grow", 8),
        ("poll-shrink", 4),
        ("poll-weight", 2),
        ("aio-max-batch", 4),
    ] {
        monitor.set("io0", name, value);
        assert_eq!(monitor.get("io0", name), value, "{name}");
        let all = monitor.execute("query-iothreads", json!({}));
        assert_eq!(all[0][name], value, "{name}: {all}");
    }
    let (windows, large) = windows_during_a_round(monitor);
    assert!(windows > 0, "with poll-max-ns=4000000 it polls");
    assert!(large > 0, "windows above the old poll-max-ns");

    monitor.set("io0", "poll-max-ns", 0);
    let (windows, _) = windows_during_a_round(monitor);
    assert_eq!(windows, 0, "with poll-max-ns=0 it does not poll");

    for (name, value) in [
        ("poll-max-ns", 32_768),
        ("poll-grow", 2),
        ("poll-shrink", 2),
        ("poll-weight", 3),
        ("aio-max-batch", 0),
    ] {
        monitor.set("io0", name, value);
    }
    let path = json!({"path": "/objects/io0", "property": "poll-max-ns", "value": -1});
    assert!(monitor.try_execute("qom-set", path).is_err(), "below zero");
}

fn polling(monitor: &mut Qmp, iothread: &str) -> Value {
    monitor.execute("x-query-polling", json!({"id": iothread}))[0].take()
}

/// Moves both disks between iothreads old and new and the main loop.
fn moves(environment: &Environment, monitor: &mut Qmp) {
    let add = json!({"qom-type": "iothread", "id": "io2", "poll-max-ns": 32768});
    monitor.execute("object-add", add);
    let homes = [json!("io2"), json!("io0"), Value::Null, json!("io1")];
    let begun = Instant::now();
    let mut count = 0;
    while count < TIMES && begun.elapsed() < TIME {
        let disk = ["data0", "data1"][count % 2];
        let home = &homes[count / 2 % homes.len()];
        let to = json!({"device": disk, "iothread": home});
        monitor.execute("blockdev-change-iothread", to);
        count += 1;
        if count % 100 == 1 {
            let mapping = monitor.disk(disk)["iothread-vq-mapping"].take();
            assert_eq!(mapping.as_array().map(Vec::len), Some(1), "{mapping}");
            let told = mapping[0].get("iothread").unwrap_or(&Value::Null);
            assert_eq!(told, home, "where {disk} is");
        }
    }
    environment.note(&format!(
        "{count} moves in {:.1} s",
        begun.elapsed().as_secs_f64()
    ));
    assert!(count >= LEAST, "only {count} moves");

    let to = |home: &str| json!({"device": "data0", "iothread": home});
    monitor.execute("blockdev-change-iothread", to("io2"));
    monitor.execute(
        "blockdev-change-iothread",
        json!({"device": "data1", "iothread": "io1"}),
    );
    let io2 = json!({"id": "io2"});
    let refused = monitor.try_execute("object-del", io2.clone());
    let refused = refused.expect_err("a disk uses it").to_string();
    assert!(refused.contains("data0"), "{refused}");
    monitor.execute("blockdev-change-iothread", to("io0"));
    monitor.execute("object-del", io2);
    let left = monitor.execute("query-iothreads", json!({}));
    assert_eq!(left.as_array().map(Vec::len), Some(2), "{left}");
}

fn stop_and_cont(environment: &Environment, monitor: &mut Qmp) {
    let begun = Instant::now();
    let mut count = 0;
    while count < TIMES && begun.elapsed() < TIME {
        monitor.execute("stop", json!({}));
        if count == 0 {
            let status = monitor.execute("query-status", json!({}));
            assert_eq!(status, json!({"running": false, "status": "paused"}));
        }
        monitor.execute("cont", json!({}));
        count += 1;
    }
    environment.note(&format!(
        "{count} times stop and cont in {:.1} s",
        begun.elapsed().as_secs_f64()
    ));
    assert!(count >= LEAST, "only {count} times");
    monitor.wait_for_event("STOP");
    monitor.wait_for_event("RESUME");
}
