//! Things that happen to a VM by themselves, and how its clients are told.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::geteuid;
use serde_json::{Value, json};
use vmm::qmp::session::Session;

use crate::common::wait_for;
use crate::vm::{Options, Vm, execute, reports};
use crate::{Held, Skipped};

/// A client that only listens.
struct Listener(std::io::Lines<BufReader<UnixStream>>);

impl Listener {
    fn connect(vm: &Vm) -> Self {
        let mut stream = None;
        wait_for("the monitor listens", || {
            stream = UnixStream::connect(vm.socket()).ok();
            stream.is_some()
        });
        let mut stream = stream.unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        stream
            .write_all(b"{\"execute\": \"qmp_capabilities\"}\n")
            .unwrap();
        let mut lines = BufReader::new(stream).lines();
        assert!(lines.next().unwrap().unwrap().contains("QMP"));
        let mut listener = Self(lines);
        assert_eq!(listener.next()["return"], json!({}));
        listener
    }

    fn next(&mut self) -> Value {
        serde_json::from_str(&self.0.next().expect("more").unwrap()).unwrap()
    }

    /// All events up to SHUTDOWN: their names and data.
    fn until_the_end(mut self) -> Vec<(String, Value)> {
        let mut events = Vec::new();
        loop {
            let message = self.next();
            assert!(message["timestamp"]["seconds"].as_u64() > Some(1_600_000_000));
            let name = message["event"].as_str().expect("an event").to_owned();
            let ends = name == "SHUTDOWN";
            events.push((name, message["data"].clone()));
            if ends {
                return events;
            }
        }
    }
}

/// Calls `unshare(1)` so that a filesystem can be mounted that only the child sees.
fn own_mounts() -> Result<Vec<&'static str>, Skipped> {
    let words = match geteuid().is_root() {
        true => vec!["unshare", "-m"],
        false => vec!["unshare", "-Urm"],
    };
    let mut probe = Command::new(words[0]);
    probe
        .args(&words[1..])
        .args(["mount", "-t", "tmpfs", "none", "/mnt"]);
    probe.stdout(Stdio::piped()).stderr(Stdio::piped());
    match probe.output() {
        Ok(output) if output.status.success() => Ok(words),
        Ok(output) => {
            let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            Err(Skipped(format!("a filesystem of limited size: {why}")))
        }
        Err(error) => Err(Skipped(format!("unshare: {error}"))),
    }
}

/// Mounts a filesystem at $1 with half of it taken by a file, then becomes the rest of the words.
const LITTLE_ROOM: &str = r#"
mount -t tmpfs -o size=16M none "$1" && truncate -s 12M "$1/d1.img" &&
dd if=/dev/zero of="$1/filler" bs=1M count=10 status=none || exit 99
shift
exec "$@""#;

pub fn full_disk() -> Held {
    let unshare = own_mounts()?;
    let dir = tempfile::tempdir().unwrap();
    Vm::prepare(dir.path())?;
    let small = dir.path().join("small");
    std::fs::create_dir(&small).unwrap();
    let disk = format!(
        "path={},id=d1,iothread=io1,werror=enospc",
        small.join("d1.img").display()
    );
    let program = Vm::command(
        dir.path(),
        &Options {
            jobs: "disk=1 job=fill rw=write bs=64k iodepth=8 verify=gen:1 timeout=60s job=check rw=verify bs=64k verify=gen:1",
            more: &["--disk", &disk],
        },
    );
    let mut command = Command::new(unshare[0]);
    command
        .args(&unshare[1..])
        .args(["sh", "-c", LITTLE_ROOM, "sh"])
        .arg(&small)
        .arg(program.get_program())
        .args(program.get_args())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let vm = Vm::adopt(command.spawn().unwrap(), dir);
    let listener = Listener::connect(&vm);
    let mut session = vm.connect();
    let stopped = |session: &mut Session| {
        wait_for("the disk is full", || {
            execute(session, "query-status", json!({}))["status"] == "io-error"
        });
    };
    stopped(&mut session);
    let disks = execute(&mut session, "query-block", json!({}));
    assert_eq!(disks[1]["io-status"], "nospace", "{disks}");
    assert_eq!(disks[0]["io-status"], "ok", "{disks}");
    // Going on without room fails again.
    execute(&mut session, "cont", json!({}));
    stopped(&mut session);

    // Room is made; the requests that were kept are done, and everything is where it should be.
    let there = format!(
        "/proc/{}/root{}",
        vm.process().as_raw_nonzero(),
        small.display()
    );
    std::fs::remove_file(std::path::Path::new(&there).join("filler")).unwrap();
    execute(&mut session, "cont", json!({}));
    let events = listener.until_the_end();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    // What came before the listener is not among them.
    let states: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| *name != "BLOCK_IO_ERROR")
        .collect();
    assert!(
        states.ends_with(&["RESUME", "STOP", "RESUME", "SHUTDOWN"]),
        "{names:?}"
    );
    // Told once a second at most, as in QEMU.
    assert!(names.contains(&"BLOCK_IO_ERROR"), "{names:?}");
    for (_, error) in events.iter().filter(|(name, _)| name == "BLOCK_IO_ERROR") {
        let told = ["device", "operation", "action", "nospace"].map(|key| error[key].clone());
        assert_eq!(
            told,
            [json!("d1"), json!("write"), json!("stop"), json!(true)]
        );
        assert!(
            error["reason"].as_str().unwrap().contains("No space left"),
            "{error}"
        );
    }
    assert_eq!(events.last().unwrap().1["reason"], "guest-shutdown");
    let finished = vm.finish();
    assert_eq!(finished.code(), Some(0), "{finished:?}");
    let reports = reports(&finished.stdout);
    assert_eq!(reports.len(), 2, "{finished:?}");
    for report in &reports {
        assert!(report["ok"] == true && report["errors"] == 0, "{report}");
    }
    assert!(
        reports[1]["verified_sectors"].as_u64() > Some(0),
        "{finished:?}"
    );
    Ok(())
}

pub fn panic() -> Held {
    let vm = Vm::start("exit=panic job=wait rw=sleep runtime=2s")?;
    let mut events = Listener::connect(&vm).until_the_end();
    // It is the start of the guest, if that was after the listener's.
    events.retain(|(name, _)| name != "RESUME");
    let data = json!({"guest": true, "reason": "guest-panic"});
    assert_eq!(events[0].0, "GUEST_PANICKED", "{events:?}");
    assert_eq!(events[0].1["action"], "poweroff");
    assert_eq!(events[1..], [("SHUTDOWN".to_owned(), data)]);
    let finished = vm.finish();
    assert_eq!(finished.code(), Some(1), "{finished:?}");
    assert!(
        finished.stderr.contains("the guest's kernel panicked"),
        "{finished:?}"
    );
    Ok(())
}
