//! The parts of a recording: the files that are named, and the older ones beside them.

use std::collections::HashSet;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use iothread::trace::file::{Header, ReadError, Reader};

use super::Error;

/// A part of a recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The file.
    pub path: PathBuf,
    /// What it says of itself.
    pub header: Header,
}

/// Opens a part.
pub(super) fn open(path: &Path) -> Result<Reader<BufReader<File>>, Error> {
    let failed = |source| Error::File {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(|source| failed(ReadError::Io { offset: 0, source }))?;
    Reader::new(BufReader::with_capacity(1 << 18, file)).map_err(failed)
}

/// The parts of the recording that `paths` belong to, in the order in which they were written:
/// those named, and `PATH.1`, `PATH.2`, … of the same recording.
///
/// # Errors
/// A named file is none of a trace, or they are of several recordings.
pub fn find(paths: &[PathBuf]) -> Result<Vec<Part>, Error> {
    let mut parts: Vec<Part> = Vec::new();
    let mut known = HashSet::new();
    for path in paths {
        let header = open(path)?.header();
        if let Some(first) = parts.first().filter(|first| first.header.run != header.run) {
            return Err(Error::Mixed {
                a: first.path.clone(),
                b: path.clone(),
            });
        }
        let mut add = |path: PathBuf, header: Header| {
            if known.insert(header.sequence) {
                parts.push(Part { path, header });
            }
        };
        add(path.clone(), header);
        for number in 1.. {
            let mut name = path.clone().into_os_string();
            name.push(format!(".{number}"));
            let older = PathBuf::from(name);
            if !older.exists() {
                break;
            }
            // What an earlier recording left is not ours.
            match open(&older).map(|reader| reader.header()) {
                Ok(found) if found.run == header.run => add(older, found),
                _ => {}
            }
        }
    }
    parts.sort_by_key(|part| part.header.sequence);
    Ok(parts)
}
