//! The loop's clock.

/// CLOCK_MONOTONIC in nanoseconds.
#[inline]
#[must_use]
pub fn now_ns() -> i64 {
    read(libc::CLOCK_MONOTONIC)
}

/// CPU time of the calling thread (CLOCK_THREAD_CPUTIME_ID) in nanoseconds. A system call.
pub(crate) fn thread_cpu_ns() -> i64 {
    read(libc::CLOCK_THREAD_CPUTIME_ID)
}

#[inline]
fn read(clock: libc::clockid_t) -> i64 {
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // By libc, whose way to the vDSO also works where there is none (under valgrind, for example).
    // SAFETY: writes to `now` only; both clocks always exist.
    unsafe { libc::clock_gettime(clock, &mut now) };
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
