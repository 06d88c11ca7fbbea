//! `--trace`: what the event loops do, in a file.
//!
//! ```text
//! loop's thread: event → sink → ring        (never waits; a full ring counts what it loses)
//! trace thread:  rings → recorder → output  (a file that is followed by the next when it is full)
//! ```
//! With no event selected no loop has a sink, and a trace point costs it one branch. Nothing that
//! happens to the file reaches a loop.

mod output;
mod recorder;
mod selection;
mod sink;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use iothread::Remote;

use self::output::Output;
use self::recorder::{Message, Recorder};
pub use self::selection::{EVENTS, Mask, matches, select};
use self::sink::Sink;
use crate::config::Trace;

/// Why there is no trace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be made.
    #[error("--trace file={}: {error}; name a file that can be written", file.display())]
    Create {
        /// The file.
        file: PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// No thread to be had.
    #[error("starting the trace's thread: {0}")]
    Thread(std::io::Error),
    /// No event has the name.
    #[error("unknown event \"{name}\"{}", did_you_mean(name))]
    Unknown {
        /// What was asked for.
        name: String,
    },
    /// The recording's thread is gone.
    #[error("the trace has ended")]
    Ended,
}

fn did_you_mean(name: &str) -> String {
    let distance = |event: &&&str| strsim::damerau_levenshtein(name, event);
    match EVENTS.iter().min_by_key(distance) {
        Some(near) if distance(&near) <= 1 + near.len() / 4 => format!("; did you mean {near}?"),
        _ => format!("; there are {}", EVENTS.join(", ")),
    }
}

/// What the tracer and the recorder's thread share.
#[derive(Debug)]
struct Shared {
    /// The events that are on.
    mask: Arc<AtomicU32>,
    loops: Mutex<Vec<Traced>>,
}

/// A loop that is traced when events are on.
#[derive(Debug)]
struct Traced {
    remote: Remote,
    thread_name: String,
    has_sink: bool,
}

impl Shared {
    fn loops(&self) -> MutexGuard<'_, Vec<Traced>> {
        self.loops.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the sinks away; what is in their rings is still written.
    fn silence(&self) {
        self.mask.store(0, Ordering::Relaxed);
        for traced in self.loops().iter_mut() {
            traced.remove_sink();
        }
    }
}

impl Traced {
    fn add_sink(&mut self, sender: &Sender<Message>, mask: &Arc<AtomicU32>) {
        if std::mem::replace(&mut self.has_sink, true) {
            return;
        }
        let (id, policy) = (self.remote.name().to_owned(), self.remote.policy());
        let (name, sender, mask) = (self.thread_name.clone(), sender.clone(), Arc::clone(mask));
        self.remote.run(move |ctx| {
            let (sink, source) = sink::pair(mask, sink::RING_BYTES);
            let thread = iothread::trace::file::Thread {
                ctx: ctx.trace_id(),
                id,
                name,
                policy: policy.name().to_owned(),
            };
            // The recorder has its end before the first entry.
            if sender.send(Message::Source(thread, source)).is_ok() {
                ctx.set_trace_sink(Some(Sink::into_rc(sink)));
            }
        });
    }

    fn remove_sink(&mut self) {
        if std::mem::replace(&mut self.has_sink, false) {
            self.remote.run(|ctx| ctx.set_trace_sink(None));
        }
    }
}

/// A recording. Cheap to share; ends when [`Tracer::finish`] is called or the last one is dropped.
#[derive(Debug)]
pub struct Tracer {
    shared: Arc<Shared>,
    sender: Sender<Message>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Tracer {
    /// Creates the file and begins to record.
    ///
    /// # Errors
    /// The file cannot be created, there is no thread, or a pattern matches no event.
    pub fn start(config: &Trace) -> Result<Self, Error> {
        let mut mask = Mask::default();
        for pattern in &config.events {
            mask |= select(pattern)?;
        }
        let output = Output::create(&config.file, config.max_size.0, config.files);
        let output = output.map_err(|error| Error::Create {
            file: config.file.clone(),
            error,
        })?;
        let shared = Arc::new(Shared {
            mask: Arc::new(AtomicU32::new(mask)),
            loops: Mutex::default(),
        });
        let (sender, receiver) = mpsc::channel();
        let recorder = Recorder::new(output, Arc::clone(&shared));
        let thread = std::thread::Builder::new()
            .name("trace".to_owned())
            .spawn(move || recorder.run(&receiver))
            .map_err(Error::Thread)?;
        Ok(Self {
            shared,
            sender,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Records a loop from its next iteration on. `thread_name` is that of its thread.
    pub fn add(&self, remote: &Remote, thread_name: &str) {
        let mut loops = self.shared.loops();
        let mut traced = Traced {
            remote: remote.clone(),
            thread_name: thread_name.to_owned(),
            has_sink: false,
        };
        if self.shared.mask.load(Ordering::Relaxed) != 0 {
            traced.add_sink(&self.sender, &self.shared.mask);
        }
        loops.push(traced);
    }

    /// Forgets a loop that has ended.
    pub fn remove(&self, id: &str) {
        self.shared
            .loops()
            .retain(|traced| traced.remote.name() != id);
    }

    /// The events that are on.
    #[must_use]
    pub fn mask(&self) -> Mask {
        self.shared.mask.load(Ordering::Relaxed)
    }

    /// Switches the events that `pattern` names on or off, in all loops.
    ///
    /// # Errors
    /// No event is called so, or the file could not be written before and still cannot.
    pub fn set(&self, pattern: &str, on: bool) -> Result<(), Error> {
        let events = select(pattern)?;
        if on {
            let (sender, receiver) = mpsc::sync_channel(1);
            let _ = self.sender.send(Message::Reopen(sender));
            receiver.recv().map_err(|_| Error::Ended)??;
        }
        let mut loops = self.shared.loops();
        let mask = match on {
            true => self.mask() | events,
            false => self.mask() & !events,
        };
        self.shared.mask.store(mask, Ordering::Relaxed);
        for traced in loops.iter_mut() {
            match mask {
                0 => traced.remove_sink(),
                _ => traced.add_sink(&self.sender, &self.shared.mask),
            }
        }
        Ok(())
    }

    /// Writes what is left and closes the file. To be called when the loops have ended.
    pub fn finish(&self) {
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = self.sender.send(Message::Stop);
            // If it has panicked, the panic hook has told so.
            let _ = thread.join();
        }
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        self.finish();
    }
}
