//! The charts: IOPS against CPU, CPU by thread, latency, polling windows.

use super::svg::{COLOURS, Drawing, PLOT, Scale, short};
use crate::cpu::Group;
use crate::record::{Latency, Measurement};
use crate::report::policies::Means;
use crate::report::{Row, Windows, windows};
use crate::stats::{Summary, pareto_front};

/// A run with its place in the legend.
pub struct Series<'a> {
    /// The run.
    pub row: &'a Row<'a>,
    /// Number of its colour.
    pub colour: usize,
}

/// IOPS against CPU with the Pareto front: the runs that no other beats in both. `None` if nothing
/// was measured.
pub fn iops_against_cpu(
    runs: &[Series<'_>],
    title: &str,
    cpu: impl Fn(&Measurement) -> f64,
    caption: &str,
) -> Option<String> {
    let points: Vec<(&Series<'_>, Summary, Summary)> = runs
        .iter()
        .filter_map(|s| Some((s, s.row.iops?, s.row.summary(|m| Some(cpu(m)))?)))
        .collect();
    let range = |f: fn(&(&Series<'_>, Summary, Summary)) -> Summary| {
        let low = points
            .iter()
            .map(|p| f(p).low)
            .fold(f64::INFINITY, f64::min);
        (low, points.iter().map(|p| f(p).high).fold(0.0, f64::max))
    };
    if points.is_empty() {
        return None;
    }
    let (left, top, right, bottom) = PLOT;
    let ((y_low, y_high), (x_low, x_high)) = (range(|p| p.1), range(|p| p.2));
    let x = Scale::around(x_low, x_high, left, right);
    let y = Scale::around(y_low, y_high, bottom, top);
    let mut drawing = Drawing::plot(&format!("{title}: IOPS against CPU"));
    drawing.axes(&x, &y, caption, "IOPS");
    let place = |p: &(&Series<'_>, Summary, Summary)| (x.at(p.2.median), y.at(p.1.median));
    let medians: Vec<(f64, f64)> = points.iter().map(|p| (p.1.median, p.2.median)).collect();
    draw_front(&mut drawing, &medians, &x, &y);
    for point in &points {
        let (series, iops, cpu) = point;
        let (cx, cy) = place(point);
        let class = format!("whisker s{}", series.colour % COLOURS);
        drawing.line(&class, cx, y.at(iops.low), cx, y.at(iops.high));
        drawing.line(&class, x.at(cpu.low), cy, x.at(cpu.high), cy);
        let tip = format!(
            "{}: {:.0} IOPS ({:.0} to {:.0}), {:.1}% CPU ({:.1} to {:.1})",
            series.row.name, iops.median, iops.low, iops.high, cpu.median, cpu.low, cpu.high
        );
        drawing.mark(series.colour, cx, cy, &tip);
    }
    Some(drawing.finish())
}

/// Rules over all loads: IOPS against CPU an I/O, both in percent of the first rule's, with the Pareto
/// front.
pub fn rules(means: &[Means]) -> String {
    let (left, top, right, bottom) = PLOT;
    let points: Vec<(f64, f64)> = means
        .iter()
        .map(|one| (100.0 * one.iops, 100.0 * one.cpu))
        .collect();
    let range = |values: Vec<f64>| {
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        (low, values.iter().copied().fold(0.0, f64::max))
    };
    let (y_low, y_high) = range(points.iter().map(|p| p.0).collect());
    let (x_low, x_high) = range(points.iter().map(|p| p.1).collect());
    let x = Scale::around(x_low, x_high, left, right);
    let y = Scale::around(y_low, y_high, bottom, top);
    let mut drawing = Drawing::plot("Polling rules over all loads: IOPS against CPU an I/O");
    let first = means.first().map_or("", |one| one.name.as_str());
    drawing.axes(
        &x,
        &y,
        &format!("CPU an I/O without vCPUs, {first} = 100"),
        &format!("IOPS, {first} = 100"),
    );
    draw_front(&mut drawing, &points, &x, &y);
    for (number, (one, (iops, cpu))) in means.iter().zip(&points).enumerate() {
        let (cx, cy) = (x.at(*cpu), y.at(*iops));
        let tip = format!("{}: IOPS {iops:.1}, CPU an I/O {cpu:.1}", one.name);
        drawing.mark(number, cx, cy, &tip);
        drawing.text("name", cx + 8.0, cy - 6.0, &one.name);
    }
    drawing.finish()
}

/// Percentiles of latency on a logarithmic axis.
pub fn latency(runs: &[Series<'_>], title: &str) -> Option<String> {
    type Percentile = (&'static str, fn(&Latency) -> f64);
    const PERCENTILES: [Percentile; 5] = [
        ("50 %", |l| l.p50_ns),
        ("90 %", |l| l.p90_ns),
        ("99 %", |l| l.p99_ns),
        ("99.9 %", |l| l.p999_ns),
        ("max", |l| l.max_ns),
    ];
    let lines: Vec<(&Series<'_>, Vec<f64>)> = runs
        .iter()
        .filter_map(|s| {
            let value = |f: fn(&Latency) -> f64| {
                s.row
                    .summary(|m| m.latency.as_ref().map(f))
                    .map(|s| s.median / 1e3)
            };
            let values: Option<Vec<f64>> = PERCENTILES.iter().map(|(_, f)| value(*f)).collect();
            values
                .filter(|v| v.iter().any(|x| *x > 0.0))
                .map(|v| (s, v))
        })
        .collect();
    if lines.is_empty() {
        return None;
    }
    let all = || {
        lines
            .iter()
            .flat_map(|(_, v)| v.iter().copied())
            .filter(|v| *v > 0.0)
    };
    let (left, top, right, bottom) = PLOT;
    let y = Scale::log(
        all().fold(f64::INFINITY, f64::min),
        all().fold(0.0, f64::max),
        bottom,
        top,
    );
    let mut drawing = Drawing::plot(&format!("{title}: latency"));
    for tick in y.ticks() {
        let at = y.at(tick);
        drawing.line("grid", left, at, right, at);
        drawing.text("tick end", left - 6.0, at + 3.5, &short(tick));
    }
    let step = (right - left) / PERCENTILES.len() as f64;
    let column = |i: usize| left + step * (i as f64 + 0.5);
    for (index, (name, _)) in PERCENTILES.iter().enumerate() {
        drawing.text("tick middle", column(index), bottom + 14.0, name);
    }
    drawing.captions("of requests are faster", "µs");
    for (series, values) in &lines {
        let points: Vec<(f64, f64)> = values
            .iter()
            .enumerate()
            .map(|(i, v)| (column(i), y.at(*v)))
            .collect();
        drawing.path(&format!("line s{}", series.colour % COLOURS), &points);
        for (((px, py), value), (name, _)) in points.iter().zip(values).zip(&PERCENTILES) {
            let tip = format!("{}, {name}: {value:.1} µs", series.row.name);
            drawing.mark(series.colour, *px, *py, &tip);
        }
    }
    Some(drawing.finish())
}

/// Lengths of polling windows: the share of each bucket.
pub fn poll_windows(runs: &[Series<'_>], title: &str) -> Option<String> {
    let mut found: Vec<(&Series<'_>, Windows)> = runs
        .iter()
        .filter_map(|s| {
            let first = windows(s.row.record).into_iter().map(|(_, w)| w);
            first.filter(|w| w.samples > 0).map(|w| (s, w)).next()
        })
        .collect();
    let octaves = found.iter().flat_map(|(_, w)| &w.buckets).count() > 12 * found.len();
    if octaves {
        found
            .iter_mut()
            .for_each(|(_, w)| w.buckets = by_octave(&w.buckets));
    }
    let mut bounds: Vec<u64> = found
        .iter()
        .flat_map(|(_, w)| w.buckets.iter().map(|b| b.0))
        .collect();
    bounds.sort_unstable();
    bounds.dedup();
    if bounds.is_empty() {
        return None;
    }
    let (left, top, right, bottom) = PLOT;
    let share = |w: &Windows, bound: u64| {
        let count = w.buckets.iter().find(|b| b.0 == bound).map_or(0, |b| b.1);
        100.0 * count as f64 / w.samples as f64
    };
    let high = found
        .iter()
        .flat_map(|(_, w)| bounds.iter().map(|b| share(w, *b)))
        .fold(0.0, f64::max);
    let y = Scale::from_zero(high, bottom, top);
    let mut drawing = Drawing::plot(&format!("{title}: polling windows"));
    for tick in y.ticks() {
        let at = y.at(tick);
        drawing.line("grid", left, at, right, at);
        drawing.text(
            "tick end",
            left - 6.0,
            at + 3.5,
            &format!("{}%", short(tick)),
        );
    }
    let step = (right - left) / bounds.len() as f64;
    let width = step * 0.85 / found.len() as f64;
    // Not more labels than there is room for.
    let every = bounds.len().div_ceil(9);
    for (index, bound) in bounds.iter().enumerate() {
        let start = left + step * index as f64 + step * 0.075;
        for (place, (series, w)) in found.iter().enumerate() {
            let percent = share(w, *bound);
            let tip = format!(
                "{}: {percent:.1}% of {} windows from {} µs",
                series.row.name,
                w.samples,
                *bound as f64 / 1e3
            );
            let class = format!("fill s{}", series.colour % COLOURS);
            let at = y.at(percent);
            drawing.bar(
                &class,
                start + width * place as f64,
                at,
                width,
                bottom - at,
                &tip,
            );
        }
        if index % every == 0 {
            let middle = left + step * (index as f64 + 0.5);
            drawing.text(
                "tick middle",
                middle,
                bottom + 14.0,
                &short(*bound as f64 / 1e3),
            );
        }
    }
    drawing.captions("window from, µs", "share");
    Some(drawing.finish())
}

/// Buckets joined to one for each power of two.
fn by_octave(buckets: &[(u64, u64)]) -> Vec<(u64, u64)> {
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (from_ns, count) in buckets {
        let from_ns = from_ns.checked_ilog2().map_or(0, |log2| 1 << log2);
        match joined.last_mut() {
            Some(last) if last.0 == from_ns => last.1 += count,
            _ => joined.push((from_ns, *count)),
        }
    }
    joined
}

/// Parts of the CPU's time in the order in which they are stacked.
const PARTS: [&str; 5] = [
    "iothreads",
    "main, others",
    "kernel I/O",
    "vCPU in guest",
    "vCPU exits",
];

/// CPU time of an I/O by thread: a stacked bar for each run.
pub fn cpu_of_an_io(runs: &[Series<'_>], title: &str) -> Option<String> {
    let bars: Vec<(&Series<'_>, Vec<f64>)> = runs
        .iter()
        .filter_map(|s| {
            let parts: Option<Vec<f64>> = (0..PARTS.len())
                .map(|part| {
                    s.row
                        .summary(|m| m.per_io(part_ns(m, part)))
                        .map(|s| s.median)
                })
                .collect();
            parts.map(|p| (s, p))
        })
        .collect();
    let longest = bars
        .iter()
        .map(|(_, p)| p.iter().sum::<f64>())
        .fold(0.0, f64::max);
    if longest == 0.0 {
        return None;
    }
    let (name_width, row_height) = (150.0, 24.0);
    let height = row_height * bars.len() as f64 + 62.0;
    let x = Scale::from_zero(longest / 1e3, name_width, 900.0);
    let mut drawing = Drawing::new(&format!("{title}: CPU of an I/O by thread"), 940.0, height);
    let bottom = 6.0 + row_height * bars.len() as f64;
    for tick in x.ticks() {
        drawing.line("grid", x.at(tick), 4.0, x.at(tick), bottom);
        drawing.text("tick middle", x.at(tick), bottom + 14.0, &short(tick));
    }
    for (index, (series, parts)) in bars.iter().enumerate() {
        let top = 6.0 + row_height * index as f64;
        drawing.text("name end", name_width - 8.0, top + 15.0, &series.row.name);
        let mut sum_us = 0.0;
        for (part, ns) in parts.iter().enumerate().filter(|(_, ns)| **ns > 0.0) {
            let us = ns / 1e3;
            let (from, to) = (x.at(sum_us), x.at(sum_us + us));
            sum_us += us;
            let tip = format!("{}, {}: {us:.2} µs an I/O", series.row.name, PARTS[part]);
            drawing.bar(
                &format!("fill p{part}"),
                from,
                top + 3.0,
                to - from,
                16.0,
                &tip,
            );
        }
        drawing.text(
            "tick",
            x.at(sum_us) + 5.0,
            top + 15.0,
            &format!("{sum_us:.2}"),
        );
    }
    drawing.text("caption middle", 525.0, bottom + 32.0, "CPU of an I/O, µs");
    let used = |part: &usize| bars.iter().any(|(_, parts)| parts[*part] > 0.0);
    for (place, part) in (0..PARTS.len()).filter(used).enumerate() {
        let (at, name) = (name_width + 130.0 * place as f64, PARTS[part]);
        drawing.bar(
            &format!("fill p{part}"),
            at,
            bottom + 40.0,
            11.0,
            11.0,
            name,
        );
        drawing.text("tick", at + 16.0, bottom + 49.5, name);
    }
    Some(drawing.finish())
}

fn part_ns(m: &Measurement, part: usize) -> u64 {
    let is_vcpu = |g: &Group| matches!(g, Group::Vcpu(_));
    let guest_ns: u64 = m.cpu.groups.iter().map(|g| g.guest_ns).sum();
    match part {
        0 => m.cpu.of_ns(|g| matches!(g, Group::Iothread(_))),
        1 => m
            .cpu
            .of_ns(|g| matches!(g, Group::Main | Group::Other | Group::Ended)),
        2 => m.cpu.of_ns(|g| *g == Group::KernelIo),
        3 => guest_ns,
        _ => m.cpu.of_ns(is_vcpu).saturating_sub(guest_ns),
    }
}

/// The Pareto front of points of (IOPS, CPU). Between two points of it, the better one for less CPU is
/// all that is known.
fn draw_front(drawing: &mut Drawing, points: &[(f64, f64)], x: &Scale, y: &Scale) {
    let front: Vec<(f64, f64)> = pareto_front(points)
        .into_iter()
        .map(|i| (x.at(points[i].1), y.at(points[i].0)))
        .collect();
    let mut steps = Vec::new();
    for (index, point) in front.iter().enumerate() {
        if index > 0 {
            steps.push((point.0, front[index - 1].1));
        }
        steps.push(*point);
    }
    drawing.path("front", &steps);
}
