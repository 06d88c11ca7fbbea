//! Events: what the VM tells all clients unasked.
//!
//! Any thread emits them through a [`Sink`], never blocking; the server takes them out of the same [`Queue`]. Events that
//! a fault can raise without end are limited: within a second after one, only the latest of its kind is kept, and sent
//! when the second is over.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::event::{EventfdFlags, eventfd};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

/// Least time between two limited events of a kind.
const LIMIT: Duration = Duration::from_secs(1);
/// Most events that wait for the server; further ones are lost and counted.
const MAX_WAITING: usize = 1024;

/// Why the VM ended or was reset, in QEMU's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ShutdownCause {
    /// Something failed on the host.
    HostError,
    /// `quit`.
    HostQmpQuit,
    /// SIGTERM, SIGINT or SIGHUP.
    HostSignal,
    /// The guest powered off.
    GuestShutdown,
    /// The guest rebooted.
    GuestReset,
    /// The guest's kernel failed.
    GuestPanic,
}

/// Data of SHUTDOWN and RESET.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct ShutdownData {
    /// The guest asked for it.
    pub guest: bool,
    /// Why.
    pub reason: ShutdownCause,
}

impl From<ShutdownCause> for ShutdownData {
    fn from(reason: ShutdownCause) -> Self {
        let guest = !matches!(
            reason,
            ShutdownCause::HostError | ShutdownCause::HostQmpQuit | ShutdownCause::HostSignal
        );
        Self { guest, reason }
    }
}

/// What a request that failed was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum IoOperation {
    /// A read.
    Read,
    /// A write, flush, discard or write of zeroes.
    Write,
}

/// What was done about it: the disk's `rerror` or `werror`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorAction {
    /// The guest was told success.
    Ignore,
    /// The guest was told.
    Report,
    /// The VM was stopped and the request kept.
    Stop,
}

/// Data of BLOCK_IO_ERROR.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub struct BlockIoError {
    /// The disk's object: `/machine/peripheral/<id>`.
    pub qom_path: String,
    /// The disk's id.
    pub device: String,
    /// What failed.
    pub operation: IoOperation,
    /// What was done about it.
    pub action: ErrorAction,
    /// The medium is full.
    pub nospace: bool,
    /// The system's reason, for people.
    pub reason: String,
}

/// What becomes of a guest that panicked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum PanicAction {
    /// The VM is stopped.
    Pause,
    /// The VM ends.
    Poweroff,
    /// Nothing; the guest goes on as it sees fit.
    Run,
}

/// Data of GUEST_PANICKED.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, JsonSchema)]
pub struct PanicData {
    /// What was done about it.
    pub action: PanicAction,
}

/// Something that clients are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The VM has ended or is about to.
    Shutdown(ShutdownCause),
    /// The guest was reset.
    Reset(ShutdownCause),
    /// The vCPUs stand still.
    Stop,
    /// The vCPUs run.
    Resume,
    /// The guest was asked to power down.
    Powerdown,
    /// A disk request failed on the host.
    BlockIoError(BlockIoError),
    /// The guest's kernel says that it has failed.
    GuestPanicked(PanicAction),
}

impl Event {
    /// Its name on the wire.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Shutdown(_) => "SHUTDOWN",
            Self::Reset(_) => "RESET",
            Self::Stop => "STOP",
            Self::Resume => "RESUME",
            Self::Powerdown => "POWERDOWN",
            Self::BlockIoError(_) => "BLOCK_IO_ERROR",
            Self::GuestPanicked(_) => "GUEST_PANICKED",
        }
    }

    fn data(&self) -> Option<Value> {
        match self {
            Self::Shutdown(reason) | Self::Reset(reason) => {
                Some(json!(ShutdownData::from(*reason)))
            }
            Self::BlockIoError(data) => Some(json!(data)),
            Self::GuestPanicked(action) => Some(json!(PanicData { action: *action })),
            Self::Stop | Self::Resume | Self::Powerdown => None,
        }
    }

    /// What events are of one kind with this one, if that kind is limited.
    fn limit(&self) -> Option<Kind> {
        match self {
            Self::BlockIoError(data) => Some((data.device.clone(), data.operation)),
            _ => None,
        }
    }

    /// The event as clients see it, `since_epoch` after 1970.
    fn message(&self, since_epoch: Duration) -> Value {
        let mut message = json!({
            "timestamp": {
                "seconds": since_epoch.as_secs(),
                "microseconds": since_epoch.subsec_micros(),
            },
            "event": self.name(),
        });
        if let Some(data) = self.data() {
            message["data"] = data;
        }
        message
    }
}

type Kind = (String, IoOperation);

#[derive(Debug)]
struct Limited {
    /// When the next may be sent.
    until: Instant,
    /// What to send then.
    kept: Option<Value>,
}

#[derive(Debug, Default)]
struct Waiting {
    messages: VecDeque<Value>,
    limited: HashMap<Kind, Limited>,
    lost: u64,
}

impl Waiting {
    fn push(&mut self, message: Value) {
        if self.messages.len() < MAX_WAITING {
            self.messages.push_back(message);
        } else {
            self.lost += 1;
        }
    }

    fn emit(&mut self, event: &Event, now: Instant, since_epoch: Duration) {
        let message = event.message(since_epoch);
        let Some(kind) = event.limit() else {
            return self.push(message);
        };
        match self.limited.get_mut(&kind) {
            Some(limited) if now < limited.until => limited.kept = Some(message),
            _ => {
                let until = now + LIMIT;
                self.limited.insert(kind, Limited { until, kept: None });
                self.push(message);
            }
        }
    }

    /// Sends what was kept and is due; returns when the next is.
    fn release(&mut self, now: Instant) -> Option<Instant> {
        let mut due = Vec::new();
        self.limited.retain(|_, limited| {
            if now < limited.until {
                return true;
            }
            let kept = limited.kept.take();
            limited.until = now + LIMIT;
            let sent = kept.is_some();
            due.extend(kept);
            sent
        });
        for message in due {
            self.push(message);
        }
        self.limited.values().map(|limited| limited.until).min()
    }
}

#[derive(Debug)]
struct Shared {
    waiting: Mutex<Waiting>,
    wake: OwnedFd,
}

impl Shared {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Only a counter at its maximum refuses, and then the server is awake.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Where any thread puts events. Without a server it takes them and does nothing.
#[derive(Debug, Clone, Default)]
pub struct Sink(Option<Arc<Shared>>);

impl Sink {
    /// Tells all clients. Never blocks: the lock is held for the copying of a message.
    pub fn emit(&self, event: &Event) {
        let Some(shared) = &self.0 else { return };
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        shared.waiting().emit(event, Instant::now(), since_epoch);
        shared.wake();
    }
}

/// The server's end.
#[derive(Debug)]
pub struct Queue(Arc<Shared>);

impl Queue {
    /// Readable when events were emitted or [`Queue::wake`] was called.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.0.wake.as_fd()
    }

    /// Makes [`Queue::wake_fd`] readable.
    pub fn wake(&self) {
        self.0.wake();
    }

    /// Makes it unreadable until the next event.
    pub fn rest(&self) {
        // It fails when nobody has woken.
        let _ = rustix::io::read(&self.0.wake, &mut [0u8; 8]);
    }

    /// All that is to be sent now, and when to look again although nobody wakes.
    pub fn take(&self) -> (Vec<Value>, Option<Instant>) {
        let mut waiting = self.0.waiting();
        let next = waiting.release(Instant::now());
        if waiting.lost > 0 {
            tracing::warn!("{} QMP events were lost", waiting.lost);
            waiting.lost = 0;
        }
        (waiting.messages.drain(..).collect(), next)
    }
}

/// A queue of events and its first sink.
pub fn channel() -> std::io::Result<(Sink, Queue)> {
    let shared = Arc::new(Shared {
        waiting: Mutex::default(),
        wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
    });
    Ok((Sink(Some(Arc::clone(&shared))), Queue(shared)))
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn io_error(device: &str, reason: &str) -> Event {
        Event::BlockIoError(BlockIoError {
            qom_path: format!("/machine/peripheral/{device}"),
            device: device.to_owned(),
            operation: IoOperation::Write,
            action: ErrorAction::Report,
            nospace: true,
            reason: reason.to_owned(),
        })
    }

    #[test]
    fn events_look_as_clients_know_them() {
        let at = Duration::from_micros(1_700_000_000_000_042);
        let text = |event: &Event| event.message(at).to_string();
        let timestamp = r#"{"timestamp":{"seconds":1700000000,"microseconds":42},"#;
        assert_eq!(
            text(&Event::Stop),
            format!(r#"{timestamp}"event":"STOP"}}"#)
        );
        assert_eq!(
            text(&Event::Shutdown(ShutdownCause::HostQmpQuit)),
            format!(
                r#"{timestamp}"event":"SHUTDOWN","data":{{"guest":false,"reason":"host-qmp-quit"}}}}"#
            )
        );
        assert_eq!(
            text(&io_error("d0", "no space")),
            format!(
                "{timestamp}{}",
                concat!(
                    r#""event":"BLOCK_IO_ERROR","data":{"qom-path":"/machine/peripheral/d0","device":"d0","#,
                    r#""operation":"write","action":"report","nospace":true,"reason":"no space"}}"#
                )
            )
        );
    }

    #[test]
    fn a_flood_of_one_kind_is_cut_to_its_first_and_its_latest() {
        let mut waiting = Waiting::default();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        for n in 0..5000 {
            waiting.emit(&io_error("d0", &n.to_string()), at(n % 999), Duration::ZERO);
        }
        // Another disk, and another event, are not held up.
        waiting.emit(&io_error("d1", "other"), at(500), Duration::ZERO);
        waiting.emit(&Event::Stop, at(500), Duration::ZERO);
        let reasons = |waiting: &mut Waiting| -> Vec<String> {
            let all = waiting.messages.drain(..);
            all.map(|message| {
                let reason = message.pointer("/data/reason").and_then(Value::as_str);
                reason.unwrap_or("none").to_owned()
            })
            .collect()
        };
        assert_eq!(reasons(&mut waiting), ["0", "other", "none"]);
        assert_eq!(waiting.release(at(999)), Some(at(1000)));
        assert!(waiting.messages.is_empty());
        assert_eq!(waiting.release(at(1000)), Some(at(1500)));
        assert_eq!(reasons(&mut waiting), ["4999"]);
        // Nothing was kept in the second after: the kind is forgotten, and free at once.
        assert_eq!(waiting.release(at(2000)), None);
        waiting.emit(&io_error("d0", "later"), at(2001), Duration::ZERO);
        assert_eq!(reasons(&mut waiting), ["later"]);
    }

    #[test]
    fn what_nobody_takes_is_bounded_and_counted() {
        let mut waiting = Waiting::default();
        for _ in 0..MAX_WAITING + 7 {
            waiting.emit(&Event::Resume, Instant::now(), Duration::ZERO);
        }
        assert_eq!((waiting.messages.len(), waiting.lost), (MAX_WAITING, 7));
    }

    #[test]
    fn a_sink_without_a_server_swallows() {
        Sink::default().emit(&Event::Stop);
    }

    #[test]
    fn an_emitted_event_wakes_the_server() {
        let (sink, queue) = channel().unwrap();
        let woken = || {
            let mut fds = [PollFd::new(&queue.0.wake, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
        };
        assert!(!woken());
        sink.clone().emit(&Event::Powerdown);
        assert!(woken());
        queue.rest();
        assert!(!woken());
        let (messages, next) = queue.take();
        assert_eq!(messages.len(), 1);
        assert_eq!(
            (messages[0]["event"].as_str(), next),
            (Some("POWERDOWN"), None)
        );
    }
}
