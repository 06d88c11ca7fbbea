//! The guest's lines of JSON.

use serde::Deserialize;

/// A line that matters here.
#[derive(Debug)]
pub(super) enum Line {
    /// A job ended.
    Job(Box<JobLine>),
    /// The guest cannot go on.
    Trouble(String),
}

/// What the guest says of a job; it says more.
#[derive(Debug, Deserialize)]
pub(super) struct JobLine {
    pub job: String,
    pub ok: bool,
    pub ios: u64,
    pub bytes: u64,
    pub elapsed_ns: u64,
    #[serde(default)]
    pub errors: u64,
    #[serde(default)]
    pub unsupported: u64,
    #[serde(default)]
    pub timed_out: bool,
    pub lat_ns: LatencyLine,
    pub kicks: u64,
    pub interrupts: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct LatencyLine {
    pub mean: u64,
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    #[serde(rename = "p99.9")]
    pub p999: u64,
    pub max: u64,
}

impl Line {
    /// Reads a console line; `None` if it is of no interest.
    pub fn read(text: &str) -> Option<Line> {
        // Firmware may leave something before the first line.
        let value: serde_json::Value = serde_json::from_str(&text[text.find('{')?..]).ok()?;
        for key in ["error", "panic", "exception"] {
            if value.get(key).is_some() {
                return Some(Line::Trouble(value.to_string()));
            }
        }
        if value.get("job").is_some() {
            return Some(match serde_json::from_value(value) {
                Ok(job) => Line::Job(Box::new(job)),
                Err(error) => Line::Trouble(format!("a job's line is not understood: {error}")),
            });
        }
        // All jobs are over; whoever still waits for one has missed it.
        value
            .get("done")
            .map(|_| Line::Trouble("it ended without the job's line".into()))
    }
}
