//! A front end that says anything to `pollux vhost-user-blk`: messages in any order, with wrong numbers,
//! wrong descriptors or none, memory that goes away, rings that make no sense.
//!
//! Whatever it does costs it its connection at most: it is let go when it has said everything, and the
//! next front end reads the disk as it is.

use std::cell::Cell;
use std::fs::File;
use std::io::{ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use arbitrary::{Arbitrary, Unstructured};
use devices::virtio::block::{Block, DiskConfig, Placement};
use iothread::{IoThread, IoThreadConfig};
use rustix::fs::{MemfdFlags, memfd_create};
use tempfile::{NamedTempFile, TempDir};
use vmm::qmp::Listener;
use vmm::vhost_user::Server;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Longer than any answer takes.
const PATIENCE: Duration = Duration::from_secs(60);

// Requests of the protocol.
const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const GET_VRING_BASE: u32 = 11;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const GET_CONFIG: u32 = 24;
const SET_CONFIG: u32 = 25;
const GET_INFLIGHT_FD: u32 = 31;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;

/// Version 1 of the protocol, and the flag that asks for an answer.
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;

/// VERSION_1, the protocol's features, EVENT_IDX, indirect descriptors, MQ, flush.
const FEATURES: u64 = 1 << 32 | 1 << 30 | EVENT_IDX | 1 << 28 | 1 << 12 | 1 << 9;
const EVENT_IDX: u64 = 1 << 29;
/// MQ, REPLY_ACK, CONFIG, INFLIGHT_SHMFD, RESET_DEVICE, CONFIGURE_MEM_SLOTS.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15;
/// Flags of a descriptor.
const NEXT: u16 = 1;
const WRITE: u16 = 2;

const QUEUES: u16 = 2;
const QUEUE_SIZE: u16 = 16;
const DISK_BYTES: u64 = 64 << 10;
const SECTOR: usize = 512;

/// The one region: its size, and where it is in the front end's process.
const RAM_BYTES: u64 = 64 << 10;
const USER: u64 = 0x5000_0000_0000;
// In it:
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const STATUS: u64 = 0x3100;
const DATA: u64 = 0x4000;

/// What a front end does.
#[derive(Debug, Arbitrary)]
struct Input {
    stage: Stage,
    event_idx: bool,
    steps: Vec<Step>,
}

/// How far it comes before it does wrong.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Arbitrary)]
enum Stage {
    Connected,
    Negotiated,
    Shared,
    Running,
}

#[derive(Debug, Arbitrary)]
enum Step {
    Say {
        message: Message,
        files: Vec<Attached>,
        need_reply: bool,
        /// A header's version and flags, and a size that is not the payload's.
        flags: Option<u32>,
        size: Option<u32>,
    },
    /// No message at all.
    Bytes(Vec<u8>),
    /// A request as it should be: read or write a sector.
    Request {
        write: bool,
        sector: u8,
    },
    Descriptor {
        at: u8,
        address: Number,
        len: Number,
        flags: u16,
        next: u16,
    },
    /// Something in the rings.
    Ring {
        at: u16,
        value: u16,
    },
    Kick,
    /// The memory's file is cut short, or made longer.
    Cut(u16),
}

#[derive(Debug, Arbitrary)]
enum Message {
    Plain(u8),
    Word(u8, u64),
    State(u8, u8, u32),
    Features(u64),
    MemTable(Vec<Region>, Option<u32>),
    AddRegion(Region),
    RemoveRegion(Region),
    Addresses(u8, u32, [Number; 4]),
    Config {
        set: bool,
        offset: u16,
        size: u16,
        flags: u8,
        bytes: Vec<u8>,
    },
    Inflight {
        set: bool,
        size: Number,
        offset: Number,
        queues: u8,
        descriptors: u16,
    },
    Any(u32, Vec<u8>),
}

#[derive(Debug, Arbitrary)]
struct Region {
    guest: Number,
    size: Number,
    user: Number,
    offset: Number,
}

/// The number that is expected, one beside it, or any.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Number {
    Right,
    Beside(i8),
    Pages(u8),
    Any(u64),
}

impl Number {
    fn of(self, right: u64) -> u64 {
        match self {
            Self::Right => right,
            Self::Beside(delta) => right.wrapping_add_signed(delta.into()),
            Self::Pages(pages) => right.wrapping_add(u64::from(pages) << 12),
            Self::Any(any) => any,
        }
    }
}

/// A descriptor that comes with a message.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Attached {
    Ram,
    Page,
    ReadOnly,
    Pipe,
    Event,
    BlockingEvent,
    Image,
}

/// The disk behind its socket.
struct Bed {
    socket: PathBuf,
    image: NamedTempFile,
    server: Server,
    page: File,
    read_only: File,
    pipe: (PipeReader, PipeWriter),
    blocking: EventFd,
    _iothread: IoThread,
    _folder: TempDir,
}

/// The target.
pub fn front_end(input: &[u8]) {
    thread_local! {
        static BED: Bed = Bed::new();
    }
    let Ok(input) = Input::arbitrary_take_rest(Unstructured::new(input)) else {
        return;
    };
    BED.with(|bed| {
        bed.suffer(&input);
        bed.serve_a_good_one();
    });
}

impl Bed {
    fn new() -> Self {
        let image = NamedTempFile::new().unwrap();
        image.as_file().set_len(DISK_BYTES).unwrap();
        let iothread = IoThread::start(IoThreadConfig {
            id: "vhost".to_owned(),
            ..IoThreadConfig::default()
        })
        .unwrap();
        let mut config = DiskConfig::new("vhost", image.path());
        config.direct = Some(false);
        config.queues = QUEUES;
        config.locking = false;
        let placement = Placement::single(iothread.remote(), QUEUES);
        let block = Block::new(config, placement).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let server = Server::start(Listener::bind(&socket).unwrap(), block, None).unwrap();
        let page = tempfile::tempfile().unwrap();
        page.set_len(0x1000).unwrap();
        Self {
            socket,
            server,
            page,
            read_only: File::open(image.path()).unwrap(),
            image,
            pipe: std::io::pipe().unwrap(),
            blocking: EventFd::new(0).unwrap(),
            _iothread: iothread,
            _folder: folder,
        }
    }

    fn suffer(&self, input: &Input) {
        let memory = Memory::new();
        let front = Front::connect(self, &memory);
        front.set_up(input.stage, input.event_idx);
        for step in input.steps.iter().take(24) {
            // Let go, it may still change its memory.
            self.step(&front, step);
        }
        front.leave();
    }

    fn step(&self, front: &Front<'_>, step: &Step) {
        let memory = front.memory;
        match step {
            Step::Say {
                message,
                files,
                need_reply,
                flags,
                size,
            } => {
                let (request, payload) = message.encode();
                let files: Vec<RawFd> = files.iter().take(10).map(|f| self.fd(front, *f)).collect();
                let usual = VERSION | if *need_reply { NEED_REPLY } else { 0 };
                let size = size.unwrap_or(payload.len() as u32);
                let header = [request, flags.unwrap_or(usual), size];
                front.send(header, &payload, &files);
            }
            Step::Bytes(bytes) => {
                let _ = (&front.stream).write_all(bytes);
            }
            Step::Request { write, sector } => memory.offer(*write, (*sector).into()),
            Step::Descriptor {
                at,
                address,
                len,
                flags,
                next,
            } => {
                let len = len.of(SECTOR as u64) as u32;
                let at = u16::from(*at) % QUEUE_SIZE;
                memory.describe(at, address.of(DATA), len, *flags, *next);
            }
            Step::Ring { at, value } => {
                let at = u64::from(*at) % (HEADER - AVAIL - 1);
                memory.put(AVAIL + at, &value.to_le_bytes());
            }
            Step::Kick => front.kick.write(1).unwrap(),
            Step::Cut(bytes) => memory.file.set_len(u64::from(*bytes) << 2).unwrap(),
        }
    }

    fn fd(&self, front: &Front<'_>, file: Attached) -> RawFd {
        match file {
            Attached::Ram => front.memory.file.as_raw_fd(),
            Attached::Page => self.page.as_raw_fd(),
            Attached::ReadOnly => self.read_only.as_raw_fd(),
            Attached::Pipe => self.pipe.0.as_raw_fd(),
            Attached::Event => front.kick.as_raw_fd(),
            Attached::BlockingEvent => self.blocking.as_raw_fd(),
            Attached::Image => self.image.as_raw_fd(),
        }
    }

    /// A front end that knows the rules reads the first sector.
    fn serve_a_good_one(&self) {
        assert!(!self.server.is_finished(), "the disk's thread has ended");
        let memory = Memory::new();
        let front = Front::connect(self, &memory);
        front.set_up(Stage::Running, true);
        memory.offer(false, 0);
        front.kick.write(1).unwrap();
        let begun = Instant::now();
        while memory.get::<2>(USED + 2) == [0, 0] {
            assert!(begun.elapsed() < PATIENCE, "no answer to a good front end");
            std::thread::sleep(Duration::from_micros(20));
        }
        assert_eq!(memory.get::<1>(STATUS), [0]);
        let mut sector = [0; SECTOR];
        self.image.as_file().read_exact_at(&mut sector, 0).unwrap();
        assert!(memory.get::<SECTOR>(DATA) == sector, "another sector");
        front.leave();
    }
}

impl Message {
    fn encode(&self) -> (u32, Vec<u8>) {
        // The requests with such a payload, and a few that have another.
        let of = |list: &[u32], choice: u8| list[usize::from(choice) % list.len()];
        match self {
            Self::Plain(choice) => ((*choice % 48).into(), Vec::new()),
            Self::Word(choice, word) => {
                let list = [
                    SET_VRING_KICK,
                    SET_VRING_CALL,
                    SET_VRING_ERR,
                    SET_PROTOCOL_FEATURES,
                ];
                let word = match of(&list, *choice) {
                    SET_PROTOCOL_FEATURES => *word,
                    // A queue in the low byte, "no descriptor" in the bit behind it.
                    _ => word & 0x1ff,
                };
                (of(&list, *choice), words(&[word]))
            }
            Self::State(choice, index, number) => {
                let list = [
                    SET_VRING_NUM,
                    SET_VRING_BASE,
                    GET_VRING_BASE,
                    SET_VRING_ENABLE,
                ];
                (of(&list, *choice), state((*index % 4).into(), *number))
            }
            Self::Features(features) => (SET_FEATURES, words(&[*features])),
            Self::MemTable(regions, count) => {
                let count = count.unwrap_or(regions.len() as u32);
                let mut payload = words(&[count.into()]);
                for region in regions.iter().take(9) {
                    payload.extend(region.encode());
                }
                (SET_MEM_TABLE, payload)
            }
            Self::AddRegion(region) => (ADD_MEM_REG, [words(&[0]), region.encode()].concat()),
            Self::RemoveRegion(region) => (REM_MEM_REG, [words(&[0]), region.encode()].concat()),
            Self::Addresses(index, flags, [descriptors, used, available, log]) => {
                let mut payload = state((*index % 4).into(), *flags);
                payload.extend(words(&[
                    descriptors.of(USER),
                    used.of(USER + USED),
                    available.of(USER + AVAIL),
                    log.of(0),
                ]));
                (SET_VRING_ADDR, payload)
            }
            Self::Config {
                set,
                offset,
                size,
                flags,
                bytes,
            } => {
                let words = [u32::from(*offset), u32::from(*size), u32::from(*flags)];
                let payload = [words.map(u32::to_ne_bytes).concat(), bytes.clone()].concat();
                (if *set { SET_CONFIG } else { GET_CONFIG }, payload)
            }
            Self::Inflight {
                set,
                size,
                offset,
                queues,
                descriptors,
            } => {
                let mut payload = words(&[size.of(RAM_BYTES), offset.of(0)]);
                payload.extend(u16::from(*queues).to_ne_bytes());
                payload.extend(descriptors.to_ne_bytes());
                payload.extend([0; 4]);
                (
                    if *set {
                        SET_INFLIGHT_FD
                    } else {
                        GET_INFLIGHT_FD
                    },
                    payload,
                )
            }
            Self::Any(request, bytes) => (*request, bytes.clone()),
        }
    }
}

impl Region {
    fn encode(&self) -> Vec<u8> {
        let Self {
            guest,
            size,
            user,
            offset,
        } = self;
        words(&[guest.of(0), size.of(RAM_BYTES), user.of(USER), offset.of(0)])
    }
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

fn state(index: u32, number: u32) -> Vec<u8> {
    [index.to_ne_bytes(), number.to_ne_bytes()].concat()
}

/// Memory of a front end, with the rings of one queue. It is read and written as a file: a mapping of
/// it would fault when the file is cut short.
struct Memory {
    file: File,
    available: Cell<u16>,
}

impl Memory {
    fn new() -> Self {
        let file = memfd_create("front end", MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(file);
        file.set_len(RAM_BYTES).unwrap();
        Self {
            file,
            available: Cell::new(0),
        }
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).unwrap();
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    fn describe(&self, at: u16, address: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.put(u64::from(at) * 16, &bytes);
    }

    /// Makes a request for one sector available, in descriptors 0 to 2.
    fn offer(&self, write: bool, sector: u64) {
        let header = [u64::from(write), sector].map(u64::to_le_bytes).concat();
        self.put(HEADER, &header);
        self.put(STATUS, &[0xff]);
        let data_flags = if write { NEXT } else { NEXT | WRITE };
        self.describe(0, HEADER, 16, NEXT, 1);
        self.describe(1, DATA, SECTOR as u32, data_flags, 2);
        self.describe(2, STATUS, 1, WRITE, 0);
        let index = self.available.get();
        let slot = AVAIL + 4 + 2 * u64::from(index % QUEUE_SIZE);
        self.put(slot, &[0, 0]);
        self.available.set(index.wrapping_add(1));
        self.put(AVAIL + 2, &index.wrapping_add(1).to_le_bytes());
    }
}

/// A connection.
struct Front<'a> {
    stream: UnixStream,
    memory: &'a Memory,
    kick: EventFd,
    call: EventFd,
}

impl<'a> Front<'a> {
    fn connect(bed: &Bed, memory: &'a Memory) -> Self {
        let stream = UnixStream::connect(&bed.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        Self {
            stream,
            memory,
            kick: EventFd::new(EFD_NONBLOCK).unwrap(),
            call: EventFd::new(EFD_NONBLOCK).unwrap(),
        }
    }

    /// Sends a message; the other side may have gone.
    fn send(&self, header: [u32; 3], payload: &[u8], files: &[RawFd]) {
        let message = [&header.map(u32::to_ne_bytes).concat()[..], payload].concat();
        let _ = match files.is_empty() {
            true => (&self.stream).write(&message).map_err(drop),
            false => self
                .stream
                .send_with_fds(&[&message[..]], files)
                .map_err(drop),
        };
    }

    fn order(&self, request: u32, payload: &[u8], files: &[RawFd]) {
        self.send([request, VERSION, payload.len() as u32], payload, files);
    }

    /// The way to `stage`, without a fault.
    fn set_up(&self, stage: Stage, event_idx: bool) {
        if stage >= Stage::Negotiated {
            let features = if event_idx {
                FEATURES
            } else {
                FEATURES & !EVENT_IDX
            };
            self.order(SET_OWNER, &[], &[]);
            self.order(GET_FEATURES, &[], &[]);
            self.order(GET_PROTOCOL_FEATURES, &[], &[]);
            self.order(SET_PROTOCOL_FEATURES, &words(&[PROTOCOL_FEATURES]), &[]);
            self.order(SET_FEATURES, &words(&[features]), &[]);
        }
        if stage >= Stage::Shared {
            let table = words(&[1, 0, RAM_BYTES, USER, 0]);
            self.order(SET_MEM_TABLE, &table, &[self.memory.file.as_raw_fd()]);
        }
        if stage >= Stage::Running {
            let mut addresses = state(0, 0);
            addresses.extend(words(&[USER, USER + USED, USER + AVAIL, 0]));
            self.order(SET_VRING_NUM, &state(0, QUEUE_SIZE.into()), &[]);
            self.order(SET_VRING_BASE, &state(0, 0), &[]);
            self.order(SET_VRING_ADDR, &addresses, &[]);
            self.order(SET_VRING_CALL, &words(&[0]), &[self.call.as_raw_fd()]);
            self.order(SET_VRING_KICK, &words(&[0]), &[self.kick.as_raw_fd()]);
            self.order(SET_VRING_ENABLE, &state(0, 1), &[]);
        }
    }

    /// Has said everything, and waits until it is let go.
    fn leave(&self) {
        // The other side may have gone.
        let _ = self.stream.shutdown(Shutdown::Write);
        let mut answers = [0; 4096];
        loop {
            match (&self.stream).read(&mut answers) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return,
                // By the fuzzer's own timer.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => panic!("the front end is not let go: {error}"),
            }
        }
    }
}
