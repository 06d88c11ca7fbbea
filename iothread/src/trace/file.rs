//! The trace file, version 1. All numbers of the frame are little-endian.
//!
//! ```text
//! header: "POLLUXTR", version u16, 0 u16, run u64, sequence u32, CRC-32 u32 of what is before it
//! block:  kind u8, 0 u8, thread u16, length u32, base i64, CRC-32 u32 of these and the payload; payload
//! ```
//! A run is one recording; when its file is full the next one goes on with the next sequence
//! number. Every file begins with the threads, handlers and settings that its events refer to. The
//! entries of a thread are in order; blocks of several threads alternate.

use std::io::{self, Read};

use super::codec::{Cursor, DecodeError, Decoder, put, put_text};

const MAGIC: [u8; 8] = *b"POLLUXTR";
const VERSION: u16 = 2;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 28;
/// Bytes in front of a block's payload.
pub const FRAME_BYTES: usize = 20;
/// Longest payload.
pub const MAX_PAYLOAD: usize = 16 << 20;

/// What a file says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Header {
    /// Tells recordings apart.
    pub run: u64,
    /// Place in the recording, from 0.
    pub sequence: u32,
}

impl Header {
    /// The header's bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..20].copy_from_slice(&self.run.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.sequence.to_le_bytes());
        let crc = crc32fast::hash(&bytes[..24]);
        bytes[24..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

/// A thread whose loop is traced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thread {
    /// The loop's number in events.
    pub ctx: u64,
    /// Its id, as given to `--iothread`, or `main`.
    pub id: String,
    /// The thread's name.
    pub name: String,
    /// Its polling rule.
    pub policy: String,
}

/// How a thread's recording went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Entries written since the recording began.
    pub written: u64,
    /// Entries lost since then.
    pub lost: u64,
}

/// Why a file ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It was full; the next one goes on.
    Rotated,
    /// The recording ended.
    Closed,
}

/// A part of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    /// `thread` in later blocks is this one.
    Thread(u16, Thread),
    /// Entries of a thread.
    Events {
        /// The thread.
        thread: u16,
        /// The time that the first entry counts from, CLOCK_MONOTONIC in nanoseconds.
        base_ns: i64,
        /// The entries, for [`Decoder`].
        entries: Vec<u8>,
    },
    /// How it went for a thread, up to here.
    Totals(u16, Totals),
    /// Nothing follows.
    End(End),
}

impl Block {
    /// Appends the block to `bytes`.
    pub fn put(&self, bytes: &mut Vec<u8>) {
        let mut payload = Vec::new();
        let (kind, thread, base_ns) = match self {
            Block::Thread(number, thread) => {
                put(&mut payload, thread.ctx);
                for text in [&thread.id, &thread.name, &thread.policy] {
                    put_text(&mut payload, text);
                }
                (b'T', *number, 0)
            }
            Block::Events {
                thread,
                base_ns,
                entries,
            } => return put_block(bytes, b'E', *thread, *base_ns, entries),
            Block::Totals(number, totals) => {
                put(&mut payload, totals.written);
                put(&mut payload, totals.lost);
                (b'L', *number, 0)
            }
            Block::End(end) => {
                payload.push(u8::from(*end == End::Closed));
                (b'Z', 0, 0)
            }
        };
        put_block(bytes, kind, thread, base_ns, &payload);
    }
}

/// Appends a block of entries.
pub fn put_events(bytes: &mut Vec<u8>, thread: u16, base_ns: i64, entries: &[u8]) {
    put_block(bytes, b'E', thread, base_ns, entries);
}

fn put_block(bytes: &mut Vec<u8>, kind: u8, thread: u16, base_ns: i64, payload: &[u8]) {
    debug_assert!(payload.len() <= MAX_PAYLOAD);
    let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    let mut frame = [0; FRAME_BYTES - 4];
    frame[0] = kind;
    frame[2..4].copy_from_slice(&thread.to_le_bytes());
    frame[4..8].copy_from_slice(&len.to_le_bytes());
    frame[8..].copy_from_slice(&base_ns.to_le_bytes());
    let crc = checksum(&frame, payload);
    bytes.extend_from_slice(&frame);
    bytes.extend_from_slice(&crc.to_le_bytes());
    bytes.extend_from_slice(payload);
}

fn checksum(frame: &[u8], payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(frame);
    hasher.update(payload);
    hasher.finalize()
}

/// What is wrong with a file, and where.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is something else.
    #[error("this is no trace; give a file written by pollux --trace file=")]
    NoTrace,
    /// It is of another version.
    #[error(
        "this trace has version {0}, and this program reads {VERSION}; use the pollux-bench that came with the pollux that wrote it"
    )]
    Version(u16),
    /// It ends within something.
    #[error(
        "offset {offset}: the file ends in the middle of a block; the VM is still writing or was killed: what is before is whole"
    )]
    Truncated {
        /// Where the unfinished block begins.
        offset: u64,
    },
    /// A block does not have its checksum, or is none.
    #[error(
        "offset {offset}: the file is damaged ({what}); what is before is whole, the rest is lost: copy the file again, or record anew"
    )]
    Damaged {
        /// Where the block begins.
        offset: u64,
        /// What is wrong with it.
        what: String,
    },
    /// The system.
    #[error("offset {offset}: {source}")]
    Io {
        /// Where it was read.
        offset: u64,
        /// The reason.
        source: io::Error,
    },
}

/// Reads a file's blocks.
#[derive(Debug)]
pub struct Reader<R> {
    input: R,
    header: Header,
    offset: u64,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// It is no trace, or none that this program can read.
    pub fn new(mut input: R) -> Result<Self, ReadError> {
        let mut bytes = [0; HEADER_BYTES];
        let got =
            fill(&mut input, &mut bytes).map_err(|source| ReadError::Io { offset: 0, source })?;
        let magic = MAGIC.len().min(got);
        if got == 0 || bytes[..magic] != MAGIC[..magic] {
            return Err(ReadError::NoTrace);
        }
        if got < HEADER_BYTES {
            return Err(ReadError::Truncated { offset: 0 });
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return Err(ReadError::Version(version));
        }
        let mut cursor = Fields(&bytes[12..]);
        let header = Header {
            run: u64::from_le_bytes(cursor.take()),
            sequence: u32::from_le_bytes(cursor.take()),
        };
        if bytes != header.to_bytes() {
            return Err(damaged(0, "the header"));
        }
        Ok(Reader {
            input,
            header,
            offset: HEADER_BYTES as u64,
        })
    }

    /// What the file says of itself.
    pub fn header(&self) -> Header {
        self.header
    }

    /// Where the next block begins.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next block; None at the end of the file.
    ///
    /// # Errors
    /// The file is cut short or damaged here, or cannot be read.
    pub fn next_block(&mut self) -> Result<Option<Block>, ReadError> {
        let offset = self.offset;
        let io = |source| ReadError::Io { offset, source };
        let mut frame = [0; FRAME_BYTES];
        let got = fill(&mut self.input, &mut frame).map_err(io)?;
        if got == 0 {
            return Ok(None);
        }
        if got < FRAME_BYTES {
            return Err(ReadError::Truncated { offset });
        }
        let mut fields = Fields(&frame);
        let [kind, _] = fields.take();
        let thread = u16::from_le_bytes(fields.take());
        let len = u32::from_le_bytes(fields.take()) as usize;
        let base_ns = i64::from_le_bytes(fields.take());
        let crc = u32::from_le_bytes(fields.take());
        if len > MAX_PAYLOAD {
            return Err(damaged(offset, "an impossible length"));
        }
        let mut payload = Vec::new();
        let mut limited = self.input.by_ref().take(len as u64);
        limited.read_to_end(&mut payload).map_err(io)?;
        if payload.len() < len {
            return Err(ReadError::Truncated { offset });
        }
        if checksum(&frame[..FRAME_BYTES - 4], &payload) != crc {
            return Err(damaged(offset, "a wrong checksum"));
        }
        self.offset += (FRAME_BYTES + len) as u64;
        block(kind, thread, base_ns, payload)
            .map(Some)
            .map_err(|error| damaged(offset, &error.to_string()))
    }
}

fn damaged(offset: u64, what: &str) -> ReadError {
    ReadError::Damaged {
        offset,
        what: what.to_owned(),
    }
}

/// Reads until `bytes` is full or the input ends.
fn fill(input: &mut impl Read, bytes: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < bytes.len() {
        match input.read(&mut bytes[got..]) {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// Takes fields from the front.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (field, rest) = self.0.split_at(N);
        self.0 = rest;
        let mut bytes = [0; N];
        bytes.copy_from_slice(field);
        bytes
    }
}

fn block(kind: u8, thread: u16, base_ns: i64, payload: Vec<u8>) -> Result<Block, DecodeError> {
    let mut cursor = Cursor { bytes: &payload };
    Ok(match kind {
        b'T' => {
            let described = Thread {
                ctx: cursor.number()?,
                id: cursor.text()?.to_owned(),
                name: cursor.text()?.to_owned(),
                policy: cursor.text()?.to_owned(),
            };
            Block::Thread(thread, described)
        }
        b'E' => {
            // The checksum held; entries that are none come of another program.
            let mut decoder = Decoder::new(&payload, 0, base_ns);
            while decoder.next()?.is_some() {}
            Block::Events {
                thread,
                base_ns,
                entries: payload,
            }
        }
        b'L' => {
            let totals = Totals {
                written: cursor.number()?,
                lost: cursor.number()?,
            };
            Block::Totals(thread, totals)
        }
        b'Z' => match payload.first() {
            Some(0) => Block::End(End::Rotated),
            Some(1) => Block::End(End::Closed),
            _ => return Err(DecodeError::Value("end")),
        },
        _ => return Err(DecodeError::Tag(kind)),
    })
}
