//! A run that is ended from outside finishes the writes that are under way: of what the guest wrote
//! with O_DIRECT everything acknowledged is on the image, and nothing is there by half.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};

use super::{Environment, Outcome, two_iothreads};
use crate::machine::{Machine, Running, Vmm};

/// Sectors in one write, and in one run of dd.
const WRITE_SECTORS: usize = 64;
const PART_SECTORS: usize = 512;
const PARTS: usize = 64;
const WRITERS: [&str; 4] = ["writer0", "writer1", "writer2", "plain"];

/// One writer a disk; each tells how far it has come.
const SCRIPT: &str = r#"
seq -f "%0511.f" 0 32767 >/tmp/content
for serial in writer0 writer1 writer2 plain; do
    device=$(disk $serial)
    while :; do
        part=0
        while [ $part -lt 64 ]; do
            dd if=/tmp/content of=$device bs=32k skip=$((part * 8)) seek=$((part * 8)) count=8 \
                oflag=direct status=none || fail "dd $serial"
            part=$((part + 1))
            report $serial $part
        done
        report $serial.full
        sleep 1000
    done &
done
wait
"#;

/// By the monitor.
pub fn quit(environment: &Environment) -> Outcome {
    end(environment, "host-qmp-quit", |running| {
        running.monitor().execute("quit", json!({}));
    })
}

pub fn sigterm(environment: &Environment) -> Outcome {
    end(environment, "host-signal", |running| {
        signal(running, "TERM")
    })
}

pub fn sigint(environment: &Environment) -> Outcome {
    end(environment, "host-signal", |running| signal(running, "INT"))
}

fn signal(running: &Running, name: &str) {
    let id = running.id().to_string();
    let sent = Command::new("kill").args(["-s", name, &id]).status();
    assert!(sent.is_ok_and(|status| status.success()), "kill -s {name}");
}

fn end(environment: &Environment, reason: &str, by: fn(&Running)) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("about Pollux's own way to end".to_owned());
    }
    let mut machine = Machine::new(SCRIPT);
    machine.monitor = true;
    machine.iothreads = two_iothreads();
    let bytes = (PARTS * PART_SECTORS * 512) as u64;
    let disk = |serial: &str| environment.disk(serial, bytes);
    machine.disks = vec![
        disk("writer0").on("io0"),
        disk("writer1").on("io0"),
        disk("writer2").on("io1"),
        disk("plain"),
    ];
    let mut running = environment.start(&machine);
    for serial in WRITERS {
        running.wait_for_nth(serial, 2);
    }
    let monitor = running.monitor();
    by(&running);
    let events = monitor.last_events();
    let ended = running.finish();
    assert!(
        ended.status.success(),
        "{}\n{}",
        ended.status,
        ended.messages
    );
    let last = events.last().unwrap_or(&Value::Null);
    assert_eq!(last["event"], "SHUTDOWN", "{events:?}");
    assert_eq!(last["data"]["reason"], reason, "{events:?}");

    for disk in &machine.disks {
        let serial = &disk.serial;
        let acknowledged = ended.all(serial).len() * PART_SECTORS;
        let image = fs::read(&disk.path).expect("it can be read");
        let sectors: Vec<&[u8]> = image.chunks_exact(512).collect();
        let right = |sector: &usize| *sectors[*sector] == *format!("{sector:0511}\n").as_bytes();
        let written = (0..sectors.len()).take_while(right).count();
        environment.note(&format!(
            "{serial}: {acknowledged} sectors acknowledged by dd's end, {written} on the image"
        ));
        assert!(
            written >= acknowledged,
            "{serial}: acknowledged data is lost"
        );
        assert!(
            written < sectors.len(),
            "{serial}: it was full before the end: this tested nothing"
        );
        assert_eq!(written % WRITE_SECTORS, 0, "{serial}: a write by half");
        assert!(
            sectors[written..]
                .iter()
                .all(|sector| sector.iter().all(|byte| *byte == 0)),
            "{serial}: sector {written} and later ones were not written yet"
        );
    }
    Outcome::Held
}
