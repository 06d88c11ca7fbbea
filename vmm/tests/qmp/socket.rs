//! The socket's life, the end of a VM as clients see it, and clients that misbehave.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};

use crate::Held;
use crate::common::{finish, wait_for};
use crate::vm::{Options, Vm, execute, operations};

/// A job that does not end by itself.
const ENDLESS: &str = "rw=randrw verify=track iodepth=8 runtime=3600s job=endless";

pub fn is_private_and_never_left_behind() -> Held {
    for end in ["power off", "quit", "SIGTERM", "SIGINT", "SIGHUP"] {
        let jobs = match end {
            "power off" => "rw=randread runtime=200ms job=short",
            _ => ENDLESS,
        };
        let vm = Vm::start(jobs)?;
        let mut session = vm.connect_at_work();
        let socket = vm.socket();
        let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let signal = match end {
            "SIGTERM" => Some(Signal::TERM),
            "SIGINT" => Some(Signal::INT),
            "SIGHUP" => Some(Signal::HUP),
            _ => None,
        };
        if let Some(signal) = signal {
            kill_process(vm.process(), signal).unwrap();
        } else if end == "quit" {
            execute(&mut session, "quit", json!({}));
        }
        let (finished, dir) = vm.finish_keeping();
        assert_eq!(finished.code(), Some(0), "{end}: {finished:?}");
        assert!(!socket.exists(), "{end}");
        drop(dir);
    }
    Ok(())
}

pub fn stale_is_replaced_and_live_refused() -> Held {
    let vm = Vm::start(ENDLESS)?;
    vm.connect_at_work();
    let options = Options {
        jobs: ENDLESS,
        more: &["--disk", "path=/dev/null"],
    };
    // The socket is looked at before the disks: a second VM must not get as far as those.
    let second = Vm::command(vm.dir.path(), &options).spawn().unwrap();
    let refused = finish(second);
    assert_eq!(refused.code(), Some(2), "{refused:?}");
    assert!(
        refused
            .stderr
            .contains("a running process answers on this socket"),
        "{refused:?}"
    );
    assert_eq!(refused.stderr.lines().count(), 1, "{refused:?}");
    // The first has not noticed.
    let mut session = vm.connect();
    execute(&mut session, "query-status", json!({}));

    kill_process(vm.process(), Signal::KILL).unwrap();
    let socket = vm.socket();
    let (_, dir) = vm.finish_keeping();
    assert!(socket.exists(), "a killed process cannot remove it");
    let options = Options {
        jobs: "rw=randread runtime=100ms job=short",
        more: &[],
    };
    // At once: the kernel may still be freeing the dead process's ring, and with it the lock on the image.
    let finished = finish(Vm::command(dir.path(), &options).spawn().unwrap());
    assert_eq!(finished.code(), Some(0), "{finished:?}");
    assert!(!socket.exists());
    Ok(())
}

pub fn quit_finishes_what_is_under_way() -> Held {
    let vm = Vm::start(ENDLESS)?;
    let mut session = vm.connect_at_work();
    let mut stream = UnixStream::connect(vm.socket()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    stream
        .write_all(br#"{"execute": "qmp_capabilities"}"#)
        .unwrap();
    assert!(lines.next().unwrap().unwrap().contains("QMP"));
    assert!(lines.next().unwrap().unwrap().contains("return"));
    let done = operations(&mut session);
    execute(&mut session, "quit", json!({}));
    // The other client is told, and then the connection is closed.
    let told: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(told["event"], "SHUTDOWN");
    assert_eq!(
        told["data"],
        json!({"guest": false, "reason": "host-qmp-quit"})
    );
    assert!(lines.next().is_none());
    let (finished, dir) = vm.finish_keeping();
    assert_eq!(finished.code(), Some(0), "{finished:?}");
    assert!(finished.stderr.contains("quit"), "{finished:?}");
    assert!(done > 0);
    // Every sector that was written holds one whole pattern: no write was torn by the end.
    let image = crate::vm::read(&dir.path().join("d0.img"));
    assert_eq!(image.len() as u64, crate::vm::DISK_BYTES);
    assert!(image.iter().any(|byte| *byte != 0));
    Ok(())
}

pub fn clients_of_all_kinds() -> Held {
    let vm = Vm::start(ENDLESS)?;
    let mut session = vm.connect_at_work();
    let connect = || UnixStream::connect(vm.socket()).unwrap();
    // Those that stay, and never read, in the middle of something.
    let mut deaf: Vec<UnixStream> = Vec::new();
    for text in [
        "",
        "{\"execute\": \"",
        "{\"execute\": \"qmp_capabilities\"}{\"execute\": \"query-qmp-schema\"}",
    ] {
        let mut stream = connect();
        stream.write_all(text.repeat(3).as_bytes()).unwrap();
        deaf.push(stream);
    }
    // Those that talk nonsense and leave.
    for round in 0..50 {
        let mut stream = connect();
        let nonsense: &[u8] = match round % 5 {
            0 => b"GET / HTTP/1.1\r\n\r\n",
            1 => b"}}}]]]\xff\x00\n",
            2 => b"{\"execute\": 7}[1, {}, \"",
            3 => &[b'{'; 70_000],
            _ => b"\"\n\"\n",
        };
        let _ = stream.write_all(nonsense);
    }
    // A line of many mebibytes.
    let mut stream = connect();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    stream.write_all(&vec![b'['; 8 << 20]).unwrap();
    stream
        .write_all(b"\n{\"execute\": \"qmp_capabilities\", \"id\": 5}")
        .unwrap();
    assert!(lines.next().unwrap().unwrap().contains("QMP"));
    assert!(lines.next().unwrap().unwrap().contains("longer than 1 MiB"));
    assert!(lines.next().unwrap().unwrap().contains("\"id\":5"));
    // As many as there may be, and the guest goes on all the while.
    let mut many: Vec<UnixStream> = Vec::new();
    wait_for("the server is full", || {
        let mut stream = connect();
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let mut line = String::new();
        BufReader::new(stream.try_clone().unwrap())
            .read_line(&mut line)
            .unwrap();
        let full = line.contains("64 clients");
        let _ = stream.write_all(b"{");
        many.push(stream);
        full
    });
    assert!(many.len() > 50, "{}", many.len());
    let before = operations(&mut session);
    wait_for("the guest goes on", || {
        operations(&mut session) > before + 100
    });
    execute(&mut session, "quit", json!({}));
    let finished = vm.finish();
    assert_eq!(finished.code(), Some(0), "{finished:?}");
    Ok(())
}
