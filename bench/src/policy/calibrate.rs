//! What a sleep costs on this host: two threads that wake each other by eventfds, as a guest and a
//! loop do.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use iothread::now_ns;

use super::sim::Host;

/// Rounds that do not count, and that do.
const WARM_UP: usize = 200;
const ROUNDS: usize = 4000;

fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes numbers only.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn write(fd: &OwnedFd) -> io::Result<()> {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the bytes are there for the call.
    let written = unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    match written {
        8 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Waits for a write.
fn read(fd: &OwnedFd) -> io::Result<()> {
    let mut count = [0; 8];
    loop {
        // SAFETY: as above.
        let got = unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        if got == 8 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// CPU time of the calling thread.
fn cpu_ns() -> i64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes one timespec, which is there.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec * 1_000_000_000 + time.tv_nsec
}

fn median(mut values: Vec<i64>) -> f64 {
    values.sort_unstable();
    let middle = values.get(values.len() / 2).copied().unwrap_or(0);
    // Below 2^53.
    #[allow(clippy::cast_precision_loss)]
    let middle = middle as f64;
    middle
}

/// Measures this host: takes part of a second. A kick here is what the write costs that wakes a
/// sleeper; a guest's has an exit on top.
///
/// # Errors
/// A system call fails, or there is no thread.
pub fn measure() -> io::Result<Host> {
    let (ping, pong) = (eventfd()?, eventfd()?);
    std::thread::scope(|scope| {
        let sleeper = std::thread::Builder::new().name("calibrate".into());
        let sleeper = sleeper.spawn_scoped(scope, || -> io::Result<_> {
            let (mut woken_ns, mut spent_ns) = (Vec::new(), Vec::new());
            for _ in 0..WARM_UP + ROUNDS {
                let before_ns = cpu_ns();
                read(&ping)?;
                woken_ns.push(now_ns());
                spent_ns.push(cpu_ns() - before_ns);
                write(&pong)?;
            }
            Ok((woken_ns, spent_ns))
        })?;
        let (mut rung_ns, mut kicks_ns) = (Vec::new(), Vec::new());
        for _ in 0..WARM_UP + ROUNDS {
            // Long enough for the other to be asleep.
            let until_ns = now_ns() + 20_000;
            while now_ns() < until_ns {
                std::hint::spin_loop();
            }
            let before_ns = now_ns();
            write(&ping)?;
            kicks_ns.push(now_ns() - before_ns);
            rung_ns.push(before_ns);
            read(&pong)?;
        }
        let (woken_ns, mut spent_ns) = sleeper
            .join()
            .map_err(|_| io::Error::other("the thread that sleeps has panicked"))??;
        let late_ns = woken_ns.iter().zip(&rung_ns);
        let late_ns = late_ns.skip(WARM_UP).map(|(woken, rung)| woken - rung);
        // What a read costs that does not sleep is no part of it.
        let mut awake_ns = Vec::new();
        for _ in 0..ROUNDS {
            write(&ping)?;
            let before_ns = cpu_ns();
            read(&ping)?;
            awake_ns.push(cpu_ns() - before_ns);
        }
        let asleep_ns = median(spent_ns.split_off(WARM_UP));
        Ok(Host {
            name: "here".into(),
            sleep_cpu_ns: (asleep_ns - median(awake_ns)).max(0.0),
            wake_late_ns: median(late_ns.collect()),
            kick_ns: median(kicks_ns.split_off(WARM_UP)),
        })
    })
}
