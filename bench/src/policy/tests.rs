use std::path::Path;

use iothread::PollSettings;
use iothread::policy::{Iteration, PolicyKind};
use iothread::trace::TraceEvent;
use iothread::trace::codec::{Entry, encode};
use iothread::trace::file::{Block, End, Header, Thread, put_events};
use proptest::prelude::*;

use super::replay::{Replay, text};
use super::sim::{Host, Load, run};
use super::{Rule, calibrate};
use crate::trace::files::find;
use crate::trace::read::read;

fn rule(text: &str) -> Rule {
    text.parse().unwrap()
}

/// IOPS, CPU a request and mean window in nanoseconds of the model in Python, with 3000 requests
/// and seed 1.
const MODEL: [(&str, &str, &str, f64, f64, f64); 35] = [
    ("metal", "gamma:75us:4", "off", 42914.989, 6459.117, 0.000),
    (
        "metal",
        "gamma:75us:4",
        "context",
        46445.304,
        12875.714,
        13490.953,
    ),
    (
        "metal",
        "gamma:75us:4",
        "per-handler",
        47435.361,
        13658.054,
        13780.293,
    ),
    (
        "metal",
        "gamma:75us:4",
        "weighted,poll-weight=2",
        47449.108,
        14280.677,
        19868.888,
    ),
    (
        "metal",
        "gamma:75us:4",
        "weighted",
        47482.723,
        14681.653,
        20236.165,
    ),
    (
        "metal",
        "gamma:75us:4",
        "weighted,poll-weight=4",
        47498.435,
        14835.398,
        20035.786,
    ),
    (
        "metal",
        "gamma:75us:4",
        "always",
        48135.684,
        18735.001,
        32768.000,
    ),
    ("virt", "exp:80us:8", "off", 57747.392, 8502.983, 0.000),
    (
        "virt",
        "exp:80us:8",
        "context",
        67477.681,
        8952.614,
        4943.292,
    ),
    (
        "virt",
        "exp:80us:8",
        "per-handler",
        83282.005,
        9268.691,
        8156.301,
    ),
    (
        "virt",
        "exp:80us:8",
        "weighted,poll-weight=2",
        81867.820,
        9196.052,
        14567.604,
    ),
    (
        "virt",
        "exp:80us:8",
        "weighted",
        84216.010,
        9603.454,
        18919.135,
    ),
    (
        "virt",
        "exp:80us:8",
        "weighted,poll-weight=4",
        82639.995,
        9472.038,
        17606.798,
    ),
    (
        "virt",
        "exp:80us:8",
        "always",
        90821.761,
        10721.010,
        32768.000,
    ),
    (
        "metal",
        "bimodal:60us:8",
        "off",
        102369.513,
        4458.483,
        0.000,
    ),
    (
        "metal",
        "bimodal:60us:8",
        "context",
        116716.076,
        8567.800,
        31521.346,
    ),
    (
        "metal",
        "bimodal:60us:8",
        "per-handler",
        116636.665,
        8573.633,
        31641.707,
    ),
    (
        "metal",
        "bimodal:60us:8",
        "weighted,poll-weight=2",
        108614.585,
        5539.109,
        16962.093,
    ),
    (
        "metal",
        "bimodal:60us:8",
        "weighted",
        114569.191,
        7490.007,
        20743.817,
    ),
    (
        "metal",
        "bimodal:60us:8",
        "weighted,poll-weight=4",
        114121.597,
        7246.370,
        23030.976,
    ),
    (
        "metal",
        "bimodal:60us:8",
        "always",
        116737.877,
        8566.200,
        32768.000,
    ),
    ("virt", "fixed:20us:1", "off", 9852.751, 38500.000, 0.000),
    (
        "virt",
        "fixed:20us:1",
        "context",
        9852.751,
        38500.000,
        0.000,
    ),
    (
        "virt",
        "fixed:20us:1",
        "per-handler",
        9852.751,
        38500.000,
        0.000,
    ),
    (
        "virt",
        "fixed:20us:1",
        "weighted,poll-weight=2",
        9852.751,
        38500.000,
        0.000,
    ),
    (
        "virt",
        "fixed:20us:1",
        "weighted",
        9852.751,
        38500.000,
        0.000,
    ),
    (
        "virt",
        "fixed:20us:1",
        "weighted,poll-weight=4",
        9852.751,
        38500.000,
        0.000,
    ),
    (
        "virt",
        "fixed:20us:1",
        "always",
        36907.864,
        27094.497,
        32768.000,
    ),
    ("metal", "slow:2000us:4", "off", 1977.048, 8362.400, 0.000),
    (
        "metal",
        "slow:2000us:4",
        "context",
        1977.523,
        12468.355,
        2270.863,
    ),
    (
        "metal",
        "slow:2000us:4",
        "per-handler",
        1984.204,
        17426.408,
        8000.000,
    ),
    (
        "metal",
        "slow:2000us:4",
        "weighted,poll-weight=2",
        1981.661,
        18808.461,
        6996.774,
    ),
    (
        "metal",
        "slow:2000us:4",
        "weighted",
        1982.159,
        18740.536,
        7094.232,
    ),
    (
        "metal",
        "slow:2000us:4",
        "weighted,poll-weight=4",
        1982.263,
        18862.449,
        7221.098,
    ),
    (
        "metal",
        "slow:2000us:4",
        "always",
        1984.378,
        40833.787,
        32768.000,
    ),
];

#[test]
fn the_simulation_is_that_of_the_model_in_python() {
    for (host, load, name, iops, cpu_ns, window_ns) in MODEL {
        let host = Host::usual()
            .into_iter()
            .find(|one| one.name == host)
            .unwrap();
        let load: Load = load.parse().unwrap();
        let got = run(&rule(name), &PollSettings::default(), &load, &host, 3000, 1);
        // Logarithms of two libraries may differ in the last digit.
        for (what, got, wanted) in [
            ("IOPS", got.iops, iops),
            ("CPU", got.cpu_ns, cpu_ns),
            ("window", got.window_ns, window_ns),
        ] {
            let off = (got - wanted).abs();
            let place = format!("{what} of {load} on {} under {name}", host.name);
            assert!(
                off <= 0.002 * wanted + 0.001,
                "{place}: {got}, not {wanted}"
            );
        }
    }
}

#[test]
fn rules_and_loads_are_read_as_they_are_written() {
    assert_eq!(
        rule("weighted,poll-weight=2").to_string(),
        "weighted weight=2"
    );
    assert_eq!(rule("off"), Rule::plain(PolicyKind::Off));
    let max = rule("always,poll-max-ns=5").settings(&PollSettings::default());
    assert_eq!(max.poll_max_ns, 5);
    let refusal = |text: &str| text.parse::<Rule>().unwrap_err().to_string();
    assert!(refusal("adaptive").contains("use weighted"));
    assert!(refusal("weighted,poll-weight=64").contains("[0, 63]"));
    assert!(refusal("weighted,weight=2").contains("weight"));
    assert!(refusal("weighted,2").contains("write RULE,"));
    let usual: Vec<PolicyKind> = Rule::usual().iter().map(|rule| rule.kind).collect();
    assert!(PolicyKind::ALL.iter().all(|kind| usual.contains(kind)));
    for load in Load::usual() {
        assert_eq!(load.to_string().parse::<Load>().unwrap(), load);
    }
    for text in [
        "gamma:75us",
        "gama:1:1",
        "exp:0us:1",
        "exp:1us:0",
        "exp:x:1",
    ] {
        assert!(text.parse::<Load>().is_err(), "{text}");
    }
}

#[test]
fn a_sleep_costs_something_here() {
    let host = calibrate::measure().unwrap();
    assert!(host.wake_late_ns > 0.0 && host.kick_ns > 0.0, "{host}");
    assert!(host.sleep_cpu_ns < 1e9 && host.wake_late_ns < 1e9, "{host}");
}

/// Records what a loop would under `kind`: slots 1 and 2 in turns, with the given waits.
fn record(path: &Path, kind: PolicyKind, waits: &[(i64, u8)]) {
    let mut bytes = Header {
        run: 1,
        sequence: 0,
    }
    .to_bytes()
    .to_vec();
    let thread = Thread {
        ctx: 1,
        id: "io0".into(),
        name: "IO io0".into(),
        policy: kind.name().into(),
    };
    Block::Thread(0, thread).put(&mut bytes);
    let mut policy = kind.build(&PollSettings::default());
    let mut entries = Vec::new();
    let mut now_ns = 1_000_000;
    let (settings, again) = (PollSettings::default(), false);
    encode(
        &mut entries,
        0,
        now_ns,
        &Entry::Settings { settings, again },
    );
    for (block_ns, who) in waits {
        let since_ns = now_ns;
        now_ns += block_ns + 1000;
        let active: Vec<u32> = [1, 2]
            .into_iter()
            .filter(|slot| u32::from(*who) & slot != 0)
            .collect();
        active.iter().for_each(|slot| policy.list(*slot));
        policy.observe(&Iteration::new(*block_ns, now_ns, &active));
        let event = TraceEvent::PollObserve {
            ctx: 1,
            block_ns: *block_ns,
            dispatch_ns: now_ns,
            active: &active,
        };
        encode(&mut entries, since_ns, now_ns, &Entry::Event(event));
        for slot in active {
            let event = TraceEvent::PollHandler {
                ctx: 1,
                node: slot.into(),
                ns: policy.handler_ns(slot),
            };
            encode(&mut entries, now_ns, now_ns, &Entry::Event(event));
        }
    }
    put_events(&mut bytes, 0, 0, &entries);
    Block::End(End::Closed).put(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// A rule replayed over its own recording comes to what it came to, and the same windows as
    /// the rule fed directly.
    #[test]
    fn a_rule_reproduces_its_own_recording(
        waits in prop::collection::vec((0i64..60_000, 0u8..4), 1..200),
        kind in prop::sample::select(PolicyKind::ALL.to_vec()),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace");
        record(&path, kind, &waits);
        let mut replay = Replay::new(&[rule("always"), rule("off")]);
        let outcome = read(&find(&[path]).unwrap(), &mut replay);
        prop_assert!(outcome.problem.is_none() && outcome.notes.is_empty());
        let rows = replay.rows(&outcome);
        prop_assert_eq!(rows.len(), 3);
        let own = &rows[0];
        prop_assert_eq!(own.iterations, waits.len() as u64);
        if waits.iter().any(|(_, who)| *who != 0) {
            prop_assert_eq!(own.same, Some(1.0));
        }
        let mut policy = kind.build(&PollSettings::default());
        let (mut within, mut vain_ns, mut changes) = (0, 0, 0);
        for (block_ns, who) in &waits {
            let window_ns = policy.window_ns();
            match *block_ns <= window_ns {
                true => within += 1,
                false => vain_ns += window_ns,
            }
            let active: Vec<u32> = [1, 2].into_iter().filter(|slot| u32::from(*who) & slot != 0).collect();
            active.iter().for_each(|slot| policy.list(*slot));
            policy.observe(&Iteration::new(*block_ns, 0, &active));
            changes += u64::from(policy.window_ns() != window_ns);
        }
        let wanted = f64::from(within) / waits.len() as f64;
        prop_assert!((own.within - wanted).abs() < 1e-9);
        prop_assert_eq!((own.vain_ns, own.changes), (vain_ns as u64, changes));
        let longest = 32768;
        prop_assert_eq!(rows[1].window_p50_ns.abs_diff(longest) / 32, 0);
        prop_assert_eq!((rows[2].polled_ns, rows[2].window_mean_ns), (0, 0));
        prop_assert!(text(&rows).contains("(recorded)"));
    }
}
