//! The load: threads that keep a number of requests in flight on the queues dealt to them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};
use vm_memory::{FileOffset, MmapRegion};

use crate::matrix::{Run, Rw};

/// Descriptors of a request: header, data, status.
const DESCRIPTORS: u32 = 3;
/// The largest queue that both back ends take.
const MAX_QUEUE: u32 = 1024;
/// Requests that such a queue holds.
pub(super) const MAX_DEPTH: u32 = MAX_QUEUE / DESCRIPTORS;
/// Virtio features used beside the ring's: flush, queues.
const BLOCK_FEATURES: u64 = 1 << 9 | 1 << 12;
/// A wait for an interrupt is cut into these, so that a lost one ends the run with a message.
const WAIT: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// What the load is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) rw: Rw,
    pub(super) bytes: u64,
    pub(super) depth: u32,
    pub(super) queues: u32,
    pub(super) threads: u32,
    pub(super) poll: bool,
    pub(super) think: Duration,
    /// Requests between two pauses.
    pub(super) think_ios: u64,
}

impl Shape {
    pub(super) fn of(run: &Run) -> Shape {
        Shape {
            rw: run.rw,
            bytes: run.bs_bytes,
            depth: run.iodepth,
            queues: run.queues,
            threads: run.vcpus.min(run.queues * run.disks),
            poll: run.completion.as_deref() == Some("poll"),
            think: Duration::from_nanos(run.think_ns.unwrap_or(0)),
            think_ios: run.think_ios.unwrap_or(1).into(),
        }
    }
}

/// What the threads are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// Nothing counts yet.
    Ramp,
    /// All counts.
    Measured,
    /// Requests are counted, nothing else.
    Counted,
    /// No new requests.
    End,
}

/// What was measured by one thread, or by all.
pub(super) struct Totals {
    pub(super) ios: u64,
    pub(super) iops: f64,
    pub(super) errors: u64,
    pub(super) kicks: u64,
    pub(super) interrupts: u64,
    pub(super) latency_ns: Histogram<u64>,
}

impl Totals {
    fn none() -> Totals {
        Totals {
            ios: 0,
            iops: 0.0,
            errors: 0,
            kicks: 0,
            interrupts: 0,
            // Grows as needed; three digits.
            latency_ns: Histogram::new(3).unwrap_or_else(|e| unreachable!("3 digits: {e}")),
        }
    }

    fn add(&mut self, other: &Totals) {
        self.ios += other.ios;
        self.iops += other.iops;
        self.errors += other.errors;
        self.kicks += other.kicks;
        self.interrupts += other.interrupts;
        // It resizes itself, so it takes every value.
        let _ = self.latency_ns.add(&other.latency_ns);
    }
}

/// What threads and owner share.
struct Shared {
    phase: AtomicU8,
    done: Vec<AtomicU64>,
}

/// A running load.
pub(super) struct Load {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Result<Totals, String>>>,
    // Dropped after the threads: it keeps the connections and the memory.
    _disks: Vec<Disk>,
}

/// A connected disk.
struct Disk {
    _transport: Box<VirtioBlkTransport>,
    _buffers: Arc<MmapRegion>,
}

/// A queue and its requests.
struct Lane {
    queue: VirtioBlkQueue<'static, u32>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
    buffers: Arc<MmapRegion>,
    /// Of this lane's part of `buffers`.
    at: usize,
    free: Vec<u32>,
    begun: Vec<Instant>,
    /// Requests completed since the last pause.
    since_pause: u64,
    next: Offsets,
}

/// The offsets of a lane's requests.
struct Offsets {
    random: bool,
    write_share: u64,
    state: u64,
    /// In blocks.
    from: u64,
    count: u64,
    at: u64,
}

impl Offsets {
    fn next(&mut self) -> (u64, bool) {
        // xorshift64*: fast, and good enough for offsets.
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        let word = self.state.wrapping_mul(0x2545_f491_4f6c_dd1d);
        let write = (word & 0xff) < self.write_share;
        let block = match self.random {
            true => (word >> 8) % self.count,
            false => {
                self.at = (self.at + 1) % self.count;
                self.at
            }
        };
        (self.from + block, write)
    }
}

impl Load {
    /// Connects to every socket, which may not be there yet, and begins.
    pub(super) fn start(
        sockets: &[PathBuf],
        shape: &Shape,
        patience: Duration,
    ) -> Result<Load, String> {
        let deadline = Instant::now() + patience;
        let threads = shape.threads.max(1) as usize;
        let mut lanes: Vec<Vec<Lane>> = (0..threads).map(|_| Vec::new()).collect();
        let mut disks = Vec::new();
        let mut dealt = 0;
        for (number, socket) in sockets.iter().enumerate() {
            let (disk, queues) = connect(socket, shape, number, deadline)
                .map_err(|error| format!("{}: {error}", socket.display()))?;
            disks.push(disk);
            for lane in queues {
                lanes[dealt % threads].push(lane);
                dealt += 1;
            }
        }
        let shared = Arc::new(Shared {
            phase: AtomicU8::new(Phase::Ramp as u8),
            done: (0..threads).map(|_| AtomicU64::new(0)).collect(),
        });
        let threads = lanes.into_iter().enumerate().map(|(index, lanes)| {
            let (shape, shared) = (*shape, shared.clone());
            std::thread::Builder::new()
                .name(format!("load{index}"))
                .spawn(move || run(lanes, &shape, &shared, index))
                .map_err(|error| format!("no thread for the load: {error}"))
        });
        let threads = threads.collect::<Result<Vec<_>, _>>();
        match threads {
            Ok(threads) => Ok(Load {
                shared,
                threads,
                _disks: disks,
            }),
            Err(error) => {
                // Those that run use the memory of `disks`.
                shared.phase.store(Phase::End as u8, Ordering::Relaxed);
                std::mem::forget(disks);
                Err(error)
            }
        }
    }

    /// Changes what the threads are about.
    pub(super) fn enter(&self, phase: Phase) {
        self.shared.phase.store(phase as u8, Ordering::Relaxed);
    }

    /// Requests done so far, whatever the phase.
    pub(super) fn done(&self) -> u64 {
        let counts = self.shared.done.iter();
        counts.map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Waits for the requests under way, and gives what was measured.
    pub(super) fn finish(mut self, patience: Duration) -> Result<Totals, String> {
        self.enter(Phase::End);
        let deadline = Instant::now() + patience;
        while !self.threads.iter().all(JoinHandle::is_finished) {
            if Instant::now() > deadline {
                return Err("a request is never completed".into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut all = Totals::none();
        for thread in std::mem::take(&mut self.threads) {
            let ended = thread.join().map_err(|_| "the load panicked".to_string())?;
            all.add(&ended?);
        }
        Ok(all)
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.enter(Phase::End);
        for thread in std::mem::take(&mut self.threads) {
            // A thread whose back end hangs gives up by itself; its memory stays until then.
            let _ = thread.join();
        }
    }
}

fn connect(
    socket: &Path,
    shape: &Shape,
    number: usize,
    deadline: Instant,
) -> Result<(Disk, Vec<Lane>), std::io::Error> {
    let wrong = |text: String| std::io::Error::other(text);
    if shape.depth > MAX_DEPTH {
        return Err(wrong(format!("iodepth is {MAX_DEPTH} at most")));
    }
    let features = VirtioFeatureFlags::VERSION_1
        | VirtioFeatureFlags::RING_EVENT_IDX
        | VirtioFeatureFlags::RING_INDIRECT_DESC;
    let path = socket.to_string_lossy();
    let mut transport: Box<VirtioBlkTransport> = loop {
        match VhostUser::new(&path, features.bits() | BLOCK_FEATURES) {
            Ok(transport) => break Box::new(transport),
            Err(error) if Instant::now() > deadline => return Err(error),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    let capacity = { transport.get_config()?.capacity }.to_native() * 512;
    let queues = shape.queues as usize;
    let size = (shape.depth * DESCRIPTORS).next_power_of_two();
    let size = u16::try_from(size.max(16)).map_err(|e| wrong(e.to_string()))?;
    let made = VirtioBlkQueue::setup_queues(&mut *transport, queues, size)?;
    let block = usize::try_from(shape.bytes).map_err(|e| wrong(e.to_string()))?;
    let lane_bytes = block * shape.depth as usize;
    let buffers = shared_memory(lane_bytes * queues)?;
    let fd = buffers.file_offset().map_or(-1, |f| f.file().as_raw_fd());
    transport.map_mem_region(buffers.as_ptr().addr(), buffers.size(), fd, 0)?;
    let blocks = capacity / shape.bytes / queues as u64;
    if blocks == 0 {
        return Err(wrong("the disk is smaller than a request a queue".into()));
    }
    let (random, write_share) = match shape.rw {
        Rw::Read => (false, 0),
        Rw::Write => (false, 256),
        Rw::Rw => (false, 128),
        Rw::RandRead => (true, 0),
        Rw::RandWrite => (true, 256),
        Rw::RandRw => (true, 128),
    };
    let lanes = made.into_iter().enumerate().map(|(index, mut queue)| {
        queue.set_used_notif_enabled(!shape.poll);
        Lane {
            queue,
            kick: transport.get_submission_notifier(index),
            call: transport.get_completion_fd(index),
            buffers: buffers.clone(),
            at: index * lane_bytes,
            free: (0..shape.depth).collect(),
            begun: vec![Instant::now(); shape.depth as usize],
            since_pause: 0,
            next: Offsets {
                random,
                write_share,
                state: 0x9e37_79b9_7f4a_7c15 ^ (number * 64 + index + 1) as u64,
                from: blocks * index as u64,
                count: blocks,
                at: 0,
            },
        }
    });
    let lanes = lanes.collect();
    let disk = Disk {
        _transport: transport,
        _buffers: buffers,
    };
    Ok((disk, lanes))
}

/// Memory that a back end can map.
fn shared_memory(bytes: usize) -> Result<Arc<MmapRegion>, std::io::Error> {
    let fd = rustix::fs::memfd_create("load", rustix::fs::MemfdFlags::CLOEXEC)?;
    let file = File::from(fd);
    file.set_len(bytes as u64)?;
    let region = MmapRegion::from_file(FileOffset::new(file, 0), bytes);
    region.map(Arc::new).map_err(std::io::Error::other)
}

fn run(
    mut lanes: Vec<Lane>,
    shape: &Shape,
    shared: &Shared,
    index: usize,
) -> Result<Totals, String> {
    let mut totals = Totals::none();
    let mut begun = None;
    let mut lasted = None;
    let mut done = 0u64;
    let mut idle_since: Option<Instant> = None;
    loop {
        let phase = shared.phase.load(Ordering::Relaxed);
        let measured = phase == Phase::Measured as u8;
        let ending = phase == Phase::End as u8;
        if measured && begun.is_none() {
            begun = Some(Instant::now());
        }
        if !measured && lasted.is_none() {
            lasted = begun.map(|at| at.elapsed());
        }
        let mut completed = 0;
        for lane in &mut lanes {
            if !ending {
                let kicked = lane.submit(shape)?;
                totals.kicks += u64::from(kicked && measured);
            }
            completed += lane.complete(shape, measured, &mut totals);
        }
        done += completed;
        shared.done[index].store(done, Ordering::Relaxed);
        let in_flight = lanes.iter().any(|lane| lane.free.len() < lane.begun.len());
        if ending && !in_flight {
            break;
        }
        if completed > 0 {
            idle_since = None;
            continue;
        }
        let idle = idle_since.get_or_insert_with(Instant::now).elapsed();
        if idle > Duration::from_secs(60) {
            return Err("no request was completed for a minute".into());
        }
        if shape.poll {
            std::hint::spin_loop();
        } else {
            let woken = wait(&mut lanes).map_err(|error| format!("interrupts: {error}"))?;
            totals.interrupts += if measured { woken } else { 0 };
        }
    }
    let seconds = lasted.unwrap_or_default().as_secs_f64();
    if seconds > 0.0 {
        totals.iops = totals.ios as f64 / seconds;
    }
    Ok(totals)
}

/// Waits for an interrupt of any lane: how many there were.
fn wait(lanes: &mut [Lane]) -> std::io::Result<u64> {
    let mut fds: Vec<PollFd<'_>> = lanes
        .iter()
        .map(|lane| {
            // SAFETY: open as long as the lane.
            let fd = unsafe { BorrowedFd::borrow_raw(lane.call.as_raw_fd()) };
            PollFd::from_borrowed_fd(fd, PollFlags::IN)
        })
        .collect();
    // Not by reading alone: QEMU's storage daemon makes the eventfds it is given non-blocking.
    match poll(&mut fds, Some(&WAIT)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    let mut woken = 0;
    for (lane, fd) in lanes.iter().zip(&fds) {
        if fd.revents().contains(PollFlags::IN) {
            lane.call.read()?;
            woken += 1;
        }
    }
    Ok(woken)
}

impl Lane {
    /// Fills the queue; whether that took a kick.
    fn submit(&mut self, shape: &Shape) -> Result<bool, String> {
        if self.free.is_empty() {
            return Ok(false);
        }
        let now = Instant::now();
        while let Some(slot) = self.free.pop() {
            let (block, write) = self.next.next();
            let offset = block * shape.bytes;
            let bytes = shape.bytes as usize;
            let buffer = self
                .buffers
                .as_ptr()
                .wrapping_add(self.at + slot as usize * bytes);
            self.begun[slot as usize] = now;
            // SAFETY: the slot's part of the mapping, which the lane keeps.
            let queued = unsafe {
                match write {
                    true => self.queue.write_raw(offset, buffer, bytes, slot),
                    false => self.queue.read_raw(offset, buffer, bytes, slot),
                }
            };
            queued.map_err(|error| format!("the queue is full: {error}"))?;
        }
        let needed = self.queue.avail_notif_needed();
        if needed {
            self.kick
                .notify()
                .map_err(|error| format!("kick: {error}"))?;
        }
        Ok(needed)
    }

    /// Takes what is completed: how many.
    fn complete(&mut self, shape: &Shape, measured: bool, totals: &mut Totals) -> u64 {
        let before = self.free.len();
        let mut now = None;
        for completion in self.queue.completions() {
            let now = *now.get_or_insert_with(Instant::now);
            let slot = completion.context;
            if measured {
                totals.ios += 1;
                totals.errors += u64::from(completion.ret != 0);
                let latency = now.saturating_duration_since(self.begun[slot as usize]);
                let ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
                // It resizes itself, so it takes every value.
                let _ = totals.latency_ns.record(ns);
            }
            self.free.push(slot);
        }
        let count = self.free.len() - before;
        self.since_pause += count as u64;
        if self.since_pause >= shape.think_ios && !shape.think.is_zero() {
            self.since_pause = 0;
            let until = Instant::now() + shape.think;
            // A long pause is an idle guest, a short one is a guest that works.
            if shape.think > Duration::from_millis(1) {
                std::thread::sleep(shape.think);
            }
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        }
        count as u64
    }
}
