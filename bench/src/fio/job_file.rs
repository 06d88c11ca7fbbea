//! What must be known of a user's fio job file.

use crate::matrix::Run;

/// What a job file says, as far as tables and the script need it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFile {
    /// The file, with `filename=` added where it has none.
    pub text: String,
    /// Longest `ramp_time`, in seconds.
    pub ramp_s: u64,
    /// Sum of `runtime`s, in seconds; a bound for waiting.
    pub runtime_s: u64,
    /// Whether it may write.
    pub writes: bool,
    /// Whether jobs differ in what the table's columns show.
    pub differs: bool,
    columns: Vec<(String, String)>,
}

/// Words of fio that mean the same.
const SYNONYMS: [(&str, &str); 2] = [("readwrite", "rw"), ("blocksize", "bs")];

impl JobFile {
    /// Reads a file for a guest with `disks` loaded disks, which it names `${DISK0}`, ….
    pub fn read(text: &str, disks: u32) -> JobFile {
        let mut pairs: Vec<(String, String)> = Vec::new();
        for line in text.lines().map(str::trim) {
            if line.starts_with(['#', ';', '[']) {
                continue;
            }
            let Some((name, value)) = line.split_once('=') else {
                continue;
            };
            let name = name.trim();
            let name = SYNONYMS
                .iter()
                .find(|(other, _)| *other == name)
                .map_or(name, |(_, n)| n);
            pairs.push((name.to_string(), value.trim().to_string()));
        }
        let all = |name: &str| -> Vec<&str> {
            pairs
                .iter()
                .filter(|(n, _)| n == name)
                .map(|(_, v)| v.as_str())
                .collect()
        };
        let mut columns = Vec::new();
        let mut differs = false;
        for name in ["rw", "bs", "iodepth", "numjobs"] {
            let mut values = all(name);
            values.dedup();
            differs |= values.len() > 1;
            if let Some(value) = values.first() {
                columns.push((name.to_string(), (*value).to_string()));
            }
        }
        let writes = all("rw")
            .iter()
            .any(|rw| !matches!(*rw, "read" | "randread"));
        let seconds = |name: &str| all(name).into_iter().filter_map(seconds);
        let ramp_s = seconds("ramp_time").max().unwrap_or(0);
        let runtime_s = seconds("runtime").sum();
        let text = if all("filename").is_empty() {
            let names: Vec<String> = (0..disks).map(|i| format!("${{DISK{i}}}")).collect();
            format!("filename={}\n{text}", names.join(":"))
        } else {
            text.to_string()
        };
        JobFile {
            text,
            ramp_s,
            runtime_s,
            writes,
            differs,
            columns,
        }
    }

    /// Puts what its first job says into the columns of a run's table.
    pub fn describe(&self, run: &mut Run) {
        for (name, value) in &self.columns {
            // fio takes values that the matrix has not, such as bs=4k/8k; then the default stays.
            if let Some(axis) = crate::matrix::axis(name) {
                let _ = (axis.set)(run, value);
            }
        }
    }
}

/// A time of fio: seconds if bare, else with a unit.
fn seconds(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let number: u64 = digits.parse().ok()?;
    match &text[digits.len()..] {
        "" | "s" => Some(number),
        "m" => number.checked_mul(60),
        "h" => number.checked_mul(3600),
        "d" => number.checked_mul(86400),
        "ms" => Some(number.div_ceil(1000)),
        "us" => Some(number.div_ceil(1_000_000)),
        _ => None,
    }
}
