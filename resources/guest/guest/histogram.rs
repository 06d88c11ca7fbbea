//! Latencies in buckets whose width is at most an eighth of their value.

const SUB_BITS: u32 = 3;
const SUB: usize = 1 << SUB_BITS;
const BUCKETS: usize = (64 - SUB_BITS as usize + 1) * SUB;

/// Counts by value; any unit.
#[derive(Clone)]
pub struct Histogram {
    counts: [u32; BUCKETS],
    pub min: u64,
    pub max: u64,
    sum: u64,
    total: u64,
}

impl Histogram {
    pub const EMPTY: Histogram = Histogram {
        counts: [0; BUCKETS],
        min: u64::MAX,
        max: 0,
        sum: 0,
        total: 0,
    };

    #[inline(always)]
    fn bucket(value: u64) -> usize {
        // The position of the highest bit, with the bits after it as the sub-bucket.
        let shift = (value | SUB as u64).ilog2() - SUB_BITS;
        ((shift as usize) << SUB_BITS) + (value >> shift) as usize
    }

    /// The least value of a bucket.
    fn floor(bucket: usize) -> u64 {
        if bucket < 2 * SUB {
            return bucket as u64;
        }
        let shift = bucket / SUB - 1;
        ((bucket % SUB + SUB) as u64) << shift
    }

    #[inline(always)]
    pub fn record(&mut self, value: u64) {
        self.counts[Self::bucket(value)] += 1;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
        self.sum = self.sum.wrapping_add(value);
        self.total += 1;
    }

    pub fn add(&mut self, other: &Histogram) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
        self.sum = self.sum.wrapping_add(other.sum);
        self.total += other.total;
    }

    pub fn mean(&self) -> u64 {
        self.sum.checked_div(self.total).unwrap_or(0)
    }

    /// The value below which `per_mille` of 1000 lie: the middle of its bucket, within min and max.
    pub fn percentile(&self, per_mille: u64) -> u64 {
        let rank = (self.total * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        for (bucket, &count) in self.counts.iter().enumerate() {
            seen += u64::from(count);
            if count > 0 && seen >= rank {
                let floor = Self::floor(bucket);
                let next = Self::floor((bucket + 1).min(BUCKETS - 1)).max(floor + 1);
                return (floor + (next - floor) / 2).clamp(self.min, self.max);
            }
        }
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_are_contiguous_and_narrow() {
        let mut last = 0;
        for value in 0..100_000 {
            let bucket = Histogram::bucket(value);
            assert!(bucket == last || bucket == last + 1, "{value}");
            assert!(Histogram::floor(bucket) <= value);
            assert!(value - Histogram::floor(bucket) <= value / 8);
            last = bucket;
        }
        assert!(Histogram::bucket(u64::MAX) < BUCKETS);
    }

    #[test]
    fn sums_are_as_if_recorded_together() {
        let mut parts = [Histogram::EMPTY, Histogram::EMPTY];
        for value in [3, 1000, 70_000, 8] {
            parts[usize::from(value > 100)].record(value);
        }
        let [mut sum, other] = parts;
        sum.add(&other);
        assert_eq!((sum.min, sum.max, sum.mean()), (3, 70_000, 71_011 / 4));
        assert_eq!(sum.percentile(250), 3);
        assert_eq!(Histogram::EMPTY.mean(), 0);
    }

    proptest! {
        #[test]
        fn percentiles_are_near_the_true_ones(mut values in prop::collection::vec(0u64..10_000_000, 1..500)) {
            let mut histogram = Histogram::EMPTY;
            values.iter().for_each(|&v| histogram.record(v));
            values.sort_unstable();
            for per_mille in [1, 500, 900, 990, 999, 1000] {
                let rank = (values.len() as u64 * per_mille).div_ceil(1000).max(1);
                let exact = values[rank as usize - 1];
                let found = histogram.percentile(per_mille);
                prop_assert!(found.abs_diff(exact) <= exact / 8 + 1, "{per_mille}: {found} for {exact}");
            }
            prop_assert_eq!(histogram.percentile(1000) <= values[values.len() - 1], true);
        }
    }
}
