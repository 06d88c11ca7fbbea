//! A disk on real iothreads with a driver in the test.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use iothread::{ContextConfig, IoThread, IoThreadConfig, PollSettings};
use tempfile::NamedTempFile;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::board::{Board, Line, Wire};
use crate::GuestMemory;
use crate::virtio::block::*;
use crate::virtio::device::VirtioDevice;
use crate::virtio::features::{EVENT_IDX, INDIRECT_DESC, VERSION_1};
use crate::virtio::testing::{DriverQueue, INDIRECT, ram};

pub(super) const IN: u32 = 0;
pub(super) const OUT: u32 = 1;
pub(super) const FLUSH: u32 = 4;
pub(super) const GET_ID: u32 = 8;
pub(super) const DISCARD: u32 = 11;
pub(super) const WRITE_ZEROES: u32 = 13;

pub(super) const OK: u8 = 0;
pub(super) const IOERR: u8 = 1;
pub(super) const UNSUPP: u8 = 2;

/// A wait that takes longer than this has gone wrong.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

pub(super) const ENGINES: [EngineKind; 3] =
    [EngineKind::IoUring, EngineKind::Native, EngineKind::Threads];

/// Buffers of a request: guest address, length, writable.
pub(super) type Buffers = Vec<(u64, u32, bool)>;

struct Sent {
    status: u64,
    input: Vec<(u64, u32)>,
}

/// What came back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: u8,
    pub(super) data: Vec<u8>,
    pub(super) written: u32,
}

const TABLES: u64 = 0x20_0000;
const TABLE_BYTES: u64 = 1024 * 16;
const DATA: u64 = 0x200_0000;
pub(super) const RAM_BYTES: usize = 128 << 20;

/// One queue's driver. Every request is an indirect table, so that its shape is free.
pub(super) struct Guest {
    pub(super) ring: DriverQueue,
    pub(super) notify: Arc<EventFd>,
    line: Arc<Line>,
    index: u16,
    free: Vec<u16>,
    sent: HashMap<u16, Sent>,
    done: HashMap<u16, Reply>,
    next_data: u64,
}

impl Guest {
    /// `bytes` bytes of guest memory, at `align + shift`.
    pub(super) fn alloc(&mut self, bytes: u64, shift: u64) -> u64 {
        let at = self.next_data.next_multiple_of(4096) + shift;
        self.next_data = at + bytes;
        assert!(at + bytes <= RAM_BYTES as u64);
        at
    }

    /// With nothing under way all of the queue's data memory is free again.
    pub(super) fn recycle(&mut self) {
        if self.sent.is_empty() && self.done.is_empty() {
            self.next_data = DATA + u64::from(self.index) * 0x100_0000;
        }
    }

    pub(super) fn put(&mut self, bytes: &[u8], shift: u64) -> u64 {
        let at = self.alloc(bytes.len() as u64, shift);
        self.ring.mem.write_slice(bytes, GuestAddress(at)).unwrap();
        at
    }

    pub(super) fn header(request_type: u32, sector: u64) -> [u8; 16] {
        let mut header = [0; 16];
        header[..4].copy_from_slice(&request_type.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        header
    }

    /// Offers a chain made of `buffers`, whose last byte is the status.
    pub(super) fn offer(&mut self, buffers: &Buffers) -> u16 {
        let head = self.free.pop().expect("no free descriptor");
        let table = TABLES
            + (u64::from(self.index) * u64::from(self.ring.layout.size) + u64::from(head))
                * TABLE_BYTES;
        self.ring.chain_at(table, 0, buffers);
        self.ring
            .desc(head, table, 16 * buffers.len() as u32, INDIRECT, 0);
        self.note(head, buffers);
        self.ring.offer(head);
        head
    }

    /// Offers a chain at descriptor `head`, which the caller has written and which consists of
    /// `buffers`.
    pub(super) fn offer_head(&mut self, head: u16, buffers: &Buffers) -> u16 {
        self.free.retain(|&free| free != head);
        self.note(head, buffers);
        self.ring.offer(head);
        head
    }

    /// Remembers where a request's answer will be.
    fn note(&mut self, head: u16, buffers: &Buffers) {
        let mut input: Vec<(u64, u32)> = buffers
            .iter()
            .filter(|b| b.2)
            .map(|&(addr, len, _)| (addr, len))
            .collect();
        let mut status = 0;
        if let Some(last) = input.iter_mut().rev().find(|b| b.1 > 0) {
            last.1 -= 1;
            status = last.0 + u64::from(last.1);
            self.ring
                .mem
                .write_obj(0xffu8, GuestAddress(status))
                .unwrap();
        }
        self.sent.insert(head, Sent { status, input });
    }

    /// Offers a chain of direct descriptors with its status at `status`.
    pub(super) fn ring_chain(&mut self, buffers: &[(u64, u32, bool)], status: u64) -> u16 {
        // Always the first descriptors: one such request at a time.
        self.free.retain(|&head| head != 0);
        self.ring.chain(0, buffers);
        let input = Vec::new();
        self.sent.insert(0, Sent { status, input });
        self.ring.offer(0);
        0
    }

    /// Whether the device has answered, as of the last `collect`.
    pub(super) fn is_answered(&self, head: u16) -> bool {
        self.done.contains_key(&head)
    }

    pub(super) fn kick(&self) {
        self.notify.write(1).unwrap();
    }

    /// Offers a request: header, `output` to the device, `input` bytes from it, status.
    pub(super) fn send(
        &mut self,
        request_type: u32,
        sector: u64,
        output: &[u8],
        input: u32,
    ) -> u16 {
        self.recycle();
        let header = self.put(&Guest::header(request_type, sector), 0);
        let mut buffers = vec![(header, 16, false)];
        if !output.is_empty() {
            let at = self.put(output, 0);
            buffers.push((at, output.len() as u32, false));
        }
        if input > 0 {
            let at = self.alloc(input.into(), 0);
            buffers.push((at, input, true));
        }
        let status = self.alloc(1, 0);
        buffers.push((status, 1, true));
        self.offer(&buffers)
    }

    /// Takes what the device has answered.
    pub(super) fn collect(&mut self) {
        while let Some((head, written)) = self.ring.take_used() {
            let head = head as u16;
            let sent = self.sent.remove(&head).expect("answered twice");
            let mut data = Vec::new();
            for (addr, len) in sent.input {
                let mut piece = vec![0; len as usize];
                self.ring
                    .mem
                    .read_slice(&mut piece, GuestAddress(addr))
                    .unwrap();
                data.extend(piece);
            }
            let status = self.ring.mem.read_obj(GuestAddress(sent.status)).unwrap();
            self.done.insert(
                head,
                Reply {
                    status,
                    data,
                    written,
                },
            );
            self.free.push(head);
        }
    }

    /// Waits for interrupts until `head` is answered.
    pub(super) fn wait(&mut self, head: u16) -> Reply {
        loop {
            let seen = self.line.count();
            self.collect();
            if let Some(reply) = self.done.remove(&head) {
                return reply;
            }
            self.ring.set_used_event(self.ring.used_idx);
            fence(Ordering::SeqCst);
            if self.ring.device_used_idx() != self.ring.used_idx {
                continue;
            }
            assert!(self.line.wait_beyond(seen), "no interrupt came");
        }
    }

    /// One request from beginning to end.
    pub(super) fn ask(
        &mut self,
        request_type: u32,
        sector: u64,
        output: &[u8],
        input: u32,
    ) -> Reply {
        let head = self.send(request_type, sector, output, input);
        self.kick();
        self.wait(head)
    }

    pub(super) fn read(&mut self, sector: u64, bytes: u32) -> Vec<u8> {
        let reply = self.ask(IN, sector, &[], bytes);
        assert_eq!((reply.status, reply.written), (OK, bytes + 1));
        reply.data
    }

    pub(super) fn write(&mut self, sector: u64, data: &[u8]) {
        let reply = self.ask(OUT, sector, data, 0);
        assert_eq!((reply.status, reply.written), (OK, 1));
    }

    /// A discard's or zeroing's payload.
    pub(super) fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        let mut payload = sector.to_le_bytes().to_vec();
        payload.extend(sectors.to_le_bytes());
        payload.extend(flags.to_le_bytes());
        payload
    }
}

/// Options of a rig.
pub(super) struct Options {
    pub(super) disk: DiskConfig,
    pub(super) threads: usize,
    pub(super) poll_max_ns: i64,
    pub(super) features: u64,
    pub(super) wire: Wire,
    pub(super) ram_bytes: usize,
}

impl Options {
    pub(super) fn new(path: &Path) -> Options {
        Options {
            disk: DiskConfig::new("d0", path),
            threads: 1,
            poll_max_ns: 32768,
            features: VERSION_1 | EVENT_IDX | INDIRECT_DESC | ALL_FEATURES,
            wire: Wire::Bare,
            ram_bytes: RAM_BYTES,
        }
    }

    /// Registered buffers, and no more memory to pin than the first queue's driver uses.
    pub(super) fn fixedbufs(mut self) -> Options {
        self.disk.fixedbufs = FixedBufs::On;
        self.ram_bytes = 48 << 20;
        self
    }

    pub(super) fn engine(mut self, engine: EngineKind) -> Options {
        self.disk.engine = Some(engine);
        self
    }

    pub(super) fn with(mut self, change: impl FnOnce(&mut DiskConfig)) -> Options {
        change(&mut self.disk);
        self
    }
}

const ALL_FEATURES: u64 = features::FLUSH
    | features::CONFIG_WCE
    | features::DISCARD
    | features::WRITE_ZEROES
    | features::BLK_SIZE
    | features::MQ;

/// An image of `bytes` bytes; on tmpfs if `/tmp` is.
pub(super) fn image(bytes: u64) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

pub(super) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..bytes)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

pub(super) fn file_bytes(file: &NamedTempFile, offset: u64, bytes: usize) -> Vec<u8> {
    // Through a descriptor of its own: the page cache is coherent with direct I/O.
    let mut data = vec![0; bytes];
    std::fs::File::open(file.path())
        .unwrap()
        .read_exact_at(&mut data, offset)
        .unwrap();
    data
}

pub(super) fn iothread(id: &str, poll_max_ns: i64) -> IoThread {
    IoThread::start(IoThreadConfig {
        id: id.into(),
        context: ContextConfig {
            settings: PollSettings {
                poll_max_ns,
                ..PollSettings::default()
            },
            ..ContextConfig::default()
        },
        ..IoThreadConfig::default()
    })
    .unwrap()
}

/// A thread that polls for up to 2 s each time: longer than a driver here ever pauses.
pub(super) fn always_polling() -> IoThread {
    IoThread::start(IoThreadConfig {
        id: "always".into(),
        context: ContextConfig {
            policy: iothread::PolicyKind::Always,
            settings: PollSettings {
                poll_max_ns: 2_000_000_000,
                ..PollSettings::default()
            },
            ..ContextConfig::default()
        },
        ..IoThreadConfig::default()
    })
    .unwrap()
}

/// A loop device over an image.
pub(super) struct LoopDevice {
    pub(super) path: std::path::PathBuf,
}

impl LoopDevice {
    /// None, and a line that says so, where loop devices cannot be made.
    pub(super) fn new(file: &NamedTempFile, sector_bytes: u32) -> Option<LoopDevice> {
        LoopDevice::at(file.path(), sector_bytes)
    }

    /// The same over the image at `path`.
    pub(super) fn at(path: &Path, sector_bytes: u32) -> Option<LoopDevice> {
        let output = std::process::Command::new("losetup")
            .args([
                "--find",
                "--show",
                "--sector-size",
                &sector_bytes.to_string(),
            ])
            .arg(path)
            .output();
        match output {
            Ok(output) if output.status.success() => {
                let path = String::from_utf8(output.stdout).unwrap();
                Some(LoopDevice {
                    path: path.trim().into(),
                })
            }
            _ => {
                println!("skipped: loop devices cannot be made here");
                None
            }
        }
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup")
            .arg("--detach")
            .arg(&self.path)
            .status();
    }
}

/// A disk on an image that nobody uses any more. A child process that another test has just forked
/// may keep the image's last descriptor, and so its lock, until it executes its program: on a busy
/// machine longer than opening waits.
pub(super) fn block(config: DiskConfig, placement: Placement) -> Block {
    for _ in 0..100 {
        match Block::new(config.clone(), placement.clone()) {
            Err(BlockError::Image(image::ImageError::Locked { .. })) => (),
            result => return result.unwrap(),
        }
    }
    panic!("{config:?} stays locked");
}

/// A disk, its threads and its driver.
pub(super) struct Rig {
    // Dropped first: its queues are on the threads.
    pub(super) block: Board,
    pub(super) handle: BlockHandle,
    pub(super) line: Arc<Line>,
    pub(super) guests: Vec<Guest>,
    pub(super) mem: GuestMemory,
    pub(super) features: u64,
    pub(super) threads: Vec<IoThread>,
}

impl Rig {
    pub(super) fn new(options: Options) -> Rig {
        let threads: Vec<IoThread> = (0..options.threads)
            .map(|i| iothread(&format!("t{i}"), options.poll_max_ns))
            .collect();
        Rig::on(options, threads)
    }

    pub(super) fn on(options: Options, threads: Vec<IoThread>) -> Rig {
        let queues = usize::from(options.disk.queues);
        let homes = threads.iter().cycle().take(queues);
        let placement =
            Placement::new(threads[0].remote(), homes.map(|t| Some(t.remote().clone())));
        let block = block(options.disk, placement);
        let mem = ram(options.ram_bytes);
        Rig::wired(options.wire, block, options.features, threads, mem)
    }

    /// A driver that accepts what it can of `features` for a disk whose threads the caller has.
    pub(super) fn of(block: Block, features: u64, threads: Vec<IoThread>) -> Rig {
        Rig::wired(Wire::Bare, block, features, threads, ram(RAM_BYTES))
    }

    fn wired(
        wire: Wire,
        block: Block,
        features: u64,
        threads: Vec<IoThread>,
        mem: GuestMemory,
    ) -> Rig {
        let handle = block.handle();
        let features = features & block.features() | VERSION_1;
        let block = Board::new(wire, block, &mem);
        let mut rig = Rig {
            handle,
            line: block.line(),
            guests: Vec::new(),
            mem,
            features,
            block,
            threads,
        };
        rig.activate();
        rig
    }

    /// What a driver does at its start.
    pub(super) fn activate(&mut self) {
        self.line = self.block.line();
        let sizes = (0u64..).zip(self.block.queue_max_sizes());
        let rings: Vec<DriverQueue> = sizes
            .map(|(index, size)| DriverQueue::new(&self.mem, 0x1000 + index * 0x1_0000, size))
            .collect();
        let kicks = self
            .block
            .start(&self.mem, self.features, &rings, &self.line);
        self.guests = (0..)
            .zip(rings.into_iter().zip(kicks))
            .map(|(index, (ring, notify))| Guest {
                free: (0..ring.layout.size).rev().collect(),
                ring,
                notify,
                line: self.line.clone(),
                index,
                sent: HashMap::new(),
                done: HashMap::new(),
                next_data: DATA + u64::from(index) * 0x100_0000,
            })
            .collect();
    }

    pub(super) fn reset(&mut self) {
        self.block.reset();
    }

    pub(super) fn guest(&mut self) -> &mut Guest {
        &mut self.guests[0]
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.block.reset();
    }
}

/// Waits until `done` holds.
pub(super) fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
