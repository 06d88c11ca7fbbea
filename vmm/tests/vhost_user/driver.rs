//! The front end of the `virtio-driver` crate, and what tests do with it.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use virtio_driver::{
    EventFd, QueueNotifier, VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};
use vm_memory::{FileOffset, MmapRegion};

use crate::common::PATIENCE;
use crate::served::{DISK_BYTES, text};

/// Bytes of a block of the tests' patterns.
pub const BLOCK: usize = 4096;
/// Buffers of a queue.
const BUFFERS: usize = 64;

/// How completions are noticed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    Event,
    Poll,
}

/// A connected driver.
pub struct Driver {
    pub transport: Box<VirtioBlkTransport>,
    pub queues: Vec<DriverQueue>,
    // Dropped after the transport, which the other side maps them by.
    _buffers: Vec<Arc<MmapRegion>>,
}

/// One queue with its buffers.
pub struct DriverQueue {
    pub queue: VirtioBlkQueue<'static, usize>,
    buffers: Arc<MmapRegion>,
    kick: Box<dyn QueueNotifier>,
    call: Arc<EventFd>,
    pub wait: Wait,
}

/// All features that the driver can do.
pub fn all_features() -> u64 {
    let ring = VirtioFeatureFlags::VERSION_1
        | VirtioFeatureFlags::RING_EVENT_IDX
        | VirtioFeatureFlags::RING_INDIRECT_DESC;
    // Read-only, block size, flush, topology, WCE, queues, discard, write zeroes.
    ring.bits() | 1 << 5 | 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12 | 1 << 13 | 1 << 14
}

impl Driver {
    pub fn connect(socket: &Path, queues: usize, wait: Wait, features: u64) -> Driver {
        let transport = VhostUser::new(text(socket), features).unwrap();
        let mut transport: Box<VirtioBlkTransport> = Box::new(transport);
        let made = VirtioBlkQueue::setup_queues(&mut *transport, queues, 256).unwrap();
        let mut buffers = Vec::new();
        let queues = made
            .into_iter()
            .enumerate()
            .map(|(index, mut queue)| {
                queue.set_used_notif_enabled(wait == Wait::Event);
                let memory = shared_memory(BLOCK * BUFFERS);
                let file = memory.file_offset().unwrap().file();
                transport
                    .map_mem_region(memory.as_ptr().addr(), memory.size(), file.as_raw_fd(), 0)
                    .unwrap();
                buffers.push(memory.clone());
                DriverQueue {
                    queue,
                    buffers: memory,
                    kick: transport.get_submission_notifier(index),
                    call: transport.get_completion_fd(index),
                    wait,
                }
            })
            .collect();
        Driver {
            transport,
            queues,
            _buffers: buffers,
        }
    }
}

/// Memory that another process can map.
pub fn shared_memory(bytes: usize) -> Arc<MmapRegion> {
    let flags = rustix::fs::MemfdFlags::CLOEXEC;
    let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
    file.set_len(bytes as u64).unwrap();
    Arc::new(MmapRegion::from_file(FileOffset::new(file, 0), bytes).unwrap())
}

/// What the block at `index` holds in generation `generation`.
pub fn pattern(index: u64, generation: u64) -> Vec<u8> {
    let word = (index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ generation;
    let words = (0..BLOCK as u64 / 8).map(|at| (word ^ at).to_le_bytes());
    words.flatten().collect()
}

impl DriverQueue {
    fn buffer(&self, at: usize) -> *mut u8 {
        assert!(at < BUFFERS);
        self.buffers.as_ptr().wrapping_add(at * BLOCK)
    }

    /// The content of a buffer that no request uses.
    pub fn content(&self, at: usize) -> Vec<u8> {
        // SAFETY: a buffer of BLOCK bytes within the mapping.
        unsafe { std::slice::from_raw_parts(self.buffer(at), BLOCK) }.to_vec()
    }

    /// Begins to write `bytes` at block `index` from buffer `at`.
    pub fn write(&mut self, index: u64, bytes: &[u8], at: usize) {
        let buffer = self.buffer(at);
        // SAFETY: a buffer of BLOCK bytes within the mapping.
        unsafe { buffer.copy_from(bytes.as_ptr(), BLOCK.min(bytes.len())) };
        let offset = index * BLOCK as u64;
        // SAFETY: the buffer stays mapped as long as the queue.
        unsafe { self.queue.write_raw(offset, buffer, BLOCK, at) }.unwrap();
    }

    /// Begins to read block `index` into buffer `at`.
    pub fn read(&mut self, index: u64, at: usize) {
        let (offset, buffer) = (index * BLOCK as u64, self.buffer(at));
        // SAFETY: the buffer stays mapped as long as the queue.
        unsafe { self.queue.read_raw(offset, buffer, BLOCK, at) }.unwrap();
    }

    pub fn kick(&mut self) {
        if self.queue.avail_notif_needed() {
            self.kick.notify().unwrap();
        }
    }

    /// Kicks, and waits for `count` requests; their buffers and results.
    pub fn complete(&mut self, count: usize) -> Vec<(usize, i32)> {
        self.kick();
        let begun = Instant::now();
        let mut done = Vec::new();
        loop {
            done.extend(self.queue.completions().map(|c| (c.context, c.ret)));
            if done.len() >= count {
                assert_eq!(done.len(), count);
                return done;
            }
            assert!(begun.elapsed() < PATIENCE, "{} of {count}", done.len());
            match self.wait {
                Wait::Poll => std::thread::yield_now(),
                Wait::Event => {
                    let mut fds = [PollFd::from_borrowed_fd(
                        // SAFETY: open as long as `call`.
                        unsafe { rustix::fd::BorrowedFd::borrow_raw(self.call.as_raw_fd()) },
                        PollFlags::IN,
                    )];
                    let second = Timespec {
                        tv_sec: 5,
                        tv_nsec: 0,
                    };
                    let ready = poll(&mut fds, Some(&second)).unwrap();
                    assert!(
                        ready == 1 || self.queue.completions().has_next(),
                        "an interrupt was lost"
                    );
                    if ready == 1 {
                        self.call.read().unwrap();
                    }
                }
            }
        }
    }

    /// Waits for `count` requests, all of which succeed.
    pub fn succeed(&mut self, count: usize) {
        for (at, result) in self.complete(count) {
            assert_eq!(result, 0, "buffer {at}");
        }
    }

    /// Writes the pattern to `blocks`, many at once, and reads it back.
    pub fn write_and_verify(&mut self, blocks: &[u64], generation: u64) {
        for batch in blocks.chunks(BUFFERS) {
            for (at, &index) in batch.iter().enumerate() {
                self.write(index, &pattern(index, generation), at);
            }
            self.succeed(batch.len());
        }
        self.verify(blocks, generation);
    }

    /// Reads `blocks`, many at once, and compares with the pattern.
    pub fn verify(&mut self, blocks: &[u64], generation: u64) {
        for batch in blocks.chunks(BUFFERS) {
            for (at, &index) in batch.iter().enumerate() {
                self.read(index, at);
            }
            self.succeed(batch.len());
            for (at, &index) in batch.iter().enumerate() {
                assert!(
                    self.content(at) == pattern(index, generation),
                    "block {index} differs"
                );
            }
        }
    }
}

/// The blocks of a disk that queue `queue` of `queues` has to itself, in an order that is no order.
pub fn blocks(queue: usize, queues: usize) -> Vec<u64> {
    let count = DISK_BYTES / BLOCK as u64;
    let all = (0..count).map(|i| i * 1_103 % count);
    all.skip(queue).step_by(queues).collect()
}

/// Compares an image with the pattern.
pub fn check_image(path: &Path, blocks: &[u64], generation: u64) {
    let image = std::fs::read(path).unwrap();
    for &index in blocks {
        let at = index as usize * BLOCK;
        assert!(
            image[at..at + BLOCK] == pattern(index, generation),
            "block {index} of the image differs"
        );
    }
}
