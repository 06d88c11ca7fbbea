//! The trace's thread: empties the rings and writes their entries to the file.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender};
use std::time::Duration;

use iothread::PollSettings;
use iothread::trace::codec::{DecodeError, Decoder, Entry, encode};
use iothread::trace::file::{Block, Thread, Totals, put_events};

use super::output::Output;
use super::sink::{RING_BYTES, Source};
use super::{Error, Shared};

/// How often rings are emptied that fill quickly, and that do not. The busiest loops need some
/// 80 ms to fill theirs.
const QUICK: Duration = Duration::from_millis(5);
const SLOW: Duration = Duration::from_millis(40);
/// A ring that was fuller than this fills quickly.
const MUCH_BYTES: usize = RING_BYTES / 16;

/// Most bytes of a block of totals.
const TOTALS_BYTES: usize = 40;

/// What the recorder is told.
pub enum Message {
    /// A loop has a sink from now on.
    Source(Thread, Source),
    /// Is the file good? If not, try again.
    Reopen(SyncSender<Result<(), Error>>),
    /// The loops have ended.
    Stop,
}

/// A traced loop, and what a further file must say of it.
struct Recorded {
    number: u16,
    thread: Thread,
    source: Source,
    totals: Totals,
    /// Entries that the file did not take.
    refused: u64,
    handlers: BTreeMap<u64, (RawFd, String)>,
    settings: Option<PollSettings>,
}

/// See the module.
pub struct Recorder {
    output: Output,
    shared: Arc<Shared>,
    recorded: Vec<Recorded>,
    /// Those of loops that have ended or lost their sink, for the summary.
    former: Vec<(String, Totals)>,
    next_number: u16,
    /// Entries taken from a ring.
    entries: Vec<u8>,
    /// Blocks on their way to the file.
    blocks: Vec<u8>,
}

impl Recorder {
    pub fn new(output: Output, shared: Arc<Shared>) -> Self {
        Self {
            output,
            shared,
            recorded: Vec::new(),
            former: Vec::new(),
            next_number: 0,
            entries: Vec::new(),
            blocks: Vec::new(),
        }
    }

    /// Until told to stop.
    pub fn run(mut self, receiver: &Receiver<Message>) {
        let mut pause = QUICK;
        loop {
            // Without a source nothing comes by itself.
            let message = match self.recorded.is_empty() {
                true => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => receiver.recv_timeout(pause),
            };
            match message {
                Ok(Message::Source(thread, source)) => self.add(thread, source),
                Ok(Message::Reopen(reply)) => {
                    let _ = reply.send(self.reopen());
                }
                Err(RecvTimeoutError::Timeout) => {}
                Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => break,
            }
            let most = self.empty_rings();
            // Events that were switched on while the file failed.
            if self.output.has_failed() && self.shared.mask.load(Ordering::Relaxed) != 0 {
                self.shared.silence();
            }
            pause = match most > MUCH_BYTES {
                true => QUICK,
                false => (pause * 2).min(SLOW),
            };
        }
        // Sources that were on their way.
        while let Ok(message) = receiver.try_recv() {
            if let Message::Source(thread, source) = message {
                self.add(thread, source);
            }
        }
        self.finish();
    }

    fn add(&mut self, thread: Thread, source: Source) {
        let number = self.next_number;
        self.next_number = self.next_number.wrapping_add(1);
        Block::Thread(number, thread.clone()).put(&mut self.blocks);
        self.recorded.push(Recorded {
            number,
            thread,
            source,
            totals: Totals::default(),
            refused: 0,
            handlers: BTreeMap::new(),
            settings: None,
        });
        self.write();
    }

    /// Writes what is in the rings. Returns how many bytes the fullest one held.
    fn empty_rings(&mut self) -> usize {
        let mut most = 0;
        let mut ended = Vec::new();
        for at in 0..self.recorded.len() {
            let recorded = &mut self.recorded[at];
            // Before the ring is looked at: afterwards something may have come in between.
            let has_ended = recorded.source.has_ended();
            recorded.source.take(&mut self.entries);
            most = most.max(self.entries.len());
            if !self.entries.is_empty() {
                let base_ns = recorded.source.base_ns;
                put_events(&mut self.blocks, recorded.number, base_ns, &self.entries);
                let totals = self.recorded.len() * TOTALS_BYTES;
                if !self.output.has_room(self.blocks.len() + totals) {
                    // The head of the next file tells what was true before these entries.
                    self.rotate();
                }
                let recorded = &mut self.recorded[at];
                let entries = recorded.follow(&self.entries).unwrap_or_else(|error| {
                    // Entries are made by this program: a mistake of ours.
                    tracing::error!("trace of {}: {error}", recorded.thread.name);
                    0
                });
                let written = self.write();
                let recorded = &mut self.recorded[at];
                match written {
                    true => recorded.totals.written += entries,
                    false => recorded.refused += entries,
                }
            }
            let recorded = &mut self.recorded[at];
            let lost = recorded.source.lost() + recorded.refused;
            if lost != recorded.totals.lost || has_ended {
                recorded.totals.lost = lost;
                let totals = Block::Totals(recorded.number, recorded.totals);
                totals.put(&mut self.blocks);
                self.write();
            }
            if has_ended {
                ended.push(at);
            }
        }
        for at in ended.into_iter().rev() {
            let recorded = self.recorded.remove(at);
            self.former.push((recorded.thread.name, recorded.totals));
        }
        most
    }

    /// Goes on in the next file, with the blocks that are on their way.
    fn rotate(&mut self) {
        let blocks = std::mem::take(&mut self.blocks);
        for recorded in &self.recorded {
            let totals = Block::Totals(recorded.number, recorded.totals);
            totals.put(&mut self.blocks);
        }
        self.write();
        let rotated = match self.output.has_failed() {
            true => Ok(()),
            false => self.output.rotate(),
        };
        match rotated {
            Ok(()) => self.describe(),
            Err(error) => self.fail(&error),
        }
        self.blocks.extend_from_slice(&blocks);
    }

    /// Everything that the entries of a further file refer to.
    fn describe(&mut self) {
        for recorded in &self.recorded {
            Block::Thread(recorded.number, recorded.thread.clone()).put(&mut self.blocks);
            let base_ns = recorded.source.base_ns;
            let mut entries = Vec::new();
            let mut tell = |entry: &Entry<'_>| encode(&mut entries, base_ns, base_ns, entry);
            if let Some(settings) = recorded.settings {
                let again = true;
                tell(&Entry::Settings { settings, again });
            }
            for (node, (fd, name)) in &recorded.handlers {
                let (node, fd) = (*node, *fd);
                tell(&Entry::Handler { node, fd, name });
            }
            if !entries.is_empty() {
                put_events(&mut self.blocks, recorded.number, base_ns, &entries);
            }
        }
    }

    /// Writes the blocks that are on their way. False if the file does not take them.
    fn write(&mut self) -> bool {
        if !self.output.has_failed()
            && let Err(error) = self.output.write(&self.blocks)
        {
            self.fail(&error);
        }
        self.blocks.clear();
        !self.output.has_failed()
    }

    /// The file is no good: nothing is recorded until somebody switches events on again.
    fn fail(&mut self, error: &io::Error) {
        self.shared.silence();
        tracing::warn!(
            "--trace file={}: {error}; the trace stops here and the VM goes on: to go on with the trace, make room and switch events on with trace-event-set-state",
            self.output.path().display()
        );
    }

    fn reopen(&mut self) -> Result<(), Error> {
        if self.output.check().is_ok() {
            return Ok(());
        }
        self.output.reopen().map_err(|error| Error::Create {
            file: self.output.path().to_owned(),
            error,
        })?;
        self.describe();
        self.write();
        Ok(())
    }

    fn finish(mut self) {
        self.empty_rings();
        for recorded in std::mem::take(&mut self.recorded) {
            let totals = Block::Totals(recorded.number, recorded.totals);
            totals.put(&mut self.blocks);
            self.former.push((recorded.thread.name, recorded.totals));
        }
        self.write();
        if !self.output.has_failed()
            && let Err(error) = self.output.close()
        {
            self.fail(&error);
        }
        self.report();
    }

    /// The last word: what was lost, if anything was.
    fn report(&self) {
        let written: u64 = self.former.iter().map(|(_, totals)| totals.written).sum();
        let mut lost: BTreeMap<&str, u64> = BTreeMap::new();
        for (name, totals) in self.former.iter().filter(|(_, totals)| totals.lost != 0) {
            *lost.entry(name).or_default() += totals.lost;
        }
        let file = self.output.path().display();
        if lost.is_empty() {
            tracing::info!("--trace file={file}: {written} entries");
            return;
        }
        let lost: Vec<String> = lost
            .iter()
            .map(|(name, count)| format!("{count} of \"{name}\""))
            .collect();
        tracing::warn!(
            "--trace file={file}: {written} entries, without {}: the rings were full (select fewer events) or the file could not be written",
            lost.join(", ")
        );
    }
}

impl Recorded {
    /// Takes up what the entries say that later files must repeat. Returns how many there are.
    fn follow(&mut self, entries: &[u8]) -> Result<u64, DecodeError> {
        let mut count = 0;
        let mut decoder = Decoder::new(entries, self.thread.ctx, self.source.base_ns);
        while let Some((_, entry)) = decoder.next()? {
            count += 1;
            match entry {
                Entry::Handler { node, fd, name } => {
                    self.handlers.insert(node, (fd, name.to_owned()));
                }
                Entry::Settings { settings, .. } => self.settings = Some(settings),
                // Told of, not recorded.
                Entry::Lost(_) => count -= 1,
                Entry::Event(_) => {}
            }
        }
        self.source.base_ns = decoder.time_ns();
        Ok(count)
    }
}
