//! Cuts the bytes that a client sends into JSON texts.
//!
//! A text ends where its brackets balance, so it needs no newline, may span many, and several may come in one packet. Only
//! brackets and strings are looked at here, each byte once; whether a text is JSON is the parser's business. Input that
//! can never become JSON is reported at once, and the framer goes on behind it: behind the offending byte, or at the next
//! line after a text that grew too long. The byte 0xFF, which no JSON contains, throws away what was begun (a client sends
//! it to get back in step).

use super::error::Error;

/// Longest text taken, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// What the bytes seen so far amount to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Between texts.
    Between,
    /// In an object or array that is `depth` brackets deep.
    Nested { depth: usize },
    /// In a string; `depth` as around it, `escaped` after a backslash.
    Text { depth: usize, escaped: bool },
    /// In a number or word outside any bracket.
    Scalar,
    /// In what is left of a line that was given up.
    Skipped,
}

/// The input of one client.
#[derive(Debug)]
pub struct Framer {
    buffer: Vec<u8>,
    /// Where the text in progress begins in `buffer`.
    start: usize,
    /// How far `buffer` was looked at.
    scanned: usize,
    state: State,
}

impl Default for Framer {
    fn default() -> Self {
        Self {
            buffer: Vec::new(),
            start: 0,
            scanned: 0,
            state: State::Between,
        }
    }
}

impl Framer {
    /// Takes more input. Call [`Framer::next_text`] until it gives nothing before taking more: that keeps the buffer below
    /// [`MAX_MESSAGE_BYTES`] and one packet.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.scanned -= self.start;
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole text, or what is wrong with the input; nothing if more input is needed.
    pub fn next_text(&mut self) -> Option<Result<&[u8], Error>> {
        while let Some(&byte) = self.buffer.get(self.scanned) {
            let begin = self.start;
            match self.step(byte) {
                Step::More => {}
                Step::Ends => return Some(Ok(&self.buffer[begin..self.start])),
                Step::Wrong(error) => return Some(Err(error)),
            }
        }
        None
    }

    /// Looks at the byte at `scanned`.
    fn step(&mut self, byte: u8) -> Step {
        if byte == 0xff {
            return self.give_up(State::Between, "invalid byte 0xff");
        }
        if self.scanned - self.start >= MAX_MESSAGE_BYTES {
            let next = match byte {
                b'\n' => State::Between,
                _ => State::Skipped,
            };
            return self.give_up(next, "message is longer than 1 MiB");
        }
        let white = matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        let state = match (self.state, byte) {
            (State::Skipped, b'\n') => State::Between,
            (State::Skipped, _) => State::Skipped,
            (State::Between, b'{' | b'[') => State::Nested { depth: 1 },
            (State::Between, b'}' | b']') => {
                let text = format!("stray '{}'", char::from(byte));
                return self.give_up(State::Between, &text);
            }
            (State::Between, b'"') => State::Text {
                depth: 0,
                escaped: false,
            },
            (State::Between, _) if white => State::Between,
            (State::Between, _) => State::Scalar,
            (State::Nested { depth }, b'"') => State::Text {
                depth,
                escaped: false,
            },
            (State::Nested { depth }, b'{' | b'[') => State::Nested { depth: depth + 1 },
            (State::Nested { depth: 1 }, b'}' | b']') => return self.end(1),
            (State::Nested { depth }, b'}' | b']') => State::Nested { depth: depth - 1 },
            (State::Nested { depth }, _) => State::Nested { depth },
            (State::Text { .. }, 0..0x20) => {
                return self.give_up(State::Between, "control character in a string");
            }
            (State::Text { depth, escaped }, _) => match (escaped, byte) {
                (false, b'"') if depth == 0 => return self.end(1),
                (false, b'"') => State::Nested { depth },
                (false, b'\\') => State::Text {
                    depth,
                    escaped: true,
                },
                _ => State::Text {
                    depth,
                    escaped: false,
                },
            },
            (State::Scalar, b'{' | b'}' | b'[' | b']' | b'"') => return self.end(0),
            (State::Scalar, _) if white => return self.end(0),
            (State::Scalar, _) => State::Scalar,
        };
        self.state = state;
        self.scanned += 1;
        if matches!(state, State::Between | State::Skipped) {
            self.start = self.scanned;
        }
        Step::More
    }

    /// The text ends here, with this byte (`taken` 1) or before it (0).
    fn end(&mut self, taken: usize) -> Step {
        self.scanned += taken;
        self.start = self.scanned;
        self.state = State::Between;
        Step::Ends
    }

    /// Drops the text in progress and this byte.
    fn give_up(&mut self, next: State, problem: &str) -> Step {
        self.scanned += 1;
        self.start = self.scanned;
        self.state = next;
        Step::Wrong(Error::Syntax(problem.to_owned()))
    }

    /// Bytes held, for the bound on memory.
    #[cfg(test)]
    fn held(&self) -> usize {
        self.buffer.len() - self.start
    }
}

enum Step {
    More,
    Ends,
    Wrong(Error),
}

#[cfg(test)]
mod tests;
