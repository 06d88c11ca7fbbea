//! The process under test and its disks.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use serde_json::{Value, json};
use vmm::qmp::session::Session;

use crate::common::{Finished, finish, pollux, wait_for};

/// Size of each disk.
pub const DISK_BYTES: u64 = 8 << 20;

/// A process that serves disks `d0`, `d1`, … at sockets of the same names.
pub struct Served {
    child: Option<Child>,
    pub dir: tempfile::TempDir,
    /// The options of each disk beside path and id.
    disks: Vec<String>,
    more: Vec<String>,
}

impl Served {
    /// Starts with a disk for each of `disks`, and `more` options.
    pub fn with(disks: &[&str], more: &[&str]) -> Served {
        let mut served = Served {
            child: None,
            dir: tempfile::tempdir().unwrap(),
            disks: disks.iter().map(ToString::to_string).collect(),
            more: more.iter().map(ToString::to_string).collect(),
        };
        for index in 0..disks.len() {
            let image = File::create(served.image(index)).unwrap();
            image.set_len(DISK_BYTES).unwrap();
        }
        served.launch();
        served
    }

    /// Starts the process, which must not be running, and waits until it listens.
    pub fn launch(&mut self) {
        assert!(self.child.is_none());
        self.child = Some(self.command().spawn().unwrap());
        for index in 0..self.disks.len() {
            let socket = self.socket(index);
            let child = self.child.as_mut().unwrap();
            wait_for("a socket to connect to", || {
                assert!(child.try_wait().unwrap().is_none(), "it ended at once");
                std::os::unix::net::UnixStream::connect(&socket).is_ok()
            });
        }
    }

    /// The command that starts it.
    pub fn command(&self) -> Command {
        let mut command = pollux();
        command.arg("vhost-user-blk").args(&self.more);
        for (index, options) in self.disks.iter().enumerate() {
            let comma = if options.is_empty() { "" } else { "," };
            let image = self.image(index);
            let disk = format!("path={},id=d{index}{comma}{options}", image.display());
            command.args(["--disk", &disk, "--socket"]);
            command.arg(self.socket(index));
        }
        // Should the tests be killed, nothing of theirs is left.
        // SAFETY: between fork and exec, a system call that touches no memory of ours.
        unsafe {
            command.pre_exec(
                || match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                },
            );
        }
        command
    }

    pub fn image(&self, index: usize) -> PathBuf {
        self.dir.path().join(format!("d{index}.img"))
    }

    pub fn socket(&self, index: usize) -> PathBuf {
        self.dir.path().join(format!("d{index}"))
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// The process's open descriptors.
    pub fn descriptors(&self) -> usize {
        let path = format!("/proc/{}/fd", self.pid());
        std::fs::read_dir(path).unwrap().count()
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// Asks it to end.
    pub fn terminate(&mut self) -> Finished {
        let child = self.child.take().unwrap();
        let pid = rustix::process::Pid::from_raw(child.id().cast_signed()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        finish(child)
    }

    /// Asks its monitor, which listens at `qmp`.
    pub fn ask(&self, command: &str, arguments: Value) -> Value {
        let mut session = Session::connect(&self.dir.path().join("qmp")).unwrap();
        session.execute(command, arguments).unwrap()
    }

    /// The numbers of a disk.
    pub fn stats(&self, id: &str) -> Value {
        let all = self.ask("query-blockstats", json!({}));
        let mut all = all.as_array().unwrap().iter();
        let found = all.find(|disk| disk.to_string().contains(&format!("\"{id}\"")));
        found.unwrap()["stats"].clone()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A path as the driver takes it.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
