//! The nested lab: an emulated machine whose kernel offers a real KVM, see `lab/run`.
//!
//! Nothing but the test program's second side ([`crate::session::serve`]) runs in it. It is fed the
//! names of scenarios, one a line, and answers each with what it has to say and one last line.

use std::env;
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::bed;

/// How long the machine may be silent while it starts or runs a scenario. A scenario gives up by
/// itself much earlier ([`crate::machine::PATIENCE`]); what runs into this is a machine that hangs.
const PATIENCE: Duration = Duration::from_secs(900);

/// The line by which the other side says that it is there.
pub const READY: &str = "@ready";

/// What the last line of a scenario's answer begins with; an [`Answer`] in JSON follows.
pub const ANSWER: &str = "@answer ";

/// How a scenario ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Answer {
    /// All held.
    Passed,
    /// It does not apply, for this reason.
    Skipped(String),
    /// Something did not hold.
    Failed(String),
}

/// Where the lab's files are.
pub fn dir() -> PathBuf {
    if let Some(dir) = env::var_os("POLLUX_LAB_DIR") {
        return dir.into();
    }
    let target = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    target
        .unwrap_or_else(|| bed::repository().join("target"))
        .join("lab")
}

/// Whether the lab can be made here.
///
/// # Errors
/// One line that says what is missing.
pub fn available() -> Result<(), String> {
    let programs = [
        "qemu-system-x86_64",
        "mmdebstrap",
        "busybox",
        "cpio",
        "mke2fs",
        "fakeroot",
    ];
    let missing: Vec<&str> = programs
        .into_iter()
        .filter(|p| !bed::has_program(p))
        .collect();
    if !bed::has_program("apt-get") {
        return Err("no apt-get on this host; the lab is made of Debian packages".to_owned());
    }
    if !missing.is_empty() && !bed::is_root() {
        return Err(format!(
            "no {}; as root: tests/lab/packages",
            missing.join(", ")
        ));
    }
    Ok(())
}

/// Makes what the lab or a guest needs, where it is not there or out of date.
///
/// # Errors
/// What the script said is on standard error; this names it.
pub fn prepare() -> Result<(), String> {
    let script = script("prepare");
    let ended = Command::new(&script)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status();
    match ended {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{}: {status}", script.display())),
        Err(error) => Err(format!("{}: {error}", script.display())),
    }
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("lab").join(name)
}

/// A running lab. Dropping it ends it.
pub struct Lab {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Lab {
    /// Starts the lab with these programs in it and `command` as the other side.
    ///
    /// # Errors
    /// It does not come up; the script has said why on standard error.
    pub fn start(programs: &[&Path], command: &[String]) -> Result<Lab, String> {
        // The lab ends with this program, also when that is killed.
        let mut run = Command::new("setpriv");
        run.args(["--pdeathsig", "TERM", "--"])
            .arg(script("run"))
            .args(["--time-out", "3600"]);
        for program in programs {
            run.arg("--with").arg(program);
        }
        run.arg("--").args(command);
        let mut child = run
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{run:?}: {error}"))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("the lab has no pipes".to_owned());
        };
        let (sender, lines) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line)
                    .trim_end_matches('\r')
                    .to_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut lab = Lab {
            child,
            stdin,
            lines,
        };
        lab.lines_until(|line| (line == READY).then_some(()), |_| ())?;
        Ok(lab)
    }

    /// Runs a scenario; every line that it prints meanwhile goes to `print`.
    ///
    /// # Errors
    /// The machine did not answer. It is of no further use.
    pub fn run(&mut self, scenario: &str, print: impl FnMut(&str)) -> Result<Answer, String> {
        writeln!(self.stdin, "{scenario}")
            .and_then(|()| self.stdin.flush())
            .map_err(|error| format!("the lab has gone: {error}"))?;
        self.lines_until(
            |line| serde_json::from_str(line.strip_prefix(ANSWER)?).ok(),
            print,
        )
    }

    fn lines_until<T>(
        &mut self,
        wanted: impl Fn(&str) -> Option<T>,
        mut print: impl FnMut(&str),
    ) -> Result<T, String> {
        let mut seen = Seen::default();
        let mut deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(found) = wanted(&line) {
                        return Ok(found);
                    }
                    print(&line);
                    seen.add(line);
                    deadline = Instant::now() + PATIENCE;
                }
                Err(RecvTimeoutError::Timeout) => {
                    self.stop();
                    return Err(format!("the lab is silent since {PATIENCE:?}{seen}"));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.child.wait();
                    return Err(format!("the lab has ended: {status:?}{seen}"));
                }
            }
        }
    }

    /// Ends the machine, by the script's own handling of the signal.
    fn stop(&mut self) {
        let id = self.child.id().to_string();
        let asked = Command::new("kill").args(["-TERM", &id]).status();
        if !asked.is_ok_and(|status| status.success()) {
            let _ = self.child.kill();
        }
        let _ = self.child.wait();
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The last lines seen, for a message.
#[derive(Default)]
struct Seen(Vec<String>);

impl Seen {
    fn add(&mut self, line: String) {
        if self.0.len() == 40 {
            self.0.remove(0);
        }
        self.0.push(line);
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.is_empty() {
            write!(f, "; its last lines:\n{}", self.0.join("\n"))?;
        }
        Ok(())
    }
}
