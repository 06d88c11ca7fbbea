//! Console output that never blocks a vCPU for long.
//!
//! Bytes go into a bounded buffer that a thread of its own writes out. A terminal or pipe that
//! takes nothing holds a vCPU up once for [`PATIENCE`]; after that bytes are dropped and counted
//! until the writer moves again.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the buffer holds before a writer has to wait.
const CAPACITY_BYTES: usize = 256 * 1024;
/// How long a full buffer may hold up a vCPU.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long dropping the output waits for what is buffered.
const CLOSING: Duration = Duration::from_secs(1);
/// Pause before a non-blocking descriptor that took nothing is tried again.
const RETRY: Duration = Duration::from_millis(2);

#[derive(Default)]
struct State {
    buffer: Vec<u8>,
    // The thread is writing bytes it took out of the buffer.
    writing: bool,
    // A writer has lost patience; nobody waits until the buffer is empty again.
    stalled: bool,
    dropped_bytes: u64,
    closed: bool,
    // The sink failed for good.
    dead: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    filled: Condvar,
    drained: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The buffering writer.
pub struct Output {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Output {
    /// Starts the thread that writes to `sink`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn new(sink: Box<dyn Write + Send>) -> io::Result<Output> {
        let shared = Arc::new(Shared::default());
        let pump = shared.clone();
        let thread = std::thread::Builder::new()
            .name("console".into())
            .spawn(move || pump_out(&pump, sink))?;
        Ok(Output {
            shared,
            thread: Some(thread),
        })
    }

    /// Waits until everything is written, at most `timeout`. Whether it was.
    pub fn drain(&self, timeout: Duration) -> bool {
        let busy = |s: &mut State| !s.dead && (s.writing || !s.buffer.is_empty());
        let (state, _) = self
            .shared
            .drained
            .wait_timeout_while(self.shared.lock(), timeout, busy)
            .unwrap_or_else(PoisonError::into_inner);
        !state.writing && state.buffer.is_empty()
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.shared.lock();
        if state.dead {
            return Ok(bytes.len());
        }
        let full = |s: &mut State| s.buffer.len() + bytes.len() > CAPACITY_BYTES && !s.dead;
        if full(&mut state) && !state.stalled {
            let (after, timeout) = self
                .shared
                .drained
                .wait_timeout_while(state, PATIENCE, full)
                .unwrap_or_else(PoisonError::into_inner);
            state = after;
            state.stalled |= timeout.timed_out();
        }
        if full(&mut state) {
            state.dropped_bytes += bytes.len() as u64;
            return Ok(bytes.len());
        }
        state.buffer.extend_from_slice(bytes);
        if !state.writing {
            self.shared.filled.notify_one();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        // The UART flushes after every byte; the thread writes as soon as it can anyway.
        Ok(())
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let written = self.drain(CLOSING);
        self.shared.lock().closed = true;
        self.shared.filled.notify_one();
        // A thread that hangs in a write to a stuck terminal cannot be joined; it ends with the
        // process.
        if let Some(thread) = self.thread.take().filter(|_| written) {
            let _ = thread.join();
        }
    }
}

fn pump_out(shared: &Shared, mut sink: Box<dyn Write + Send>) {
    let mut taken = Vec::new();
    let mut state = shared.lock();
    loop {
        state = shared
            .filled
            .wait_while(state, |s| s.buffer.is_empty() && !s.closed)
            .unwrap_or_else(PoisonError::into_inner);
        if state.buffer.is_empty() {
            return;
        }
        std::mem::swap(&mut taken, &mut state.buffer);
        state.writing = true;
        drop(state);
        // Room is free from here on: the buffer was swapped for an empty one.
        shared.drained.notify_all();
        let result = write_patiently(&mut *sink, &taken);
        taken.clear();
        state = shared.lock();
        state.writing = false;
        if let Err(error) = result {
            tracing::warn!(%error, "console output failed: the guest's further output is dropped");
            state.dead = true;
            state.buffer.clear();
        }
        if state.stalled {
            tracing::warn!(
                bytes = state.dropped_bytes,
                "console output was stuck: what the guest wrote meanwhile is lost"
            );
            state.stalled = false;
            state.dropped_bytes = 0;
        }
        shared.drained.notify_all();
        if state.dead {
            return;
        }
    }
}

/// Writes and flushes everything, also to a descriptor that another program made non-blocking.
fn write_patiently(sink: &mut dyn Write, mut bytes: &[u8]) -> io::Result<()> {
    let mut last_progress = Instant::now();
    loop {
        let result = if bytes.is_empty() {
            sink.flush().map(|()| 0)
        } else {
            sink.write(bytes)
        };
        match result {
            Ok(0) if bytes.is_empty() => return Ok(()),
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => {
                bytes = &bytes[count..];
                last_progress = Instant::now();
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                // Slower steps for a reader that stays away: an idle console costs no CPU.
                let waited = last_progress.elapsed();
                std::thread::sleep(RETRY.max(waited / 8).min(RETRY * 50));
            }
            Err(e) => return Err(e),
        }
    }
}
