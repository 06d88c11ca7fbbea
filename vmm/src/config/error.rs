//! What is wrong with a configuration, and where.

use std::fmt;

use super::nearest::nearest;

/// One mistake in the command line or the configuration file.
///
/// Its text is one line: where it is (option or file, then the key path), the value, what is wrong with it and what to
/// write instead.
#[derive(Debug)]
pub struct Error {
    /// The option with its text (`--disk path=a.img`) or the file; empty while unknown.
    place: String,
    /// Keys and indices from the place down to the value.
    path: Vec<Step>,
    /// The offending value as the user wrote it.
    value: Option<String>,
    problem: Problem,
}

#[derive(Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(usize),
}

/// The kinds of mistake.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// A key that the section does not have.
    #[error("no key {key:?}{}", known(key, expected))]
    UnknownKey {
        /// The key given.
        key: String,
        /// The keys that exist.
        expected: &'static [&'static str],
    },
    /// A word that is none of the choices.
    #[error("no such choice{}", choices(given, expected))]
    UnknownChoice {
        /// The word given.
        given: String,
        /// The choices that exist.
        expected: &'static [&'static str],
    },
    /// A key that must be there is not.
    #[error("{0}= is missing; add it")]
    MissingKey(&'static str),
    /// A key given twice.
    #[error("key {0:?} is given twice; keep one")]
    DuplicateKey(String),
    /// A value of the wrong kind or range.
    #[error("not valid here; give {0}")]
    Expected(String),
    /// The text is no list of `key=value`.
    #[error("{0}")]
    Syntax(String),
    /// Anything else: what is wrong and what to do.
    #[error("{0}")]
    Other(String),
}

impl Error {
    /// A mistake in `option` as a whole.
    pub fn new(option: impl Into<String>, problem: impl Into<String>) -> Self {
        Self {
            place: option.into(),
            path: Vec::new(),
            value: None,
            problem: Problem::Other(problem.into()),
        }
    }

    /// A mistake whose place is added by the caller.
    pub(super) fn of(problem: Problem) -> Self {
        Self {
            place: String::new(),
            path: Vec::new(),
            value: None,
            problem,
        }
    }

    /// Puts `place` in front, unless an inner one is known.
    pub(super) fn at(mut self, place: impl Into<String>) -> Self {
        if self.place.is_empty() {
            self.place = place.into();
        }
        self
    }

    /// Remembers the value that was refused, unless a deeper one is known.
    pub(super) fn refusing(mut self, value: &serde_json::Value) -> Self {
        let scalar = !value.is_object() && !value.is_array();
        if self.value.is_none() && self.path.is_empty() && scalar {
            self.value = Some(match value {
                serde_json::Value::String(text) => text.clone(),
                other => other.to_string(),
            });
        }
        self
    }

    /// Forgets the refused value, where the place shows it already.
    pub(super) fn without_value(mut self) -> Self {
        self.value = None;
        self
    }

    /// Goes one key up.
    pub(super) fn under_key(mut self, key: &str) -> Self {
        self.path.insert(0, Step::Key(key.to_owned()));
        self
    }

    /// Goes one list element up.
    pub(super) fn under_index(mut self, index: usize) -> Self {
        self.path.insert(0, Step::Index(index));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            // Control characters in a name given by the user must not break the line.
            f.write_str(&one_line(&self.place))?;
            f.write_str(": ")?;
        }
        for (at, step) in self.path.iter().enumerate() {
            match step {
                Step::Key(key) if at == 0 => f.write_str(&one_line(key))?,
                Step::Key(key) => write!(f, ".{}", one_line(key))?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        match (&self.value, self.path.is_empty()) {
            (Some(value), false) => write!(f, "={}: ", one_line(value))?,
            (Some(value), true) => write!(f, "{:?}: ", value)?,
            (None, false) => f.write_str(": ")?,
            (None, true) => {}
        }
        f.write_str(&one_line(&self.problem.to_string()))
    }
}

impl std::error::Error for Error {}

impl serde::de::Error for Error {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::of(Problem::Other(message.to_string()))
    }

    fn invalid_type(_: serde::de::Unexpected<'_>, expected: &dyn serde::de::Expected) -> Self {
        Self::of(Problem::Expected(plain(&expected.to_string())))
    }

    fn invalid_value(_: serde::de::Unexpected<'_>, expected: &dyn serde::de::Expected) -> Self {
        Self::of(Problem::Expected(plain(&expected.to_string())))
    }

    fn unknown_variant(variant: &str, expected: &'static [&'static str]) -> Self {
        Self::of(Problem::UnknownChoice {
            given: variant.to_owned(),
            expected,
        })
    }

    fn unknown_field(field: &str, expected: &'static [&'static str]) -> Self {
        Self::of(Problem::UnknownKey {
            key: field.to_owned(),
            expected,
        })
    }

    fn missing_field(field: &'static str) -> Self {
        Self::of(Problem::MissingKey(field))
    }

    fn duplicate_field(field: &'static str) -> Self {
        Self::of(Problem::DuplicateKey(field.to_owned()))
    }
}

/// Escapes control characters, so that a message stays one line.
pub fn one_line(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let escape = c.is_control();
            escape
                .then(|| c.escape_default())
                .into_iter()
                .flatten()
                .chain((!escape).then_some(c))
        })
        .collect()
}

/// Serde's names of types in words.
fn plain(expected: &str) -> String {
    match expected {
        "u8" => "a whole number from 0 to 255".to_owned(),
        "u16" => "a whole number from 0 to 65535".to_owned(),
        "u32" => format!("a whole number from 0 to {}", u32::MAX),
        "u64" | "usize" => "a whole number of at least 0".to_owned(),
        "i64" => "a whole number".to_owned(),
        "a boolean" => "on or off".to_owned(),
        "a string" => "a text".to_owned(),
        other => other.to_owned(),
    }
}

fn known(key: &str, expected: &'static [&'static str]) -> String {
    match nearest(key, expected) {
        Some(near) => format!("; did you mean {near:?}?"),
        None => format!("; the keys are {}", expected.join(", ")),
    }
}

fn choices(given: &str, expected: &'static [&'static str]) -> String {
    match nearest(given, expected) {
        Some(near) => format!("; did you mean {near:?}? (one of {})", expected.join(", ")),
        None => format!("; give one of {}", expected.join(", ")),
    }
}
