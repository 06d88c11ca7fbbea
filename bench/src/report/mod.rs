//! Reports of what was measured: text tables, CSV, an HTML page.
//!
//! All are made from the same [`Row`]s: a run, its name, its baseline and its summaries.

mod compare;
mod csv;
mod html;
mod policies;
mod reference;
#[cfg(test)]
mod tests;
pub(crate) mod text;

use crate::matrix::{Layout, Run};
use crate::record::{Measurement, Results, RunRecord};
use crate::stats::{Difference, Summary, difference, paired_ratio};

pub use compare::compare;
pub use csv::csv;
pub use html::html;
pub use reference::reference;
pub use text::text;
pub(crate) use text::{lines, plain_table};

/// One run, as reports show it.
pub struct Row<'a> {
    /// Named by what varies.
    pub name: String,
    /// The load in a few words.
    pub load: String,
    /// The run and its measurements.
    pub record: &'a RunRecord,
    /// Index of the row that it is compared with; its own if it is a baseline.
    pub baseline: usize,
    /// I/Os a second; `None` if no round succeeded.
    pub iops: Option<Summary>,
    /// CPU of the VMM, all threads, in percent of one CPU.
    pub cpu: Option<Summary>,
}

impl<'a> Row<'a> {
    /// The run.
    pub fn run(&self) -> &'a Run {
        &self.record.run
    }

    /// A figure of the run, summarised.
    pub fn summary(&self, figure: impl Fn(&Measurement) -> Option<f64>) -> Option<Summary> {
        self.record.summary(figure)
    }
}

/// All runs: those that are compared stand together, their baseline first.
pub fn rows(results: &Results) -> Vec<Row<'_>> {
    let layout = Layout::of(results.runs.iter().map(|r| &r.run));
    let runs: Vec<&Run> = results.runs.iter().map(|r| &r.run).collect();
    let baselines = layout.baselines(&runs);
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by_key(|&i| (baselines[i], i));
    order
        .iter()
        .map(|&i| {
            let record = &results.runs[i];
            Row {
                name: layout.name(&record.run),
                load: layout.load(&record.run),
                record,
                baseline: order.iter().position(|&o| o == baselines[i]).unwrap_or(i),
                iops: record.summary(|m| Some(m.iops)),
                cpu: record.summary(|m| Some(m.cpu_percent())),
            }
        })
        .collect()
}

/// The difference of a row's figure to its baseline's; `None` for the baseline itself.
pub fn against_baseline(
    rows: &[Row<'_>],
    index: usize,
    figure: impl Fn(&Row<'_>) -> Option<Summary>,
) -> Option<Difference> {
    let row = &rows[index];
    if row.baseline == index {
        return None;
    }
    difference(&figure(&rows[row.baseline])?, &figure(row)?)
}

/// A row's figure over its baseline's, of each round's pair.
pub fn paired(
    rows: &[Row<'_>],
    index: usize,
    figure: fn(&Measurement) -> Option<f64>,
) -> Option<Summary> {
    let row = &rows[index];
    let base = rows[row.baseline].record.series(figure);
    paired_ratio(&base, &row.record.series(figure))
}

/// Polling windows of an iothread or a handler over all rounds.
pub struct Windows {
    /// How many.
    pub samples: u64,
    /// Their mean length, each taken at the middle of its bucket.
    pub mean_ns: f64,
    /// Half are no longer than the bucket that begins here.
    pub p50_ns: u64,
    /// Nine tenths are no longer than the bucket that begins here.
    pub p90_ns: u64,
    /// That found work.
    pub hits: u64,
    /// That did not.
    pub misses: u64,
    /// Shortest window and count of each bucket, rising.
    pub buckets: Vec<(u64, u64)>,
}

/// The polling windows of a run by name, its rounds added up.
pub fn windows(record: &RunRecord) -> Vec<(String, Windows)> {
    let mut names: Vec<String> = Vec::new();
    for polling in record.measurements().flat_map(|m| &m.polling) {
        // A window of 0 is no polling.
        let polls = polling.windows.iter().any(|(from_ns, _)| *from_ns > 0);
        if polls && !names.contains(&polling.name) {
            names.push(polling.name.clone());
        }
    }
    names
        .into_iter()
        .map(|name| {
            let mut buckets = std::collections::BTreeMap::new();
            let (mut hits, mut misses) = (0, 0);
            let same = |p: &&crate::record::Polling| p.name == name;
            for polling in record.measurements().flat_map(|m| &m.polling).filter(same) {
                hits += polling.hits;
                misses += polling.misses;
                for (from_ns, count) in &polling.windows {
                    *buckets.entry(*from_ns).or_insert(0) += count;
                }
            }
            let buckets: Vec<(u64, u64)> = buckets.into_iter().collect();
            (name, summarise(buckets, hits, misses))
        })
        .collect()
}

fn summarise(buckets: Vec<(u64, u64)>, hits: u64, misses: u64) -> Windows {
    let samples: u64 = buckets.iter().map(|b| b.1).sum();
    // A bucket is a quarter of its power of two wide.
    let middle = |from_ns: u64| match from_ns {
        0..4 => from_ns as f64,
        _ => from_ns as f64 + (1u64 << (from_ns.ilog2() - 2)) as f64 / 2.0,
    };
    let sum: f64 = buckets
        .iter()
        .map(|(from_ns, count)| middle(*from_ns) * *count as f64)
        .sum();
    let percentile = |percent: u64| {
        let mut seen = 0;
        buckets
            .iter()
            .find(|(_, count)| {
                seen += count;
                seen * 100 >= samples * percent
            })
            .map_or(0, |(from_ns, _)| *from_ns)
    };
    Windows {
        samples,
        mean_ns: if samples > 0 {
            sum / samples as f64
        } else {
            0.0
        },
        p50_ns: percentile(50),
        p90_ns: percentile(90),
        hits,
        misses,
        buckets,
    }
}
