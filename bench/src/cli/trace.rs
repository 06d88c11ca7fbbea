//! `pollux-bench trace`.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args;
use iothread::trace::codec::Entry;

use super::Error;
use crate::trace::csv::Table;
use crate::trace::files::find;
use crate::trace::read::{Traced, Visitor, read};
use crate::trace::summary::Counter;
use crate::trace::{self};

#[derive(Debug, Args)]
pub(super) struct TraceArgs {
    /// Written by pollux --trace; older parts (FILE.1, …) are found by themselves
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,

    /// Write every entry as a line of CSV; - is standard output, without the summary
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
}

impl From<trace::Error> for Error {
    fn from(error: trace::Error) -> Error {
        match error {
            trace::Error::Write { .. } => Error::Failed(error.to_string()),
            other => Error::Usage(other.to_string()),
        }
    }
}

/// The entries for the summary, and for the table if there is one.
struct Both {
    counter: Counter,
    table: Option<Table<Box<dyn Write>>>,
}

impl Visitor for Both {
    fn entry(&mut self, traced: &Traced, time_ns: i64, entry: &Entry<'_>) {
        self.counter.entry(traced, time_ns, entry);
        if let Some(table) = &mut self.table {
            table.entry(traced, time_ns, entry);
        }
    }
}

fn create(path: &Path) -> Result<Box<dyn Write>, trace::Error> {
    if path == Path::new("-") {
        return Ok(Box::new(BufWriter::new(io::stdout())));
    }
    let file = File::create(path).map_err(|source| unwritten(path, source))?;
    Ok(Box::new(BufWriter::new(file)))
}

fn unwritten(path: &Path, source: io::Error) -> trace::Error {
    trace::Error::Write {
        path: path.to_owned(),
        source,
    }
}

pub(super) fn run(args: &TraceArgs) -> Result<(), Error> {
    let parts = find(&args.files)?;
    let output = args.csv.as_deref().map(create).transpose()?;
    let mut both = Both {
        counter: Counter::default(),
        table: output.map(Table::new),
    };
    let outcome = read(&parts, &mut both);
    if let (Some(table), Some(path)) = (both.table, &args.csv) {
        match table.finish() {
            // A reader that closes its end has read enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            finished => finished.map_err(|source| unwritten(path, source))?,
        }
    }
    let summary = both.counter.summary(&outcome);
    if args.csv.as_deref() != Some(Path::new("-")) {
        let text = match args.json {
            true => serde_json::to_string_pretty(&summary)
                .map_err(|error| Error::Failed(error.to_string()))?,
            false => summary.text().trim_end().to_owned(),
        };
        // As above.
        let _ = writeln!(io::stdout(), "{text}");
    }
    match outcome.problem {
        // What is before it was shown.
        Some(problem) => Err(Error::Failed(problem.to_string())),
        None => Ok(()),
    }
}
