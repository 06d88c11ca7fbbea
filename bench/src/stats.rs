//! Medians, spreads and the verdict on a difference. Numbers only.

use serde::{Deserialize, Serialize};

/// What repetitions of one measurement say.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// How many repetitions.
    pub count: usize,
    /// Their median.
    pub median: f64,
    /// Lower end of the interval in which the true median lies with 90 % confidence.
    pub low: f64,
    /// Upper end of that interval.
    pub high: f64,
}

impl Summary {
    /// Summarises the finite numbers of `values`; `None` if there is none.
    ///
    /// The interval is made of order statistics, so it supposes no distribution: with n values
    /// it runs from the k-th smallest to the k-th largest, k being the largest for which at
    /// least 90 % of all samples would enclose the true median. Up to 7 values that is the
    /// whole range (which for fewer than 5 is less than 90 %).
    pub fn of(values: &[f64]) -> Option<Summary> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let (first, last) = (count.checked_sub(1)? / 2, count / 2);
        let cut = trimmed(count);
        Some(Summary {
            count,
            median: f64::midpoint(sorted[first], sorted[last]),
            low: sorted[cut],
            high: sorted[count - 1 - cut],
        })
    }

    /// Half the interval, counted from the median to its farther end; `None` for one value,
    /// which has no spread.
    pub fn spread(&self) -> Option<f64> {
        (self.count > 1).then(|| (self.high - self.median).max(self.median - self.low))
    }

    /// The spread in percent of the median.
    pub fn spread_percent(&self) -> Option<f64> {
        self.spread()
            .filter(|_| self.median != 0.0)
            .map(|s| 100.0 * s / self.median.abs())
    }
}

/// How many values are cut off at each end: the largest c with P(median enclosed) ≥ 0.9, where
/// that probability is 1 − 2·P(Binomial(n, ½) ≤ c).
fn trimmed(count: usize) -> usize {
    let mut probability = 0.5f64.powi(i32::try_from(count).unwrap_or(i32::MAX));
    let mut below = probability;
    let mut cut = 0;
    while cut < count / 2 {
        probability *= (count - cut) as f64 / (cut + 1) as f64;
        below += probability;
        if 1.0 - 2.0 * below < 0.9 {
            break;
        }
        cut += 1;
    }
    cut
}

/// What may be said of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Larger than both spreads together, upwards.
    Higher,
    /// Larger than both spreads together, downwards.
    Lower,
    /// Inside the spread.
    Noise,
    /// One of the two was measured only once.
    Unknown,
}

/// A median against its baseline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Of the medians, in percent of the baseline.
    pub percent: f64,
    /// Whether it stands out of the spread.
    pub verdict: Verdict,
}

/// Compares `other` with `base`; `None` if the baseline is zero.
pub fn difference(base: &Summary, other: &Summary) -> Option<Difference> {
    if base.median == 0.0 {
        return None;
    }
    let delta = other.median - base.median;
    let verdict = match (base.spread(), other.spread()) {
        (Some(a), Some(b)) if delta.abs() <= a + b => Verdict::Noise,
        (Some(_), Some(_)) if delta > 0.0 => Verdict::Higher,
        (Some(_), Some(_)) => Verdict::Lower,
        _ => Verdict::Unknown,
    };
    Some(Difference {
        percent: 100.0 * delta / base.median.abs(),
        verdict,
    })
}

/// The ratio of two series measured turn by turn: of each round's pair, so that a drift of the
/// machine cancels. Pairs with a zero or missing half are left out.
pub fn paired_ratio(base: &[Option<f64>], other: &[Option<f64>]) -> Option<Summary> {
    let ratios: Vec<f64> = base
        .iter()
        .zip(other)
        .filter_map(|(a, b)| Some(b.as_ref()? / a.as_ref()?))
        .filter(|ratio| ratio.is_finite())
        .collect();
    Summary::of(&ratios)
}

/// Which of the points (more of `gain` is better, less of `cost` is better) no other one beats
/// in both: the Pareto front, as indices in order of rising cost.
pub fn pareto_front(points: &[(f64, f64)]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..points.len())
        .filter(|&i| points[i].0.is_finite() && points[i].1.is_finite())
        .collect();
    order.sort_by(|&a, &b| {
        points[a]
            .1
            .total_cmp(&points[b].1)
            .then(points[b].0.total_cmp(&points[a].0))
    });
    let mut best = f64::NEG_INFINITY;
    order.retain(|&i| {
        let better = points[i].0 > best;
        best = best.max(points[i].0);
        better
    });
    order
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn summary(values: &[f64]) -> Summary {
        Summary::of(values).expect("values")
    }

    #[test]
    fn medians_and_ranges() {
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[f64::NAN]), None);
        let one = summary(&[7.0]);
        assert_eq!((one.median, one.spread()), (7.0, None));
        let even = summary(&[4.0, 1.0, 2.0, 3.0]);
        assert_eq!((even.median, even.low, even.high), (2.5, 1.0, 4.0));
        let five = summary(&[10.0, 11.0, 9.0, 30.0, 10.0]);
        assert_eq!((five.median, five.spread()), (10.0, Some(20.0)));
    }

    #[test]
    fn the_cut_agrees_with_tables_of_the_sign_test() {
        // 1 − 2·P(Bin(n, ½) ≤ c) ≥ 0.9, from printed tables (confidence intervals of a median).
        for (n, c) in [
            (1, 0),
            (5, 0),
            (7, 0),
            (8, 1),
            (10, 1),
            (11, 2),
            (20, 5),
            (30, 10),
        ] {
            assert_eq!(trimmed(n), c, "n = {n}");
        }
    }

    #[test]
    fn a_difference_inside_the_spread_is_noise() {
        let base = summary(&[98.0, 100.0, 102.0]);
        let verdict = |v: &[f64]| difference(&base, &summary(v)).expect("a base").verdict;
        assert_eq!(verdict(&[101.0, 103.0, 105.0]), Verdict::Noise);
        assert_eq!(verdict(&[108.0, 110.0, 112.0]), Verdict::Higher);
        assert_eq!(verdict(&[88.0, 90.0, 92.0]), Verdict::Lower);
        assert_eq!(verdict(&[200.0]), Verdict::Unknown);
        assert_eq!(difference(&summary(&[0.0, 0.0]), &base), None);
    }

    #[test]
    fn pairs_cancel_a_drift() {
        let base = [Some(100.0), Some(200.0), Some(400.0), None];
        let other = [Some(150.0), Some(300.0), Some(600.0), Some(1.0)];
        let ratio = paired_ratio(&base, &other).expect("pairs");
        assert_eq!(
            (ratio.count, ratio.median, ratio.spread()),
            (3, 1.5, Some(0.0))
        );
        assert_eq!(paired_ratio(&[Some(0.0)], &[Some(1.0)]), None);
    }

    proptest! {
        #[test]
        fn a_median_lies_in_its_interval_in_the_range(
            values in proptest::collection::vec(-1e12f64..1e12, 1..60)
        ) {
            let s = summary(&values);
            let min = values.iter().copied().fold(f64::INFINITY, f64::min);
            let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            prop_assert!(min <= s.low && s.low <= s.median);
            prop_assert!(s.median <= s.high && s.high <= max);
            let below = values.iter().filter(|v| **v < s.median).count();
            let above = values.iter().filter(|v| **v > s.median).count();
            prop_assert!(below * 2 <= values.len() && above * 2 <= values.len());
            let mut turned = values.clone();
            turned.reverse();
            prop_assert_eq!(summary(&turned), s);
        }

        #[test]
        fn verdicts_are_antisymmetric(
            a in proptest::collection::vec(1f64..1e6, 1..8),
            b in proptest::collection::vec(1f64..1e6, 1..8),
        ) {
            let (a, b) = (summary(&a), summary(&b));
            let there = difference(&a, &b).expect("positive").verdict;
            let back = difference(&b, &a).expect("positive").verdict;
            let turned = match there {
                Verdict::Higher => Verdict::Lower,
                Verdict::Lower => Verdict::Higher,
                same => same,
            };
            prop_assert_eq!(back, turned);
            // Nothing differs from itself.
            let own = difference(&a, &a).expect("positive");
            prop_assert!(own.percent == 0.0 && own.verdict != Verdict::Higher);
        }

        #[test]
        fn no_point_beats_the_front_and_every_other_is_beaten(
            points in proptest::collection::vec((0u8..30, 0u8..30), 0..40)
        ) {
            let points: Vec<(f64, f64)> =
                points.iter().map(|(g, c)| (f64::from(*g), f64::from(*c))).collect();
            let front = pareto_front(&points);
            let beats = |a: (f64, f64), b: (f64, f64)| a.0 >= b.0 && a.1 <= b.1 && a != b;
            for i in 0..points.len() {
                let beaten = points.iter().any(|p| beats(*p, points[i]));
                if front.contains(&i) {
                    prop_assert!(!beaten);
                } else {
                    prop_assert!(beaten || front.iter().any(|f| points[*f] == points[i]));
                }
            }
            for pair in front.windows(2) {
                prop_assert!(points[pair[0]].1 <= points[pair[1]].1);
                prop_assert!(points[pair[0]].0 < points[pair[1]].0);
            }
        }
    }
}
