//! Times of the loop's parts by criterion: `cargo bench --bench iteration`. Times depend on the
//! machine and on what else it does; what was promised is judged by `costs` and `instructions`.
#![allow(clippy::unwrap_used, missing_docs)]

mod scenarios;

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use iothread::policy::{Iteration, Policy};
use iothread::{ContextConfig, IoThread, IoThreadConfig, PolicyKind, PollSettings};
use scenarios::*;

const HANDLERS: [usize; 4] = [1, 16, 64, 256];

fn polling(c: &mut Criterion) {
    let mut group = c.benchmark_group("polling hit, handlers listed");
    for handlers in HANDLERS {
        let listed = Listed::new(handlers, PolicyKind::Always, 1_000_000_000);
        let id = BenchmarkId::from_parameter(handlers);
        group.bench_function(id, |b| b.iter(|| listed.hit()));
    }
    group.finish();
    let mut group = c.benchmark_group("polling miss and sleep, handlers listed");
    for handlers in HANDLERS {
        let listed = Listed::new(handlers, PolicyKind::Always, 1);
        listed.prepare_misses();
        let id = BenchmarkId::from_parameter(handlers);
        group.bench_function(id, |b| b.iter(|| listed.miss()));
    }
    group.finish();
}

fn timed(run: impl FnOnce()) -> Duration {
    let start = Instant::now();
    run();
    start.elapsed()
}

fn waiting(c: &mut Criterion) {
    let mut group = c.benchmark_group("wait for an eventfd, poll-max-ns=0");
    let blocked = Blocked::new();
    group.bench_function("the loop, signalled before", |b| {
        b.iter(|| blocked.round(&mut |fd| signal(fd)));
    });
    let mut bare = Bare::new();
    group.bench_function("a bare ring, signalled before", |b| {
        b.iter_custom(|rounds| timed(|| bare.run(rounds, &mut |fd| signal(fd))));
    });
    let (mine, theirs) = (Partner::new(bare.fd()), Partner::new(blocked.fd()));
    group.bench_function("the loop, signalled by a thread", |b| {
        b.iter(|| blocked.round(&mut |_| theirs.ask()));
    });
    group.bench_function("a bare ring, signalled by a thread", |b| {
        b.iter_custom(|rounds| timed(|| bare.run(rounds, &mut |_| mine.ask())));
    });
    group.finish();
}

fn policies(c: &mut Criterion) {
    for kind in PolicyKind::ALL {
        let mut group = c.benchmark_group(format!("update of poll-policy={kind}, handlers"));
        for handlers in HANDLERS {
            let mut policy: Box<dyn Policy> = kind.build(&PollSettings::default());
            (0..u32::try_from(handlers).unwrap()).for_each(|slot| policy.list(slot));
            let mut round = 0;
            group.bench_function(BenchmarkId::from_parameter(handlers), |b| {
                b.iter(|| {
                    round += 1;
                    policy.observe(black_box(&Iteration::new(round & 0x3fff, round, &[0])));
                });
            });
        }
        group.finish();
    }
}

fn notifying(c: &mut Criterion) {
    let start = |poll_max_ns| {
        IoThread::start(IoThreadConfig {
            id: "bench".into(),
            context: ContextConfig {
                settings: PollSettings {
                    poll_max_ns,
                    ..PollSettings::default()
                },
                ..ContextConfig::default()
            },
            ..IoThreadConfig::default()
        })
        .unwrap()
    };
    let mut group = c.benchmark_group("from another thread");
    let sleeping = start(0);
    group.bench_function("call of a sleeping loop, and back", |b| {
        b.iter(|| sleeping.remote().call(|_| ()).unwrap());
    });
    group.bench_function("notify, asleep or just woken", |b| {
        b.iter(|| sleeping.remote().notify());
    });
    group.finish();
}

criterion_group!(benches, polling, waiting, policies, notifying);
criterion_main!(benches);
