//! Going through the entries of a recording.

use std::collections::HashMap;
use std::path::PathBuf;

use iothread::PollSettings;
use iothread::trace::codec::{Decoder, Entry};
use iothread::trace::file::{Block, End, ReadError, Thread};

use super::Error;
use super::files::{Part, open};

/// A thread of the recording, as known at the entry that is shown.
#[derive(Debug, Clone)]
pub struct Traced {
    /// Its place among the threads, from 0.
    pub number: usize,
    /// What the recording says of it.
    pub thread: Thread,
    /// Names of its handlers.
    pub handlers: HashMap<u64, String>,
    /// Settings in effect.
    pub settings: Option<PollSettings>,
    /// Entries lost up to the last time that the recording told.
    pub lost: u64,
}

impl Traced {
    /// A handler's name; its number if it was never told.
    #[must_use]
    pub fn handler(&self, node: u64) -> String {
        let name = self.handlers.get(&node).cloned();
        name.unwrap_or_else(|| format!("handler {node}"))
    }
}

/// What takes the entries.
pub trait Visitor {
    /// An entry of a thread, and when it happened (CLOCK_MONOTONIC, nanoseconds).
    fn entry(&mut self, traced: &Traced, time_ns: i64, entry: &Entry<'_>);
}

/// How the recording ended.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Why no more could be read.
    pub problem: Option<Error>,
    /// What a reader of the numbers should know.
    pub notes: Vec<String>,
    /// The threads, as they were in the end.
    pub threads: Vec<Traced>,
}

/// Shows every entry of `parts` to `visitor`: those of a thread in order, threads in turns. Stops at
/// the first place that cannot be read.
pub fn read(parts: &[Part], visitor: &mut dyn Visitor) -> Outcome {
    let mut walk = Walk {
        visitor,
        numbers: HashMap::new(),
        outcome: Outcome::default(),
    };
    if let Some(first) = parts.first()
        && first.header.sequence != 0
    {
        let note = format!(
            "the recording's first {} files are gone: the oldest were removed, as files= says",
            first.header.sequence
        );
        walk.outcome.notes.push(note);
    }
    let mut end = None;
    for (at, part) in parts.iter().enumerate() {
        if let Some(before) = at.checked_sub(1).map(|at| &parts[at])
            && before.header.sequence + 1 != part.header.sequence
        {
            let note = format!(
                "a part is missing between {} and {}",
                before.path.display(),
                part.path.display()
            );
            walk.outcome.notes.push(note);
        }
        match walk.part(part) {
            Ok(ended) => end = ended,
            Err(source) => {
                walk.outcome.problem = Some(failed(&part.path, source));
                return walk.outcome;
            }
        }
    }
    let note = match end {
        Some(End::Closed) => return walk.outcome,
        Some(End::Rotated) => "the recording goes on in a file that was not given",
        None => "the recording was not closed: the VM is still writing, or it was killed",
    };
    walk.outcome.notes.push(note.to_owned());
    walk.outcome
}

fn failed(path: &std::path::Path, source: ReadError) -> Error {
    Error::File {
        path: PathBuf::from(path),
        source,
    }
}

struct Walk<'a> {
    visitor: &'a mut dyn Visitor,
    /// From the numbers in the file to places in `outcome.threads`.
    numbers: HashMap<u16, usize>,
    outcome: Outcome,
}

impl Walk<'_> {
    fn part(&mut self, part: &Part) -> Result<Option<End>, ReadError> {
        let mut reader = match open(&part.path) {
            Ok(reader) => reader,
            Err(Error::File { source, .. }) => return Err(source),
            Err(_) => return Err(ReadError::NoTrace),
        };
        let mut end = None;
        loop {
            let offset = reader.offset();
            let Some(block) = reader.next_block()? else {
                return Ok(end);
            };
            let refuse = |what: &str| ReadError::Damaged {
                offset,
                what: what.to_owned(),
            };
            match block {
                Block::Thread(number, thread) => self.thread(number, thread),
                Block::Events {
                    thread,
                    base_ns,
                    entries,
                } => {
                    let place = self.numbers.get(&thread);
                    let place = *place.ok_or_else(|| refuse("entries of an unknown thread"))?;
                    self.entries(place, base_ns, &entries)
                        .map_err(|error| refuse(&error.to_string()))?;
                }
                // Losses are also among the entries, where they happened, but for those at the end.
                Block::Totals(thread, totals) => {
                    if let Some(place) = self.numbers.get(&thread) {
                        self.outcome.threads[*place].lost = totals.lost;
                    }
                }
                Block::End(how) => end = Some(how),
            }
        }
    }

    fn thread(&mut self, number: u16, thread: Thread) {
        let threads = &mut self.outcome.threads;
        // A further file says it again.
        let known = self.numbers.get(&number).copied();
        if known.is_some_and(|place| threads[place].thread == thread) {
            return;
        }
        self.numbers.insert(number, threads.len());
        threads.push(Traced {
            number: threads.len(),
            thread,
            handlers: HashMap::new(),
            settings: None,
            lost: 0,
        });
    }

    fn entries(
        &mut self,
        place: usize,
        base_ns: i64,
        entries: &[u8],
    ) -> Result<(), iothread::trace::codec::DecodeError> {
        let traced = &mut self.outcome.threads[place];
        let mut decoder = Decoder::new(entries, traced.thread.ctx, base_ns);
        while let Some((time_ns, entry)) = decoder.next()? {
            match entry {
                Entry::Handler { node, name, .. } => {
                    traced.handlers.insert(node, name.to_owned());
                }
                Entry::Settings { settings, .. } => traced.settings = Some(settings),
                _ => {}
            }
            self.visitor.entry(traced, time_ns, &entry);
        }
        Ok(())
    }
}
