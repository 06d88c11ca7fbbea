//! System calls of a process, counted by the kernel's tracepoint `raw_syscalls:sys_enter`.
//!
//! Needs tracefs and the right to use it (root, or CAP_PERFMON); without them there is no count.

use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// `struct perf_event_attr` of perf_event_open(2) in its first version of 64 bytes.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    config1: u64,
}

const TRACEPOINT: u32 = 2;
/// Close on exec.
const FD_CLOEXEC: libc::c_ulong = 8;

/// Counts from the moment it is made.
pub(super) struct Counter {
    threads: Vec<std::fs::File>,
}

impl Counter {
    /// Of all threads that the process has now; none where it is not to be had.
    pub(super) fn of(pid: i32) -> Option<Counter> {
        let ids = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
        let id = ids.iter().find_map(|root| {
            let path = format!("{root}/events/raw_syscalls/sys_enter/id");
            std::fs::read_to_string(path).ok()?.trim().parse().ok()
        })?;
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
        let tids = tasks.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let threads = tids.map(|tid| open(id, tid)).collect::<Option<Vec<_>>>()?;
        Some(Counter { threads })
    }

    /// The calls so far.
    pub(super) fn read(&self) -> Option<u64> {
        let counts = self.threads.iter().map(|mut thread| {
            let mut bytes = [0; 8];
            thread.read_exact(&mut bytes).ok()?;
            Some(u64::from_ne_bytes(bytes))
        });
        counts.sum()
    }
}

fn open(id: u64, tid: i32) -> Option<std::fs::File> {
    let attributes = Attributes {
        kind: TRACEPOINT,
        size: size_of::<Attributes>() as u32,
        config: id,
        ..Attributes::default()
    };
    // SAFETY: the attributes are of the size that they tell; on any CPU, no group.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            tid,
            -1,
            -1,
            FD_CLOEXEC,
        )
    };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the descriptor is new and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    debug_assert!(fd.as_raw_fd() >= 0);
    Some(fd.into())
}
