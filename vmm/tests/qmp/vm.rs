//! The VM of these tests: the embedded guest with a disk on an iothread, and a connection to its monitor.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use serde_json::{Value, json};
use vmm::qmp::session::Session;

use crate::common::{Finished, finish, pollux, wait_for};
use crate::{Held, Skipped};

/// Size of the disk.
pub const DISK_BYTES: u64 = 16 << 20;

/// What this VM has beside its defaults.
pub struct Options<'a> {
    /// The guest's jobs.
    pub jobs: &'a str,
    /// More options for the program.
    pub more: &'a [&'a str],
}

/// A running VM.
pub struct Vm {
    /// There until somebody waits for its end.
    child: Option<Child>,
    /// Its files; kept until the end.
    pub dir: tempfile::TempDir,
}

/// Ends the test where there is no KVM.
pub fn needs_kvm() -> Held {
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    match kvm {
        Ok(_) => Ok(()),
        Err(error) => Err(Skipped(format!("/dev/kvm: {error}"))),
    }
}

impl Vm {
    /// Starts `jobs` on a disk `d0` on iothread `io0`, with a second iothread `io1`.
    pub fn start(jobs: &str) -> Result<Self, Skipped> {
        Self::with(&Options { jobs, more: &[] })
    }

    /// Starts with more options.
    pub fn with(options: &Options<'_>) -> Result<Self, Skipped> {
        let dir = tempfile::tempdir().unwrap();
        Self::prepare(dir.path())?;
        let child = Self::command(dir.path(), options).spawn().unwrap();
        Ok(Self::adopt(child, dir))
    }

    /// A VM that was started by other means in `dir`.
    pub fn adopt(child: Child, dir: tempfile::TempDir) -> Self {
        let child = Some(child);
        Self { child, dir }
    }

    /// Makes `guest` and `d0.img` in a directory.
    pub fn prepare(dir: &Path) -> Held {
        needs_kvm()?;
        let image =
            vmm::guest::image(vmm::guest::Form::Pvh).map_err(|error| Skipped(error.to_string()))?;
        std::fs::write(dir.join("guest"), image).unwrap();
        let disk = File::create(dir.join("d0.img")).unwrap();
        disk.set_len(DISK_BYTES).unwrap();
        Ok(())
    }

    /// The program with its options, in a directory that has `guest` and `d0.img`.
    pub fn command(dir: &Path, options: &Options<'_>) -> Command {
        let file = |name: &str| dir.join(name).display().to_string();
        let mut command = pollux();
        command
            .args([
                "--kernel",
                &file("guest"),
                "--memory",
                "64M",
                "--cmdline",
                options.jobs,
            ])
            .args(["--iothread", "io0", "--iothread", "io1"])
            .args([
                "--disk",
                &format!("path={},id=d0,iothread=io0", file("d0.img")),
            ])
            .args(["--qmp", &format!("unix:{}", file("qmp"))])
            .args(options.more);
        command
    }

    /// The monitor's socket.
    pub fn socket(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    /// Connects as soon as the monitor listens.
    pub fn connect(&self) -> Session {
        let mut session = None;
        wait_for("the monitor listens", || {
            session = Session::connect(&self.socket()).ok();
            session.is_some()
        });
        session.unwrap()
    }

    /// Connects, and waits until the guest's job does its requests.
    pub fn connect_at_work(&self) -> Session {
        let mut session = self.connect();
        wait_for("the guest works", || operations(&mut session) > 0);
        session
    }

    /// Its process.
    pub fn process(&self) -> rustix::process::Pid {
        let child = self.child.as_ref().unwrap();
        rustix::process::Pid::from_child(child)
    }

    /// Waits for its end.
    pub fn finish(mut self) -> Finished {
        self.end()
    }

    /// Waits for its end, and gives back its files.
    pub fn finish_keeping(mut self) -> (Finished, tempfile::TempDir) {
        let finished = self.end();
        let none = tempfile::tempdir().unwrap();
        (finished, std::mem::replace(&mut self.dir, none))
    }

    fn end(&mut self) -> Finished {
        finish(self.child.take().unwrap())
    }
}

impl Drop for Vm {
    /// A test that fails leaves no VM behind.
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The guest's reports of its jobs.
pub fn reports(stdout: &str) -> Vec<Value> {
    let lines = stdout.lines();
    let values = lines.filter_map(|line| serde_json::from_str::<Value>(line.trim()).ok());
    values.filter(|value| value.get("job").is_some()).collect()
}

/// Reads and writes that the disk has finished.
pub fn operations(session: &mut Session) -> u64 {
    let stats = session.execute("query-blockstats", json!({})).unwrap();
    let stats = &stats[0]["stats"];
    stats["rd_operations"].as_u64().unwrap() + stats["wr_operations"].as_u64().unwrap()
}

/// A command that must succeed.
pub fn execute(session: &mut Session, command: &str, arguments: Value) -> Value {
    let result = session.execute(command, arguments);
    result.unwrap_or_else(|error| panic!("{error}"))
}

/// All of a file.
pub fn read(path: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    File::open(path).unwrap().read_to_end(&mut bytes).unwrap();
    bytes
}
