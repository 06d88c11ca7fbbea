//! Published figures of the same studies, and ours beside them.
//!
//! They come from other machines: what can be compared is how a setting changes IOPS and CPU, not
//! how many there are.

use serde::Deserialize;

use super::text::{lines, plain_table};
use super::windows;
use crate::matrix::{Engine, Run, Rw};
use crate::record::RunRecord;
use crate::stats::{Summary, difference};

const WEIGHTS: &str = include_str!("../../data/reference-weights-randread.csv");
const WINDOWS: &str = include_str!("../../data/reference-poll-window.csv");
const S390X: &str = include_str!("../../data/reference-s390x.csv");
const ENGINES: &str = include_str!("../../data/reference-add-sqe.csv");

/// A file of published figures that is not as it should be.
#[derive(Debug, thiserror::Error)]
#[error("the published figures cannot be read: {0}")]
pub struct Error(#[from] ::csv::Error);

/// All published tables with ours, as far as `records` has the same runs.
pub fn reference(records: &[&RunRecord]) -> Result<String, Error> {
    Ok([
        weights(records)?,
        poll_windows(records)?,
        iothreads(records)?,
        engines(records)?,
    ]
    .join("\n"))
}

fn read<T: for<'de> Deserialize<'de>>(text: &str) -> Result<Vec<T>, Error> {
    let mut reader = ::csv::ReaderBuilder::new()
        .comment(Some(b'#'))
        .from_reader(text.as_bytes());
    Ok(reader.deserialize().collect::<Result<_, _>>()?)
}

/// The polling rule of a published run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// Of QEMU 9.x.
    Context,
    /// Of QEMU 10.0, the baseline of the change.
    PerHandler,
    /// With this weight.
    Weighted(u32),
}

impl Rule {
    fn of_name(name: &str) -> Option<Rule> {
        match name {
            "v9.2.0" | "qemu-9.1" => Some(Rule::Context),
            "v10.0.0" | "baseline" | "qemu-10.0" => Some(Rule::PerHandler),
            other => Some(Rule::Weighted(other.strip_prefix('w')?.parse().ok()?)),
        }
    }

    fn is_of(self, run: &Run) -> bool {
        match self {
            Rule::Context => run.poll_policy.as_deref() == Some("context"),
            Rule::PerHandler => run.poll_policy.as_deref() == Some("per-handler"),
            Rule::Weighted(weight) => {
                // The weighted rule is the default one.
                run.vmm == crate::matrix::Vmm::Pollux
                    && run.poll_policy.as_deref().is_none_or(|p| p == "weighted")
                    && run.poll_weight == Some(weight)
            }
        }
    }
}

fn iops(record: &RunRecord) -> Option<Summary> {
    record.summary(|m| Some(m.iops))
}

fn cpu(record: &RunRecord) -> Option<Summary> {
    record.summary(|m| Some(m.cpu_percent()))
}

fn percent_text(percent: Option<f64>) -> String {
    percent.map_or("-".into(), |p| format!("{p:+.1}%"))
}

#[derive(Deserialize)]
struct WeightLine {
    run: String,
    rw: String,
    bs: String,
    numjobs: u32,
    iothreads: u32,
    iops: f64,
    diff_percent: f64,
}

/// Random reads by weight, on one iothread.
fn weights(records: &[&RunRecord]) -> Result<String, Error> {
    let mut table = plain_table(
        &[
            "run",
            "rw",
            "bs",
            "numjobs",
            "iothreads",
            "published iops",
            "diff",
            "our iops",
            "diff",
        ],
        3,
    );
    let ours = |rule: Rule| {
        records.iter().find(|r| {
            let run = &r.run;
            rule.is_of(run)
                && (run.rw, run.bs_bytes, run.iodepth) == (Rw::RandRead, 8192, 8)
                && (run.numjobs, run.iothreads) == (1, 1)
        })
    };
    let base = ours(Rule::PerHandler).and_then(|r| iops(r));
    for line in read::<WeightLine>(WEIGHTS)? {
        // A version of QEMU is not a rule; only its rule can be run here.
        let own = Rule::of_name(&line.run)
            .and_then(ours)
            .and_then(|r| iops(r));
        let diff = base
            .zip(own)
            .and_then(|(a, b)| difference(&a, &b))
            .map(|d| d.percent);
        table.add_row(vec![
            line.run,
            line.rw,
            line.bs,
            line.numjobs.to_string(),
            line.iothreads.to_string(),
            format!("{:.0}", line.iops),
            format!("{:+.1}%", line.diff_percent),
            own.map_or("-".into(), |s| format!("{:.0}", s.median)),
            percent_text(diff),
        ]);
    }
    Ok(format!(
        "Published: randread 8k, depth 8, NVMe (ours: v9.2.0 is context, v10.0.0 and baseline are \
         per-handler)\n{}",
        lines(&table)
    ))
}

#[derive(Deserialize)]
struct WindowLine {
    workload: String,
    weight: u32,
    samples: u64,
    mean_ns: f64,
    p50_ns: f64,
    p90_ns: f64,
}

/// Polling windows by weight.
fn poll_windows(records: &[&RunRecord]) -> Result<String, Error> {
    let mut table = plain_table(
        &[
            "workload", "weight", "samples", "mean", "p50", "p90", "ours", "mean", "p50", "p90",
        ],
        1,
    );
    for line in read::<WindowLine>(WINDOWS)? {
        let rw = if line.workload == "randwrite" {
            Rw::RandWrite
        } else {
            Rw::RandRead
        };
        let own = records
            .iter()
            .filter(|r| Rule::Weighted(line.weight).is_of(&r.run))
            .filter(|r| (r.run.rw, r.run.bs_bytes, r.run.iodepth) == (rw, 8192, 8))
            .find_map(|r| windows(r).into_iter().next())
            .map(|(_, w)| w);
        let own = |f: &dyn Fn(&super::Windows) -> String| own.as_ref().map_or("-".into(), f);
        table.add_row(vec![
            line.workload,
            line.weight.to_string(),
            line.samples.to_string(),
            format!("{:.0}", line.mean_ns),
            format!("{:.0}", line.p50_ns),
            format!("{:.0}", line.p90_ns),
            own(&|w| w.samples.to_string()),
            own(&|w| format!("{:.0}", w.mean_ns)),
            own(&|w| w.p50_ns.to_string()),
            own(&|w| w.p90_ns.to_string()),
        ]);
    }
    Ok(format!(
        "Published: polling windows in ns, 8k, depth 8, SSD on s390x\n{}",
        lines(&table)
    ))
}

#[derive(Deserialize)]
struct ChangeLine {
    base: String,
    disk: String,
    iothreads: u32,
    workload: String,
    metric: String,
    w2_percent: f64,
    w3_percent: f64,
}

/// Changes of throughput and CPU by weights 2 and 3, averaged over numjobs.
fn iothreads(records: &[&RunRecord]) -> Result<String, Error> {
    let mut table = plain_table(
        &[
            "base",
            "disk",
            "iothreads",
            "workload",
            "metric",
            "w2",
            "w3",
            "our w2",
            "our w3",
        ],
        2,
    );
    for line in read::<ChangeLine>(S390X)? {
        let rw = match line.workload.as_str() {
            "seqread" => Rw::Read,
            "seqwrite" => Rw::Write,
            "randread" => Rw::RandRead,
            _ => Rw::RandWrite,
        };
        let metric = if line.metric == "cpu" { cpu } else { iops };
        let own = |weight: u32| -> Option<f64> {
            let base = Rule::of_name(&line.base)?;
            mean_change(
                records,
                base,
                Rule::Weighted(weight),
                rw,
                line.iothreads,
                metric,
            )
        };
        let (w2, w3) = (own(2), own(3));
        table.add_row(vec![
            line.base,
            line.disk,
            line.iothreads.to_string(),
            line.workload,
            line.metric,
            format!("{:+.1}%", line.w2_percent),
            format!("{:+.1}%", line.w3_percent),
            percent_text(w2),
            percent_text(w3),
        ]);
    }
    Ok(format!(
        "Published: change by weights 2 and 3 on s390x, mean over numjobs 1, 4 and 8 (ours: \
         qemu-10.0 is per-handler, qemu-9.1 is context)\n{}",
        lines(&table)
    ))
}

/// The mean change of a figure from one rule to another over all pairs of runs that are otherwise
/// equal, in percent.
fn mean_change(
    records: &[&RunRecord],
    base: Rule,
    other: Rule,
    rw: Rw,
    iothreads: u32,
    metric: fn(&RunRecord) -> Option<Summary>,
) -> Option<f64> {
    let of = |rule: Rule| {
        records
            .iter()
            .filter(move |r| rule.is_of(&r.run) && r.run.rw == rw && r.run.iothreads == iothreads)
    };
    let neutral = |run: &Run| Run {
        poll_policy: None,
        poll_weight: None,
        ..run.clone()
    };
    let changes: Vec<f64> = of(base)
        .flat_map(|a| of(other).map(move |b| (a, b)))
        .filter(|(a, b)| neutral(&a.run) == neutral(&b.run))
        .filter_map(|(a, b)| Some(difference(&metric(a)?, &metric(b)?)?.percent))
        .collect();
    (!changes.is_empty()).then(|| changes.iter().sum::<f64>() / changes.len() as f64)
}

#[derive(Deserialize)]
struct EngineLine {
    rw: String,
    bs: String,
    iodepth: u32,
    engine: String,
    iothread: u32,
    iops_before: f64,
    iops_after: f64,
}

/// Linux AIO against io_uring, on the main loop and on an iothread.
fn engines(records: &[&RunRecord]) -> Result<String, Error> {
    let mut table = plain_table(
        &[
            "rw", "bs", "iodepth", "engine", "iothread", "before", "after", "our iops",
        ],
        2,
    );
    for line in read::<EngineLine>(ENGINES)? {
        let rw = if line.rw == "randwrite" {
            Rw::RandWrite
        } else {
            Rw::RandRead
        };
        let engine = if line.engine == "native" {
            Engine::Native
        } else {
            Engine::IoUring
        };
        let own = records
            .iter()
            .filter(|r| {
                let run = &r.run;
                (run.rw, run.bs_bytes, run.iodepth) == (rw, 4096, line.iodepth)
                    && (run.engine, run.iothreads) == (engine, line.iothread)
            })
            .find_map(|r| iops(r));
        table.add_row(vec![
            line.rw,
            line.bs,
            line.iodepth.to_string(),
            line.engine,
            line.iothread.to_string(),
            format!("{:.0}", line.iops_before),
            format!("{:.0}", line.iops_after),
            own.map_or("-".into(), |s| format!("{:.0}", s.median)),
        ]);
    }
    Ok(format!(
        "Published: IOPS before and after io_uring moved into the event loop, 8 vCPUs (iothread 0 is \
         the main loop)\n{}",
        lines(&table)
    ))
}
