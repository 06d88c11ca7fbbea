//! What a request costs the iothread: CPU time, ring enters, interrupts and kicks per request, with
//! a driver that spins on another CPU. `cargo bench -p devices --bench hot_path -- 200000 512 32 io_uring
//! buffered polled`: requests, block size, depth; engines, page cache or not, polled or not, all of
//! them if none is named.
//!
//! Figures of a machine whose CPUs are busy otherwise mean nothing; compare runs that alternate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use devices::GuestMemory;
use devices::virtio::block::{Block, DiskConfig, EngineKind, Placement};
use devices::virtio::device::{Activation, ActiveQueue, Interrupt, VirtioDevice};
use devices::virtio::features::{EVENT_IDX, INDIRECT_DESC, VERSION_1};
use devices::virtio::queue::Queue;
use iothread::{ContextConfig, IoThread, IoThreadConfig, PollSettings};
use testing::DriverQueue;
use vm_memory::{Address, Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

// What the driver's side in the crate's tests refers to.
mod queue {
    pub(crate) use devices::virtio::queue::Layout;
}
#[allow(dead_code, clippy::unwrap_used)]
#[path = "../src/virtio/testing.rs"]
mod testing;

#[derive(Default)]
struct Line(AtomicU64);

impl Interrupt for Line {
    fn queue(&self, _: u16) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn config(&self) {}
    fn needs_reset(&self) {
        panic!("the driver broke the queue");
    }
}

fn thread_cpu_ns(thread: &IoThread) -> i64 {
    let now = |_: &iothread::Context| {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    };
    thread.remote().call(now).expect("the thread runs")
}

const SIZE: u16 = 128;
const DATA: u64 = 0x10_0000;

struct Case {
    engine: EngineKind,
    direct: bool,
    poll_max_ns: i64,
}

fn run(case: &Case, requests: u64, bytes: u32, depth: u16) {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("a file here");
    let image = vec![0x5a; 64 << 20];
    std::fs::write(file.path(), &image).expect("64 MiB of disk");
    file.as_file().sync_all().expect("written");
    let thread = IoThread::start(IoThreadConfig {
        id: "bench".into(),
        context: ContextConfig {
            settings: PollSettings {
                poll_max_ns: case.poll_max_ns,
                ..PollSettings::default()
            },
            ..ContextConfig::default()
        },
        ..IoThreadConfig::default()
    })
    .expect("an iothread");
    let mut config = DiskConfig::new("bench", file.path());
    config.engine = Some(case.engine);
    config.direct = Some(case.direct);
    config.queue_size = SIZE;
    let placement = Placement::single(thread.remote(), 1);
    let mut block = Block::new(config, placement).expect("a disk");
    let mem: GuestMemory = testing::ram(16 << 20);
    let mut driver = DriverQueue::new(&mem, 0x1000, SIZE);
    let features = VERSION_1 | EVENT_IDX | INDIRECT_DESC;
    let notify = Arc::new(EventFd::new(0).expect("an eventfd"));
    let line = Arc::new(Line::default());
    block
        .activate(Activation {
            features,
            mem: mem.clone(),
            queues: vec![ActiveQueue {
                index: 0,
                queue: Queue::new(&mem, driver.layout, SIZE, features, 0).expect("a queue"),
                notify: notify.clone(),
            }],
            interrupt: line.clone(),
        })
        .expect("an active disk");
    // A table of three descriptors a request, as Linux makes them.
    for head in 0..depth {
        let base = DATA + u64::from(head) * 0x1_0000;
        driver.chain_at(
            base,
            0,
            &[
                (base + 0x100, 16, false),
                (base + 0x1000, bytes, true),
                (base + 0x200, 1, true),
            ],
        );
        driver.desc(head, base, 48, testing::INDIRECT, 0);
    }
    let sectors = (64u64 << 20) / 512;
    let mut random = 1u64;
    let mut offer = |driver: &mut DriverQueue, head: u16| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let sector = (random >> 33) % (sectors - 128) / 8 * 8;
        let header = GuestAddress(DATA + u64::from(head) * 0x1_0000 + 0x100);
        mem.write_obj(sector, header.unchecked_add(8))
            .expect("guest memory");
        driver.offer(head);
    };
    let kick = |driver: &DriverQueue, old: u16| {
        fence(Ordering::SeqCst);
        let (new, event) = (driver.avail_idx, driver.avail_event());
        if new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old) {
            notify.write(1).expect("a kick");
        }
    };
    let mut warm = true;
    let mut begin = (Instant::now(), 0, 0, block.handle().stats(), 0);
    let mut done = 0u64;
    let old = driver.avail_idx;
    for head in 0..depth {
        offer(&mut driver, head);
    }
    kick(&driver, old);
    while done < requests {
        if warm && done > requests / 10 {
            warm = false;
            let enters = thread.remote().stats().enters;
            begin = (
                Instant::now(),
                thread_cpu_ns(&thread),
                done,
                block.handle().stats(),
                enters,
            );
        }
        driver.set_used_event(driver.used_idx);
        let old = driver.avail_idx;
        while let Some((head, _)) = driver.take_used() {
            offer(&mut driver, head as u16);
            done += 1;
        }
        if driver.avail_idx != old {
            kick(&driver, old);
        }
    }
    let (start, cpu, from, before, enters) = begin;
    let seconds = start.elapsed().as_secs_f64();
    let cpu = thread_cpu_ns(&thread) - cpu;
    let count = (done - from) as f64;
    let stats = block.handle().stats();
    let enters = thread.remote().stats().enters - enters;
    println!(
        "{:9} direct={:5} poll-max-ns={:6} bs={bytes} depth={depth}: {:8.0} IOPS, {:6.0} CPU-ns, {:.3} enters, {:.3} interrupts, {:.3} kicks a request",
        case.engine.name(),
        case.direct,
        case.poll_max_ns,
        count / seconds,
        cpu as f64 / count,
        enters as f64 / count,
        (stats.interrupts - before.interrupts) as f64 / count,
        (stats.kicks - before.kicks) as f64 / count,
    );
    block.reset();
}

/// False and true, or the one that an argument names.
fn either(no: &str, yes: &str) -> Vec<bool> {
    let named = |word: &str| std::env::args().any(|argument| argument == word);
    match (named(no), named(yes)) {
        (true, false) => vec![false],
        (false, true) => vec![true],
        _ => vec![false, true],
    }
}

fn main() {
    let numbers: Vec<u64> = std::env::args()
        .skip(1)
        .filter_map(|a| a.parse().ok())
        .collect();
    let requests = numbers.first().copied().unwrap_or(200_000);
    let bytes = numbers.get(1).copied().unwrap_or(512) as u32;
    let depth = numbers.get(2).copied().unwrap_or(32) as u16;
    let named: Vec<EngineKind> = std::env::args().filter_map(|a| a.parse().ok()).collect();
    let all = [EngineKind::IoUring, EngineKind::Native, EngineKind::Threads];
    let engines = if named.is_empty() { &all[..] } else { &named };
    for &engine in engines {
        for direct in either("buffered", "direct") {
            for polled in either("unpolled", "polled") {
                let poll_max_ns = if polled { 32768 } else { 0 };
                let case = Case {
                    engine,
                    direct,
                    poll_max_ns,
                };
                run(&case, requests, bytes, depth.min(SIZE));
            }
        }
    }
}
