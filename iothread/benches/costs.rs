//! Costs that the loop promises, as ratios of CPU time: the two sides of each take turns, so that
//! what else the machine does falls on both.
//!
//! `cargo bench --bench costs`. With `--cfg iothread_no_stats` in RUSTFLAGS the loop counts nothing;
//! `costs --against PROGRAM`, of this benchmark built so, gives the cost of statistics: the two
//! programs take turns.
#![allow(clippy::unwrap_used)]

mod scenarios;

use iothread::TaskRun;
use scenarios::*;

/// CPU time of this thread, in nanoseconds.
fn cpu_ns() -> i64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes to `time` only; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

/// CPU time of one of `rounds` rounds, in picoseconds.
fn cost_ps(rounds: u64, run: &mut dyn FnMut(u64)) -> i64 {
    let start_ns = cpu_ns();
    run(rounds);
    (cpu_ns() - start_ns) * 1000 / i64::try_from(rounds).unwrap()
}

fn median(values: &mut [i64]) -> i64 {
    values.sort_unstable();
    values[values.len() / 2]
}

const TURNS: usize = 41;

/// Both sides by turns; prints their medians and the median of the ratios.
fn compare(
    what: &str,
    rounds: u64,
    base: &mut dyn FnMut(u64),
    other: &mut dyn FnMut(u64),
    limit: Option<i64>,
) {
    base(rounds / 4);
    other(rounds / 4);
    let (mut bases, mut others, mut ratios) = (vec![], vec![], vec![]);
    for turn in 0..TURNS {
        let (a, b) = if turn % 2 == 0 {
            let a = cost_ps(rounds, base);
            (a, cost_ps(rounds, other))
        } else {
            let b = cost_ps(rounds, other);
            (cost_ps(rounds, base), b)
        };
        bases.push(a);
        others.push(b);
        ratios.push(b * 10_000 / a);
    }
    let ratio = median(&mut ratios) - 10_000;
    let quartile = |part: usize| (ratios[TURNS * part / 4] - 10_000) / 100;
    let spread = format!("[{:+}..{:+}]", quartile(1), quartile(3));
    let (a, b) = (median(&mut bases), median(&mut others));
    let promise = limit.map_or(String::new(), |limit| {
        format!("(promised: at most {limit} %)")
    });
    println!(
        "{what:<62} {:>6}.{:02} ns  {:>6}.{:02} ns  {:>+4}.{:02} % {spread:>9}  {promise}",
        a / 1000,
        a % 1000 / 10,
        b / 1000,
        b % 1000 / 10,
        ratio / 100,
        ratio.abs() % 100,
    );
}

/// What statistics are weighed in, with the rounds of a short run.
type Weighed = (&'static str, u64, fn(u64) -> Box<dyn FnMut(u64)>);

const WEIGHED: [Weighed; 5] = [
    ("iteration with a polling hit", 100_000, |_| {
        let hit = Listed::new(1, iothread::PolicyKind::Weighted, 1_000_000_000);
        Box::new(move |n| (0..n).for_each(|_| hit.hit()))
    }),
    ("polling miss and sleep", 20_000, |_| {
        let miss = Listed::new(1, iothread::PolicyKind::Always, 1);
        miss.prepare_misses();
        Box::new(move |n| (0..n).for_each(|_| miss.miss()))
    }),
    ("512-byte read, depth 1", 30_000, |_| {
        let requests = Requests::new(1, 0, 32768, Work::Read);
        Box::new(move |n| requests.run(n))
    }),
    ("512-byte read, depth 32", 100_000, |_| {
        let requests = Requests::new(32, 0, 32768, Work::Read);
        Box::new(move |n| requests.run(n))
    }),
    ("nop, depth 32", 300_000, |_| {
        let requests = Requests::new(32, 0, 32768, Work::Nop);
        Box::new(move |n| requests.run(n))
    }),
];

/// One short run: the least of a few costs, in picoseconds.
fn weigh(name: &str) -> i64 {
    let (_, rounds, scenario) = WEIGHED.iter().find(|(one, ..)| *one == name).unwrap();
    let mut run = scenario(*rounds);
    run(*rounds / 4);
    (0..4).map(|_| cost_ps(*rounds, &mut run)).min().unwrap()
}

/// This program and `other`, which counts nothing, by turns.
fn weigh_against(other: &str) {
    const PAIRS: usize = 31;
    let own = std::env::current_exe().unwrap();
    let run = |program: &std::path::Path, name: &str| -> i64 {
        let output = std::process::Command::new(program)
            .args(["--weigh", name])
            .output()
            .unwrap();
        String::from_utf8(output.stdout)
            .unwrap()
            .trim()
            .parse()
            .unwrap()
    };
    println!("cost of statistics: CPU time of both builds, {PAIRS} pairs of processes");
    for (name, ..) in WEIGHED {
        let (mut counting, mut ratios) = (vec![], vec![]);
        for pair in 0..PAIRS {
            let other = std::path::Path::new(other);
            let (with, without) = if pair % 2 == 0 {
                let with = run(&own, name);
                (with, run(other, name))
            } else {
                let without = run(other, name);
                (run(&own, name), without)
            };
            counting.push(with);
            ratios.push(with * 10_000 / without - 10_000);
        }
        let (cost, ratio) = (median(&mut counting), median(&mut ratios));
        let percent = |hundredths: i64| f64::from(i32::try_from(hundredths).unwrap()) / 100.0;
        println!(
            "{name:<40} {:>6}.{:02} ns  {:>+6.2} % [{:+.2}..{:+.2}]",
            cost / 1000,
            cost % 1000 / 10,
            percent(ratio),
            percent(ratios[PAIRS / 4]),
            percent(ratios[PAIRS * 3 / 4]),
        );
    }
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args
        .iter()
        .position(|arg| arg == "--weigh" || arg == "--against")
    {
        Some(at) if args[at] == "--weigh" => return println!("{}", weigh(&args[at + 1])),
        Some(at) => return weigh_against(&args[at + 1]),
        None => {}
    }
    println!(
        "{:<62} {:>12}  {:>12}  {:>8}  quartiles",
        "", "base", "compared", "more"
    );
    let mut bare = Bare::new();
    let blocked = Blocked::new();
    compare(
        "event that is there already: bare ring | poll-max-ns=0",
        20_000,
        &mut |n| bare.run(n, &mut |fd| signal(fd)),
        &mut |n| (0..n).for_each(|_| blocked.round(&mut |fd| signal(fd))),
        None,
    );
    // With another thread, so that the wait is one.
    let (mine, theirs) = (Partner::new(bare.fd()), Partner::new(blocked.fd()));
    compare(
        "bare submit-and-wait | the loop with poll-max-ns=0",
        2_000,
        &mut |n| bare.run(n, &mut |_| mine.ask()),
        &mut |n| (0..n).for_each(|_| blocked.round(&mut |_| theirs.ask())),
        Some(5),
    );
    for depth in [32, 1] {
        let alone = Requests::new(depth, 0, 32768, Work::Read);
        let beside = Requests::new(depth, 256, 32768, Work::Read);
        compare(
            &format!("512-byte read, depth {depth} | beside 256 idle listed handlers"),
            if depth == 1 { 10_000 } else { 40_000 },
            &mut |n| alone.run(n),
            &mut |n| beside.run(n),
            Some(5),
        );
    }
    let modes = [TaskRun::Defer, TaskRun::Coop];
    let [defer, coop] = modes.map(Blocked::in_mode);
    let partners = [Partner::new(defer.fd()), Partner::new(coop.fd())];
    compare(
        "wait, poll-max-ns=0: DEFER_TASKRUN | COOP_TASKRUN",
        2_000,
        &mut |n| (0..n).for_each(|_| defer.round(&mut |_| partners[0].ask())),
        &mut |n| (0..n).for_each(|_| coop.round(&mut |_| partners[1].ask())),
        None,
    );
    for (depth, work) in [(1, Work::Timer), (32, Work::Timer), (32, Work::Read)] {
        let [defer, coop] = modes.map(|mode| Requests::in_mode(mode, depth, 32768, work));
        compare(
            &format!("{work:?}, depth {depth}: DEFER_TASKRUN | COOP_TASKRUN"),
            if work == Work::Read { 40_000 } else { 2_000 },
            &mut |n| defer.run(n),
            &mut |n| coop.run(n),
            None,
        );
    }
}
