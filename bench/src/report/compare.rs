//! Two result files side by side.

use std::fmt::Write as _;

use super::text::{difference_text, lines, plain_table, with_spread};
use crate::matrix::{AXES, Kind, Layout, Run};
use crate::record::{Measurement, Results, RunRecord};
use crate::stats::difference;

/// The table of B against A.
///
/// Runs that are equal belong together. What is left belongs together where load and placement
/// are the same and neither file has another of that kind, so that results of two VMMs, or of two
/// settings, can be compared.
pub fn compare(a: &Results, b: &Results) -> String {
    let pairs = pairs(&a.runs, &b.runs);
    let mut table = plain_table(
        &[
            "run",
            "load",
            "iops A",
            "iops B",
            "diff",
            "cpu A",
            "cpu B",
            "diff",
            "io-cpu/io",
        ],
        2,
    );
    let layout = Layout::of(a.runs.iter().chain(&b.runs).map(|r| &r.run));
    for (first, second) in &pairs {
        let mut cells = vec![
            pair_name(&layout, &first.run, &second.run),
            layout.load(&first.run),
        ];
        for (figure, decimals, unit) in FIGURES {
            let (x, y) = (first.summary(figure), second.summary(figure));
            let text = |s: Option<crate::stats::Summary>| {
                s.map_or("failed".into(), |s| with_spread(&s, *decimals, unit))
            };
            cells.extend([text(x), text(y)]);
            let diff = x.zip(y).and_then(|(x, y)| difference(&x, &y));
            cells.push(diff.map_or(String::new(), |d| difference_text(&d)));
        }
        let per_io = |r: &RunRecord| r.summary(Measurement::io_cpu_per_io);
        let diff = per_io(first)
            .zip(per_io(second))
            .and_then(|(x, y)| difference(&x, &y));
        cells.push(diff.map_or(String::new(), |d| difference_text(&d)));
        table.add_row(cells);
    }
    let mut out = lines(&table);
    for (file, all, chosen) in [
        ("A", &a.runs, pairs.iter().map(|p| p.0).collect::<Vec<_>>()),
        ("B", &b.runs, pairs.iter().map(|p| p.1).collect()),
    ] {
        let alone = all
            .iter()
            .filter(|r| !chosen.iter().any(|c| std::ptr::eq(*c, *r)));
        for record in alone {
            let run = &record.run;
            let (name, load) = (layout.name(run), layout.load(run));
            let _ = writeln!(out, "note: only in {file}: {name}, {load}");
        }
    }
    if a.conditions.processor != b.conditions.processor
        || a.conditions.kernel != b.conditions.kernel
    {
        let of = |r: &Results| format!("{}, Linux {}", r.conditions.processor, r.conditions.kernel);
        let _ = writeln!(
            out,
            "note: measured on different hosts: A {}; B {}",
            of(a),
            of(b)
        );
    }
    out
}

type Figure = (fn(&Measurement) -> Option<f64>, usize, &'static str);

const FIGURES: &[Figure] = &[
    (|m| Some(m.iops), 0, ""),
    (|m| Some(m.cpu_percent()), 1, "%"),
];

fn pair_name(layout: &Layout, a: &Run, b: &Run) -> String {
    let (a, b) = (layout.name(a), layout.name(b));
    if a == b { a } else { format!("{a} → {b}") }
}

fn pairs<'a>(a: &'a [RunRecord], b: &'a [RunRecord]) -> Vec<(&'a RunRecord, &'a RunRecord)> {
    let equal = |x: &RunRecord, y: &RunRecord| x.run == y.run;
    let left_a = || a.iter().filter(|x| !b.iter().any(|y| equal(x, y)));
    let left_b = || b.iter().filter(|y| !a.iter().any(|x| equal(x, y)));
    let alike = |x: &RunRecord, y: &RunRecord| {
        AXES.iter()
            .filter(|axis| axis.kind != Kind::Setting)
            .all(|axis| (axis.get)(&x.run) == (axis.get)(&y.run))
    };
    a.iter()
        .filter_map(|x| {
            if let Some(y) = b.iter().find(|y| equal(x, y)) {
                return Some((x, y));
            }
            let mut candidates = left_b().filter(|y| alike(x, y));
            let y = candidates.next()?;
            let alone =
                candidates.next().is_none() && left_a().filter(|o| alike(o, y)).count() == 1;
            alone.then_some((x, y))
        })
        .collect()
}
