//! Instructions of the loop by callgrind: exact, and the same on every machine.
//!
//! `cargo bench --bench instructions` counts each scenario twice, with few and with many rounds;
//! the difference is what a round costs. Kernel instructions are not counted.
#![allow(clippy::unwrap_used)]

mod scenarios;

use std::hint::black_box;
use std::process::Command;

use iothread::policy::{Iteration, Policy};
use iothread::{PolicyKind, PollSettings};
use scenarios::*;

type Scenario = (&'static str, fn(u64));

fn hit(handlers: usize, rounds: u64) {
    let listed = Listed::new(handlers, PolicyKind::Always, 1_000_000_000);
    for _ in 0..rounds {
        listed.hit();
    }
}

fn miss(handlers: usize, rounds: u64) {
    let listed = Listed::new(handlers, PolicyKind::Always, 1);
    listed.prepare_misses();
    for _ in 0..rounds {
        listed.miss();
    }
}

fn observe(kind: PolicyKind, handlers: u32, rounds: u64) {
    let settings = PollSettings::default();
    let mut policy: Box<dyn Policy> = kind.build(&settings);
    (0..handlers).for_each(|slot| policy.list(slot));
    for round in 0..rounds {
        let round = i64::try_from(round).unwrap();
        policy.observe(black_box(&Iteration::new(round & 0x3fff, round, &[0])));
    }
}

const FOR_EVER_NS: i64 = 1_000_000_000;

fn requests(depth: u32, idle: usize, rounds: u64) {
    Requests::new(depth, idle, FOR_EVER_NS, Work::Nop).run(rounds);
}

const SCENARIOS: &[Scenario] = &[
    ("clock read", |rounds| {
        for _ in 0..rounds {
            black_box(iothread::now_ns());
        }
    }),
    ("polling hit, 1 handler listed", |n| hit(1, n)),
    ("polling hit, 16 handlers listed", |n| hit(16, n)),
    ("polling hit, 64 handlers listed", |n| hit(64, n)),
    ("polling hit, 256 handlers listed", |n| hit(256, n)),
    ("polling miss and sleep, 1 handler listed", |n| miss(1, n)),
    ("polling miss and sleep, 16 handlers listed", |n| {
        miss(16, n)
    }),
    ("polling miss and sleep, 64 handlers listed", |n| {
        miss(64, n)
    }),
    ("polling miss and sleep, 256 handlers listed", |n| {
        miss(256, n)
    }),
    ("sleep, poll-max-ns=0", |n| {
        let blocked = Blocked::new();
        (0..n).for_each(|_| blocked.round(&mut |fd| signal(fd)));
    }),
    ("sleep, bare ring", |n| {
        Bare::new().run(n, &mut |fd| signal(fd));
    }),
    ("request, depth 1", |n| requests(1, 0, n)),
    ("request, depth 1, 255 idle", |n| requests(1, 255, n)),
    ("request, depth 32", |n| requests(32, 0, n)),
    ("request, depth 32, 255 idle", |n| requests(32, 255, n)),
    ("update of weighted, 1 handler", |n| {
        observe(PolicyKind::Weighted, 1, n);
    }),
    ("update of weighted, 256 handlers", |n| {
        observe(PolicyKind::Weighted, 256, n);
    }),
    ("update of per-handler, 256 handlers", |n| {
        observe(PolicyKind::PerHandler, 256, n);
    }),
    ("update of context, 256 handlers", |n| {
        observe(PolicyKind::Context, 256, n);
    }),
    ("notify, the loop awake", |n| {
        let blocked = Blocked::new();
        (0..n).for_each(|_| blocked.remote().notify());
    }),
];

/// Instructions that callgrind counts in a run of this program, or None without valgrind.
fn count(scenario: &str, rounds: u64) -> Option<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe().unwrap())
        .args(["--scenario", scenario, &rounds.to_string()])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let collected = text.lines().find(|line| line.contains("Collected :"))?;
    collected.rsplit(' ').next()?.parse().ok()
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some(at) = args.iter().position(|arg| arg == "--scenario") {
        let (_, run) = SCENARIOS
            .iter()
            .find(|(name, _)| *name == args[at + 1])
            .unwrap();
        run(args[at + 2].parse().unwrap());
        return;
    }
    const ROUNDS: u64 = 2000;
    println!("{:<46} {:>14}", "a round of", "instructions");
    for (name, _) in SCENARIOS {
        let (Some(few), Some(many)) = (count(name, 100), count(name, 100 + ROUNDS)) else {
            println!(
                "{name:<46} {:>14}",
                "SKIPPED: no valgrind, or it cannot run this"
            );
            continue;
        };
        let tenths = (many - few) * 10 / ROUNDS;
        println!("{name:<46} {:>12}.{}", tenths / 10, tenths % 10);
    }
}
