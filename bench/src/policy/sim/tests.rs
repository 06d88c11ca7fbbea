//! How `auto` behaves in the closed loop. The same numbers on every machine.

use iothread::policy::Experiment;

use super::*;

const SECOND_NS: f64 = 1e9;
const ALPHA: f64 = 0.3;

fn host(name: &str) -> Host {
    let mut hosts = Host::usual().into_iter();
    hosts.find(|host| host.name == name).unwrap()
}

fn load(text: &str) -> Load {
    text.parse().unwrap()
}

fn auto(loads: &str, host: &Host) -> World {
    let rule: Rule = format!("auto,poll-alpha={ALPHA}").parse().unwrap();
    World::new(rule.build(&PollSettings::default()), &load(loads), host, 7)
}

fn experiment(world: &World) -> Experiment {
    world.policy.experiment().unwrap()
}

fn score(outcome: &Outcome) -> f64 {
    outcome.iops.ln() - ALPHA * outcome.cpu_ns.ln()
}

/// What the best window that never changes comes to.
fn best_fixed(load: &Load, host: &Host) -> f64 {
    let scores = [0, 4096, 8192, 16384, 32768].map(|window_ns| {
        let rule: Rule = format!("always,poll-max-ns={window_ns}").parse().unwrap();
        let mut world = World::new(rule.build(&PollSettings::default()), load, host, 7);
        world.run_for(0.05 * SECOND_NS);
        let from = world.totals();
        world.run_for(0.3 * SECOND_NS);
        score(&world.totals().since(&from))
    });
    scores.into_iter().fold(f64::NEG_INFINITY, f64::max)
}

/// Whatever the load was before and is now: a second later the loop does as well as with the best
/// window, but for what the differences are worth.
#[test]
fn settles_within_a_second_of_a_change_of_load() {
    let loads = [
        "gamma:75us:1",
        "gamma:75us:16",
        "fixed:12us:1",
        "gamma:75us:1:think=50us",
        "bimodal:60us:8",
    ];
    for host in Host::usual() {
        let mut world = auto("gamma:10us:4", &host);
        world.run_for(1.0 * SECOND_NS);
        for text in loads {
            world.change(&load(text));
            world.run_for(SECOND_NS);
            let from = world.totals();
            world.run_for(0.5 * SECOND_NS);
            let got = score(&world.totals().since(&from));
            let best = best_fixed(&load(text), &host);
            let place = format!("{text} on {}: {got}, at best {best}", host.name);
            assert!(got > best - 0.05, "{place}, {:?}", experiment(&world));
        }
    }
}

/// Once settled it stays with its window, and looking for a better one costs less than 1 %.
#[test]
fn does_not_oscillate_and_trials_are_cheap() {
    for host in Host::usual() {
        for text in [
            "gamma:75us:1",
            "bimodal:60us:8",
            "fixed:20us:1",
            "slow:2000us:4",
        ] {
            let load = load(text);
            let mut world = auto(&load.to_string(), &host);
            world.run_for(2.0 * SECOND_NS);
            let before = experiment(&world);
            let from = world.totals();
            world.run_for(4.0 * SECOND_NS);
            let after = experiment(&world);
            let place = format!("{load} on {}: {before:?}, {after:?}", host.name);
            assert!(after.switches - before.switches <= 1, "{place}");
            assert!(after.scans - before.scans <= 1, "{place}");
            let epochs = after.epochs - before.epochs;
            let trials = after.trials - before.trials;
            assert!(trials * 20 < epochs, "{place}");
            let rule = format!("always,poll-max-ns={}", after.incumbent_ns);
            let fixed: Rule = rule.parse().unwrap();
            let mut fixed = World::new(fixed.build(&PollSettings::default()), &load, &host, 7);
            fixed.run_for(0.1 * SECOND_NS);
            let fixed_from = fixed.totals();
            fixed.run_for(2.0 * SECOND_NS);
            let lost =
                score(&fixed.totals().since(&fixed_from)) - score(&world.totals().since(&from));
            assert!(lost < 0.01, "{place}: {lost}");
        }
    }
}

#[test]
fn an_idle_loop_neither_polls_nor_experiments() {
    let mut world = auto("gamma:75us:4", &host("virt"));
    world.run_for(2.0 * SECOND_NS);
    let before = experiment(&world);
    assert!(world.policy.window_ns() > 0);
    // Now a request every half second.
    let until_ns = world.totals().now_ns + 1e6;
    world.rest(until_ns);
    world.change(&load("gamma:75us:1:every=500000us"));
    world.run_for(0.6 * SECOND_NS);
    let from = world.totals();
    world.run_for(20.0 * SECOND_NS);
    let idle = world.totals().since(&from);
    let after = experiment(&world);
    assert!(after.epochs - before.epochs <= 1, "{before:?} {after:?}");
    // The request's own time is polled for, not the half second.
    assert!(
        idle.cpu_ns < 2.0 * (32_768.0 + 18_000.0 + 5_000.0),
        "{idle:?}"
    );
    assert_eq!(after.incumbent_ns, before.incumbent_ns);
}

/// The window found in one burst serves in the next.
#[test]
fn bursts_do_not_begin_anew() {
    let text = "fixed:20us:1:burst=20000us/80000us";
    let mut world = auto(text, &host("virt"));
    world.run_for(6.0 * SECOND_NS);
    let before = experiment(&world);
    let from = world.totals();
    world.run_for(6.0 * SECOND_NS);
    let after = experiment(&world);
    assert!(
        after.switches - before.switches <= 1,
        "{before:?} {after:?}"
    );
    let got = world.totals().since(&from);
    assert!(score(&got) > best_fixed(&load(text), &host("virt")) - 0.05);
}
