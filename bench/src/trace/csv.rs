//! A recording as CSV: a line an entry.

use std::io::Write;

use iothread::trace::TraceEvent;
use iothread::trace::codec::Entry;

use super::read::{Traced, Visitor};

/// The columns. What an entry does not have is empty.
const COLUMNS: [&str; 25] = [
    "time_ns",
    "thread",
    "event",
    "handler",
    "fd",
    "revents",
    "max_ns",
    "timeout_ns",
    "progress",
    "old_ns",
    "new_ns",
    "block_ns",
    "dispatch_ns",
    "active",
    "ns",
    "cpu_ns",
    "completions",
    "events",
    "kicks",
    "blocks",
    "scanning",
    "score_micro",
    "advantage_micro",
    "switches",
    "lost",
];

/// Writes lines.
pub struct Table<W: Write> {
    writer: csv::Writer<W>,
    failed: Option<csv::Error>,
}

impl<W: Write> Table<W> {
    /// A table with its header.
    pub fn new(output: W) -> Self {
        let mut writer = csv::Writer::from_writer(output);
        let failed = writer.write_record(COLUMNS).err();
        Table { writer, failed }
    }

    /// Writes what is left.
    ///
    /// # Errors
    /// The first thing that could not be written.
    pub fn finish(mut self) -> std::io::Result<()> {
        match self.failed {
            Some(error) => Err(match error.into_kind() {
                csv::ErrorKind::Io(error) => error,
                other => std::io::Error::other(format!("{other:?}")),
            }),
            None => self.writer.flush(),
        }
    }
}

impl<W: Write> Visitor for Table<W> {
    fn entry(&mut self, traced: &Traced, time_ns: i64, entry: &Entry<'_>) {
        if self.failed.is_some() {
            return;
        }
        let mut line = Line(Default::default());
        line.set("time_ns", time_ns);
        line.set("thread", &traced.thread.name);
        match entry {
            Entry::Event(event) => {
                line.set("event", event.name());
                line.event(traced, event);
            }
            Entry::Lost(count) => {
                line.set("event", "lost");
                line.set("lost", count);
            }
            Entry::Settings { settings, .. } => {
                line.set("event", "settings");
                line.set("max_ns", settings.poll_max_ns);
            }
            Entry::Handler { node, fd, .. } => {
                line.set("event", "handler");
                line.set("handler", traced.handler(*node));
                line.set("fd", fd);
            }
        }
        self.failed = self.writer.write_record(&line.0).err();
    }
}

struct Line([String; COLUMNS.len()]);

impl Line {
    fn set(&mut self, column: &str, value: impl ToString) {
        if let Some(place) = COLUMNS.iter().position(|name| *name == column) {
            self.0[place] = value.to_string();
        }
    }

    fn event(&mut self, traced: &Traced, event: &TraceEvent<'_>) {
        match *event {
            TraceEvent::RunPollHandlersBegin {
                max_ns, timeout, ..
            } => {
                self.set("max_ns", max_ns);
                self.set("timeout_ns", timeout);
            }
            TraceEvent::RunPollHandlersEnd {
                progress, timeout, ..
            } => {
                self.set("progress", u8::from(progress));
                self.set("timeout_ns", timeout);
            }
            TraceEvent::PollGrow { old, new, .. } | TraceEvent::PollShrink { old, new, .. } => {
                self.set("old_ns", old);
                self.set("new_ns", new);
            }
            TraceEvent::PollAdd {
                node, fd, revents, ..
            } => {
                self.set("handler", traced.handler(node));
                self.set("fd", fd);
                self.set("revents", revents);
            }
            TraceEvent::PollRemove { node, fd, .. } => {
                self.set("handler", traced.handler(node));
                self.set("fd", fd);
            }
            TraceEvent::PollDispatch { node, revents, .. } => {
                self.set("handler", traced.handler(node));
                self.set("revents", revents);
            }
            TraceEvent::PollObserve {
                block_ns,
                dispatch_ns,
                active,
                ..
            } => {
                self.set("block_ns", block_ns);
                self.set("dispatch_ns", dispatch_ns);
                let active = active.iter().map(|slot| traced.handler((*slot).into()));
                self.set("active", active.collect::<Vec<_>>().join(" "));
            }
            TraceEvent::PollHandler { node, ns, .. } => {
                self.set("handler", traced.handler(node));
                self.set("ns", ns);
            }
            TraceEvent::PollReading { reading, .. } => {
                self.set("dispatch_ns", reading.now_ns);
                self.set("cpu_ns", reading.cpu_ns);
                self.set("completions", reading.completions);
                self.set("events", reading.events);
                self.set("kicks", reading.kicks);
                self.set("blocks", reading.blocks);
            }
            TraceEvent::PollTrial {
                incumbent_ns,
                window_ns,
                scanning,
                score_micro,
                advantage_micro,
                switches,
                ..
            } => {
                self.set("old_ns", incumbent_ns);
                self.set("new_ns", window_ns);
                self.set("scanning", u8::from(scanning));
                self.set("score_micro", score_micro);
                self.set("advantage_micro", advantage_micro);
                self.set("switches", switches);
            }
            _ => {}
        }
    }
}
