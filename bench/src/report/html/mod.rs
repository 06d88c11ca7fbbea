//! The HTML report: one page that needs nothing else, with charts as SVG.

mod charts;
mod svg;
#[cfg(test)]
mod tests;

use std::fmt::Write as _;

use super::{Row, against_baseline, rows};
use crate::matrix::{Axis, Layout, axis};
use crate::record::{Measurement, Results};
use crate::stats::{Difference, Summary, Verdict};

use charts::Series;
use svg::{Drawing, escape};

const STYLE: &str = include_str!("style.css");

/// The page.
pub fn html(results: &Results) -> String {
    let rows = rows(results);
    let names = names(&rows);
    let mut page = String::new();
    let title = match results.tool {
        crate::matrix::Tool::Fio => "fio in a Linux guest: IOPS against CPU",
        crate::matrix::Tool::Guest => "Embedded guest: IOPS against CPU",
        crate::matrix::Tool::Vhost => "vhost-user: IOPS against CPU",
    };
    let _ = write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style></head>\n<body><main>\n<h1>{title}</h1>\n"
    );
    page += &conditions(results);
    let notes = super::text::notes(results, &rows);
    if !notes.is_empty() {
        let items = notes
            .iter()
            .map(|n| format!("<li>{}</li>", escape(n)))
            .collect::<String>();
        let _ = writeln!(page, "<div class=\"notes\"><ul>{items}</ul></div>");
    }
    let groups = groups(&rows);
    let means = super::policies::means(&rows);
    if !means.is_empty() {
        let tables = super::policies::tables(&rows);
        let _ = writeln!(
            page,
            "<h2>Polling rules over all loads</h2>\n{}<pre>{}</pre>",
            charts::rules(&means),
            escape(tables.trim())
        );
    }
    page += &summary(&rows, &groups);
    page += &table(results, &rows);
    page += &per_io(&rows);
    if groups.len() > 3 {
        let links = groups.iter().map(|g| {
            format!(
                "<a href=\"#load{}\">{}</a> ",
                g[0],
                escape(&section_title(&rows[g[0]]))
            )
        });
        let _ = writeln!(page, "<nav>{}</nav>", links.collect::<String>());
    }
    for group in groups {
        page += &section(&rows, &group, &names);
    }
    page += "</main></body></html>\n";
    page
}

/// The names of runs in the order of their first appearance: a name has one colour on the page.
fn names(rows: &[Row<'_>]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for row in rows {
        if !names.contains(&row.name) {
            names.push(row.name.clone());
        }
    }
    names
}

/// Indices of rows that are compared with each other.
fn groups(rows: &[Row<'_>]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (index, row) in rows.iter().enumerate() {
        match groups.iter_mut().find(|g| g[0] == row.baseline) {
            Some(group) => group.push(index),
            None => groups.push(vec![index]),
        }
    }
    groups
}

fn conditions(results: &Results) -> String {
    let c = &results.conditions;
    let mut facts = vec![
        date(c.started_unix),
        format!("{} ({} CPUs)", c.processor, c.cpus),
        format!("Linux {}", c.kernel),
    ];
    facts.extend(c.versions.iter().cloned());
    let facts: Vec<String> = facts.iter().map(|f| escape(f)).collect();
    let command = format!("pollux-bench {}", c.arguments.join(" "));
    format!(
        "<p class=\"faint\">{}</p>\n<p class=\"faint\"><code>{}</code></p>\n",
        facts.join(" · "),
        escape(command.trim())
    )
}

/// A day of the proleptic Gregorian calendar and the time, in UTC.
fn date(unix: u64) -> String {
    let (mut days, seconds) = (unix / 86_400, unix % 86_400);
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    let (hour, minute) = (seconds / 3600, seconds / 60 % 60);
    format!(
        "{year}-{month:02}-{:02} {hour:02}:{minute:02} UTC",
        days + 1
    )
}

/// Loads whose winners are named; a longer list is not read.
const NAMED_LOADS: usize = 8;

/// What to take away: of each load the run with the most IOPS, and the one with the least CPU an I/O.
fn summary(rows: &[Row<'_>], groups: &[Vec<usize>]) -> String {
    let compared = groups.iter().filter(|group| group.len() > 1);
    let mut items = String::new();
    for group in compared.take(NAMED_LOADS) {
        let best = |figure: &dyn Fn(&Row<'_>) -> Option<Summary>, sign: f64| {
            let known = group.iter().filter_map(|&i| Some((i, figure(&rows[i])?)));
            known.max_by(|a, b| (sign * a.1.median).total_cmp(&(sign * b.1.median)))
        };
        let iops = |row: &Row<'_>| row.iops;
        let cost = |row: &Row<'_>| row.summary(Measurement::io_cpu_per_io);
        let (Some(most), Some(least)) = (best(&iops, 1.0), best(&cost, -1.0)) else {
            continue;
        };
        let base = &rows[rows[group[0]].baseline].name;
        let _ = writeln!(
            items,
            "<li><b>{}</b>: most IOPS <b>{}</b>, {}{}; least CPU an I/O <b>{}</b>, {:.2} µs{}</li>",
            escape(&section_title(&rows[group[0]])),
            escape(&rows[most.0].name),
            thousands(most.1.median),
            compared_text(against_baseline(rows, most.0, iops), base),
            escape(&rows[least.0].name),
            least.1.median / 1e3,
            compared_text(against_baseline(rows, least.0, cost), base),
        );
    }
    match items.is_empty() {
        true => items,
        false => format!("<div class=\"summary\"><ul>\n{items}</ul></div>\n"),
    }
}

/// A difference in words, in parentheses.
fn compared_text(difference: Option<Difference>, base: &str) -> String {
    let Some(difference) = difference else {
        return " (the baseline)".into();
    };
    let verdict = match difference.verdict {
        Verdict::Noise => ", inside the noise",
        Verdict::Unknown => ", measured once",
        _ => "",
    };
    let percent = difference.percent;
    format!(" ({percent:+.0}% to {}{verdict})", escape(base))
}

/// A whole number with thin spaces between its thousands.
fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push('\u{202f}');
        }
        text.push(digit);
    }
    text
}

/// What an I/O costs: notifications, system calls, sleeps.
fn per_io(rows: &[Row<'_>]) -> String {
    // Those of the main table are not repeated.
    let figures: Vec<_> = super::text::known_figures(rows)
        .into_iter()
        .filter(|(name, _, _)| name.ends_with("/io") && !name.starts_with("io-cpu"))
        .collect();
    if figures.is_empty() {
        return String::new();
    }
    let mut head = String::from("<th class=\"left\">run</th><th class=\"left\">load</th>");
    for (name, _, _) in &figures {
        let _ = write!(head, "<th>{name}</th>");
    }
    let mut body = String::new();
    for row in rows.iter().filter(|row| row.iops.is_some()) {
        let (name, load) = (escape(&row.name), escape(&row.load));
        let _ = write!(
            body,
            "<tr><td class=\"left\">{name}</td><td class=\"left\">{load}</td>"
        );
        for (_, decimals, figure) in &figures {
            let value = row.summary(figure);
            let text = value.map_or("–".into(), |s| format!("{:.*}", *decimals, s.median));
            let _ = write!(body, "<td>{text}</td>");
        }
        body += "</tr>\n";
    }
    format!(
        "<h3 class=\"under\">What happens for an I/O</h3>\n<div class=\"scroll\"><table><thead><tr>{head}</tr></thead>\
         <tbody>\n{body}</tbody></table></div>\n\
         <p class=\"faint\">kicks: notifications by the driver. irqs: interrupts that it got. enters: calls of \
         io_uring_enter by the VMM. syscalls: all its system calls.</p>\n"
    )
}

/// The main table, with more columns than the text has room for.
fn table(results: &Results, rows: &[Row<'_>]) -> String {
    let layout = Layout::of(results.runs.iter().map(|r| &r.run));
    let varies = |axis: &Axis| {
        rows.iter()
            .any(|r| (axis.get)(r.run()) != (axis.get)(rows[0].run()))
    };
    let standing = |names: &[&str]| names.iter().filter_map(|n| axis(n)).collect::<Vec<_>>();
    let mut columns = standing(&["rw", "bs", "iodepth"]);
    columns.extend(layout.further());
    // What is the same everywhere stands below the table.
    let (varying, constant): (Vec<&Axis>, Vec<&Axis>) = standing(&["numjobs", "iothreads"])
        .into_iter()
        .partition(|axis| varies(axis));
    columns.extend(varying);
    let constant: String = constant
        .iter()
        .filter_map(|axis| {
            Some(format!(
                " {}: {}.",
                axis.name,
                (axis.get)(rows.first()?.run())?
            ))
        })
        .collect();
    let mut head = String::from("<th class=\"left\">run</th>");
    for column in &columns {
        let class = if column.name == "rw" {
            " class=\"left\""
        } else {
            ""
        };
        let _ = write!(head, "<th{class}>{}</th>", column.name);
    }
    for name in [
        "IOPS",
        "diff",
        "CPU",
        "diff",
        "I/O CPU ns/IO",
        "diff",
        "p50 µs",
        "p99 µs",
    ] {
        let _ = write!(head, "<th>{name}</th>");
    }
    let mut body = String::new();
    for (index, row) in rows.iter().enumerate() {
        let _ = write!(body, "<tr><td class=\"left\">{}</td>", escape(&row.name));
        for column in &columns {
            let class = if column.name == "rw" {
                " class=\"left\""
            } else {
                ""
            };
            let value = (column.get)(row.run()).unwrap_or_default();
            let _ = write!(body, "<td{class}>{}</td>", escape(&value));
        }
        if row.iops.is_none() {
            let text = if row.record.rounds.is_empty() {
                "not measured"
            } else {
                "failed"
            };
            let _ = writeln!(
                body,
                "<td colspan=\"8\" class=\"left noise\">{text}</td></tr>"
            );
            continue;
        }
        let per_io = |r: &Row<'_>| r.summary(Measurement::io_cpu_per_io);
        body += &figure_cells(
            row.iops,
            0,
            "",
            against_baseline(rows, index, |r| r.iops),
            true,
        );
        body += &figure_cells(
            row.cpu,
            1,
            "%",
            against_baseline(rows, index, |r| r.cpu),
            false,
        );
        body += &figure_cells(
            per_io(row),
            0,
            "",
            against_baseline(rows, index, per_io),
            false,
        );
        for latency in [
            row.summary(|m| m.latency.map(|l| l.p50_ns / 1e3)),
            row.summary(|m| m.latency.map(|l| l.p99_ns / 1e3)),
        ] {
            let _ = write!(
                body,
                "<td>{}</td>",
                latency.map_or("–".into(), |s| format!("{:.1}", s.median))
            );
        }
        body += "</tr>\n";
    }
    format!(
        "<div class=\"scroll\"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n\
         <p class=\"faint\">CPU: all threads of the VMM, in percent of one CPU. I/O CPU: all but the \
         vCPUs. Differences are to the first run of the same load; grey ones are inside the spread.{constant}</p>\n"
    )
}

/// The cells of a figure and of its difference.
fn figure_cells(
    summary: Option<Summary>,
    decimals: usize,
    unit: &str,
    difference: Option<Difference>,
    more_is_better: bool,
) -> String {
    let value = summary.map_or("–".into(), |s| {
        let spread = s
            .spread_percent()
            .map_or(String::new(), |p| format!(" <small>±{p:.1}%</small>"));
        format!("{:.decimals$}{unit}{spread}", s.median)
    });
    let diff = difference.map_or("<td></td>".into(), |d| {
        let class = match d.verdict {
            Verdict::Noise => "noise",
            Verdict::Unknown => "",
            Verdict::Higher if more_is_better => "better",
            Verdict::Lower if !more_is_better => "better",
            _ => "worse",
        };
        let noise = if d.verdict == Verdict::Noise {
            " noise"
        } else {
            ""
        };
        format!("<td class=\"{class}\">{:+.1}%{noise}</td>", d.percent)
    });
    format!("<td>{value}</td>{diff}")
}

fn has_vcpus(row: &Row<'_>) -> bool {
    let mut groups = row.record.measurements().flat_map(|m| &m.cpu.groups);
    groups.any(|usage| !usage.group.is_io())
}

/// What the runs of a section have in common.
fn section_title(first: &Row<'_>) -> String {
    match first.run().iothreads {
        _ if first.load.contains("iothread") || first.load.contains("main loop") => {
            first.load.clone()
        }
        1 => first.load.clone(),
        0 => format!("{}, main loop", first.load),
        n => format!("{}, {n} iothreads", first.load),
    }
}

/// The charts of runs that are compared.
fn section(rows: &[Row<'_>], group: &[usize], names: &[String]) -> String {
    let series: Vec<Series<'_>> = group
        .iter()
        .filter(|&&i| rows[i].iops.is_some())
        .map(|&i| Series {
            row: &rows[i],
            colour: names.iter().position(|n| *n == rows[i].name).unwrap_or(0),
        })
        .collect();
    if series.is_empty() {
        return String::new();
    }
    let title = section_title(&rows[group[0]]);
    let mut legend = String::new();
    for s in &series {
        let mut mark = Drawing::new(&s.row.name, 14.0, 14.0);
        mark.mark(s.colour, 7.0, 7.0, &s.row.name);
        let _ = write!(
            legend,
            "<span>{}{}</span>",
            mark.finish(),
            escape(&s.row.name)
        );
    }
    legend += "<span><span class=\"dash\"></span>Pareto front: no other run gives more IOPS for less CPU</span>";
    let mut charts = String::new();
    let mut figure = |title: &str, chart: Option<String>| {
        if let Some(chart) = chart {
            let _ = writeln!(charts, "<figure><h3>{title}</h3>{chart}</figure>");
        }
    };
    let whole =
        charts::iops_against_cpu(&series, &title, Measurement::cpu_percent, "CPU, % of one");
    // A back end without a guest has no other threads than those of I/O.
    if series.iter().any(|s| has_vcpus(s.row)) {
        figure("IOPS against CPU of the whole VMM", whole);
        figure(
            "IOPS against CPU of the I/O threads",
            charts::iops_against_cpu(
                &series,
                &title,
                Measurement::io_cpu_percent,
                "CPU of all threads but vCPUs, % of one",
            ),
        );
    } else {
        figure("IOPS against CPU of the back end", whole);
    }
    figure("Latency", charts::latency(&series, &title));
    figure("Polling windows", charts::poll_windows(&series, &title));
    let wide = charts::cpu_of_an_io(&series, &title).map_or(String::new(), |chart| {
        format!("<figure class=\"wide\"><h3>CPU of an I/O by thread</h3>{chart}</figure>\n")
    });
    format!(
        "<section id=\"load{}\"><h2>{}</h2>\n<div class=\"legend\">{legend}</div>\n<div class=\"charts\">\n{charts}</div>\n\
         {wide}</section>\n",
        group[0],
        escape(&title)
    )
}
