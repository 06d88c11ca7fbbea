//! The answer of `x-query-polling` in words.

use std::fmt::Write as _;

use serde_json::Value;

/// A paragraph for each loop: what it did, its windows, its handlers.
pub fn describe(loops: &Value) -> String {
    let mut text = String::new();
    for one in loops.as_array().into_iter().flatten() {
        describe_loop(&mut text, one);
    }
    text
}

fn describe_loop(text: &mut String, one: &Value) {
    let number = |key: &str| one[key].as_u64().unwrap_or(0);
    let word = |key: &str| one[key].as_str().unwrap_or("?").to_owned();
    // Writing to a string does not fail, here and below.
    let _ = writeln!(
        text,
        "{} (thread {}, poll-policy={}):",
        word("id"),
        number("thread-id"),
        word("poll-policy")
    );
    let _ = writeln!(
        text,
        "  iterations {}, of which slept {}; woken {} times; CPU {} ms",
        number("iterations"),
        number("blocks"),
        number("wakeups"),
        number("cpu-ns") / 1_000_000
    );
    let _ = writeln!(
        text,
        "  requests {} submitted, {} completed, {} system calls",
        number("submissions"),
        number("completions"),
        number("enters")
    );
    let windows = number("windows");
    if windows > 0 {
        let _ = writeln!(
            text,
            "  polled {windows} times, {:.1} % found work; {} ms, of which in vain {} ms",
            100.0 * number("hits") as f64 / windows as f64,
            number("poll-ns") / 1_000_000,
            number("vain-ns") / 1_000_000
        );
        let _ = writeln!(
            text,
            "  window {} ns now; by iteration{}",
            number("window-ns"),
            percentiles(&one["window-histogram"])
        );
        let _ = writeln!(
            text,
            "  waits by iteration{}",
            percentiles(&one["block-histogram"])
        );
    }
    let experiment = &one["experiment"];
    if experiment.is_object() {
        let number = |key: &str| experiment[key].as_u64().unwrap_or(0);
        let doing = match (
            experiment["scanning"].as_bool(),
            experiment["trial-ns"].as_u64(),
        ) {
            (Some(true), _) => ", comparing all windows".to_owned(),
            (_, Some(ns)) => format!(", trying {ns} ns"),
            _ => String::new(),
        };
        let _ = writeln!(
            text,
            "  auto at poll-alpha={}: holds {} ns{doing}; score {:.3}; {} epochs, {} scans, {} trials, {} switches",
            one["poll-alpha"],
            number("incumbent-ns"),
            experiment["score"].as_f64().unwrap_or(0.0),
            number("epochs"),
            number("scans"),
            number("trials"),
            number("switches")
        );
    }
    let handlers = one["handlers"].as_array().into_iter().flatten();
    for handler in handlers.filter(|handler| handler["events"] != 0) {
        let number = |key: &str| handler[key].as_u64().unwrap_or(0);
        let polled = match handler["polled"].as_bool() {
            Some(true) => ", polled now",
            _ => "",
        };
        let _ = writeln!(
            text,
            "  {}: {} events, {} found by polling, {} ns{polled}",
            handler["name"].as_str().unwrap_or("?"),
            number("events"),
            number("hits"),
            number("ns")
        );
    }
}

/// Where half, most and nearly all values of a histogram lie; to the width of its ranges.
fn percentiles(histogram: &Value) -> String {
    let buckets = histogram.as_array().into_iter().flatten();
    let buckets: Vec<(u64, u64)> = buckets
        .filter_map(|bucket| Some((bucket["from-ns"].as_u64()?, bucket["count"].as_u64()?)))
        .collect();
    let total: u64 = buckets.iter().map(|(_, count)| count).sum();
    let mut text = String::new();
    for percent in [50, 90, 99] {
        let rank = (u128::from(total) * percent).div_ceil(100);
        let mut seen = 0;
        let value = buckets.iter().find(|(_, count)| {
            seen += u128::from(*count);
            seen >= rank
        });
        let _ = write!(
            text,
            " p{percent} {} ns",
            value.map_or(0, |(from_ns, _)| *from_ns)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_loop_is_described() {
        let answer = json!([{
            "id": "io0", "thread-id": 7, "poll-policy": "weighted", "cpu-ns": 5_000_000, "iterations": 10, "blocks": 3,
            "wakeups": 2, "submissions": 8, "completions": 7, "enters": 6, "windows": 4, "hits": 3, "misses": 1,
            "poll-ns": 9_000_000, "vain-ns": 1_000_000, "window-ns": 1500,
            "window-histogram": [{"from-ns": 1000, "count": 50}, {"from-ns": 2000, "count": 41}, {"from-ns": 4000, "count": 9}],
            "block-histogram": [],
            "handlers": [{"name": "q0", "events": 5, "hits": 4, "ns": 70, "polled": true},
                         {"name": "silent", "events": 0, "hits": 0, "ns": 0, "polled": false}],
        }, {"id": "main", "thread-id": 1, "poll-policy": "auto", "windows": 0, "poll-alpha": 0.3,
            "experiment": {"incumbent-ns": 8192, "trial-ns": 4096, "scanning": false, "score": -12.5, "advantage": -0.1,
                           "epochs": 50, "scans": 1, "trials": 7, "switches": 2}}]);
        assert_eq!(
            describe(&answer),
            "\
io0 (thread 7, poll-policy=weighted):
  iterations 10, of which slept 3; woken 2 times; CPU 5 ms
  requests 8 submitted, 7 completed, 6 system calls
  polled 4 times, 75.0 % found work; 9 ms, of which in vain 1 ms
  window 1500 ns now; by iteration p50 1000 ns p90 2000 ns p99 4000 ns
  waits by iteration p50 0 ns p90 0 ns p99 0 ns
  q0: 5 events, 4 found by polling, 70 ns, polled now
main (thread 1, poll-policy=auto):
  iterations 0, of which slept 0; woken 0 times; CPU 0 ms
  requests 0 submitted, 0 completed, 0 system calls
  auto at poll-alpha=0.3: holds 8192 ns, trying 4096 ns; score -12.500; 50 epochs, 1 scans, 7 trials, 2 switches
"
        );
    }
}
