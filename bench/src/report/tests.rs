use super::*;
use crate::matrix::{self, Tool};
use crate::record::tests::measurement;
use crate::record::{Conditions, Latency, Polling};

/// Three weights at two depths: the baseline, one that differs, one that does not.
pub(crate) fn sample() -> Results {
    let runs = matrix::parse(&["bs=8k poll-weight=1,2,3 iodepth=1,8"], Tool::Guest);
    let mut results = Results::new(
        Tool::Guest,
        Conditions::default(),
        3,
        runs.expect("a matrix"),
    );
    for (index, record) in results.runs.iter_mut().enumerate() {
        let base = [
            100_000.0, 200_000.0, 120_000.0, 240_000.0, 100_500.0, 201_000.0,
        ][index];
        record.rounds = [0.99, 1.0, 1.01]
            .iter()
            .map(|f| {
                let mut m = measurement(base * f, 300_000_000);
                m.latency = Some(Latency {
                    p50_ns: 9_000.0,
                    ..Latency::default()
                });
                m.polling = vec![Polling {
                    name: "io0".into(),
                    hits: 8,
                    misses: 2,
                    missed_ns: 10,
                    windows: vec![(1000, 5), (2000, 4), (4000, 1)],
                }];
                Some(m)
            })
            .collect();
    }
    results.complete = true;
    results
}

#[test]
fn the_table_has_the_fields_layout() {
    let text = text(&sample());
    let mut lines = text.lines();
    let words = |line: &str| {
        line.split_whitespace()
            .map(String::from)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        words(lines.next().expect("a header")),
        [
            "run",
            "rw",
            "bs",
            "iodepth",
            "numjobs",
            "iothreads",
            "iops",
            "diff",
            "cpu",
            "diff"
        ]
    );
    assert_eq!(
        words(lines.next().expect("the baseline")),
        [
            "w1", "randread", "8k", "1", "1", "1", "100000", "±1.0%", "-", "80.0%", "±0.0%", "-"
        ]
    );
    let other = words(lines.next().expect("w2"));
    assert_eq!(other[6..9], ["120000", "±1.0%", "+20.0%"]);
    assert_eq!(other[11..], ["+0.0%", "noise"]);
    let same = words(lines.next().expect("w3"));
    assert_eq!(same[6..10], ["100500", "±1.0%", "+0.5%", "noise"]);
    let next = words(lines.next().expect("the next load's baseline"));
    assert_eq!(
        (next[0].as_str(), next[3].as_str(), next[8].as_str()),
        ("w1", "8", "-")
    );
}

#[test]
fn threads_ratios_and_windows_are_shown() {
    let text = text(&sample());
    let line = |start: &str| text.lines().find(|l| l.trim_start().starts_with(start));
    let io = line("w1   randread 8k d1  IO io0").expect("a group's line");
    assert_eq!(io.split_whitespace().nth(6), Some("30.0%"), "{io}");
    assert!(io.contains("3000"), "ns for each I/O: {io}");
    assert!(text.contains("vcpu0"));
    assert!(text.contains("1.20 ±0.00"), "{text}");
    let windows = line("w1            randread 8k d1").expect("windows");
    // 30 samples in three rounds: 15 below 1000, 12 below 2000, 3 below 4000.
    assert_eq!(
        windows.split_whitespace().collect::<Vec<_>>(),
        [
            "w1", "randread", "8k", "d1", "io0", "1", "30", "1150", "1000", "2000", "24", "6"
        ]
    );
}

#[test]
fn what_failed_or_was_not_measured_is_said() {
    let mut results = sample();
    results.complete = false;
    results.runs[1].rounds = vec![None, None];
    results.runs[1].failures = vec!["round 1: no console".into()];
    results.runs[5].rounds.clear();
    results.runs[0].rounds.truncate(1);
    let text = text(&results);
    for part in [
        "failed",
        "not measured",
        "round 1: no console",
        "interrupted",
        "measured once",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn csv_has_a_line_for_each_measurement() {
    let mut results = sample();
    results.runs[2].rounds[1] = None;
    let bytes = csv(&results).expect("CSV");
    let mut reader = ::csv::Reader::from_reader(bytes.as_slice());
    let header = reader.headers().expect("a header").clone();
    let at = |name: &str| header.iter().position(|h| h == name).expect(name);
    let lines: Vec<_> = reader.records().collect::<Result<_, _>>().expect("lines");
    assert_eq!(lines.len(), 17);
    assert_eq!(&lines[0][at("iops")], "99000");
    assert_eq!(&lines[0][at("cpu_iothreads_ns")], "300000000");
    assert_eq!(&lines[0][at("poll-weight")], "1");
    assert_eq!(&lines[0][at("latency_p50_ns")], "9000");
    assert_eq!(&lines[0][at("engine")], "io_uring");
    assert_eq!(&lines[0][at("monitor")], "");
    assert!(!String::from_utf8_lossy(&bytes).contains("NaN"));
}

#[test]
fn percentiles_of_buckets() {
    let none = summarise(Vec::new(), 0, 0);
    assert_eq!((none.samples, none.p50_ns), (0, 0));
    let one = summarise(vec![(10, 1)], 1, 0);
    assert_eq!((one.mean_ns, one.p50_ns, one.p90_ns), (5.0, 10, 10));
}
