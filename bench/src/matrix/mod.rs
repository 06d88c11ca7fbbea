//! The matrix language: which runs a measurement consists of.
//!
//! A matrix is a list of words `axis=value[,value…]`, such as
//! `rw=randread,randwrite bs=4k,8k iodepth=1,32 iothreads=1,2`; the runs are the product of
//! the axes, the last axis varying fastest. Whole numbers may be written as a range: `1..5`
//! is `1,2,3,4,5`.
//!
//! An axis that means nothing to a run is dropped from it, and equal runs are merged: in
//! `poll-policy=context,weighted poll-weight=1..5` the policy `context`, which has no weight,
//! is one run, not five. The same holds for what a peer VMM cannot be told.

mod axes;
mod run;
#[cfg(test)]
mod tests;

pub use axes::{AXES, Axis, Kind, axis};
pub(crate) use axes::{bytes, size_text};
pub use run::{Engine, Layout, Run, Rw, Vmm};

/// The most runs that a matrix may have: beyond it a mistyped axis is more likely than a plan.
pub const MAX_RUNS: usize = 4096;

/// Which load a matrix is for: not every axis has a meaning for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tool {
    /// fio in a Linux guest.
    Fio,
    /// The embedded bare-metal guest.
    Guest,
    /// A driver of our own at a vhost-user back end.
    Vhost,
}

impl Tool {
    /// The subcommand's name.
    pub fn name(self) -> &'static str {
        match self {
            Tool::Fio => "fio",
            Tool::Guest => "guest",
            Tool::Vhost => "vhost",
        }
    }
}

/// What is wrong with a matrix.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// A word without `=`.
    #[error("matrix: `{0}` is not axis=value; write an axis with its values, such as bs=4k,8k")]
    NotAPair(String),
    /// An axis that does not exist.
    #[error("matrix: there is no axis `{name}`{}; the axes of `{tool}` are {known}", hint(.near))]
    UnknownAxis {
        /// As written.
        name: String,
        /// The nearest existing name.
        near: Option<&'static str>,
        /// The subcommand.
        tool: &'static str,
        /// All names, with commas.
        known: String,
    },
    /// An axis that appears twice.
    #[error("matrix: the axis `{0}` is given twice; list its values in one word: {0}=a,b")]
    Twice(&'static str),
    /// A value that the axis does not take.
    #[error("matrix: {axis}={value} is not possible; {axis} takes {takes}")]
    BadValue {
        /// The axis.
        axis: &'static str,
        /// As written.
        value: String,
        /// What it takes.
        takes: &'static str,
    },
    /// One value given twice.
    #[error("matrix: {axis} lists {value} twice; repetitions are asked for with --repeat")]
    ValueTwice {
        /// The axis.
        axis: &'static str,
        /// The value.
        value: String,
    },
    /// A product beyond [`MAX_RUNS`].
    #[error("matrix: {0} runs are more than {MAX_RUNS}; give fewer values or split the matrix")]
    TooMany(usize),
}

fn hint(near: &Option<&'static str>) -> String {
    near.map(|name| format!(" (did you mean `{name}`?)"))
        .unwrap_or_default()
}

/// Reads a matrix into its runs, in order, each once.
///
/// `words` are split at white space again, so a matrix may come as one argument or as many.
pub fn parse<S: AsRef<str>>(words: &[S], tool: Tool) -> Result<Vec<Run>, Error> {
    let mut given: Vec<(&'static Axis, Vec<String>)> = Vec::new();
    for word in words.iter().flat_map(|w| w.as_ref().split_whitespace()) {
        let (name, list) = word
            .split_once('=')
            .ok_or_else(|| Error::NotAPair(word.into()))?;
        let axis = known_axis(name, tool)?;
        if given.iter().any(|(other, _)| other.name == axis.name) {
            return Err(Error::Twice(axis.name));
        }
        given.push((axis, values(axis, list)?));
    }
    let count = given
        .iter()
        .fold(1usize, |n, (_, v)| n.saturating_mul(v.len()));
    if count > MAX_RUNS {
        return Err(Error::TooMany(count));
    }
    product(&given, count)
}

fn known_axis(name: &str, tool: Tool) -> Result<&'static Axis, Error> {
    let of_tool = || AXES.iter().filter(|a| a.tools.contains(&tool));
    of_tool()
        .find(|a| a.name == name)
        .ok_or_else(|| Error::UnknownAxis {
            name: name.into(),
            near: of_tool()
                .map(|a| (strsim::damerau_levenshtein(a.name, name), a.name))
                .min()
                .filter(|(distance, _)| *distance <= 3)
                .map(|(_, near)| near),
            tool: tool.name(),
            known: of_tool().map(|a| a.name).collect::<Vec<_>>().join(", "),
        })
}

/// The values of one word, ranges written out, each checked against the axis.
fn values(axis: &'static Axis, list: &str) -> Result<Vec<String>, Error> {
    let bad = |value: &str| Error::BadValue {
        axis: axis.name,
        value: value.into(),
        takes: axis.takes,
    };
    let mut out: Vec<String> = Vec::new();
    for item in list.split(',') {
        let expanded = match item.split_once("..") {
            None => vec![item.to_string()],
            Some((from, to)) => {
                let from: u64 = from.parse().map_err(|_| bad(item))?;
                let to: u64 = to.trim_start_matches('=').parse().map_err(|_| bad(item))?;
                let length = to.checked_sub(from).ok_or_else(|| bad(item))?;
                if length >= MAX_RUNS as u64 {
                    return Err(Error::TooMany(
                        usize::try_from(length).unwrap_or(usize::MAX),
                    ));
                }
                (from..=to).map(|n| n.to_string()).collect()
            }
        };
        for value in expanded {
            let mut probe = Run::default();
            (axis.set)(&mut probe, &value).ok_or_else(|| bad(&value))?;
            // Compared as the axis understands them: 4k and 4096 are one value.
            let canonical = (axis.get)(&probe).unwrap_or_else(|| value.clone());
            if out.contains(&canonical) {
                return Err(Error::ValueTwice {
                    axis: axis.name,
                    value,
                });
            }
            out.push(canonical);
        }
    }
    Ok(out)
}

fn product(given: &[(&'static Axis, Vec<String>)], count: usize) -> Result<Vec<Run>, Error> {
    let mut runs: Vec<Run> = Vec::new();
    for number in 0..count {
        let mut run = Run::default();
        let mut rest = number;
        for (axis, values) in given.iter().rev() {
            let value = &values[rest % values.len()];
            rest /= values.len();
            (axis.set)(&mut run, value).ok_or_else(|| Error::BadValue {
                axis: axis.name,
                value: value.clone(),
                takes: axis.takes,
            })?;
        }
        run.drop_meaningless();
        if !runs.contains(&run) {
            runs.push(run);
        }
    }
    Ok(runs)
}
