//! A VM that runs the embedded guest.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Bench;
use super::disk::Image;

/// The longest that anything may take: much more than it does, for machines that are busy.
const PATIENCE: Duration = Duration::from_secs(60);

/// A form of the guest's image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    Pvh,
    Linux64,
    BzImage,
}

/// A VM to start.
pub struct Vm<'a> {
    bench: &'a Bench,
    jobs: String,
    form: Form,
    cpus: u32,
    memory: String,
    arguments: Vec<String>,
    under: Vec<String>,
}

impl<'a> Vm<'a> {
    /// A VM of one CPU and 160 MiB that runs the jobs of a guest's command line.
    pub fn new(bench: &'a Bench, jobs: &str) -> Vm<'a> {
        Vm {
            bench,
            jobs: jobs.to_owned(),
            form: Form::Pvh,
            cpus: 1,
            memory: "160M".to_owned(),
            arguments: Vec::new(),
            under: Vec::new(),
        }
    }

    /// A program and its arguments that starts `pollux` in its own place.
    pub fn under(mut self, program: &[&str]) -> Self {
        self.under = program.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    pub fn form(mut self, form: Form) -> Self {
        self.form = form;
        self
    }

    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    pub fn memory(mut self, memory: &str) -> Self {
        self.memory = memory.to_owned();
        self
    }

    /// Any argument of `pollux`.
    pub fn arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments
            .extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }

    /// An iothread, by its options.
    pub fn iothread(self, options: &str) -> Self {
        self.arguments(&["--iothread", options])
    }

    /// A disk with further options, which may be empty.
    pub fn disk(self, image: &Image, options: &str) -> Self {
        let comma = if options.is_empty() { "" } else { "," };
        let disk = format!("path={}{comma}{options}", image.path().display());
        self.arguments(&["--disk", &disk])
    }

    /// Starts it.
    ///
    /// # Panics
    /// The program cannot be started.
    pub fn start(self) -> Running {
        let directory = self.bench.directory();
        let kernel = directory.path().join("guest");
        let image = match self.form {
            Form::Pvh => guest_image::elf().map(<[u8]>::to_vec),
            Form::Linux64 => guest_image::elf_without_note(),
            Form::BzImage => guest_image::bzimage(),
        };
        fs::write(&kernel, image.expect("a guest for this processor")).expect("the guest's image");
        let pollux = self.bench.pollux();
        let mut command = match self.under.split_first() {
            None => Command::new(pollux),
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments).arg(pollux);
                command
            }
        };
        command
            .arg("--kernel")
            .arg(&kernel)
            .args(["--cmdline", &self.jobs, "--memory", &self.memory])
            .args(["--cpus", &self.cpus.to_string()])
            .args(&self.arguments);
        Running::start(command, directory)
    }
}

/// A VM that runs.
pub struct Running {
    child: Child,
    lines: Receiver<String>,
    messages: JoinHandle<String>,
    /// What the guest printed so far.
    console: Vec<String>,
    _directory: tempfile::TempDir,
}

/// A VM that has ended.
pub struct Ended {
    pub status: ExitStatus,
    /// What the guest printed.
    pub console: Vec<String>,
    /// What `pollux` wrote to standard error.
    pub messages: String,
}

impl Running {
    fn start(mut command: Command, directory: tempfile::TempDir) -> Running {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let (sender, lines) = mpsc::channel();
        let output = child.stdout.take().expect("a pipe");
        thread::spawn(move || {
            let lines = BufReader::new(output).lines().map_while(Result::ok);
            // The receiver is gone when the test is over.
            lines.for_each(|line| drop(sender.send(line)));
        });
        let mut errors = child.stderr.take().expect("a pipe");
        let messages = thread::spawn(move || {
            let mut text = String::new();
            let _ = errors.read_to_string(&mut text);
            text
        });
        Running {
            child,
            lines,
            messages,
            console: Vec::new(),
            _directory: directory,
        }
    }

    /// The process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends text to the guest's console.
    ///
    /// # Panics
    /// The VM has ended.
    pub fn type_text(&mut self, text: &str) {
        let input = self.child.stdin.as_mut().expect("a pipe");
        input
            .write_all(text.as_bytes())
            .expect("the console's input");
        input.flush().expect("the console's input");
    }

    /// The next line that `wanted` accepts, as JSON.
    ///
    /// # Panics
    /// It does not come.
    pub fn wait_for(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = match self.lines.recv_timeout(left) {
                Ok(line) => line,
                Err(RecvTimeoutError::Timeout) => self.fail(&format!("no {what} in time")),
                Err(RecvTimeoutError::Disconnected) => {
                    self.fail(&format!("the VM ended without {what}"))
                }
            };
            let value: Option<Value> = serde_json::from_str(&line).ok();
            self.console.push(line);
            match value {
                None => self.fail("a line of the guest is no JSON"),
                Some(value) if value["panic"].is_string() || value["exception"].is_u64() => {
                    self.fail("the guest failed")
                }
                Some(value) if wanted(&value) => return value,
                Some(_) => (),
            }
        }
    }

    /// The line with which the guest begins.
    ///
    /// # Panics
    /// It does not come.
    pub fn machine(&mut self) -> Value {
        self.wait_for("first line", |line| line["guest"] == "pollux")
    }

    /// A job's line.
    ///
    /// # Panics
    /// It does not come.
    pub fn job(&mut self, name: &str) -> Value {
        self.wait_for(&format!("line of job {name}"), |line| {
            line["job"] == name && (line["ok"].is_boolean() || line["error"].is_string())
        })
    }

    /// A job's line, which must say that all went well.
    ///
    /// # Panics
    /// It does not come or says otherwise.
    pub fn good_job(&mut self, name: &str) -> Value {
        let line = self.job(name);
        if line["ok"] != true {
            self.fail(&format!("job {name} went wrong"));
        }
        line
    }

    /// Sends a signal by its name.
    ///
    /// # Panics
    /// It cannot be sent.
    pub fn signal(&self, name: &str) {
        let id = self.id().to_string();
        let sent = Command::new("kill").args(["-s", name, &id]).status();
        assert!(sent.is_ok_and(|status| status.success()), "kill -s {name}");
    }

    /// Waits for the end.
    ///
    /// # Panics
    /// It does not come.
    pub fn end(mut self) -> Ended {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            match self.child.try_wait().expect("a child") {
                Some(status) => break status,
                None if Instant::now() > deadline => self.fail("the VM does not end"),
                None => thread::sleep(Duration::from_millis(5)),
            }
        };
        // The pipe is closed now, so this ends.
        self.console.extend(self.lines.iter());
        Ended {
            status,
            console: self.console,
            messages: self.messages.join().expect("the reader of messages"),
        }
    }

    /// Waits for the guest to finish all its jobs well and to power off.
    ///
    /// # Panics
    /// It does otherwise.
    pub fn good_end(mut self) -> Ended {
        let done = self.wait_for("last line", |line| line["done"] == true);
        if done["failed"] != 0 {
            self.fail("a job failed");
        }
        let end = self.end();
        if !end.status.success() {
            end.fail("the exit status tells of a failure");
        }
        end
    }

    /// Ends the test with everything that is known.
    ///
    /// # Panics
    /// Always.
    pub fn fail(&mut self, why: &str) -> ! {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.console.extend(self.lines.iter());
        let messages = std::mem::replace(&mut self.messages, thread::spawn(String::new));
        fail(why, &self.console, &messages.join().unwrap_or_default())
    }

    /// CPU time of the VM's threads whose names begin with `name`, in milliseconds.
    ///
    /// # Panics
    /// The VM has ended.
    pub fn cpu_ms(&self, name: &str) -> u64 {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.id())).expect("the VM's threads");
        tasks
            .flatten()
            .map(|task| thread_cpu_ms(&task.path(), name))
            .sum()
    }

    /// Kills it at once.
    ///
    /// # Panics
    /// It cannot be waited for.
    pub fn kill(mut self) -> Ended {
        self.child.kill().expect("a child");
        self.end()
    }
}

fn thread_cpu_ms(task: &Path, name: &str) -> u64 {
    let read = |file: &str| fs::read_to_string(task.join(file)).unwrap_or_default();
    if !read("comm").starts_with(name) {
        return 0;
    }
    // Nanoseconds on a CPU, nanoseconds waiting, turns.
    let ns = read("schedstat")
        .split_whitespace()
        .next()
        .and_then(|text| text.parse::<u64>().ok());
    ns.unwrap_or(0) / 1_000_000
}

impl Ended {
    /// Ends the test with everything that is known.
    ///
    /// # Panics
    /// Always.
    pub fn fail(&self, why: &str) -> ! {
        fail(
            &format!("{why} ({})", self.status),
            &self.console,
            &self.messages,
        )
    }

    /// Sees the exit status and some words of the messages.
    ///
    /// # Panics
    /// They are not as expected.
    pub fn expect(&self, status: i32, words: &str) {
        if self.status.code() != Some(status) {
            self.fail(&format!("expected exit status {status}"));
        }
        if !self.messages.to_lowercase().contains(words) {
            self.fail(&format!("expected a message with the words: {words}"));
        }
    }
}

fn fail(why: &str, console: &[String], messages: &str) -> ! {
    let console = console.join("\n");
    panic!("{why}\n--- console\n{console}\n--- messages\n{messages}---")
}
