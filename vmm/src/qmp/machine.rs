//! What the monitor can ask of a virtual machine.

use std::path::PathBuf;

use devices::virtio::block::BlockStats;
use iothread::Remote;
use schemars::JsonSchema;
use serde::Serialize;

use super::error::Error;
use crate::config::{Cache, IoThread};
use crate::trace::Tracer;

/// The id under which [`Machine::main_loop`] is shown.
pub const MAIN_LOOP_ID: &str = "main";

/// A virtual machine as its monitor sees it.
///
/// Calls come from the monitor's thread, one at a time, and return when the thing is done. The machine emits the events
/// that come of them (STOP, RESUME, POWERDOWN, SHUTDOWN) before it returns.
pub trait Machine: Send + Sync {
    /// What this machine can do; the commands for the rest are not offered.
    fn can(&self, ability: Ability) -> bool;

    /// Whether the guest runs.
    fn run_state(&self) -> RunState;

    /// Stops the vCPUs, and the disks once their requests are finished. Nothing happens to a guest that stands still.
    fn stop(&self) -> Result<(), Error>;

    /// Lets them run again.
    fn cont(&self) -> Result<(), Error>;

    /// Presses the guest's power button.
    fn powerdown(&self) -> Result<(), Error>;

    /// Ends the VM, soon after this returns.
    fn quit(&self);

    /// The vCPUs, in order.
    fn vcpus(&self) -> Vec<Vcpu>;

    /// The iothreads, in the order in which they were made.
    fn iothreads(&self) -> Vec<IoThreadView>;

    /// The loop of the disks that have no iothread, if there is one.
    fn main_loop(&self) -> Option<IoThreadView>;

    /// What records the loops' events, if they are recorded.
    fn tracer(&self) -> Option<&Tracer>;

    /// Starts an iothread. Its values were checked each by itself; its id may be taken.
    fn add_iothread(&self, config: &IoThread) -> Result<(), Error>;

    /// Ends an iothread that no disk uses.
    fn remove_iothread(&self, id: &str) -> Result<(), Error>;

    /// The disks, in the order of the configuration.
    fn disks(&self) -> Vec<DiskView>;

    /// Changes the size of a disk's image and tells the guest. The disk exists.
    fn resize_disk(&self, id: &str, size_bytes: u64) -> Result<(), Error>;

    /// Moves all queues of a disk to an iothread, or to the main loop; requests go on. The disk exists.
    fn move_disk(&self, id: &str, iothread: Option<&str>) -> Result<(), Error>;
}

/// Something that not every machine can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ability {
    /// [`Machine::stop`] and [`Machine::cont`].
    Pause,
    /// [`Machine::powerdown`].
    Powerdown,
    /// [`Machine::add_iothread`] and [`Machine::remove_iothread`].
    ChangeIoThreads,
    /// [`Machine::resize_disk`].
    ResizeDisk,
    /// [`Machine::move_disk`].
    MoveDisk,
    /// The numbers of [`DiskView::stats`].
    DiskStats,
}

/// Whether and why the guest runs or stands still, in QEMU's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RunState {
    /// It has not been started.
    Prelaunch,
    /// It runs.
    Running,
    /// It was stopped.
    Paused,
    /// It was stopped because a disk's request failed.
    IoError,
    /// Its kernel has failed.
    GuestPanicked,
    /// It has ended.
    Shutdown,
}

/// A vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vcpu {
    /// Its number, from 0.
    pub index: u32,
    /// Its thread's id in the host's process table.
    pub thread_id: i32,
}

/// An event loop.
#[derive(Debug, Clone)]
pub struct IoThreadView {
    /// Its id.
    pub id: String,
    /// Its thread's id in the host's process table.
    pub thread_id: i32,
    /// Settings and statistics.
    pub remote: Remote,
}

/// A disk.
#[derive(Debug, Clone)]
pub struct DiskView {
    /// Its id.
    pub id: String,
    /// The image.
    pub path: PathBuf,
    /// The guest may not write.
    pub readonly: bool,
    /// The host's page cache is gone around.
    pub direct: bool,
    /// When writes count as done, at the moment.
    pub cache: Cache,
    /// Its capacity.
    pub size_bytes: u64,
    /// For each queue the iothread that runs it, or none for the main loop.
    pub queues: Vec<Option<String>>,
    /// A request failed on the host since the last `cont`, and the VM was stopped for it.
    pub io_status: IoStatus,
    /// What it has done.
    pub stats: BlockStats,
}

/// Whether a disk's requests were stopped by an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IoStatus {
    /// No.
    #[default]
    Ok,
    /// By a failure.
    Failed,
    /// Because the medium is full.
    Nospace,
}
