//! What the system says about this process's threads.

/// CPU time that a thread of this process has used, in nanoseconds; none if there is no such thread.
///
/// The kernel makes a clock of every thread (clock_getcpuclockid(3)); unlike /proc it needs no file to be opened.
pub fn thread_cpu_ns(thread_id: i32) -> Option<u64> {
    /// CPUCLOCK_SCHED | CPUCLOCK_PERTHREAD_MASK: precise time, of a thread.
    const SCHED_OF_THREAD: i32 = 2 | 4;
    let clock = (!thread_id << 3) | SCHED_OF_THREAD;
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is valid for writing; the clock is only a number, and an unknown one is refused.
    let failed = unsafe { libc::clock_gettime(clock, &mut time) } != 0;
    let seconds = u64::try_from(time.tv_sec).ok()?;
    let nanoseconds = u64::try_from(time.tv_nsec).ok()?;
    (!failed).then(|| seconds * 1_000_000_000 + nanoseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_threads_cpu_time_is_its_own_and_grows_with_its_work() {
        let (send, receive) = std::sync::mpsc::channel();
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let sleeper = std::thread::spawn(move || {
            send.send(rustix::thread::gettid().as_raw_nonzero().get())
                .unwrap();
            let _ = wait.recv();
        });
        let asleep = receive.recv().unwrap();
        let awake = rustix::thread::gettid().as_raw_nonzero().get();
        let before = [awake, asleep].map(|id| thread_cpu_ns(id).unwrap());
        while thread_cpu_ns(awake).unwrap() < before[0] + 20_000_000 {}
        assert!(thread_cpu_ns(asleep).unwrap() < before[1] + 10_000_000);
        drop(end);
        sleeper.join().unwrap();
        assert_eq!(thread_cpu_ns(1), None, "another process's thread");
    }
}
