//! A VMM as a child process: its console line by line, its messages, its end.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::runner::{Failure, Stop};

/// How much of the console is shown when a VM fails.
const SHOWN_LINES: usize = 30;
/// A line of console longer than this is cut: nothing that is looked for is.
const LONGEST_LINE: u64 = 1 << 20;

/// Why a VM was not of use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program could not be started.
    #[error("{program} cannot be started: {error}; {remedy}")]
    Start {
        /// The program.
        program: String,
        /// Why.
        error: String,
        /// The option that names another.
        remedy: &'static str,
    },
    /// What was waited for did not come.
    #[error("no {what} within {seconds} s; the guest's console ended with:\n{console}")]
    TimeOut {
        /// What was waited for.
        what: String,
        /// For how long.
        seconds: u64,
        /// Its last lines.
        console: String,
    },
    /// It ended before what was waited for.
    #[error("the VM ended ({status}) before its {what}; {output}")]
    Ended {
        /// What was waited for.
        what: String,
        /// How.
        status: String,
        /// Its messages, or the console's last lines.
        output: String,
    },
    /// Ctrl-C.
    #[error("interrupted")]
    Interrupted,
    /// A system call failed.
    #[error("the VM cannot be waited for: {0}")]
    Wait(std::io::Error),
}

impl Error {
    pub(super) fn start(program: &Path, error: &std::io::Error) -> Error {
        let name = program.display().to_string();
        let remedy = if name.contains("qemu") {
            "install qemu-system-x86 or name the program with --qemu"
        } else {
            "build it with `cargo build --release` or name the program with --pollux"
        };
        Error::Start {
            program: name,
            error: error.to_string(),
            remedy,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        match error {
            Error::Interrupted => Failure::Interrupted,
            Error::Start { .. } => Failure::Fatal(error.to_string()),
            other => Failure::Run(other.to_string()),
        }
    }
}

/// A running VM. It is killed when this is dropped.
pub struct Vm {
    child: Child,
    lines: Receiver<(Instant, String)>,
    console: Vec<String>,
    messages: Option<JoinHandle<String>>,
    stop: Stop,
}

impl Vm {
    /// Starts it.
    pub fn start(mut command: Command, stop: &Stop) -> Result<Vm, Error> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // A group of its own: the terminal's Ctrl-C is ours, and what was measured is kept.
        command.process_group(0);
        let parent = std::process::id();
        // SAFETY: the closure runs between fork and exec and only makes the system calls prctl
        // and getppid, which are async-signal-safe; it touches no memory of ours.
        unsafe {
            command.pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                // The parent may have ended before the call above.
                if u32::try_from(libc::getppid()) != Ok(parent) {
                    return Err(std::io::ErrorKind::BrokenPipe.into());
                }
                Ok(())
            });
        }
        let mut child = command
            .spawn()
            .map_err(|error| Error::start(Path::new(command.get_program()), &error))?;
        let (sender, lines) = channel();
        if let Some(output) = child.stdout.take() {
            std::thread::spawn(move || {
                let mut reader = BufReader::new(output);
                let mut line = Vec::new();
                while (&mut reader)
                    .take(LONGEST_LINE)
                    .read_until(b'\n', &mut line)
                    .is_ok_and(|n| n > 0)
                {
                    let at = Instant::now();
                    let text = String::from_utf8_lossy(&line).trim_end().to_string();
                    line.clear();
                    if sender.send((at, text)).is_err() {
                        break;
                    }
                }
            });
        }
        let messages = child.stderr.take().map(|mut output| {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                // What was read before an error is all there is to say.
                let _ = output.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).into_owned()
            })
        });
        Ok(Vm {
            child,
            lines,
            console: Vec::new(),
            messages,
            stop: stop.clone(),
        })
    }

    /// Its process id.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(i32::MAX)
    }

    /// Waits for the console line in which `wanted` finds something, and gives that and the
    /// moment at which the line came.
    pub fn wait_for<T>(
        &mut self,
        what: &str,
        within: Duration,
        mut wanted: impl FnMut(&str) -> Option<T>,
    ) -> Result<(Instant, T), Error> {
        let deadline = Instant::now() + within;
        while let Some((at, line)) = self.next_line(what, within, deadline)? {
            let found = wanted(&line);
            self.console.push(line);
            if let Some(found) = found {
                return Ok((at, found));
            }
        }
        let (status, messages) = self.wait_end(within)?;
        let output = if messages.trim().is_empty() {
            format!("the guest's console ended with:\n{}", self.console_tail())
        } else {
            format!("its messages:\n{}", tail(messages.lines()))
        };
        Err(Error::Ended {
            what: what.into(),
            status: status_text(status),
            output,
        })
    }

    /// Waits for its end and gives the status and all its messages.
    pub fn wait_end(&mut self, within: Duration) -> Result<(ExitStatus, String), Error> {
        let deadline = Instant::now() + within;
        while let Some((_, line)) = self.next_line("end", within, deadline)? {
            self.console.push(line);
        }
        // The console is closed; the process follows.
        loop {
            if let Some(status) = self.child.try_wait().map_err(Error::Wait)? {
                let thread = self.messages.take();
                let messages = thread.and_then(|t| t.join().ok()).unwrap_or_default();
                return Ok((status, messages));
            }
            self.check(Instant::now(), "end", within, deadline)?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The next line of console, or `None` if it is closed.
    fn next_line(
        &self,
        what: &str,
        within: Duration,
        deadline: Instant,
    ) -> Result<Option<(Instant, String)>, Error> {
        loop {
            match self.lines.recv_timeout(Duration::from_millis(50)) {
                Ok(line) => return Ok(Some(line)),
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.check(Instant::now(), what, within, deadline)?;
        }
    }

    /// Gives up waiting if told so, or if it is too late.
    fn check(
        &self,
        now: Instant,
        what: &str,
        within: Duration,
        deadline: Instant,
    ) -> Result<(), Error> {
        if self.stop.is_set() {
            return Err(Error::Interrupted);
        }
        if now < deadline {
            return Ok(());
        }
        Err(Error::TimeOut {
            what: what.into(),
            seconds: within.as_secs(),
            console: self.console_tail(),
        })
    }

    /// All console lines until now.
    pub fn console(&self) -> &[String] {
        &self.console
    }

    fn console_tail(&self) -> String {
        tail(self.console.iter().map(String::as_str))
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // It may have ended already; then there is nothing to do.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tail<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    let all: Vec<&str> = lines.collect();
    let from = all.len().saturating_sub(SHOWN_LINES);
    all[from..]
        .iter()
        .map(|line| format!("  | {line}"))
        .collect::<Vec<_>>()
        .join("\n")
}

fn status_text(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("status {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown status".into(),
    }
}
