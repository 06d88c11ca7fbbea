//! The table of IOPS against CPU.

use std::fmt::Write;
use std::time::Duration;

use super::run::Measured;

/// One line of the table.
#[derive(Debug, Clone)]
pub struct Row {
    /// Kind of load.
    pub rw: &'static str,
    /// Requests in flight a disk.
    pub depth: u32,
    /// Polling rule.
    pub policy: &'static str,
    /// The numbers.
    pub measured: Measured,
}

impl Row {
    /// CPU time of the iothreads for a time, in percent of one CPU.
    fn cpu_percent(&self) -> f64 {
        ratio(self.measured.iothreads_ns, self.measured.elapsed_ns) * 100.0
    }

    fn cpu_us_an_io(&self) -> f64 {
        ratio(self.measured.iothreads_ns, self.measured.ios) / 1000.0
    }

    fn kicks_an_io(&self) -> f64 {
        ratio(self.measured.kicks, self.measured.ios)
    }
}

fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

/// A difference in percent, or a dash for the line that others are compared with.
fn difference(value: f64, base: Option<f64>) -> String {
    match base {
        Some(base) if base > 0.0 => format!("{:+.0}%", (value / base - 1.0) * 100.0),
        _ => "-".to_owned(),
    }
}

/// The table, one block a load, compared with the rows whose policy is `base`.
pub fn render(rows: &[Row], base: &str, runtime: Duration) -> String {
    let mut text = format!(
        "{:<10} {:>7} {:<12} {:>9} {:>7} {:>7} {:>7} {:>10} {:>9}\n",
        "rw", "iodepth", "policy", "iops", "diff", "cpu", "diff", "cpu-us/io", "kicks/io"
    );
    let mut loads: Vec<(&str, u32)> = Vec::new();
    for row in rows {
        if !loads.contains(&(row.rw, row.depth)) {
            loads.push((row.rw, row.depth));
        }
    }
    for load in loads {
        let of_load = || rows.iter().filter(|row| (row.rw, row.depth) == load);
        let compared = of_load().find(|row| row.policy == base);
        for row in of_load() {
            let base = compared.filter(|base| base.policy != row.policy);
            let iops = row.measured.iops as f64;
            // Writing to a String does not fail.
            let _ = writeln!(
                text,
                "{:<10} {:>7} {:<12} {:>9} {:>7} {:>6.0}% {:>7} {:>10.1} {:>9.2}",
                row.rw,
                row.depth,
                row.policy,
                row.measured.iops,
                difference(iops, base.map(|base| base.measured.iops as f64)),
                row.cpu_percent(),
                difference(row.cpu_percent(), base.map(Row::cpu_percent)),
                row.cpu_us_an_io(),
                row.kicks_an_io()
            );
        }
        text.push('\n');
    }
    let seconds = runtime.as_secs_f64();
    let _ = write!(
        text,
        "cpu: all iothreads together, 100% being one CPU. kicks/io: notifications by the guest, each an exit.\n\
         One run of {seconds} s each: expect differences of some percent by chance, and more on a busy machine.\n"
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(policy: &'static str, iops: u64, iothreads_ns: u64) -> Row {
        Row {
            rw: "randread",
            depth: 8,
            policy,
            measured: Measured {
                iops,
                ios: 2 * iops,
                kicks: iops,
                iothreads_ns,
                elapsed_ns: 2_000_000_000,
            },
        }
    }

    #[test]
    fn rows_are_compared_with_the_first_policy() {
        let rows = [
            row("off", 1000, 500_000_000),
            row("always", 1500, 2_000_000_000),
        ];
        let text = render(&rows, "off", Duration::from_secs(2));
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(
            lines[1],
            [
                "randread", "8", "off", "1000", "-", "25%", "-", "250.0", "0.50"
            ]
        );
        assert_eq!(
            lines[2],
            [
                "randread", "8", "always", "1500", "+50%", "100%", "+300%", "666.7", "0.50"
            ]
        );
    }

    #[test]
    fn a_load_that_did_nothing_is_no_division_by_zero() {
        let mut idle = row("off", 0, 0);
        idle.measured.elapsed_ns = 0;
        let text = render(&[idle, row("always", 1, 1)], "off", Duration::from_secs(1));
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
}
