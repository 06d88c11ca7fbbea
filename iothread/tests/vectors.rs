//! The polling rules against exact sequences: the window and every handler's value after every
//! step, to the nanosecond. `POLLUX_VECTORS=FILE` runs another file of the same form.

#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use iothread::PollSettings;
use iothread::policy::{Iteration, Policy, PolicyKind};
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    name: String,
    rule: String,
    handlers: u32,
    settings: HashMap<String, i64>,
    steps: Vec<Step>,
    expect: Vec<Expect>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Step {
    Reconfigure {
        reconfigure: HashMap<String, i64>,
    },
    Iterate {
        block_ns: i64,
        now_ns: i64,
        ready: Vec<u32>,
    },
}

#[derive(Deserialize)]
struct Expect {
    poll_ns: i64,
    handlers: Vec<i64>,
}

fn settings(given: &HashMap<String, i64>) -> PollSettings {
    let mut settings = PollSettings::default();
    for (name, value) in given {
        settings
            .set(
                match name.as_str() {
                    "max_ns" => "poll-max-ns",
                    "grow" => "poll-grow",
                    "shrink" => "poll-shrink",
                    "weight" => "poll-weight",
                    other => panic!("unknown setting {other}"),
                },
                *value,
            )
            .unwrap();
    }
    settings
}

fn run(case: &Case) {
    let kind: PolicyKind = case.rule.replace('_', "-").parse().unwrap();
    let mut policy: Box<dyn Policy> = kind.build(&settings(&case.settings));
    assert_eq!(case.steps.len(), case.expect.len(), "{}", case.name);
    let mut max_ns = settings(&case.settings).poll_max_ns;
    for (number, (step, expect)) in case.steps.iter().zip(&case.expect).enumerate() {
        match step {
            Step::Reconfigure { reconfigure } => {
                policy.reset(&settings(reconfigure));
                max_ns = settings(reconfigure).poll_max_ns;
            }
            Step::Iterate {
                block_ns,
                now_ns,
                ready,
            } => {
                // As the loop does: nothing is listed while polling is off.
                if max_ns != 0 {
                    ready.iter().for_each(|slot| policy.list(*slot));
                }
                policy.observe(&Iteration::new(*block_ns, *now_ns, ready));
            }
        }
        assert_eq!(
            policy.window_ns(),
            expect.poll_ns,
            "{} step {number}: window",
            case.name
        );
        for (slot, ns) in (0..case.handlers).zip(&expect.handlers) {
            assert_eq!(
                policy.handler_ns(slot),
                *ns,
                "{} step {number}: handler {slot}",
                case.name
            );
        }
    }
}

#[test]
fn every_vector_matches() {
    let (source, text) = match std::env::var("POLLUX_VECTORS") {
        Ok(file) => {
            let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{file}: {e}"));
            (file, text)
        }
        Err(_) => (
            "tests/data/polling.jsonl".into(),
            include_str!("data/polling.jsonl").into(),
        ),
    };
    let cases: Vec<Case> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let steps: usize = cases.iter().map(|case| case.steps.len()).sum();
    assert!(!cases.is_empty(), "{source} holds no case");
    cases.iter().for_each(run);
    println!("{source}: {} cases, {steps} steps", cases.len());
}
