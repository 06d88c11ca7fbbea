//! The table of figures, VMMs side by side.

use super::Sample;
use crate::report::{lines, plain_table};
use crate::stats::Summary;

/// One row of the table.
struct Figure {
    name: &'static str,
    of: fn(&Sample) -> f64,
    digits: usize,
}

const MIB: f64 = (1 << 20) as f64;

const FIGURES: [Figure; 6] = [
    Figure {
        name: "start to first instruction, ms",
        of: |s| s.start_ms,
        digits: 1,
    },
    Figure {
        name: "memory beyond the guest's, MiB",
        of: |s| s.memory_bytes as f64 / MIB,
        digits: 1,
    },
    Figure {
        name: "  of it not shared, MiB",
        of: |s| s.private_bytes as f64 / MIB,
        digits: 1,
    },
    Figure {
        name: "idle, % of a CPU",
        of: |s| s.idle_percent,
        digits: 2,
    },
    Figure {
        name: "threads",
        of: |s| s.threads as f64,
        digits: 0,
    },
    Figure {
        name: "descriptors",
        of: |s| s.descriptors as f64,
        digits: 0,
    },
];

/// Each figure's median and the interval that holds it, for each VMM; `sizes` are their programs',
/// stripped, in bytes.
pub fn report(vmms: &[(&str, Vec<Sample>)], sizes: &[Option<u64>]) -> String {
    let mut header = vec![""];
    header.extend(vmms.iter().map(|(name, _)| *name));
    let mut table = plain_table(&header, 1);
    for figure in &FIGURES {
        let mut row = vec![figure.name.to_owned()];
        row.extend(vmms.iter().map(|(_, samples)| {
            let values: Vec<f64> = samples.iter().map(figure.of).collect();
            Summary::of(&values).map_or("-".into(), |s| {
                let digits = figure.digits;
                match s.spread() {
                    Some(spread) if spread > 0.0 => {
                        format!("{:.digits$} ±{spread:.digits$}", s.median)
                    }
                    _ => format!("{:.digits$}", s.median),
                }
            })
        }));
        table.add_row(row);
    }
    let mut row = vec!["program, stripped, MiB".to_owned()];
    row.extend(
        sizes
            .iter()
            .map(|size| size.map_or("-".into(), |bytes| format!("{:.1}", bytes as f64 / MIB))),
    );
    table.add_row(row);
    lines(&table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stand_side_by_side() {
        let sample = |start_ms| Sample {
            start_ms,
            memory_bytes: 6 << 20,
            private_bytes: 3 << 20,
            idle_percent: 0.25,
            threads: 8,
            descriptors: 40,
        };
        let text = report(
            &[
                ("pollux", vec![sample(9.0), sample(10.0), sample(12.0)]),
                ("qemu", vec![sample(90.0)]),
            ],
            &[Some(5 << 20), None],
        );
        assert!(
            text.contains("start to first instruction, ms  10.0 ±2.0  90.0"),
            "{text}"
        );
        assert!(
            text.contains("program, stripped, MiB") && text.contains("5.0     -"),
            "{text}"
        );
    }
}
