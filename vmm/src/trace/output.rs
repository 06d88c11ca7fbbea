//! The trace's files: one that is written, and up to so many older ones behind it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use iothread::trace::file::{Block, End, Header};

/// A trace being written to `path`; the file before it is `path.1`, and so on.
#[derive(Debug)]
pub struct Output {
    path: PathBuf,
    max_bytes: u64,
    /// Files that are kept, the one being written among them.
    keep: u32,
    header: Header,
    /// None after a failure.
    file: Option<File>,
    size_bytes: u64,
}

impl Output {
    /// Creates the first file; one of that name is replaced.
    pub fn create(path: &Path, max_bytes: u64, keep: u32) -> io::Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        // A name, not a time: the low bits differ between any two recordings of one host.
        let nanoseconds = now.map_or(0, |now| now.as_nanos() as u64);
        let header = Header {
            run: nanoseconds ^ u64::from(std::process::id()).rotate_left(40),
            sequence: 0,
        };
        let mut output = Self {
            path: path.to_owned(),
            max_bytes,
            keep,
            header,
            file: None,
            size_bytes: 0,
        };
        output.open(0)?;
        Ok(output)
    }

    fn open(&mut self, sequence: u32) -> io::Result<()> {
        let header = Header {
            sequence,
            ..self.header
        };
        // Files are renamed and removed: not what a device or a pipe is for.
        if std::fs::metadata(&self.path).is_ok_and(|found| !found.is_file()) {
            return Err(io::Error::other("it is no regular file"));
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&self.path)?;
        let bytes = header.to_bytes();
        file.write_all(&bytes).inspect_err(|_| {
            // Without its header it is nothing.
            let _ = std::fs::remove_file(&self.path);
        })?;
        self.header = header;
        self.size_bytes = bytes.len() as u64;
        self.file = Some(file);
        Ok(())
    }

    /// The file's name, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a failure has stopped it.
    pub fn has_failed(&self) -> bool {
        self.file.is_none()
    }

    /// Whether `more` bytes and an end fit into the file.
    pub fn has_room(&self, more: usize) -> bool {
        let end = end(End::Rotated).len();
        self.size_bytes + (more + end) as u64 <= self.max_bytes
    }

    /// Looks whether the file is still there.
    ///
    /// # Errors
    /// It failed before, or somebody has removed it.
    pub fn check(&self) -> io::Result<()> {
        let Some(file) = &self.file else {
            return Err(io::Error::other("it failed before"));
        };
        match file.metadata()?.nlink() {
            0 => Err(io::Error::new(io::ErrorKind::NotFound, "it was removed")),
            _ => Ok(()),
        }
    }

    /// Appends whole blocks. After an error the file has none of them and nothing is written any
    /// more.
    pub fn write(&mut self, blocks: &[u8]) -> io::Result<()> {
        let written = self.check().and_then(|()| match &mut self.file {
            Some(file) => file.write_all(blocks),
            None => Ok(()),
        });
        match (&written, self.file.take()) {
            (Ok(()), file) => {
                self.size_bytes += blocks.len() as u64;
                self.file = file;
            }
            (Err(_), Some(file)) => {
                // A reader shall find whole blocks; if that fails too it finds half a one.
                let _ = file.set_len(self.size_bytes);
            }
            (Err(_), None) => {}
        }
        written
    }

    /// Ends the file and begins the next.
    pub fn rotate(&mut self) -> io::Result<()> {
        let ended = self.write(&end(End::Rotated));
        self.file = None;
        ended?;
        self.next()
    }

    /// Begins the next file after a failure.
    pub fn reopen(&mut self) -> io::Result<()> {
        // Gone or not: what is there must not be overwritten.
        self.next()
    }

    fn next(&mut self) -> io::Result<()> {
        let there = self.path.try_exists()?;
        for older in (1..self.keep).rev().filter(|_| there) {
            let from = match older {
                1 => self.path.clone(),
                _ => self.behind(older - 1),
            };
            match std::fs::rename(from, self.behind(older)) {
                // The first few times there are not so many, and users may take files away.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                renamed => renamed?,
            }
        }
        self.open(self.header.sequence + 1)
    }

    fn behind(&self, number: u32) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(format!(".{number}"));
        name.into()
    }

    /// Ends the recording.
    pub fn close(&mut self) -> io::Result<()> {
        let closed = self.write(&end(End::Closed));
        self.file = None;
        closed
    }
}

fn end(end: End) -> Vec<u8> {
    let mut bytes = Vec::new();
    Block::End(end).put(&mut bytes);
    bytes
}
