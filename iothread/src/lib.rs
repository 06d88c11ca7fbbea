#![doc = include_str!("guide.md")]

mod bottom_half;
mod buffers;
mod clock;
mod context;
mod error;
mod handler;
mod histogram;
mod inbox;
mod monitor;
mod notify;
pub mod policy;
mod remote;
mod ring;
mod sequence;
mod settings;
mod sqe;
pub mod stats;
mod sync;
mod thread;
mod timer;
pub mod trace;
pub mod transfer;

pub use bottom_half::{BottomHalf, RemoteBottomHalf};
pub use buffers::{BUFFER_MAX_BYTES, BUFFER_SLOTS};
pub use clock::now_ns;
pub use context::{Context, ContextConfig, WeakContext};
pub use error::{CallError, Error, SettingError};
pub use handler::{EventHandler, HandlerId, Interest, Polling};
pub use histogram::Histogram;
/// The crate whose entries [`Context::add_sqe`] takes.
pub use io_uring;
pub use monitor::{MonitorKind, UnknownMonitor};
pub use policy::{PolicyKind, UnknownPolicy};
pub use remote::Remote;
pub use ring::TaskRun;
pub use settings::{POLL_ALPHA_MAX_MILLI, PollSettings, alpha_milli, alpha_text};
pub use sqe::{Completer, CompleterId, FILE_SLOTS, SqeId};
pub use stats::{HandlerStats, Stats};
pub use thread::{IoThread, IoThreadConfig, OnPanic};
pub use timer::Timer;
