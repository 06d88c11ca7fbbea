//! Reads the times of a process's threads and of the host from /proc.

use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{fs, io};

/// Why a process could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process is gone.
    #[error("process {0} ended before its CPU time was read")]
    Gone(i32),
    /// A file of /proc could not be read.
    #[error("{path}: {error}; mount /proc to measure CPU time")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A file of /proc has another form than documented in proc(5).
    #[error("{0}: not in the form of proc(5)")]
    Form(PathBuf),
}

/// A process to be measured.
#[derive(Clone, Debug)]
pub struct Process {
    proc_root: PathBuf,
    pid: i32,
    tick_ns: u64,
}

/// The times of all threads of a process and of the host at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub(super) at: Instant,
    pub(super) threads: Vec<ThreadTimes>,
    /// User and system time of the process, threads that ended included.
    pub(super) process_ticks: u64,
    pub(super) tick_ns: u64,
    pub(super) host: HostTimes,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ThreadTimes {
    pub tid: i32,
    pub is_main: bool,
    pub name: String,
    /// Since boot: with the id it names a thread for good, ids being used again.
    pub start_ticks: u64,
    /// `None` where the kernel keeps no schedstat.
    pub run_ns: Option<u64>,
    /// Guest time included.
    pub user_ticks: u64,
    pub system_ticks: u64,
    pub guest_ticks: u64,
    pub sleeps: u64,
    pub preemptions: u64,
}

/// The first line of /proc/stat, in ticks, and how many CPUs follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct HostTimes {
    pub cpus: usize,
    pub user: u64,
    pub nice: u64,
    pub system: u64,
    pub idle: u64,
    pub iowait: u64,
    pub irq: u64,
    pub soft: u64,
    pub steal: u64,
}

impl Process {
    /// The process of this id.
    pub fn new(pid: i32) -> Process {
        Process::at(Path::new("/proc"), pid)
    }

    /// As [`Process::new`], with /proc mounted at `proc_root`.
    pub fn at(proc_root: &Path, pid: i32) -> Process {
        // SAFETY: sysconf has no preconditions.
        let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        let ticks_a_second = u64::try_from(ticks).ok().filter(|n| *n > 0).unwrap_or(100);
        Process {
            proc_root: proc_root.into(),
            pid,
            tick_ns: 1_000_000_000 / ticks_a_second,
        }
    }

    /// Reads all times now. Threads that end while they are read are left out.
    pub fn snapshot(&self) -> Result<Snapshot, Error> {
        let directory = self.proc_root.join(self.pid.to_string());
        let at = Instant::now();
        let whole = self.read(&directory.join("stat"))?;
        let whole = parse_stat(&whole).ok_or_else(|| Error::Form(directory.join("stat")))?;
        let host_path = self.proc_root.join("stat");
        let host = self.read(&host_path)?;
        let host = parse_host(&host).ok_or(Error::Form(host_path))?;
        let mut threads = Vec::new();
        let tasks = directory.join("task");
        for entry in fs::read_dir(&tasks).map_err(|error| self.failed(&tasks, error))? {
            let path = entry.map_err(|error| self.failed(&tasks, error))?.path();
            match self.thread(&path) {
                Ok(thread) => threads.push(thread),
                Err(Error::Gone(_)) => {}
                Err(error) => return Err(error),
            }
        }
        threads.sort_by_key(|t| t.tid);
        Ok(Snapshot {
            at,
            threads,
            process_ticks: whole.user_ticks + whole.system_ticks,
            tick_ns: self.tick_ns,
            host,
        })
    }

    fn thread(&self, directory: &Path) -> Result<ThreadTimes, Error> {
        let path = directory.join("stat");
        let mut thread = parse_stat(&self.read(&path)?).ok_or_else(|| Error::Form(path.clone()))?;
        thread.is_main = thread.tid == self.pid;
        // `stat` and `comm` agree; `schedstat` and `status` may be absent.
        thread.run_ns = fs::read_to_string(directory.join("schedstat"))
            .ok()
            .and_then(|text| text.split_ascii_whitespace().next()?.parse().ok());
        if let Ok(status) = fs::read_to_string(directory.join("status")) {
            let field = |name: &str| -> Option<u64> {
                status
                    .lines()
                    .find_map(|line| line.strip_prefix(name))?
                    .trim()
                    .parse()
                    .ok()
            };
            thread.sleeps = field("voluntary_ctxt_switches:").unwrap_or(0);
            thread.preemptions = field("nonvoluntary_ctxt_switches:").unwrap_or(0);
        }
        Ok(thread)
    }

    fn read(&self, path: &Path) -> Result<String, Error> {
        // A thread's name may be any bytes.
        fs::read(path)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .map_err(|error| self.failed(path, error))
    }

    fn failed(&self, path: &Path, error: io::Error) -> Error {
        let gone =
            error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH);
        if gone {
            Error::Gone(self.pid)
        } else {
            Error::Read {
                path: path.into(),
                error,
            }
        }
    }
}

/// Reads `/proc/<pid>/stat` (proc(5)): fields are numbered from 1, and the second, the name in
/// parentheses, may itself contain spaces and parentheses.
fn parse_stat(text: &str) -> Option<ThreadTimes> {
    let (tid, rest) = text.split_once(" (")?;
    let (name, rest) = rest.rsplit_once(") ")?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    let field = |number: usize| -> Option<u64> { fields.get(number - 3)?.parse().ok() };
    Some(ThreadTimes {
        tid: tid.parse().ok()?,
        is_main: false,
        name: name.into(),
        start_ticks: field(22)?,
        run_ns: None,
        user_ticks: field(14)?,
        system_ticks: field(15)?,
        guest_ticks: field(43).unwrap_or(0),
        sleeps: 0,
        preemptions: 0,
    })
}

/// Reads the line `cpu  user nice system idle iowait irq softirq steal …` of /proc/stat.
fn parse_host(text: &str) -> Option<HostTimes> {
    let line = text.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let n: Vec<u64> = line
        .split_ascii_whitespace()
        .map_while(|w| w.parse().ok())
        .collect();
    let is_cpu = |line: &&str| {
        line.strip_prefix("cpu")
            .is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    Some(HostTimes {
        cpus: text.lines().filter(is_cpu).count(),
        user: *n.first()?,
        nice: *n.get(1)?,
        system: *n.get(2)?,
        idle: *n.get(3)?,
        iowait: n.get(4).copied().unwrap_or(0),
        irq: n.get(5).copied().unwrap_or(0),
        soft: n.get(6).copied().unwrap_or(0),
        steal: n.get(7).copied().unwrap_or(0),
    })
}
