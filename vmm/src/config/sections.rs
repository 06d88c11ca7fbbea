//! The sections of a configuration: memory, iothreads, disks, log. Each is one option's `key=value` list, and one object
//! of the JSON file.

use std::path::PathBuf;

use devices::virtio::block;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::types::{Alpha, HugePages, IndexSet, Size};

/// `--memory`: the guest's RAM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Memory {
    /// How much, in bytes.
    pub size: Size,
    /// Take it from the host's pool of huge pages.
    pub hugepages: HugePages,
    /// Populate it before the guest starts, so that it never faults pages in.
    pub prefault: bool,
    /// Map it shared (a memfd), so that another process can be given it.
    pub shared: bool,
}

impl Default for Memory {
    fn default() -> Self {
        Self {
            size: Size(512 << 20),
            hugepages: HugePages::Off,
            prefault: false,
            shared: false,
        }
    }
}

/// Which rule sets the polling window of an iothread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PollPolicy {
    /// Weighted interval of each handler, the largest active one makes the window.
    #[default]
    Weighted,
    /// Each handler adjusts its own window.
    PerHandler,
    /// One window for the loop, adjusted in every iteration.
    Context,
    /// Never poll.
    Off,
    /// Poll for `poll-max-ns` every time.
    Always,
    /// The window that brings most for its CPU time, found by experiment; `poll-alpha` says how the
    /// two are weighed.
    Auto,
}

/// How an iothread waits for its file descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub enum Monitor {
    /// io_uring where it works, else epoll.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    /// One ring for readiness and disk I/O.
    #[serde(rename = "io_uring")]
    IoUring,
    /// epoll(7).
    #[serde(rename = "epoll")]
    Epoll,
    /// ppoll(2).
    #[serde(rename = "ppoll")]
    Ppoll,
}

/// `--iothread`: an event loop in a thread of its own, for disks to run on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct IoThread {
    /// Its name, unique; the thread is called `IO <id>`.
    pub id: String,
    /// Longest time to poll before blocking, in nanoseconds; 0 turns polling off.
    #[serde(default = "poll_max_ns")]
    pub poll_max_ns: i64,
    /// Factor by which the window grows; 0 is the default.
    #[serde(default = "poll_factor")]
    pub poll_grow: i64,
    /// Divisor by which the window shrinks; 0 is the default.
    #[serde(default = "poll_factor")]
    pub poll_shrink: i64,
    /// Weight of the past in a handler's interval, as a shift; 0 is the default.
    #[serde(default = "poll_weight")]
    pub poll_weight: i64,
    /// What CPU time is worth to the rule `auto`, from 0 (nothing) to 10: at 0.25, 1 % more requests a
    /// second are worth 4 % more CPU time a request.
    #[serde(default = "poll_alpha")]
    pub poll_alpha: Alpha,
    /// The rule.
    #[serde(default)]
    pub poll_policy: PollPolicy,
    /// The wait.
    #[serde(default)]
    pub monitor: Monitor,
    /// Disk completions are a polled handler of their own.
    #[serde(default = "on")]
    pub poll_completions: bool,
    /// Most requests submitted at once; 0 is the engine's default.
    #[serde(default)]
    pub aio_max_batch: i64,
    /// Host CPUs that the thread may run on; all if empty.
    #[serde(default)]
    pub cpus: IndexSet,
}

fn poll_max_ns() -> i64 {
    32768
}
fn poll_factor() -> i64 {
    2
}
fn poll_weight() -> i64 {
    3
}
fn poll_alpha() -> Alpha {
    Alpha(iothread::PollSettings::default().poll_alpha_milli)
}
fn on() -> bool {
    true
}
fn queue_size() -> u16 {
    256
}

/// How disk I/O reaches the host kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// The ring of the disk's iothread.
    #[serde(rename = "io_uring")]
    IoUring,
    /// Linux AIO.
    Native,
    /// A pool of threads making blocking calls.
    Threads,
}

/// When a write counts as done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Cache {
    /// In the host's cache; the guest flushes.
    #[default]
    Writeback,
    /// On the medium.
    Writethrough,
    /// In the host's cache; flushes are ignored.
    Unsafe,
}

/// What happens to a request that fails on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorPolicy {
    /// The guest sees the error.
    Report,
    /// The guest sees success.
    Ignore,
    /// The VM stops and the request is kept.
    Stop,
    /// As `stop` when the medium is full, else as `report`.
    Enospc,
}

impl From<Engine> for block::EngineKind {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::IoUring => Self::IoUring,
            Engine::Native => Self::Native,
            Engine::Threads => Self::Threads,
        }
    }
}

impl From<Cache> for block::CacheMode {
    fn from(cache: Cache) -> Self {
        match cache {
            Cache::Writeback => Self::Writeback,
            Cache::Writethrough => Self::Writethrough,
            Cache::Unsafe => Self::Unsafe,
        }
    }
}

impl From<ErrorPolicy> for block::ErrorPolicy {
    fn from(policy: ErrorPolicy) -> Self {
        match policy {
            ErrorPolicy::Report => Self::Report,
            ErrorPolicy::Ignore => Self::Ignore,
            ErrorPolicy::Stop => Self::Stop,
            ErrorPolicy::Enospc => Self::Enospc,
        }
    }
}

/// How a disk is attached to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// virtio-mmio.
    Mmio,
    /// virtio-pci.
    Pci,
    /// virtio-ccw.
    Ccw,
}

/// `--disk`: a raw image or block device as a virtio-blk disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Disk {
    /// The image or device.
    pub path: PathBuf,
    /// Its name, unique; `disk<N>` if not given.
    #[serde(default)]
    pub id: Option<String>,
    /// The iothread that runs all its queues; the main loop if none.
    #[serde(default)]
    pub iothread: Option<String>,
    /// Several iothreads; the queues are spread over them in turn, or as `vqs` says.
    #[serde(default)]
    pub iothreads: Vec<String>,
    /// For each of `iothreads`, the queues that it runs.
    #[serde(default)]
    pub vqs: Vec<IndexSet>,
    /// Number of request queues; default: one a vCPU on pci, one on mmio.
    #[serde(default)]
    pub queues: Option<u16>,
    /// Descriptors in a queue, a power of two.
    #[serde(default = "queue_size")]
    pub queue_size: u16,
    /// The guest may not write.
    #[serde(default)]
    pub readonly: bool,
    /// Go around the host's page cache; default: where the file allows it.
    #[serde(default)]
    pub direct: Option<bool>,
    /// The way to the host kernel; default: the best that works.
    #[serde(default)]
    pub engine: Option<Engine>,
    /// Register the guest's memory with the iothread's ring, which populates and pins it; default: where `--memory
    /// prefault=on` populates it anyway and the disk is direct.
    #[serde(default)]
    pub fixedbufs: Option<bool>,
    /// When writes count as done.
    #[serde(default)]
    pub cache: Cache,
    /// Serial number, at most 20 bytes.
    #[serde(default)]
    pub serial: Option<String>,
    /// Sector size told to the guest, in bytes.
    #[serde(default)]
    pub logical_block_size: Option<u32>,
    /// Physical sector size told to the guest, in bytes.
    #[serde(default)]
    pub physical_block_size: Option<u32>,
    /// Pass the guest's discards on to the medium.
    #[serde(default = "on")]
    pub discard: bool,
    /// What to do when a read fails.
    #[serde(default = "report")]
    pub rerror: ErrorPolicy,
    /// What to do when a write fails.
    #[serde(default = "report")]
    pub werror: ErrorPolicy,
    /// The way to the guest; default: pci.
    #[serde(default)]
    pub transport: Option<Transport>,
    /// Hold a lock on the image, so that no second process writes it.
    #[serde(default = "on")]
    pub locking: bool,
}

fn report() -> ErrorPolicy {
    ErrorPolicy::Report
}

/// `--log`: messages on standard error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Log {
    /// A level (off, error, warn, info, debug, trace), or one for each part: `warn,iothread=debug`.
    pub level: String,
    /// Write them to this file instead.
    pub file: Option<PathBuf>,
}

impl Default for Log {
    fn default() -> Self {
        Self {
            level: "warn".to_owned(),
            file: None,
        }
    }
}

/// `--metrics`: the VM's numbers in a file, in Prometheus' text format.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Metrics {
    /// The file, replaced each time.
    pub file: PathBuf,
    /// Seconds between two times.
    #[serde(default = "ten")]
    pub interval: u32,
}

fn ten() -> u32 {
    10
}

/// `--trace`: what the event loops do, event by event, in a file for `pollux-bench trace`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Trace {
    /// The file, replaced if there is one; older parts are called `FILE.1` and so on.
    pub file: PathBuf,
    /// Events that are on from the start, by name or by pattern with `*` and `?`; all by default. The monitor switches
    /// them later.
    #[serde(default = "all_events")]
    pub events: Vec<String>,
    /// Size at which the file is followed by the next, at least 4M.
    #[serde(default = "trace_size")]
    pub max_size: Size,
    /// Number of files kept, the one being written included, 1 to 1000.
    #[serde(default = "trace_files")]
    pub files: u32,
}

fn all_events() -> Vec<String> {
    vec!["*".to_owned()]
}
fn trace_size() -> Size {
    Size(64 << 20)
}
fn trace_files() -> u32 {
    8
}
