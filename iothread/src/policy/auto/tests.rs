use super::*;

/// A loop whose rate and CPU time depend on the window alone.
struct Model {
    reading: Reading,
    /// Events a second and CPU time of an event in nanoseconds, by window.
    load: fn(i64) -> (f64, f64),
    noise: u64,
}

impl Model {
    fn new(load: fn(i64) -> (f64, f64)) -> Self {
        Model {
            reading: Reading::default(),
            load,
            noise: 1,
        }
    }

    /// Within 2 % of 1.
    fn noise(&mut self) -> f64 {
        // Knuth's MMIX generator.
        self.noise = self
            .noise
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        #[allow(clippy::cast_precision_loss)]
        let part = (self.noise >> 40) as f64 / (1u64 << 24) as f64;
        0.98 + 0.04 * part
    }

    /// One epoch.
    fn epoch(&mut self, policy: &mut Auto) {
        let (rate, cost_ns) = (self.load)(policy.window_ns());
        let work = rate * self.noise() * 0.01;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        {
            self.reading.completions += work as u64;
            self.reading.cpu_ns += (work * cost_ns * self.noise()) as i64;
        }
        self.reading.now_ns += EPOCH_NS;
        policy.observe(&Iteration::new(10_000, self.reading.now_ns, &[1]));
        assert!(policy.wants_reading(self.reading.now_ns));
        policy.take(&self.reading);
    }

    fn epochs(&mut self, policy: &mut Auto, epochs: u32) {
        (0..epochs).for_each(|_| self.epoch(policy));
    }
}

fn auto(poll_max_ns: i64, poll_alpha_milli: i64) -> Auto {
    Auto::new(&PollSettings {
        poll_max_ns,
        poll_alpha_milli,
        ..PollSettings::default()
    })
}

fn held_ns(policy: &Auto) -> i64 {
    policy.experiment().unwrap().incumbent_ns
}

#[test]
fn the_ladder_ends_at_poll_max_ns() {
    assert_eq!(ladder(32768), [0, 4096, 8192, 16384, 32768]);
    assert_eq!(ladder(5000), [0, 4096, 5000]);
    assert_eq!(ladder(4096), [0, 4096]);
    assert_eq!(ladder(1), [0, 1]);
    assert_eq!(ladder(0), [0]);
    assert_eq!(ladder(i64::MAX).last(), Some(&LAST_NS));
    assert_eq!(ladder(i64::MAX).len(), 17);
}

/// 8 µs bring half more events; longer windows only cost.
fn short_waits(window_ns: i64) -> (f64, f64) {
    #[allow(clippy::cast_precision_loss)]
    let cost_ns = 10_000.0 + window_ns as f64;
    (
        if window_ns >= 8192 {
            30_000.0
        } else {
            20_000.0
        },
        cost_ns,
    )
}

#[test]
fn the_best_window_is_found_and_kept() {
    let mut policy = auto(131_072, 300);
    let mut model = Model::new(short_waits);
    model.epochs(&mut policy, 60);
    assert_eq!(held_ns(&policy), 8192);
    let settled = policy.experiment().unwrap();
    assert!(!settled.scanning);
    model.epochs(&mut policy, 3000);
    let later = policy.experiment().unwrap();
    assert_eq!(
        (later.incumbent_ns, later.switches),
        (8192, settled.switches)
    );
    assert_eq!(later.scans, 1);
    let trials = later.trials - settled.trials;
    assert!(
        (10..=60).contains(&trials),
        "{trials} trials in 3000 epochs"
    );
}

/// The exchange rate decides: all for events a second, or all for CPU time.
#[test]
fn alpha_is_the_exchange_rate() {
    // Each doubling brings 10 % more events for 30 % more CPU time an event.
    fn dear(window_ns: i64) -> (f64, f64) {
        let doublings = f64::from((window_ns / 2048).max(1).ilog2());
        (
            20_000.0 * 1.1_f64.powf(doublings),
            10_000.0 * 1.3_f64.powf(doublings),
        )
    }
    for (alpha_milli, expected_ns) in [(0, 65536), (200, 65536), (700, 0), (10_000, 0)] {
        let mut policy = auto(65536, alpha_milli);
        Model::new(dear).epochs(&mut policy, 200);
        assert_eq!(held_ns(&policy), expected_ns, "alpha {alpha_milli}");
    }
}

#[test]
fn another_load_is_scanned_at_once() {
    let mut policy = auto(32768, 300);
    let mut model = Model::new(short_waits);
    model.epochs(&mut policy, 1000);
    assert_eq!(held_ns(&policy), 8192);
    // Polling is of no use any more.
    model.load = |window_ns| (90_000.0, if window_ns == 0 { 8000.0 } else { 11_000.0 });
    model.epochs(&mut policy, 40);
    assert_eq!((held_ns(&policy), policy.window_ns()), (0, 0));
    assert_eq!(policy.experiment().unwrap().scans, 2);
}

#[test]
fn an_idle_loop_neither_polls_nor_learns() {
    let mut policy = auto(32768, 300);
    let mut model = Model::new(short_waits);
    model.epochs(&mut policy, 100);
    let before = policy.experiment().unwrap();
    assert_eq!(policy.window_ns(), 8192);
    for _ in 0..100 {
        model.reading.now_ns += 1_000_000_000;
        model.reading.completions += 1;
        model.reading.cpu_ns += 50_000;
        policy.observe(&Iteration::new(999_000_000, model.reading.now_ns, &[1]));
        policy.take(&model.reading);
    }
    assert_eq!(policy.window_ns(), 0);
    assert_eq!(policy.experiment().unwrap(), before);
    // The first short wait brings the window back.
    model.reading.now_ns += 20_000;
    policy.observe(&Iteration::new(20_000, model.reading.now_ns, &[1]));
    assert_eq!(policy.window_ns(), 8192);
    model.epochs(&mut policy, 20);
    assert_eq!(held_ns(&policy), 8192);
}

#[test]
fn new_settings_begin_anew_and_bound_the_window() {
    let mut policy = auto(131_072, 300);
    let mut model = Model::new(short_waits);
    model.epochs(&mut policy, 200);
    let epochs = policy.experiment().unwrap().epochs;
    for poll_max_ns in [4096, 0, 32768] {
        policy.reset(&PollSettings {
            poll_max_ns,
            ..PollSettings::default()
        });
        for _ in 0..100 {
            assert!(policy.window_ns() <= poll_max_ns);
            if poll_max_ns != 0 {
                model.epoch(&mut policy);
            }
            assert!(poll_max_ns != 0 || !policy.wants_reading(i64::MAX));
        }
    }
    assert_eq!(held_ns(&policy), 8192);
    assert!(policy.experiment().unwrap().epochs > epochs);
}

/// Epochs with few events last longer, and end nevertheless.
#[test]
fn a_slow_load_has_longer_epochs() {
    let mut policy = auto(32768, 300);
    let mut reading = Reading::default();
    for _ in 0..400 {
        reading.now_ns += 2_500_000;
        reading.completions += 1;
        reading.cpu_ns += 20_000;
        policy.observe(&Iteration::new(2_400_000, reading.now_ns, &[1]));
        if policy.wants_reading(reading.now_ns) {
            policy.take(&reading);
        }
    }
    let epochs = policy.experiment().unwrap().epochs;
    assert_eq!(epochs, 399 / EPOCH_WORK);
}
