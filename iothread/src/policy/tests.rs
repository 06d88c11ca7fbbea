use proptest::prelude::*;

use super::*;

/// The weighted rule written as its definition reads: every listed handler, every iteration.
struct Plain {
    settings: PollSettings,
    window_ns: i64,
    handlers: Vec<(i64, bool)>,
}

impl Plain {
    fn observe(&mut self, block_ns: i64, active: &[u32]) {
        let s = self.settings.effective(PolicyKind::Weighted);
        if s.poll_max_ns == 0 {
            return;
        }
        let mut longest = -1;
        for (slot, (ns, listed)) in self.handlers.iter_mut().enumerate() {
            if !*listed {
                continue;
            }
            if active.contains(&u32::try_from(slot).unwrap()) {
                *ns = if *ns == 0 {
                    block_ns
                } else {
                    (*ns - (*ns >> s.poll_weight)).saturating_add(block_ns >> s.poll_weight)
                };
                if *ns > s.poll_max_ns {
                    *ns = 0;
                }
                longest = longest.max(*ns);
            } else if *ns != 0 {
                *ns = ns.saturating_add(block_ns);
                if *ns > s.poll_max_ns {
                    *ns = 0;
                }
            }
        }
        if longest > self.window_ns {
            let grown = self.window_ns.saturating_mul(s.poll_grow);
            self.window_ns = longest.max(grown).min(s.poll_max_ns);
        } else if longest >= 0 && longest < self.window_ns / s.poll_shrink {
            self.window_ns /= s.poll_shrink;
        }
    }
}

fn any_settings() -> impl Strategy<Value = PollSettings> {
    let max = prop_oneof![
        Just(0),
        Just(1),
        Just(32768),
        0i64..1_000_000,
        Just(i64::MAX)
    ];
    let factor = prop_oneof![0i64..9, Just(i64::MAX)];
    (max, factor.clone(), factor, 0i64..=63).prop_map(
        |(poll_max_ns, poll_grow, poll_shrink, poll_weight)| PollSettings {
            poll_max_ns,
            poll_grow,
            poll_shrink,
            poll_weight,
            aio_max_batch: 0,
            ..PollSettings::default()
        },
    )
}

fn any_block() -> impl Strategy<Value = i64> {
    prop_oneof![0i64..100_000, 0i64..=i64::MAX, Just(0), Just(i64::MAX)]
}

proptest! {
    /// Ageing late is ageing in every iteration, for any numbers.
    #[test]
    fn late_ageing_is_exact(
        settings in any_settings(),
        steps in prop::collection::vec((any_block(), prop::collection::vec(0u32..4, 0..4), 0u32..12), 1..80),
    ) {
        let mut rule = Weighted::new(&settings);
        let mut plain = Plain { settings, window_ns: 0, handlers: vec![(0, false); 4] };
        for (block_ns, mut active, extra) in steps {
            active.sort_unstable();
            active.dedup();
            match extra {
                0..4 => {
                    rule.unlist(extra);
                    plain.handlers[extra as usize] = (0, false);
                    active.retain(|slot| *slot != extra);
                }
                4 => {
                    rule.reset(&settings);
                    plain.window_ns = 0;
                    plain.handlers.iter_mut().for_each(|h| h.0 = 0);
                }
                _ => {}
            }
            for &slot in &active {
                rule.list(slot);
                plain.handlers[slot as usize].1 = true;
            }
            rule.observe(&Iteration::new(block_ns, 0, &active));
            plain.observe(block_ns, &active);
            prop_assert_eq!(rule.window_ns(), plain.window_ns);
            for slot in 0..4u32 {
                prop_assert_eq!(rule.handler_ns(slot), plain.handlers[slot as usize].0);
            }
        }
    }

    /// No rule ever polls longer than allowed, or a negative time, and none overflows.
    #[test]
    fn window_stays_within_its_limit(
        settings in any_settings(),
        steps in prop::collection::vec((any_block(), prop::collection::vec(0u32..4, 0..4)), 1..80),
    ) {
        for kind in PolicyKind::ALL {
            let mut rule = kind.build(&settings);
            for (block_ns, active) in &steps {
                active.iter().for_each(|slot| rule.list(*slot));
                rule.observe(&Iteration::new(*block_ns, 0, active));
                prop_assert!((0..=settings.poll_max_ns).contains(&rule.window_ns()), "{kind}");
            }
        }
    }
}

#[test]
fn names_are_read_back() {
    for kind in PolicyKind::ALL {
        assert_eq!(kind.name().parse::<PolicyKind>(), Ok(kind));
    }
    assert!("adaptive".parse::<PolicyKind>().is_err());
}

#[test]
fn always_and_off_do_not_learn() {
    let settings = PollSettings::default();
    for (kind, window_ns) in [(PolicyKind::Off, 0), (PolicyKind::Always, 32768)] {
        let mut rule = kind.build(&settings);
        rule.list(0);
        for block_ns in [0, 10, 1_000_000] {
            rule.observe(&Iteration::new(block_ns, 1, &[0]));
            assert_eq!(rule.window_ns(), window_ns);
        }
    }
}

#[test]
fn per_handler_window_falls_when_the_longest_shrinks() {
    let mut rule = PerHandler::new(&PollSettings::default());
    rule.list(0);
    rule.list(1);
    rule.observe(&Iteration::new(10_000, 1, &[0, 1]));
    rule.observe(&Iteration::new(10_000, 2, &[1]));
    assert_eq!(rule.window_ns(), 8000);
    // Slot 1 waited longer than the limit: dropped to 0, slot 0 remains.
    rule.observe(&Iteration::new(40_000, 3, &[1]));
    assert_eq!(rule.window_ns(), 4000);
    rule.unlist(0);
    assert_eq!(rule.window_ns(), 0);
}

/// Waits in microseconds, and the handler that ended them: work every 10 µs; then every 24 µs; then
/// another handler beside it, whose work comes after 60 µs; then every 5 µs.
fn pictured_steps() -> Vec<(i64, u32)> {
    let beside = [(60, 1), (24, 0), (24, 0)].repeat(4);
    [vec![(10, 0); 8], vec![(24, 0); 8], beside, vec![(5, 0); 12]].concat()
}

/// One character a value, eight heights up to `poll_max_ns`; a dot for 0.
fn bar(ns: i64, max_ns: i64) -> char {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    if ns == 0 {
        return '·';
    }
    let height = usize::try_from(ns * 8 / max_ns).unwrap();
    BARS[height.min(8).saturating_sub(1)]
}

/// The picture in the crate's guide is what the rules do. On a difference the right one is printed.
#[test]
fn the_picture_of_the_rules_is_true() {
    let settings = PollSettings::default();
    let max_ns = settings.poll_max_ns;
    let steps = pictured_steps();
    let line = |name: &str, values: &[i64]| {
        let bars: String = values.iter().map(|ns| bar(*ns, max_ns)).collect();
        format!("{name:<12} {bars}\n")
    };
    let who: String = steps
        .iter()
        .map(|step| ["a", "b"][step.1 as usize])
        .collect();
    let waits_ns: Vec<i64> = steps.iter().map(|step| step.0 * 1000).collect();
    let mut picture = format!("{:<12} {who}\n", "handler") + &line("wait", &waits_ns) + "\n";
    // What `auto` comes to depends on more than waits.
    let pictured = PolicyKind::ALL
        .into_iter()
        .filter(|kind| *kind != PolicyKind::Auto);
    for kind in pictured {
        let mut rule = kind.build(&settings);
        let windows: Vec<i64> = steps
            .iter()
            .map(|(wait_us, slot)| {
                rule.list(*slot);
                rule.observe(&Iteration::new(wait_us * 1000, 0, &[*slot]));
                rule.window_ns()
            })
            .collect();
        picture += &line(kind.name(), &windows);
    }
    let guide = include_str!("../guide.md");
    assert!(
        guide.contains(&picture),
        "the guide should show:\n{picture}"
    );
}
