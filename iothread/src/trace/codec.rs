//! Trace entries as bytes: what a loop's thread puts into its ring, and what a trace file's blocks
//! hold.
//!
//! An entry is a tag, the time since the entry before it, and its numbers, all in LEB128 groups of
//! seven bits, signed ones with the sign in the lowest bit. Whoever keeps entries keeps the time
//! that the first one counts from.

use std::os::fd::RawFd;

use super::TraceEvent;
use crate::policy::Reading;
use crate::settings::PollSettings;

/// Something in a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Entry<'a> {
    /// A trace point.
    Event(TraceEvent<'a>),
    /// From here on `node` is this handler.
    Handler {
        /// The number in events.
        node: u64,
        /// Its descriptor.
        fd: RawFd,
        /// Its name.
        name: &'a str,
    },
    /// Settings in effect from here on, as users gave them.
    Settings {
        /// The settings.
        settings: PollSettings,
        /// They were in effect before and are only told once more, at the head of a further file.
        again: bool,
    },
    /// So many entries are missing here: the ring was full.
    Lost(u64),
}

/// Tags up to here are trace points, at their place in [`TraceEvent::NAMES`].
const LAST_EVENT: u8 = 0x1f;
const HANDLER: u8 = 0x20;
const SETTINGS: u8 = 0x21;
const SETTINGS_AGAIN: u8 = 0x22;
const LOST: u8 = 0x23;

/// Longest name of a handler that is kept, in bytes.
pub const NAME_BYTES: usize = 255;

/// Appends `entry`, which happened at `time_ns`, to `bytes`; the entry before it was at `since_ns`.
pub fn encode(bytes: &mut Vec<u8>, since_ns: i64, time_ns: i64, entry: &Entry<'_>) {
    let tag = match entry {
        // There are far fewer than 32.
        #[allow(clippy::cast_possible_truncation)]
        Entry::Event(event) => event.index() as u8,
        Entry::Handler { .. } => HANDLER,
        Entry::Settings { again: false, .. } => SETTINGS,
        Entry::Settings { again: true, .. } => SETTINGS_AGAIN,
        Entry::Lost(_) => LOST,
    };
    bytes.push(tag);
    put_signed(bytes, time_ns.wrapping_sub(since_ns));
    match *entry {
        Entry::Event(event) => encode_event(bytes, &event),
        Entry::Handler { node, fd, name } => {
            put(bytes, node);
            put_signed(bytes, fd.into());
            put_text(bytes, name);
        }
        Entry::Settings { settings, .. } => {
            for value in [
                settings.poll_max_ns,
                settings.poll_grow,
                settings.poll_shrink,
                settings.poll_weight,
                settings.poll_alpha_milli,
                settings.aio_max_batch,
            ] {
                put_signed(bytes, value);
            }
        }
        Entry::Lost(count) => put(bytes, count),
    }
}

fn encode_event(bytes: &mut Vec<u8>, event: &TraceEvent<'_>) {
    match *event {
        TraceEvent::RunPollHandlersBegin {
            max_ns, timeout, ..
        } => {
            put_signed(bytes, max_ns);
            put_signed(bytes, timeout);
        }
        TraceEvent::RunPollHandlersEnd {
            progress, timeout, ..
        } => {
            put(bytes, progress.into());
            put_signed(bytes, timeout);
        }
        TraceEvent::PollGrow { old, new, .. } | TraceEvent::PollShrink { old, new, .. } => {
            put_signed(bytes, old);
            put_signed(bytes, new);
        }
        TraceEvent::PollAdd {
            node, fd, revents, ..
        } => {
            put(bytes, node);
            put_signed(bytes, fd.into());
            put(bytes, revents.into());
        }
        TraceEvent::PollRemove { node, fd, .. } => {
            put(bytes, node);
            put_signed(bytes, fd.into());
        }
        TraceEvent::PollDispatch { node, revents, .. } => {
            put(bytes, node);
            put(bytes, revents.into());
        }
        TraceEvent::PollObserve {
            block_ns,
            dispatch_ns,
            active,
            ..
        } => {
            put_signed(bytes, block_ns);
            put_signed(bytes, dispatch_ns);
            put(bytes, active.len() as u64);
            for &slot in active {
                put(bytes, slot.into());
            }
        }
        TraceEvent::PollHandler { node, ns, .. } => {
            put(bytes, node);
            put_signed(bytes, ns);
        }
        TraceEvent::PollReading { reading, .. } => {
            put_signed(bytes, reading.now_ns);
            put_signed(bytes, reading.cpu_ns);
            for count in [
                reading.completions,
                reading.events,
                reading.kicks,
                reading.blocks,
            ] {
                put(bytes, count);
            }
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
            put_signed(bytes, incumbent_ns);
            put_signed(bytes, window_ns);
            put(bytes, scanning.into());
            put_signed(bytes, score_micro);
            put_signed(bytes, advantage_micro);
            put(bytes, switches);
        }
    }
}

/// Appends a number.
pub(super) fn put(bytes: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        bytes.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    // Below 0x80.
    bytes.push((value & 0x7f) as u8);
}

fn put_signed(bytes: &mut Vec<u8>, value: i64) {
    put(bytes, ((value << 1) ^ (value >> 63)).cast_unsigned());
}

/// Appends a text with its length, cut to [`NAME_BYTES`].
pub(super) fn put_text(bytes: &mut Vec<u8>, text: &str) {
    let mut len = text.len().min(NAME_BYTES);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    put(bytes, len as u64);
    bytes.extend_from_slice(&text.as_bytes()[..len]);
}

/// Bytes that are no entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The last entry is cut short.
    #[error("an entry is cut short")]
    Short,
    /// A tag that this version does not know.
    #[error("an entry of the unknown kind {0:#x}")]
    Tag(u8),
    /// A number, name or list that no entry can have.
    #[error("an entry with an impossible {0}")]
    Value(&'static str),
}

/// Takes numbers from the front of a slice.
#[derive(Debug, Clone)]
pub(super) struct Cursor<'a> {
    pub(super) bytes: &'a [u8],
}

impl<'a> Cursor<'a> {
    fn byte(&mut self) -> Result<u8, DecodeError> {
        let (first, rest) = self.bytes.split_first().ok_or(DecodeError::Short)?;
        self.bytes = rest;
        Ok(*first)
    }

    pub(super) fn number(&mut self) -> Result<u64, DecodeError> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let group = u64::from(byte & 0x7f);
            if shift == 63 && group > 1 {
                break;
            }
            value |= group << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(DecodeError::Value("number"))
    }

    fn signed(&mut self) -> Result<i64, DecodeError> {
        let value = self.number()?;
        Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    fn small<T: TryFrom<u64>>(&mut self, what: &'static str) -> Result<T, DecodeError> {
        T::try_from(self.number()?).map_err(|_| DecodeError::Value(what))
    }

    fn fd(&mut self) -> Result<RawFd, DecodeError> {
        RawFd::try_from(self.signed()?).map_err(|_| DecodeError::Value("descriptor"))
    }

    pub(super) fn text(&mut self) -> Result<&'a str, DecodeError> {
        let len: usize = self.small("name")?;
        let text = self.bytes.get(..len).ok_or(DecodeError::Short)?;
        self.bytes = &self.bytes[len..];
        std::str::from_utf8(text).map_err(|_| DecodeError::Value("name"))
    }
}

/// Reads entries back.
#[derive(Debug)]
pub struct Decoder<'a> {
    cursor: Cursor<'a>,
    ctx: u64,
    time_ns: i64,
    active: Vec<u32>,
}

impl<'a> Decoder<'a> {
    /// Entries of the loop `ctx`; the first counts its time from `since_ns`.
    #[must_use]
    pub fn new(bytes: &'a [u8], ctx: u64, since_ns: i64) -> Self {
        Decoder {
            cursor: Cursor { bytes },
            ctx,
            time_ns: since_ns,
            active: Vec::new(),
        }
    }

    /// When the entry that was read last happened, CLOCK_MONOTONIC in nanoseconds.
    #[must_use]
    pub fn time_ns(&self) -> i64 {
        self.time_ns
    }

    /// Bytes that were not read yet.
    #[must_use]
    pub fn remaining(&self) -> usize {
        self.cursor.bytes.len()
    }

    /// The next entry, with its time; None at the end.
    ///
    /// # Errors
    /// The bytes are no entries; what follows cannot be read.
    #[allow(clippy::should_implement_trait)] // It lends.
    pub fn next(&mut self) -> Result<Option<(i64, Entry<'_>)>, DecodeError> {
        if self.cursor.bytes.is_empty() {
            return Ok(None);
        }
        let tag = self.cursor.byte()?;
        let time_ns = self.time_ns.wrapping_add(self.cursor.signed()?);
        self.time_ns = time_ns;
        let cursor = &mut self.cursor;
        let entry = match tag {
            0..=LAST_EVENT => Entry::Event(self.event(tag)?),
            HANDLER => Entry::Handler {
                node: cursor.number()?,
                fd: cursor.fd()?,
                name: cursor.text()?,
            },
            SETTINGS | SETTINGS_AGAIN => Entry::Settings {
                settings: PollSettings {
                    poll_max_ns: cursor.signed()?,
                    poll_grow: cursor.signed()?,
                    poll_shrink: cursor.signed()?,
                    poll_weight: cursor.signed()?,
                    poll_alpha_milli: cursor.signed()?,
                    aio_max_batch: cursor.signed()?,
                },
                again: tag == SETTINGS_AGAIN,
            },
            LOST => Entry::Lost(cursor.number()?),
            _ => return Err(DecodeError::Tag(tag)),
        };
        Ok(Some((time_ns, entry)))
    }

    fn event(&mut self, tag: u8) -> Result<TraceEvent<'_>, DecodeError> {
        let ctx = self.ctx;
        let cursor = &mut self.cursor;
        Ok(match TraceEvent::NAMES.get(usize::from(tag)).copied() {
            Some("run_poll_handlers_begin") => TraceEvent::RunPollHandlersBegin {
                ctx,
                max_ns: cursor.signed()?,
                timeout: cursor.signed()?,
            },
            Some("run_poll_handlers_end") => TraceEvent::RunPollHandlersEnd {
                ctx,
                progress: cursor.number()? != 0,
                timeout: cursor.signed()?,
            },
            Some("poll_grow") => TraceEvent::PollGrow {
                ctx,
                old: cursor.signed()?,
                new: cursor.signed()?,
            },
            Some("poll_shrink") => TraceEvent::PollShrink {
                ctx,
                old: cursor.signed()?,
                new: cursor.signed()?,
            },
            Some("poll_add") => TraceEvent::PollAdd {
                ctx,
                node: cursor.number()?,
                fd: cursor.fd()?,
                revents: cursor.small("revents")?,
            },
            Some("poll_remove") => TraceEvent::PollRemove {
                ctx,
                node: cursor.number()?,
                fd: cursor.fd()?,
            },
            Some("poll_dispatch") => TraceEvent::PollDispatch {
                ctx,
                node: cursor.number()?,
                revents: cursor.small("revents")?,
            },
            Some("poll_observe") => {
                let (block_ns, dispatch_ns) = (cursor.signed()?, cursor.signed()?);
                let count: usize = cursor.small("number of handlers")?;
                if count > cursor.bytes.len() {
                    return Err(DecodeError::Short);
                }
                self.active.clear();
                for _ in 0..count {
                    self.active.push(cursor.small("handler")?);
                }
                TraceEvent::PollObserve {
                    ctx,
                    block_ns,
                    dispatch_ns,
                    active: &self.active,
                }
            }
            Some("poll_handler") => TraceEvent::PollHandler {
                ctx,
                node: cursor.number()?,
                ns: cursor.signed()?,
            },
            Some("poll_reading") => TraceEvent::PollReading {
                ctx,
                reading: Reading {
                    now_ns: cursor.signed()?,
                    cpu_ns: cursor.signed()?,
                    completions: cursor.number()?,
                    events: cursor.number()?,
                    kicks: cursor.number()?,
                    blocks: cursor.number()?,
                },
            },
            Some("poll_trial") => TraceEvent::PollTrial {
                ctx,
                incumbent_ns: cursor.signed()?,
                window_ns: cursor.signed()?,
                scanning: cursor.number()? != 0,
                score_micro: cursor.signed()?,
                advantage_micro: cursor.signed()?,
                switches: cursor.number()?,
            },
            _ => return Err(DecodeError::Tag(tag)),
        })
    }
}
