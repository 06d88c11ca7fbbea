//! A VM in a child process, its guest's report and its threads' CPU time.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use serde_json::Value;

use super::{Error, IOTHREADS};

/// How long the guest may take beyond its jobs.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a job did, and what it cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Measured {
    /// Requests a second.
    pub iops: u64,
    /// Requests.
    pub ios: u64,
    /// Notifications of the disks by the guest.
    pub kicks: u64,
    /// CPU time of all iothreads together.
    pub iothreads_ns: u64,
    /// How long it took.
    pub elapsed_ns: u64,
}

/// A VM that runs jobs.
pub struct Vm {
    child: Child,
    lines: Receiver<String>,
}

impl Vm {
    /// Starts a VM with the embedded guest in `kernel`, whose iothreads poll by `policy`.
    pub fn start(
        kernel: &File,
        disks: &[File],
        policy: &str,
        cpus: usize,
        jobs: &str,
    ) -> Result<Vm, Error> {
        // The files have no names, but this process has them open.
        let path = |file: &File| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        let program = std::env::current_exe()
            .map_err(|error| Error::Vm(format!("this program's file: {error}")))?;
        let mut command = Command::new(program);
        command
            .args(["--kernel", &path(kernel), "--memory", "128M"])
            .args(["--cpus", &cpus.to_string(), "--cmdline", jobs]);
        for iothread in 0..IOTHREADS {
            command.args([
                "--iothread",
                &format!("id=io{iothread},poll-policy={policy}"),
            ]);
        }
        for (index, disk) in disks.iter().enumerate() {
            let options = format!(
                "path={},iothread=io{},direct=off",
                path(disk),
                index % IOTHREADS
            );
            command.args(["--disk", &options]);
        }
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Error::Vm(format!("{}: {error}", command.get_program().display())))?;
        let lines = read_lines(child.stdout.take());
        Ok(Vm { child, lines })
    }

    /// Waits for the jobs `ramp-NAME` and `NAME`, which last for `lasts` together.
    pub fn measure(&mut self, name: &str, lasts: Duration) -> Result<Measured, Error> {
        self.wait_for(&format!("ramp-{name}"), lasts)?;
        let before = self.iothreads_ns();
        let line = self.wait_for(name, lasts)?;
        let iothreads_ns = self.iothreads_ns().saturating_sub(before);
        let number = |key: &str| line[key].as_u64().unwrap_or(0);
        Ok(Measured {
            iops: number("iops"),
            ios: number("ios"),
            kicks: number("kicks"),
            iothreads_ns,
            elapsed_ns: number("elapsed_ns"),
        })
    }

    fn wait_for(&mut self, name: &str, lasts: Duration) -> Result<Value, Error> {
        while let Ok(line) = self.lines.recv_timeout(lasts + PATIENCE) {
            let Ok(line) = serde_json::from_str::<Value>(&line) else {
                continue;
            };
            if ["panic", "exception", "error"]
                .iter()
                .any(|key| !line[key].is_null())
            {
                return Err(self.failed(&format!("the guest reports {line}")));
            }
            if line["job"] == name {
                return match line["ok"] == true {
                    true => Ok(line),
                    false => Err(self.failed(&format!("job {name} failed: {line}"))),
                };
            }
        }
        Err(self.failed(&format!(
            "the VM ended or stood still before job {name} was done"
        )))
    }

    /// CPU time of the threads that are iothreads by their name.
    fn iothreads_ns(&self) -> u64 {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.child.id())) else {
            return 0;
        };
        let times = tasks.flatten().map(|task| {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            match read("comm").starts_with("IO ") {
                true => read("schedstat")
                    .split(' ')
                    .next()
                    .and_then(|ns| ns.parse().ok())
                    .unwrap_or(0),
                false => 0,
            }
        });
        times.sum()
    }

    /// Waits for the VM's end.
    pub fn end(mut self) -> Result<(), Error> {
        // All that it still prints, up to its end.
        while self.lines.recv_timeout(PATIENCE).is_ok() {}
        match self.child.try_wait() {
            Ok(Some(status)) if status.success() => Ok(()),
            Ok(None) => match self.child.wait() {
                Ok(status) if status.success() => Ok(()),
                _ => Err(self.failed("the VM failed at its end")),
            },
            _ => Err(self.failed("the VM failed at its end")),
        }
    }

    /// An error with what the VM said.
    fn failed(&mut self, what: &str) -> Error {
        let _ = self.child.kill();
        let mut messages = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            let _ = stderr.read_to_string(&mut messages);
        }
        let _ = self.child.wait();
        match messages.trim() {
            "" => Error::Vm(what.to_owned()),
            messages => Error::Vm(format!("{what}: {messages}")),
        }
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The lines of the guest's console as they come; the channel closes at the VM's end.
fn read_lines(console: Option<ChildStdout>) -> Receiver<String> {
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let lines = console
            .into_iter()
            .flat_map(|console| BufReader::new(console).lines());
        for line in lines.map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    lines
}
