//! `pollux top`: a running VM's iothreads and disks, refreshed on the terminal.
//!
//! Each picture is made of two samples taken over QMP: [`sample`] reads them, [`rates`] takes their difference, [`view`]
//! draws. Nothing of the terminal's state is changed, so that there is nothing to restore; where the output is no
//! terminal the pictures follow each other.

mod rates;
mod sample;
mod view;

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use crate::qmp::session::{self, Session};
use rates::Rates;

/// How to show it.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Time between two samples.
    pub interval: Duration,
    /// End after so many pictures.
    pub count: Option<u64>,
    /// Show every handler of every loop.
    pub handlers: bool,
}

/// Why it ends early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The VM does not answer.
    #[error(transparent)]
    Session(#[from] session::Error),
    /// It answers what cannot be understood.
    #[error("{command}: an answer that this version does not understand: {error}")]
    Answer {
        /// The command.
        command: &'static str,
        /// Why not.
        error: serde_json::Error,
    },
    /// The output is gone.
    #[error("standard output: {0}")]
    Output(io::Error),
}

/// Shows the VM behind `socket` until `options.count` pictures are shown, the VM has ended, or the reader has gone.
pub fn run(socket: &Path, options: Options) -> Result<(), Error> {
    let mut session = Session::connect(socket)?;
    let terminal = io::stdout().is_terminal();
    let mut shown = 0;
    let mut before = sample::take(&mut session)?;
    while options.count.is_none_or(|count| shown < count) {
        std::thread::sleep(options.interval);
        let now = sample::take(&mut session)?;
        let rates = Rates::between(&before, &now);
        let (columns, rows) = window_size(terminal);
        let picture = view::draw(
            &socket.display().to_string(),
            &rates,
            options.handlers,
            columns,
        );
        if let Err(error) = show(&picture, terminal.then_some(rows)) {
            return match error.kind() {
                io::ErrorKind::BrokenPipe => Ok(()),
                _ => Err(Error::Output(error)),
            };
        }
        before = now;
        shown += 1;
    }
    Ok(())
}

/// Columns and rows of the terminal; 80 columns elsewhere.
fn window_size(terminal: bool) -> (usize, usize) {
    let size = terminal.then(|| rustix::termios::tcgetwinsize(io::stdout()));
    match size {
        Some(Ok(size)) if size.ws_col > 0 && size.ws_row > 0 => {
            (usize::from(size.ws_col), usize::from(size.ws_row))
        }
        _ => (80, usize::MAX),
    }
}

/// Writes a picture: over the last one on a terminal, cut to its `rows`.
fn show(picture: &str, rows: Option<usize>) -> io::Result<()> {
    let mut text = String::new();
    match rows {
        None => {
            text.push_str(picture);
            text.push('\n');
        }
        Some(rows) => {
            // Home; then each line with the rest of it cleared, and all below: less flicker than clearing first.
            text.push_str("\x1b[H");
            for line in picture.lines().take(rows.saturating_sub(1)) {
                text.push_str(line);
                text.push_str("\x1b[K\n");
            }
            text.push_str("\x1b[J");
        }
    }
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()
}
