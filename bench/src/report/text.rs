//! The text report: tables in the layout that the field reads.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};

use super::{Row, against_baseline, rows};
use crate::cpu::{Group, GroupUsage};
use crate::matrix::{Axis, Layout, axis};
use crate::record::{Measurement, Results, RunRecord};
use crate::stats::{Difference, Summary, Verdict, paired_ratio};

/// A table without rules: columns two spaces apart, numbers to the right.
pub(crate) fn plain_table(header: &[&str], left: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.iter().copied());
    for (index, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if index >= left {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The table as text without trailing spaces.
pub(crate) fn lines(table: &Table) -> String {
    let mut text = String::new();
    for line in table.to_string().lines() {
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// The whole report.
pub fn text(results: &Results) -> String {
    let rows = rows(results);
    let mut out = main_table(results, &rows);
    let _ = write!(out, "\n{}", cpu_table(&rows));
    for part in [per_io_table(&rows), ratio_table(&rows), window_table(&rows)] {
        if !part.is_empty() {
            let _ = write!(out, "\n{part}");
        }
    }
    out += &super::policies::tables(&rows);
    for (index, note) in notes(results, &rows).iter().enumerate() {
        let gap = if index == 0 { "\n" } else { "" };
        let _ = writeln!(out, "{gap}note: {note}");
    }
    out
}

/// `run rw bs iodepth numjobs iothreads iops diff cpu diff`.
fn main_table(results: &Results, rows: &[Row<'_>]) -> String {
    let layout = Layout::of(results.runs.iter().map(|r| &r.run));
    let columns = load_columns(&layout);
    let mut header = vec!["run"];
    header.extend(columns.iter().map(|a| a.name));
    header.extend(["iops", "diff", "cpu", "diff"]);
    let mut table = plain_table(&header, 2);
    for (index, row) in rows.iter().enumerate() {
        let mut cells = vec![row.name.clone()];
        cells.extend(
            columns
                .iter()
                .map(|a| (a.get)(row.run()).unwrap_or_default()),
        );
        if row.record.rounds.is_empty() {
            cells.push("not measured".into());
        } else {
            cells.push(row.iops.map_or("failed".into(), |s| with_spread(&s, 0, "")));
            cells.push(diff_text(
                row,
                index,
                against_baseline(rows, index, |r| r.iops),
            ));
            cells.push(row.cpu.map_or(String::new(), |s| with_spread(&s, 1, "%")));
            cells.push(diff_text(
                row,
                index,
                against_baseline(rows, index, |r| r.cpu),
            ));
        }
        table.add_row(cells);
    }
    lines(&table)
}

fn load_columns(layout: &Layout) -> Vec<&'static Axis> {
    let mut columns: Vec<&'static Axis> = ["rw", "bs", "iodepth", "numjobs"]
        .into_iter()
        .filter_map(axis)
        .collect();
    columns.extend(layout.further());
    columns.extend(axis("iothreads"));
    columns
}

fn diff_text(row: &Row<'_>, index: usize, difference: Option<Difference>) -> String {
    if row.baseline == index {
        return "-".into();
    }
    difference.map_or(String::new(), |d| difference_text(&d))
}

/// `+3.2%`, and `noise` if it does not stand out of the spread.
pub(crate) fn difference_text(d: &Difference) -> String {
    let noise = if d.verdict == Verdict::Noise {
        " noise"
    } else {
        ""
    };
    format!("{:+.1}%{noise}", d.percent)
}

/// A median with its spread in percent.
pub(crate) fn with_spread(s: &Summary, decimals: usize, unit: &str) -> String {
    match s.spread_percent() {
        Some(spread) => format!("{:.*}{unit} ±{spread:.1}%", decimals, s.median),
        None => format!("{:.*}{unit}", decimals, s.median),
    }
}

/// Groups as rows: the iothreads, vCPUs, main and the others.
fn cpu_table(rows: &[Row<'_>]) -> String {
    let mut table = plain_table(
        &[
            "run",
            "load",
            "thread",
            "cpu",
            "user",
            "sys",
            "guest",
            "ns/io",
            "sleeps/io",
        ],
        3,
    );
    for row in rows {
        let mut name = row.name.clone();
        let mut load = row.load.clone();
        for group in groups(row.record) {
            let figure = |f: fn(&GroupUsage) -> u64| {
                row.summary(|m| Some(m.cpu.percent(of_group(m, &group, f))))
            };
            let percent =
                |s: Option<Summary>| s.map_or(String::new(), |s| format!("{:.1}%", s.median));
            let number = |s: Option<Summary>, decimals: usize| {
                s.map_or(String::new(), |s| format!("{:.*}", decimals, s.median))
            };
            let total = figure(|g| g.total_ns);
            table.add_row(vec![
                std::mem::take(&mut name),
                std::mem::take(&mut load),
                group.to_string(),
                percent(total),
                percent(figure(|g| g.user_ns)),
                percent(figure(|g| g.system_ns)),
                percent(figure(|g| g.guest_ns)),
                number(
                    row.summary(|m| m.per_io(of_group(m, &group, |g| g.total_ns))),
                    0,
                ),
                number(
                    row.summary(|m| m.per_io(of_group(m, &group, |g| g.sleeps))),
                    3,
                ),
            ]);
        }
    }
    format!(
        "CPU by thread, in percent of one CPU, over the measured interval\n{}",
        lines(&table)
    )
}

fn of_group(m: &Measurement, group: &Group, f: fn(&GroupUsage) -> u64) -> u64 {
    m.cpu
        .groups
        .iter()
        .filter(|g| g.group == *group)
        .map(f)
        .sum()
}

/// The groups that any round of a run had.
pub(crate) fn groups(record: &RunRecord) -> Vec<Group> {
    let mut all: Vec<Group> = record
        .measurements()
        .flat_map(|m| m.cpu.groups.iter().map(|g| g.group.clone()))
        .collect();
    all.sort();
    all.dedup();
    all
}

/// A column: its name, decimals and figure.
pub(super) type Figure = (&'static str, usize, fn(&Measurement) -> Option<f64>);

/// What an I/O costs and how long it takes.
const PER_IO: [Figure; 10] = [
    ("io-cpu ns/io", 0, Measurement::io_cpu_per_io),
    ("kicks/io", 3, |m| m.kicks_per_io),
    ("irqs/io", 3, |m| m.interrupts_per_io),
    ("enters/io", 3, Measurement::enters_per_io),
    ("syscalls/io", 3, |m| m.syscalls_per_io),
    ("p50 µs", 1, |m| m.latency.map(|l| l.p50_ns / 1e3)),
    ("p99 µs", 1, |m| m.latency.map(|l| l.p99_ns / 1e3)),
    ("p99.9 µs", 1, |m| m.latency.map(|l| l.p999_ns / 1e3)),
    ("guest busy", 1, |m| m.guest_cpu.map(|c| 100.0 - c.idle)),
    ("host busy", 1, |m| Some(100.0 - m.cpu.host.idle_percent)),
];

/// The figures of an I/O that the load tells.
pub(super) fn known_figures(rows: &[Row<'_>]) -> Vec<&'static Figure> {
    let known = |figure: &&Figure| rows.iter().any(|row| row.summary(figure.2).is_some());
    PER_IO.iter().filter(known).collect()
}

/// What an I/O costs and how long it takes, as far as the load tells.
fn per_io_table(rows: &[Row<'_>]) -> String {
    let known = known_figures(rows);
    let mut header = vec!["run", "load"];
    header.extend(known.iter().map(|(name, _, _)| *name));
    let mut table = plain_table(&header, 2);
    for row in rows.iter().filter(|row| row.iops.is_some()) {
        let mut cells = vec![row.name.clone(), row.load.clone()];
        for (name, decimals, figure) in &known {
            let unit = if name.ends_with("busy") { "%" } else { "" };
            let text = row
                .summary(figure)
                .map(|s| format!("{:.*}{unit}", decimals, s.median));
            cells.push(text.unwrap_or_default());
        }
        table.add_row(cells);
    }
    lines(&table)
}

/// Each run against its baseline, round by round: the ratio that a drift of the machine spares.
fn ratio_table(rows: &[Row<'_>]) -> String {
    let mut table = plain_table(&["ratio", "load", "to", "iops", "cpu/io", "io-cpu/io"], 3);
    let mut any = false;
    for (index, row) in rows
        .iter()
        .enumerate()
        .filter(|(i, row)| row.baseline != *i)
    {
        let base = &rows[row.baseline];
        let ratio = |figure: fn(&Measurement) -> Option<f64>| {
            paired_ratio(&base.record.series(figure), &row.record.series(figure)).map_or(
                String::new(),
                |s| match s.spread() {
                    Some(spread) => format!("{:.2} ±{spread:.2}", s.median),
                    None => format!("{:.2}", s.median),
                },
            )
        };
        any = true;
        table.add_row(vec![
            rows[index].name.clone(),
            row.load.clone(),
            base.name.clone(),
            ratio(|m| Some(m.iops)),
            ratio(|m| m.per_io(m.cpu.total_ns())),
            ratio(Measurement::io_cpu_per_io),
        ]);
    }
    if any { lines(&table) } else { String::new() }
}

/// The table of polling windows: `weight samples mean p50 p90`.
fn window_table(rows: &[Row<'_>]) -> String {
    let mut table = plain_table(
        &[
            "poll windows",
            "load",
            "iothread",
            "weight",
            "samples",
            "mean ns",
            "p50 ns",
            "p90 ns",
            "hits",
            "in vain",
        ],
        3,
    );
    let mut any = false;
    for row in rows {
        for (name, windows) in super::windows(row.record) {
            any = true;
            let run = row.run();
            let weight = run.poll_weight.map_or("-".into(), |w| w.to_string());
            table.add_row(vec![
                row.name.clone(),
                row.load.clone(),
                name,
                weight,
                windows.samples.to_string(),
                format!("{:.0}", windows.mean_ns),
                windows.p50_ns.to_string(),
                windows.p90_ns.to_string(),
                windows.hits.to_string(),
                windows.misses.to_string(),
            ]);
        }
    }
    if any { lines(&table) } else { String::new() }
}

/// What a reader has to know beside the figures.
pub(crate) fn notes(results: &Results, rows: &[Row<'_>]) -> Vec<String> {
    let mut notes: Vec<String> = results.conditions.remarks.clone();
    if !results.complete {
        notes.push("interrupted: what was measured until then is shown".into());
    }
    let others = rows
        .iter()
        .filter_map(|row| row.summary(others_percent))
        .map(|s| s.median);
    let others = others.fold(0.0, f64::max);
    if others > 20.0 {
        notes.push(format!(
            "other processes took up to {others:.0}% of the host's CPUs meanwhile: repeat this on an \
             idle host"
        ));
    }
    let counts: Vec<usize> = rows
        .iter()
        .filter_map(|row| row.iops.map(|s| s.count))
        .collect();
    match counts.iter().min() {
        Some(1) => notes.push(
            "measured once: without repetitions nobody knows what is noise (--repeat 5)".into(),
        ),
        Some(n) if *n < 5 => notes.push(format!(
            "± is the range of {n} repetitions; from 5 on it holds the median with 90 % confidence"
        )),
        _ => {}
    }
    for row in rows {
        let errors: u64 = row.record.measurements().map(|m| m.errors).sum();
        if errors > 0 {
            notes.push(format!("{}: the guest saw {errors} I/O errors", row.name));
        }
        for failure in &row.record.failures {
            notes.push(format!("{} ({}): {failure}", row.name, row.load.clone()));
        }
    }
    notes
}

/// CPU of other processes while the run was measured, in percent of all CPUs of the host.
fn others_percent(m: &Measurement) -> Option<f64> {
    let host = &m.cpu.host;
    (host.cpus > 0).then(|| 100.0 - host.idle_percent - m.cpu_percent() / host.cpus as f64)
}
