//! Histograms that the loop writes with one store and any thread reads.

use crate::sequence::Counter;

/// Buckets a power of two is divided into, as a power of two.
const STEPS_LOG2: u32 = 2;
/// One bucket for each value of a byte, so that no value is out of range.
const BUCKETS: usize = 256;
/// Bucket of 0. No whole number has the bucket by the rule of the others: it would be 1.25.
const ZERO: u8 = 0xfd;

/// The bucket of a value: four to each power of two. 0 shares that of 2.
///
/// The conversion to floating point does the work: the exponent's last six bits and the first two
/// of the fraction are the bucket. Values below 2^52 convert exactly.
#[inline]
fn bucket_of(value: u64) -> u8 {
    #[allow(clippy::cast_precision_loss)]
    let bits = (value.cast_signed() as f64).to_bits();
    (bits >> (f64::MANTISSA_DIGITS - 1 - STEPS_LOG2)) as u8
}

/// The bucket of 1; those of larger values follow, the byte wrapping round.
const ONE: u8 = 0xfc;

/// The smallest value of a bucket; None where no whole number falls.
fn bucket_start(bucket: usize) -> Option<u64> {
    let bucket = u8::try_from(bucket).ok()?;
    if bucket == ZERO {
        return Some(0);
    }
    let place = u64::from(bucket.wrapping_sub(ONE));
    let (octave, step) = (place >> STEPS_LOG2, place & 3);
    let quarters = (4 + step) << octave;
    (octave < 62 && quarters.is_multiple_of(4)).then_some(quarters / 4)
}

/// A histogram that the loop writes: fixed log-linear buckets, at most 25 % wide.
#[derive(Debug)]
pub(crate) struct LiveHistogram([Counter; BUCKETS]);

impl LiveHistogram {
    pub(crate) fn new() -> Self {
        LiveHistogram(std::array::from_fn(|_| Counter::default()))
    }

    /// Counts one value; a 0 as a 2.
    #[inline]
    pub(crate) fn add_one(&self, value: u64) {
        self.0[usize::from(bucket_of(value))].add(1);
    }

    pub(crate) fn add(&self, value: u64, n: u64) {
        let bucket = if value == 0 { ZERO } else { bucket_of(value) };
        self.0[usize::from(bucket)].add(n);
    }

    pub(crate) fn read(&self) -> Histogram {
        let buckets = self.0.iter().enumerate();
        let mut counts: Vec<_> = buckets
            .filter_map(|(bucket, counter)| Some((bucket_start(bucket)?, counter.get())))
            .filter(|(_, count)| *count != 0)
            .collect();
        counts.sort_unstable();
        Histogram { counts }
    }
}

/// A histogram as read: counts by log-linear bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Histogram {
    /// Smallest value and count of the buckets that hold something, in ascending order.
    counts: Vec<(u64, u64)>,
}

impl Histogram {
    /// Number of values.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().map(|(_, count)| count).sum()
    }

    /// The buckets that hold something: smallest value, and count.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.counts.iter().copied()
    }

    /// `n` more of `value`.
    pub(crate) fn add(&mut self, value: u64, n: u64) {
        let start = match value {
            0 => 0,
            _ => bucket_start(usize::from(bucket_of(value))).unwrap_or(value),
        };
        match self
            .counts
            .binary_search_by_key(&start, |(start, _)| *start)
        {
            Ok(place) => self.counts[place].1 += n,
            Err(place) if n != 0 => self.counts.insert(place, (start, n)),
            Err(_) => {}
        }
    }

    /// The value below or at which `percent` of the values lie, to the width of a bucket: the
    /// bucket's smallest value. 0 when empty.
    #[must_use]
    pub fn percentile(&self, percent: f64) -> u64 {
        let total = self.count();
        // Counts are far below 2^52; the fraction is clamped to the range.
        #[allow(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss
        )]
        let rank = ((percent.clamp(0.0, 100.0) / 100.0) * total as f64).ceil() as u64;
        let mut seen = 0;
        for (value, count) in self.buckets() {
            seen += count;
            if seen >= rank {
                return value;
            }
        }
        0
    }

    /// The same in the form of the hdrhistogram crate, for merging and printing.
    #[must_use]
    pub fn to_hdr(&self) -> hdrhistogram::Histogram<u64> {
        let mut hdr = hdrhistogram::Histogram::new(2).expect("two significant digits are valid");
        for (value, count) in self.buckets() {
            // Grows as needed, which saturating_record_n does not.
            let _ = hdr.record_n(value, count);
        }
        hdr
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_at_most_a_quarter_wide() {
        let mut starts: Vec<_> = (0..BUCKETS).filter_map(bucket_start).collect();
        starts.sort_unstable();
        assert_eq!(starts[..8], [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(*starts.last().unwrap() > 1 << 61);
        for pair in starts[1..].windows(2) {
            let (start, next) = (pair[0], pair[1]);
            let bucket = usize::from(bucket_of(start));
            assert_eq!(bucket_start(bucket), Some(start));
            // Beyond 2^52 the conversion rounds.
            let last = if next < 1 << 52 { next - 1 } else { start };
            assert_eq!(usize::from(bucket_of(last)), bucket, "{last}");
            assert!(next - start <= (start / 4).max(1), "{start}..{next}");
        }
    }

    #[test]
    fn percentiles_come_from_the_right_bucket() {
        let live = LiveHistogram::new();
        live.add(1000, 90);
        for _ in 0..10 {
            live.add_one(50_000);
        }
        live.add(0, 100);
        let read = live.read();
        assert_eq!(read.count(), 200);
        assert_eq!(read.percentile(50.0), 0);
        assert_eq!(read.percentile(95.0), 896);
        assert_eq!(read.percentile(99.0), 49152);
        assert_eq!(read.to_hdr().len(), 200);
        assert!(read.to_hdr().max() >= read.percentile(100.0));
    }
}
