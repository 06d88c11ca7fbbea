//! What the whole-program tests share: tiny guests, and the program under test with a watch on its time.
#![allow(dead_code)] // Each test file uses a part.

pub mod guest;

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The longest that any of these runs may take on a busy machine before it counts as hung.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The program under test.
pub fn pollux() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pollux"));
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// What a run left behind.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }
}

/// Waits for the end of `child`; kills it and fails when it takes too long.
pub fn finish(mut child: Child) -> Finished {
    let stdout = read_all(child.stdout.take());
    let stderr = read_all(child.stderr.take());
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    let Some(status) = status else {
        panic!("the run hangs; so far it said\n{stdout}\n{stderr}");
    };
    Finished {
        status,
        stdout,
        stderr,
    }
}

fn read_all(stream: Option<impl Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            stream.read_to_end(&mut bytes).unwrap();
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Runs `command` to its end.
pub fn run(command: &mut Command) -> Finished {
    loop {
        match command.spawn() {
            // A test that runs a copy of the program: another test's child, forked while the copy
            // was written, has not reached its exec yet and holds it open.
            Err(error) if error.kind() == std::io::ErrorKind::ExecutableFileBusy => {
                std::thread::sleep(Duration::from_millis(5));
            }
            child => return finish(child.unwrap()),
        }
    }
}

/// False, with a word on standard error, where there is no /dev/kvm.
pub fn has_kvm(test: &str) -> bool {
    let there = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_ok();
    if !there {
        eprintln!("skipped: {test} needs /dev/kvm");
    }
    there
}

/// A directory with a guest image in it.
pub struct Image {
    pub dir: tempfile::TempDir,
    pub path: PathBuf,
}

impl Image {
    pub fn new(program: &[u8]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("guest.elf");
        std::fs::write(&path, guest::elf(program)).unwrap();
        Self { dir, path }
    }

    /// `pollux --kernel` of this image.
    pub fn command(&self) -> Command {
        let mut command = pollux();
        command.arg("--kernel").arg(&self.path);
        command
    }
}

/// Waits until `condition` holds, and fails with `what` when it never does.
pub fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
