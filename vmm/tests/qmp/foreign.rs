//! The program's own tools on a running VM, and other people's: the qemu.qmp package, Prometheus' parser, a validator of
//! JSON schemas.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use serde_json::json;

use crate::common::{finish, pollux, run, wait_for};
use crate::vm::{Options, Vm, execute};
use crate::{Held, Skipped};

const ENDLESS: &str = "rw=randread iodepth=4 runtime=3600s job=endless";

fn here(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/qmp")
        .join(file)
}

/// A Python interpreter with the packages of `venv.sh`.
fn python() -> Result<PathBuf, Skipped> {
    // Two tests that made it at once would each clear away the other's half.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    // Beside what cargo builds, so that it is made once.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let output = Command::new(here("venv.sh"))
        .arg(target.join("qmp-venv"))
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    match output.status.code() {
        Some(0) => Ok(String::from_utf8_lossy(&output.stdout).trim().into()),
        Some(3) => Err(Skipped(said)),
        _ => panic!("venv.sh: {said}"),
    }
}

/// Runs one of the scripts; it must say that it is done.
fn script(python: &Path, name: &str, arguments: &[&str]) {
    let mut command = Command::new(python);
    command.arg(here(name)).args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let finished = run(&mut command);
    assert!(
        finished.code() == Some(0) && finished.stdout.ends_with("done\n"),
        "{name}: {}\n{}",
        finished.stdout,
        finished.stderr
    );
}

pub fn tools() -> Held {
    let vm = Vm::start(ENDLESS)?;
    let mut session = vm.connect_at_work();
    let socket = vm.socket().display().to_string();
    let tool = |arguments: &[&str]| {
        let finished = run(pollux().args(arguments).arg(&socket));
        assert_eq!(finished.code(), Some(0), "{arguments:?}: {finished:?}");
        finished.stdout
    };
    let text = tool(&["info", "iothreads"]);
    assert!(
        text.starts_with("io0:\n  thread_id=") && text.contains("\nio1:\n"),
        "{text}"
    );
    assert!(tool(&["info", "polling"]).contains("poll-policy=weighted"));
    assert_eq!(tool(&["info", "status"]), "VM status: running\n");
    let text = tool(&["top", "--interval", "0.3", "--count", "2", "--handlers"]);
    assert_eq!(
        text.matches("pollux top  running  1 vCPU").count(),
        2,
        "{text}"
    );
    assert!(
        text.lines().all(|line| line.chars().count() <= 80),
        "{text}"
    );
    // The second picture shows the disk at work, on its iothread.
    let line = text.lines().rfind(|line| line.starts_with("d0 ")).unwrap();
    let iops: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(iops > 0.0 && line.ends_with("io0"), "{text}");
    execute(&mut session, "quit", json!({}));
    assert_eq!(vm.finish().code(), Some(0));
    let gone = run(pollux().args(["info", "status", &socket]));
    assert_eq!(gone.code(), Some(1), "{gone:?}");
    assert!(gone.stderr.contains("cannot connect"), "{gone:?}");
    Ok(())
}

pub fn qemu_qmp() -> Held {
    let python = python()?;
    let vm = Vm::start(ENDLESS)?;
    let session = vm.connect_at_work();
    drop(session);
    script(&python, "client.py", &[&vm.socket().display().to_string()]);
    // The script ends the VM.
    let finished = vm.finish();
    assert_eq!(finished.code(), Some(0), "{finished:?}");
    Ok(())
}

/// The same package's shell, as somebody types into it.
pub fn qmp_shell() -> Held {
    let shell = python()?.with_file_name("qmp-shell");
    let vm = Vm::start(ENDLESS)?;
    let mut session = vm.connect_at_work();
    let mut child = Command::new(shell)
        .arg(vm.socket())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let typed = "query-status\n\
        qom-set path=/objects/io0 property=poll-max-ns value=1234\n\
        qom-get path=/objects/io0 property=poll-max-ns\n\
        migrate\n";
    // Dropped at once: that is the end of what is typed.
    let mut keys = child.stdin.take().unwrap();
    keys.write_all(typed.as_bytes()).unwrap();
    drop(keys);
    let finished = finish(child);
    assert_eq!(finished.code(), Some(0), "{finished:?}");
    for answer in [
        r#""status": "running""#,
        r#"{"return": 1234}"#,
        r#""class": "CommandNotFound""#,
    ] {
        assert!(finished.stdout.contains(answer), "{answer}: {finished:?}");
    }
    execute(&mut session, "quit", json!({}));
    assert_eq!(vm.finish().code(), Some(0));
    Ok(())
}

pub fn prometheus() -> Held {
    let python = python()?;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("metrics.prom").display().to_string();
    let vm = Vm::with(&Options {
        jobs: ENDLESS,
        more: &["--metrics", &format!("file={file},interval=1")],
    })?;
    let mut session = vm.connect_at_work();
    let written = || std::fs::read_to_string(&file).unwrap_or_default();
    wait_for("the disk's reads are in the file", || {
        let text = written();
        let mut lines = text.lines();
        let reads = "pollux_disk_operations_total{disk=\"d0\",operation=\"read\"} ";
        lines.any(|line| line.strip_prefix(reads).is_some_and(|count| count != "0"))
    });
    script(&python, "metrics.py", &[&file]);
    execute(&mut session, "quit", json!({}));
    assert_eq!(vm.finish().code(), Some(0));
    // Once more at the end.
    assert!(written().contains("\npollux_running 0\n"));
    script(&python, "metrics.py", &[&file]);

    let nowhere = Vm::with(&Options {
        jobs: ENDLESS,
        more: &["--metrics", "file=/no/such/directory/file"],
    })?;
    let refused = nowhere.finish();
    assert_eq!(refused.code(), Some(2), "{refused:?}");
    assert!(
        refused
            .stderr
            .contains("--metrics file=/no/such/directory/file"),
        "{refused:?}"
    );
    Ok(())
}

pub fn json_schema() -> Held {
    let python = python()?;
    let dir = tempfile::tempdir().unwrap();
    let schema = dir.path().join("schema.json").display().to_string();
    let printed = finish(pollux().arg("schema").spawn().unwrap());
    std::fs::write(&schema, printed.stdout).unwrap();
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/config");
    let mut files = vec![schema];
    for entry in std::fs::read_dir(examples).unwrap() {
        let path = entry.unwrap().path();
        if path.ends_with("schema.json") {
            continue;
        }
        let name = path.display().to_string();
        // As it is, and as the program prints it.
        let printed = run(pollux().args(["--config", &name, "--print-config"]));
        assert_eq!(printed.code(), Some(0), "{printed:?}");
        let copy = dir.path().join(path.file_name().unwrap());
        std::fs::write(&copy, printed.stdout).unwrap();
        files.extend([name, copy.display().to_string()]);
    }
    assert_eq!(files.len(), 7);
    let arguments: Vec<&str> = files.iter().map(String::as_str).collect();
    script(&python, "examples.py", &arguments);
    Ok(())
}
