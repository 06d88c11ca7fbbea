//! The loop's clock.

/// CLOCK_MONOTONIC in nanoseconds.
#[inline]
#[must_use]
pub fn now_ns() -> i64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// The sooner of two timeouts, where −1 means "for ever": compared as unsigned, −1 is the largest.
#[inline]
#[must_use]
pub fn soonest(a: i64, b: i64) -> i64 {
    if a.cast_unsigned() < b.cast_unsigned() {
        a
    } else {
        b
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_ever_is_the_largest_timeout() {
        assert_eq!(soonest(-1, 5), 5);
        assert_eq!(soonest(5, -1), 5);
        assert_eq!(soonest(-1, -1), -1);
        assert_eq!(soonest(0, i64::MAX), 0);
    }
}
