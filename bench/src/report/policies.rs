//! Polling rules over all loads of a measurement: each load against the first rule, then geometric
//! means.

use super::text::{lines, plain_table};
use super::{Row, paired};
use crate::record::Measurement;

/// What a rule brings and costs against the first one, over all loads; factors.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Means {
    pub(super) name: String,
    pub(super) iops: f64,
    /// CPU an I/O of all threads but the vCPUs.
    pub(super) cpu: f64,
    pub(super) p50: f64,
    pub(super) p99: f64,
    /// On which load it is worst against the better of `off` and `weighted`, and by what factor of
    /// the score's exponential; None where neither was measured.
    pub(super) worst: Option<(String, f64)>,
}

/// At this exchange rate loads are called better or worse.
const ALPHA: f64 = 0.3;

type Figure = fn(&Measurement) -> Option<f64>;

const FIGURES: [Figure; 4] = [
    |m| Some(m.iops),
    Measurement::io_cpu_per_io,
    |m| m.latency.as_ref().map(|l| l.p50_ns),
    |m| m.latency.as_ref().map(|l| l.p99_ns),
];

/// Rows of one load, by the first.
fn loads(rows: &[Row<'_>]) -> Vec<Vec<usize>> {
    let baselines = (0..rows.len()).filter(|i| rows[*i].baseline == *i);
    baselines
        .map(|base| {
            (0..rows.len())
                .filter(|i| rows[*i].baseline == base)
                .collect()
        })
        .collect()
}

/// The figure of a row against its baseline.
fn ratio(rows: &[Row<'_>], index: usize, figure: Figure) -> Option<f64> {
    paired(rows, index, figure).map(|s| s.median)
}

/// Logarithm of what a row is worth against its baseline.
fn worth(rows: &[Row<'_>], index: usize) -> Option<f64> {
    let iops = ratio(rows, index, FIGURES[0])?;
    let cpu = ratio(rows, index, FIGURES[1])?;
    Some(iops.ln() - ALPHA * cpu.ln())
}

fn geometric_mean(ratios: &[f64]) -> Option<f64> {
    let sum: f64 = ratios.iter().map(|ratio| ratio.ln()).sum();
    (!ratios.is_empty()).then(|| (sum / ratios.len() as f64).exp())
}

/// The rules in the order of the first load; empty unless rules were compared under several loads.
pub(super) fn means(rows: &[Row<'_>]) -> Vec<Means> {
    let loads = loads(rows);
    let policies = rows.iter().map(|row| &row.run().poll_policy);
    let varies = policies.clone().any(|p| Some(p) != policies.clone().next());
    if loads.len() < 2 || !varies {
        return Vec::new();
    }
    let names = loads[0].iter().map(|index| rows[*index].name.clone());
    names
        .filter_map(|name| {
            let places: Vec<usize> = loads
                .iter()
                .filter_map(|load| load.iter().copied().find(|i| rows[*i].name == name))
                .collect();
            let mean = |figure: Figure| {
                let ratios = places.iter().filter_map(|i| ratio(rows, *i, figure));
                geometric_mean(&ratios.collect::<Vec<_>>())
            };
            let worst = loads.iter().filter_map(|load| worst_of(rows, load, &name));
            Some(Means {
                iops: mean(FIGURES[0])?,
                cpu: mean(FIGURES[1])?,
                p50: mean(FIGURES[2]).unwrap_or(f64::NAN),
                p99: mean(FIGURES[3]).unwrap_or(f64::NAN),
                worst: worst.min_by(|a, b| a.1.total_cmp(&b.1)),
                name,
            })
        })
        .collect()
}

/// How the rule `name` does on one load against the better of `off` and `weighted`.
fn worst_of(rows: &[Row<'_>], load: &[usize], name: &str) -> Option<(String, f64)> {
    let own = load.iter().copied().find(|i| rows[*i].name == name)?;
    let known = load.iter().copied().filter(|i| {
        let policy = rows[*i].run().poll_policy.as_deref();
        matches!(policy, Some("off" | "weighted"))
    });
    let best = known
        .filter_map(|i| worth(rows, i))
        .max_by(f64::total_cmp)?;
    Some((rows[own].load.clone(), (worth(rows, own)? - best).exp()))
}

fn percent(ratio: f64) -> String {
    match ratio.is_nan() {
        true => "-".into(),
        false => format!("{:+.1}", 100.0 * (ratio - 1.0)),
    }
}

/// Both tables; empty where there is nothing to compare.
pub(super) fn tables(rows: &[Row<'_>]) -> String {
    let means = means(rows);
    let Some(first) = means.first() else {
        return String::new();
    };
    let names: Vec<&str> = means.iter().map(|one| one.name.as_str()).collect();
    let mut header = vec!["load"];
    header.extend(&names);
    let mut by_load = plain_table(&header, 1);
    for load in loads(rows) {
        let mut cells = vec![rows[load[0]].load.clone()];
        for name in &names {
            let place = load.iter().copied().find(|i| rows[*i].name == *name);
            let cell = place.and_then(|i| {
                let figures = [FIGURES[0], FIGURES[1]].map(|figure| ratio(rows, i, figure));
                let [Some(iops), Some(cpu)] = figures else {
                    return None;
                };
                Some(format!("{} / {}", percent(iops), percent(cpu)))
            });
            cells.push(cell.unwrap_or_else(|| "-".into()));
        }
        by_load.add_row(cells);
    }
    let mut of_all = plain_table(
        &["rule", "iops", "io-cpu/io", "p50", "p99", "worst", "on"],
        1,
    );
    for one in &means {
        let (load, worst) = one.worst.clone().unwrap_or((String::new(), f64::NAN));
        let figures = [one.iops, one.cpu, one.p50, one.p99, worst];
        let mut cells = vec![one.name.clone()];
        cells.extend(figures.map(percent));
        cells.push(load);
        of_all.add_row(cells);
    }
    format!(
        "\npolling rules against {}: change of IOPS / of CPU an I/O without vCPUs, in percent\n{}\n\
         geometric means over the loads, in percent; worst: score against the better of off and \
         weighted, at an exchange rate of {ALPHA}\n{}",
        first.name,
        lines(&by_load),
        lines(&of_all)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{Tool, parse};
    use crate::record::{Conditions, Results, tests::measurement};
    use crate::report::rows;

    #[test]
    fn means_are_geometric_and_the_worst_load_is_named() {
        let words = ["iodepth=1,4 poll-policy=per-handler,off,auto"];
        let runs = parse(&words, Tool::Guest).unwrap();
        let mut results = Results::new(Tool::Guest, Conditions::of_this_host(), 1, runs);
        // IOPS and CPU time by run.
        let figures = [
            (100.0, 1000),
            (50.0, 250),
            (200.0, 1000),
            (100.0, 1000),
            (100.0, 500),
            (50.0, 1000),
        ];
        for (record, (iops, cpu_ns)) in results.runs.iter_mut().zip(figures) {
            record.rounds.push(Some(measurement(iops, cpu_ns)));
        }
        let rows = rows(&results);
        let means = means(&rows);
        let names: Vec<&str> = means.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["per-handler", "off", "auto"]);
        assert!((means[0].iops - 1.0).abs() < 1e-9 && (means[0].cpu - 1.0).abs() < 1e-9);
        assert!((means[1].iops - 0.5_f64.sqrt()).abs() < 1e-9);
        // Twice and half the IOPS, half and twice the CPU an I/O.
        assert!((means[2].iops - 1.0).abs() < 1e-9 && (means[2].cpu - 1.0).abs() < 1e-9);
        let (load, worst) = means[2].worst.clone().unwrap();
        assert!(load.contains("d4"), "{load}");
        let expected = (0.5_f64.ln() - ALPHA * 4.0_f64.ln()).exp();
        assert!((worst - expected).abs() < 1e-9, "{worst}, not {expected}");
        let text = tables(&rows);
        assert!(
            text.contains("+100.0 / -50.0") && text.contains("-50.0 / +100.0"),
            "{text}"
        );
    }
}
