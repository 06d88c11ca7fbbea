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
                    vain_ns: 10,
                    enters: 50_000,
                    windows: vec![(1024, 5), (2048, 4), (4096, 1)],
                    ..Polling::default()
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
    // 30 samples in three rounds, counted in the middle of their buckets: 15 at 1152, 12 at 2304,
    // 3 at 4608.
    assert_eq!(
        windows.split_whitespace().collect::<Vec<_>>(),
        [
            "w1", "randread", "8k", "d1", "io0", "1", "30", "1958", "1024", "2048", "24", "6"
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
    let one = summarise(vec![(8, 1)], 1, 0);
    assert_eq!((one.mean_ns, one.p50_ns, one.p90_ns), (9.0, 8, 8));
}

fn line_with<'a>(text: &'a str, parts: &[&str]) -> Vec<&'a str> {
    let found = text.lines().find(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        words.starts_with(parts)
    });
    found
        .unwrap_or_else(|| panic!("{parts:?} in {text}"))
        .split_whitespace()
        .collect()
}

/// Results of the study of weights: the weighted rule 2 % below per-handler, for less CPU.
fn weights_study() -> Results {
    let words = crate::preset::Preset::Weights.matrix(Tool::Guest, &[]);
    let runs = matrix::parse(&words, Tool::Guest).expect("a matrix");
    let mut results = Results::new(Tool::Guest, Conditions::default(), 1, runs);
    for record in &mut results.runs {
        let weighted = record.run.poll_weight.is_some();
        let (iops, ns) = if weighted {
            (98_000.0, 180_000_000)
        } else {
            (100_000.0, 300_000_000)
        };
        let mut m = measurement(iops, ns);
        m.polling = vec![Polling {
            name: "io0".into(),
            windows: vec![(4096, 30), (8192, 70)],
            ..Polling::default()
        }];
        record.rounds = vec![Some(m)];
    }
    results
}

#[test]
fn published_figures_stand_beside_ours() {
    let study = weights_study();
    let records: Vec<_> = study.runs.iter().collect();
    let text = reference(&records).expect("published figures");
    let w2 = line_with(&text, &["w2", "randread", "8k"]);
    assert_eq!(w2[5..], ["163718", "-3.1%", "98000", "-2.0%"]);
    let old = line_with(&text, &["v9.2.0", "randread"]);
    assert_eq!(old[7..], ["100000", "+0.0%"]);
    let window = line_with(&text, &["randread", "3"]);
    assert_eq!(
        window[2..],
        [
            "5010000", "15647", "14863", "28695", "100", "7834", "8192", "8192"
        ]
    );
    assert_eq!(line_with(&text, &["randwrite", "3"])[6..], ["-"; 4]);
    let change = line_with(&text, &["qemu-10.0", "FCP", "1", "randread", "cpu"]);
    assert_eq!(change[5..], ["-7.3%", "-5.3%", "-15.0%", "-15.0%"]);
    let engine = line_with(&text, &["randread", "4k", "64", "io_uring", "1"]);
    assert_eq!(engine[5..], ["324797", "318429", "-"]);
    // Every published line is there: three header lines and a caption for each table.
    let csv_lines: usize = [6, 10, 64, 16].iter().sum();
    assert_eq!(
        text.lines().filter(|l| !l.is_empty()).count(),
        csv_lines + 2 * 4
    );
}

#[test]
fn without_results_the_published_figures_stand_alone() {
    let text = reference(&[]).expect("published figures");
    assert_eq!(line_with(&text, &["w2", "randread", "8k"])[7..], ["-", "-"]);
}

#[test]
fn two_files_are_compared_run_by_run() {
    let a = sample();
    let mut b = sample();
    for record in &mut b.runs {
        record
            .rounds
            .iter_mut()
            .flatten()
            .for_each(|m| m.iops *= 1.5);
    }
    b.runs.truncate(5);
    let text = compare(&a, &b);
    let w1 = line_with(&text, &["w1", "randread", "8k", "d1"]);
    assert_eq!(w1[4..9], ["100000", "±1.0%", "150000", "±1.0%", "+50.0%"]);
    assert!(
        text.contains("note: only in A: w3, randread 8k d8"),
        "{text}"
    );
    assert_eq!(text.lines().count(), 1 + 5 + 1, "{text}");
}

#[test]
fn results_of_two_vmms_are_compared_by_their_load() {
    let results = |matrix: &str, iops: f64| {
        let runs = matrix::parse(&[matrix], Tool::Guest).expect("a matrix");
        let mut r = Results::new(Tool::Guest, Conditions::default(), 1, runs);
        r.runs
            .iter_mut()
            .for_each(|x| x.rounds = vec![Some(measurement(iops, 1))]);
        r
    };
    let text = compare(
        &results("vmm=qemu iodepth=1,8", 100.0),
        &results("vmm=pollux iodepth=1,8", 200.0),
    );
    let line = line_with(&text, &["qemu", "→", "pollux", "randread", "4k", "d8"]);
    assert_eq!(line[6..9], ["100", "200", "+100.0%"]);
    // Two of a kind on one side: nothing is guessed.
    let text = compare(
        &results("poll-weight=1,2", 100.0),
        &results("poll-weight=3", 200.0),
    );
    assert_eq!(text.matches("only in A").count(), 2, "{text}");
}
