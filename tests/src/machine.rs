//! A virtual machine as a scenario describes it, and the process that runs it.

use std::env;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::guest::{Guest, Kernel};
use crate::qmp::Qmp;

/// How long a guest may be silent before the test gives up: longer than anything here takes, also
/// in an emulation on a busy host, so that only what hangs runs into it.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Which program runs the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// `pollux`, which the tests are for.
    Pollux,
    /// QEMU's microvm: the peer for comparison, and a check of the lab itself.
    Qemu,
}

/// An iothread.
#[derive(Debug, Clone)]
pub struct IoThread {
    /// Its name.
    pub id: &'static str,
    /// The longest time it polls before it blocks, in nanoseconds.
    pub poll_max_ns: u64,
}

/// A disk.
#[derive(Debug, Clone)]
pub struct Disk {
    /// The image.
    pub path: PathBuf,
    /// Its serial number, by which a script finds it, and its id in the monitor.
    pub serial: String,
    /// Whether the guest may only read it.
    pub readonly: bool,
    /// The iothread, if any.
    pub iothread: Option<&'static str>,
    /// The number of queues.
    pub queues: u32,
    /// Further options, for Pollux only.
    pub options: String,
}

impl Disk {
    /// A disk with one queue on an image that is there.
    pub fn of(path: PathBuf, serial: impl Into<String>) -> Disk {
        Disk {
            path,
            serial: serial.into(),
            readonly: false,
            iothread: None,
            queues: 1,
            options: String::new(),
        }
    }

    /// A new disk of `bytes` zeroes at `path`, with one queue.
    ///
    /// # Panics
    /// The file cannot be made.
    pub fn create(path: PathBuf, serial: impl Into<String>, bytes: u64) -> Disk {
        let made = File::create(&path).and_then(|file| file.set_len(bytes));
        made.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Disk::of(path, serial)
    }

    /// The same on an iothread.
    pub fn on(mut self, iothread: &'static str) -> Disk {
        self.iothread = Some(iothread);
        self
    }

    /// The same with that many queues.
    pub fn with_queues(mut self, queues: u32) -> Disk {
        self.queues = queues;
        self
    }

    /// The same with further options of `--disk`, for Pollux only.
    pub fn with_options(mut self, options: impl Into<String>) -> Disk {
        self.options = options.into();
        self
    }
}

/// A virtual machine. The root disk comes first and is not among `disks`.
#[derive(Debug, Clone)]
pub struct Machine {
    /// The form of the kernel.
    pub kernel: Kernel,
    /// The number of vCPUs.
    pub cpus: u32,
    /// Memory in MiB.
    pub memory_mib: u32,
    /// Iothreads.
    pub iothreads: Vec<IoThread>,
    /// Data disks, in order.
    pub disks: Vec<Disk>,
    /// Words added to the kernel's command line.
    pub cmdline: &'static str,
    /// What the guest runs, see [`Guest::write_initramfs`].
    pub script: String,
    /// Whether there is a monitor, see [`Running::monitor`]; Pollux only.
    pub monitor: bool,
}

impl Machine {
    /// A machine with two vCPUs and 256 MiB that runs `script`.
    pub fn new(script: impl Into<String>) -> Machine {
        Machine {
            kernel: Kernel::BzImage,
            cpus: 2,
            memory_mib: 256,
            iothreads: Vec::new(),
            disks: Vec::new(),
            cmdline: "",
            script: script.into(),
            monitor: false,
        }
    }

    /// Starts it with `program`, with its own files in `dir`.
    ///
    /// # Panics
    /// A file cannot be written or the program not be started.
    pub fn start(&self, vmm: Vmm, program: &Path, guest: &Guest, dir: &Path) -> Running {
        let initramfs = dir.join("initramfs");
        guest
            .write_initramfs(&initramfs, self.kernel, &self.script)
            .unwrap_or_else(|error| panic!("{}: {error}", initramfs.display()));
        // That a panic or a reboot ends the run is Pollux's to see to.
        let ending = if vmm == Vmm::Qemu {
            "panic=-1 reboot=t"
        } else {
            ""
        };
        let words = ["console=ttyS0 root=/dev/vda ro quiet", ending, self.cmdline];
        let cmdline = words.join(" ");
        let mut root = Disk::of(guest.root_image().to_owned(), "root");
        root.readonly = true;
        let mut command = match vmm {
            Vmm::Pollux => self.pollux(program, &root),
            Vmm::Qemu => self.qemu(program, &root),
        };
        command
            .arg(flag(vmm, "kernel"))
            .arg(guest.kernel(self.kernel));
        command.arg(flag(vmm, "initrd")).arg(initramfs);
        command
            .arg(if vmm == Vmm::Pollux {
                "--cmdline"
            } else {
                "-append"
            })
            .arg(cmdline.trim());
        let socket = dir.join("qmp");
        if self.monitor {
            command
                .arg("--qmp")
                .arg(format!("unix:{}", socket.display()));
        }
        Running::start(command, socket)
    }

    fn pollux(&self, program: &Path, root: &Disk) -> Command {
        let mut command = Command::new(program);
        command.arg("--stats");
        command.arg("--cpus").arg(self.cpus.to_string());
        command.arg("--memory").arg(format!("{}M", self.memory_mib));
        for IoThread { id, poll_max_ns } in &self.iothreads {
            command
                .arg("--iothread")
                .arg(format!("id={id},poll-max-ns={poll_max_ns}"));
        }
        for disk in std::iter::once(root).chain(&self.disks) {
            let Disk {
                path,
                serial,
                readonly,
                iothread,
                queues,
                options,
            } = disk;
            let mut option = format!("path={},id={serial},serial={serial}", path.display());
            if *readonly {
                option += ",readonly=on";
            }
            if let Some(iothread) = iothread {
                option += &format!(",iothread={iothread}");
            }
            option += &format!(",queues={queues}");
            if !options.is_empty() {
                option += &format!(",{options}");
            }
            command.arg("--disk").arg(option);
        }
        command
    }

    fn qemu(&self, program: &Path, root: &Disk) -> Command {
        let mut command = Command::new(program);
        if let Some(share) = env::var_os("POLLUX_LAB") {
            command.arg("-L").arg(Path::new(&share).join("qemu"));
        }
        command.args([
            "-M",
            "microvm,acpi=on,pic=off,pit=off,rtc=on",
            "-accel",
            "kvm",
        ]);
        command.args(["-cpu", "host", "-smp", &self.cpus.to_string()]);
        command.args(["-m", &self.memory_mib.to_string()]);
        command.args(["-global", "virtio-mmio.force-legacy=false"]);
        command.args(["-nodefaults", "-no-user-config", "-no-reboot"]);
        command.args(["-display", "none", "-serial", "stdio"]);
        for IoThread { id, poll_max_ns } in &self.iothreads {
            command
                .arg("-object")
                .arg(format!("iothread,id={id},poll-max-ns={poll_max_ns}"));
        }
        for (index, disk) in std::iter::once(root).chain(&self.disks).enumerate() {
            let Disk {
                path,
                serial,
                readonly,
                iothread,
                queues,
                options: _,
            } = disk;
            let readonly = if *readonly { "on" } else { "off" };
            command.arg("-drive").arg(format!(
                "id=drive{index},if=none,format=raw,cache=none,aio=io_uring,readonly={readonly},\
                 file={}",
                path.display()
            ));
            let iothread = iothread
                .map(|id| format!(",iothread={id}"))
                .unwrap_or_default();
            command.arg("-device").arg(format!(
                "virtio-blk-device,drive=drive{index},serial={serial},num-queues={queues}{iothread}"
            ));
        }
        command
    }
}

fn flag(vmm: Vmm, name: &str) -> String {
    match vmm {
        Vmm::Pollux => format!("--{name}"),
        Vmm::Qemu => format!("-{name}"),
    }
}

/// A thread of the VMM, from /proc.
#[derive(Debug, Clone, PartialEq)]
pub struct Thread {
    /// Its number.
    pub id: u32,
    /// Its name, cut by the kernel at 15 bytes.
    pub name: String,
    /// The processor time it has used, in seconds: its own, the kernel's for it, and the guest's.
    pub cpu_s: f64,
}

/// A running machine. Dropping it kills it.
pub struct Running {
    child: Child,
    command: String,
    stdin: Option<ChildStdin>,
    console: Stream,
    messages: Stream,
    socket: PathBuf,
}

impl Running {
    pub(crate) fn start(mut command: Command, socket: PathBuf) -> Running {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let text = format!("{command:?}");
        let mut child = command
            .spawn()
            .unwrap_or_else(|error| panic!("{text}: {error}"));
        let stdin = child.stdin.take();
        let console = Stream::of(child.stdout.take().expect("it is piped"));
        let messages = Stream::of(child.stderr.take().expect("it is piped"));
        Running {
            child,
            command: text,
            stdin,
            console,
            messages,
            socket,
        }
    }

    /// A connection to the monitor, see [`Machine::monitor`].
    ///
    /// # Panics
    /// There is none.
    pub fn monitor(&self) -> Qmp {
        Qmp::connect(&self.socket)
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a line to the guest's console.
    ///
    /// # Panics
    /// The machine has ended.
    pub fn send(&mut self, line: &str) {
        let stdin = self
            .stdin
            .as_mut()
            .expect("it is open while the machine runs");
        let sent = writeln!(stdin, "{line}").and_then(|()| stdin.flush());
        if let Err(error) = sent {
            self.give_up(&format!("cannot write to the console: {error}"));
        }
    }

    /// Waits for the guest to report `key` (see [`Guest::write_initramfs`]) and returns the value.
    ///
    /// # Panics
    /// It does not come, the guest reports a failure, or the machine ends.
    pub fn wait_for(&mut self, key: &str) -> String {
        self.wait_for_nth(key, 1)
    }

    /// The same for the `nth` report of `key`, counted from 1.
    ///
    /// # Panics
    /// As [`Running::wait_for`].
    pub fn wait_for_nth(&mut self, key: &str, nth: usize) -> String {
        let mut patience = Patience::new();
        loop {
            let ended = self.console.ended();
            let seen = self.console.len();
            let console = self.console.text();
            let found = reports(&console)
                .filter(|(name, _)| *name == key)
                .nth(nth - 1)
                .map(|(_, v)| v.to_owned());
            if let Some(value) = found {
                return value;
            }
            if let Some((_, why)) = reports(&console).find(|(name, _)| *name == "fail") {
                self.give_up(&format!("the guest says: {why}"));
            }
            if ended {
                self.give_up(&format!("ended before the guest reported {key}"));
            }
            if patience.is_over(seen) {
                self.give_up(&format!("silent for {PATIENCE:?}, and no report of {key}"));
            }
            self.console.wait(seen);
        }
    }

    /// How often the guest has reported `key` so far.
    pub fn count(&self, key: &str) -> usize {
        let console = self.console.text();
        reports(&console).filter(|(name, _)| *name == key).count()
    }

    /// Waits for the machine to end.
    ///
    /// # Panics
    /// It does not end, or the guest has reported a failure.
    pub fn finish(mut self) -> Finished {
        let mut patience = Patience::new();
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if patience.is_over(self.console.len()) => {
                    self.give_up(&format!("silent for {PATIENCE:?}, and no end"))
                }
                Ok(None) => thread::sleep(Duration::from_millis(50)),
                Err(error) => self.give_up(&format!("cannot wait for it: {error}")),
            }
        };
        self.console.wait_end();
        self.messages.wait_end();
        let console = self.console.text();
        if let Some((_, why)) = reports(&console).find(|(name, _)| *name == "fail") {
            self.give_up(&format!("the guest says: {why}"));
        }
        Finished {
            status,
            console,
            messages: self.messages.text(),
            command: self.command.clone(),
        }
    }

    /// Threads of the process and the time they have used.
    ///
    /// # Panics
    /// /proc says nothing about the process: it has ended.
    pub fn threads(&self) -> Vec<Thread> {
        let mut threads = Vec::new();
        let tasks = PathBuf::from(format!("/proc/{}/task", self.id()));
        for entry in std::fs::read_dir(&tasks)
            .expect("the process runs")
            .flatten()
        {
            // A thread may end meanwhile.
            let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
                continue;
            };
            let (Some(open), Some(close)) = (stat.find('('), stat.rfind(')')) else {
                continue;
            };
            let fields: Vec<&str> = stat[close + 1..].split_whitespace().collect();
            // proc(5): utime (guest time included) and stime are fields 14 and 15; state is 3.
            let ticks = |field: usize| fields[field - 3].parse::<f64>().unwrap_or(0.0);
            threads.push(Thread {
                id: stat[..open].trim().parse().unwrap_or(0),
                name: stat[open + 1..close].to_owned(),
                cpu_s: (ticks(14) + ticks(15)) / 100.0,
            });
        }
        threads
    }

    fn give_up(&mut self, why: &str) -> ! {
        let _ = self.child.kill();
        let status = self.child.wait();
        panic!(
            "{why}\n  command: {}\n  status: {status:?}\n  messages:\n{}\n  console:\n{}",
            self.command,
            tail(&self.messages.text()),
            tail(&self.console.text())
        );
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A machine that has ended.
pub struct Finished {
    /// The VMM's exit status.
    pub status: ExitStatus,
    /// What the guest wrote to its console.
    pub console: String,
    /// What the VMM wrote to standard error.
    pub messages: String,
    command: String,
}

impl Finished {
    /// Every value that the guest reported for `key`.
    pub fn all(&self, key: &str) -> Vec<&str> {
        reports(&self.console)
            .filter(|(name, _)| *name == key)
            .map(|(_, value)| value)
            .collect()
    }

    /// The value that the guest reported for `key`.
    ///
    /// # Panics
    /// It did not.
    pub fn value(&self, key: &str) -> &str {
        self.all(key)
            .pop()
            .unwrap_or_else(|| self.fail(&format!("the guest did not report {key}")))
    }

    /// Checks that the guest's script ran to its end and that the VMM's status is 0.
    ///
    /// # Panics
    /// Otherwise.
    pub fn assert_success(&self) {
        if !self.console.contains("lab: script ended with 0") {
            self.fail("the script in the guest did not end well");
        }
        if !self.status.success() {
            self.fail("the VMM did not end well");
        }
    }

    /// Fails with everything that the machine said.
    ///
    /// # Panics
    /// Always.
    pub fn fail(&self, why: &str) -> ! {
        panic!(
            "{why}\n  command: {}\n  {}\n  messages:\n{}\n  console:\n{}",
            self.command,
            self.status,
            tail(&self.messages),
            tail(&self.console)
        );
    }
}

/// The lines `@KEY VALUE` of a console.
fn reports(console: &str) -> impl Iterator<Item = (&str, &str)> {
    // The last line may not be whole yet.
    let whole = console.rfind('\n').map_or("", |end| &console[..end]);
    whole.lines().filter_map(|line| {
        let line = line.trim_end_matches('\r').strip_prefix('@')?;
        Some(line.split_once(' ').unwrap_or((line, "")))
    })
}

/// The last lines of a text.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(80)..].join("\n")
}

/// Runs out when a guest has been silent for [`PATIENCE`].
struct Patience {
    seen: usize,
    deadline: Instant,
}

impl Patience {
    fn new() -> Patience {
        Patience {
            seen: 0,
            deadline: Instant::now() + PATIENCE,
        }
    }

    /// Whether nothing has come for too long, when `seen` bytes have come so far.
    fn is_over(&mut self, seen: usize) -> bool {
        if seen != self.seen {
            self.seen = seen;
            self.deadline = Instant::now() + PATIENCE;
        }
        Instant::now() > self.deadline
    }
}

/// What a pipe has brought so far.
#[derive(Clone)]
struct Stream(Arc<(Mutex<Collected>, Condvar)>);

#[derive(Default)]
struct Collected {
    bytes: Vec<u8>,
    ended: bool,
}

impl Stream {
    /// Collects what comes out of `pipe` until it ends.
    fn of(mut pipe: impl Read + Send + 'static) -> Stream {
        let stream = Stream(Arc::default());
        let collector = stream.clone();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            loop {
                let read = match pipe.read(&mut buffer) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Ok(read) => read,
                    Err(_) => 0,
                };
                let mut collected = collector.lock();
                collected.bytes.extend_from_slice(&buffer[..read]);
                collected.ended = read == 0;
                collector.0.1.notify_all();
                if read == 0 {
                    return;
                }
            }
        });
        stream
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Collected> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.lock().bytes).into_owned()
    }

    fn len(&self) -> usize {
        self.lock().bytes.len()
    }

    fn ended(&self) -> bool {
        self.lock().ended
    }

    /// Waits, a second at most, for more than `seen` bytes or the end.
    fn wait(&self, seen: usize) {
        let collected = self.lock();
        if collected.bytes.len() <= seen && !collected.ended {
            drop(self.0.1.wait_timeout(collected, Duration::from_secs(1)));
        }
    }

    /// Waits for the end, which is near when the process has gone.
    fn wait_end(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.ended() && Instant::now() < deadline {
            self.wait(usize::MAX);
        }
    }
}
