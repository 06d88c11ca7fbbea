//! A front end written by hand: messages as they are, and a driver of split rings in its own memory.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering, fence};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use vm_memory::MmapRegion;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::common::PATIENCE;
use crate::driver::shared_memory;

// Requests of the protocol.
pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const SET_VRING_ERR: u32 = 14;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const SET_VRING_ENABLE: u32 = 18;
pub const GET_CONFIG: u32 = 24;
pub const SET_CONFIG: u32 = 25;
pub const GET_INFLIGHT_FD: u32 = 31;
pub const SET_INFLIGHT_FD: u32 = 32;
pub const RESET_DEVICE: u32 = 34;
pub const ADD_MEM_REG: u32 = 37;
pub const REM_MEM_REG: u32 = 38;

const VERSION: u32 = 1;
pub const REPLY: u32 = 4;
pub const NEED_REPLY: u32 = 8;

/// VERSION_1, EVENT_IDX, indirect descriptors, the protocol's features, WCE, flush, queues.
pub const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28 | 1 << 12 | 1 << 11 | 1 << 9;

/// Guest address and size of the one region, and where it is in the front end's own address space.
pub const RAM_BYTES: u64 = 4 << 20;
pub const USER: u64 = 0x5000_0000_0000;

pub const QUEUE_SIZE: u16 = 128;
/// Requests at once: three descriptors each.
pub const REQUESTS: u16 = 42;
const AVAIL: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADERS: u64 = 0x4000;
const DATA: u64 = 0x10_0000;
pub const BLOCK: usize = 4096;

/// Words as a message's payload.
pub fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Index and number, as the messages about a ring have them.
pub fn state(index: u32, num: u32) -> Vec<u8> {
    [index.to_ne_bytes(), num.to_ne_bytes()].concat()
}

/// A table of regions: guest address, size, user address, offset.
pub fn table(regions: &[[u64; 4]]) -> Vec<u8> {
    let mut payload = words(&[regions.len() as u64]);
    for region in regions {
        payload.extend(words(region));
    }
    payload
}

/// An eventfd that does not block.
pub fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap()
}

/// A front end.
pub struct Front {
    pub stream: UnixStream,
    pub ram: Arc<MmapRegion>,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    pub error: OwnedFd,
    pub avail_idx: u16,
    pub used_idx: u16,
}

impl Front {
    /// Connects and does nothing else.
    pub fn connect(socket: &Path) -> Front {
        Front::with_ram(socket, shared_memory(RAM_BYTES as usize), 0, 0)
    }

    /// Connects with memory and rings that a predecessor has used.
    pub fn with_ram(socket: &Path, ram: Arc<MmapRegion>, avail_idx: u16, used_idx: u16) -> Front {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Front {
            stream,
            ram,
            kick: eventfd(),
            call: eventfd(),
            error: eventfd(),
            avail_idx,
            used_idx,
        }
    }

    /// Sends a message and does not wait. False if nobody takes it.
    pub fn send(&self, request: u32, flags: u32, payload: &[u8], fds: &[RawFd]) -> bool {
        let size = payload.len() as u32;
        let header = [request, VERSION | flags, size]
            .map(u32::to_ne_bytes)
            .concat();
        let message = [header, payload.to_vec()].concat();
        let sent = match fds.is_empty() {
            true => (&self.stream).write(&message).unwrap_or(0),
            false => self.stream.send_with_fds(&[&message[..]], fds).unwrap_or(0),
        };
        sent == message.len()
    }

    /// The payload of the next message; none if the other side is gone.
    pub fn receive(&self) -> Option<(Vec<u8>, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let (count, fd) = self.stream.recv_with_fd(&mut header).ok()?;
        (count == 12).then_some(())?;
        let size = u32::from_ne_bytes(header[8..].try_into().unwrap());
        let mut payload = vec![0; size as usize];
        (&self.stream).read_exact(&mut payload).ok()?;
        Some((payload, fd.map(OwnedFd::from)))
    }

    /// Asks for a word.
    pub fn ask(&self, request: u32) -> u64 {
        assert!(self.send(request, 0, &[], &[]));
        let (payload, _) = self.receive().unwrap();
        u64::from_ne_bytes(payload.try_into().unwrap())
    }

    /// Sends a message, and whether it was accepted: refused, the connection ends.
    pub fn order(&self, request: u32, payload: &[u8], fds: &[RawFd]) -> bool {
        self.send(request, NEED_REPLY, payload, fds)
            && self
                .receive()
                .is_some_and(|(reply, _)| reply == words(&[0]))
    }

    /// Whether the other side has ended the connection.
    pub fn is_let_go(&self) -> bool {
        // What it still answers is of no interest.
        loop {
            match (&self.stream).read(&mut [0; 4096]) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }

    /// Agrees on features.
    pub fn negotiate(&self) {
        assert!(self.send(SET_OWNER, 0, &[], &[]));
        let offered = self.ask(GET_FEATURES);
        assert_eq!(offered & FEATURES, FEATURES);
        let protocol = self.ask(GET_PROTOCOL_FEATURES);
        assert!(self.send(SET_PROTOCOL_FEATURES, 0, &words(&[protocol]), &[]));
        assert!(self.order(SET_FEATURES, &words(&[FEATURES]), &[]));
    }

    /// The memory's descriptor.
    pub fn ram_fd(&self) -> RawFd {
        self.ram.file_offset().unwrap().file().as_raw_fd()
    }

    pub fn share_memory(&self) {
        let payload = table(&[[0, RAM_BYTES, USER, 0]]);
        assert!(self.order(SET_MEM_TABLE, &payload, &[self.ram_fd()]));
    }

    /// The payload of SET_VRING_ADDR.
    pub fn addresses(index: u32) -> Vec<u8> {
        let mut payload = state(index, 0);
        payload.extend(words(&[USER, USER + USED, USER + AVAIL, 0]));
        payload
    }

    /// Sets queue 0 up from index `base` on and starts it.
    pub fn start_queue(&self, base: u16) {
        assert!(self.order(SET_VRING_NUM, &state(0, QUEUE_SIZE.into()), &[]));
        assert!(self.order(SET_VRING_BASE, &state(0, base.into()), &[]));
        assert!(self.order(SET_VRING_ADDR, &Front::addresses(0), &[]));
        assert!(self.order(SET_VRING_CALL, &words(&[0]), &[self.call.as_raw_fd()]));
        assert!(self.order(SET_VRING_ERR, &words(&[0]), &[self.error.as_raw_fd()]));
        assert!(self.order(SET_VRING_KICK, &words(&[0]), &[self.kick.as_raw_fd()]));
        assert!(self.order(SET_VRING_ENABLE, &state(0, 1), &[]));
    }

    /// All of it.
    pub fn ready(socket: &Path) -> Front {
        let front = Front::connect(socket);
        front.negotiate();
        front.share_memory();
        front.start_queue(0);
        front
    }

    pub fn host(&self, guest: u64, len: usize) -> *mut u8 {
        assert!(guest + len as u64 <= RAM_BYTES);
        self.ram.as_ptr().wrapping_add(guest as usize)
    }

    pub fn put(&self, guest: u64, bytes: &[u8]) {
        let to = self.host(guest, bytes.len());
        // SAFETY: `host` checked that it is within the mapping.
        unsafe { to.copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub fn get<const N: usize>(&self, guest: u64) -> [u8; N] {
        // SAFETY: `host` checked that it is within the mapping; any bytes are an array of bytes.
        unsafe { self.host(guest, N).cast::<[u8; N]>().read_unaligned() }
    }

    fn index(&self, guest: u64) -> &AtomicU16 {
        // SAFETY: within the mapping and even; the other side accesses it atomically too.
        unsafe { AtomicU16::from_ptr(self.host(guest, 2).cast()) }
    }

    pub fn descriptor(&self, at: u16, addr: u64, len: u32, flags: u16, next: u16) {
        let mut bytes = addr.to_le_bytes().to_vec();
        bytes.extend(len.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.put(u64::from(at) * 16, &bytes);
    }

    /// Guest address of a request's data.
    pub fn data(slot: u16) -> u64 {
        DATA + u64::from(slot) * BLOCK as u64
    }

    fn header(slot: u16) -> u64 {
        HEADERS + u64::from(slot) * 32
    }

    /// The status that a request got.
    pub fn status(&self, slot: u16) -> u8 {
        self.get::<1>(Front::header(slot) + 16)[0]
    }

    /// Makes a request of one block available: 0 reads, 1 writes.
    pub fn offer(&mut self, slot: u16, request_type: u32, block: u64) {
        let header = Front::header(slot);
        let sector = block * (BLOCK / 512) as u64;
        self.put(header, &request_type.to_le_bytes());
        self.put(header + 4, &[0; 4]);
        self.put(header + 8, &sector.to_le_bytes());
        self.put(header + 16, &[0xff]);
        let head = slot * 3;
        let write = if request_type == 0 { 2 } else { 0 };
        self.descriptor(head, header, 16, 1, head + 1);
        self.descriptor(
            head + 1,
            Front::data(slot),
            BLOCK as u32,
            1 | write,
            head + 2,
        );
        self.descriptor(head + 2, header + 16, 1, 2, 0);
        self.offer_head(head);
    }

    pub fn offer_head(&mut self, head: u16) {
        let at = AVAIL + 4 + 2 * u64::from(self.avail_idx % QUEUE_SIZE);
        self.index(at).store(head.to_le(), Ordering::Relaxed);
        self.set_avail_idx(self.avail_idx.wrapping_add(1));
    }

    pub fn set_avail_idx(&mut self, idx: u16) {
        self.avail_idx = idx;
        self.index(AVAIL + 2).store(idx.to_le(), Ordering::Release);
    }

    pub fn kick(&self) {
        rustix::io::write(&self.kick, &1u64.to_ne_bytes()).unwrap();
    }

    /// The used index as the other side has it.
    pub fn device_used_idx(&self) -> u16 {
        u16::from_le(self.index(USED + 2).load(Ordering::Acquire))
    }

    /// Waits for `count` requests; their slots in the order of answers.
    pub fn answered(&mut self, count: usize) -> Vec<u16> {
        let begun = Instant::now();
        let mut slots = Vec::new();
        while slots.len() < count {
            // Always ask for an interrupt, so that the other side writes the eventfd too.
            let event = AVAIL + 4 + 2 * u64::from(QUEUE_SIZE);
            self.index(event)
                .store(self.used_idx.to_le(), Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if self.device_used_idx() == self.used_idx {
                assert!(begun.elapsed() < PATIENCE, "{} of {count}", slots.len());
                std::thread::sleep(Duration::from_micros(50));
                continue;
            }
            let at = USED + 4 + 8 * u64::from(self.used_idx % QUEUE_SIZE);
            let head = u32::from_le_bytes(self.get(at));
            slots.push(head as u16 / 3);
            self.used_idx = self.used_idx.wrapping_add(1);
        }
        slots
    }

    /// Reads block 0 and expects success.
    pub fn works(&mut self) {
        self.offer(0, 0, 0);
        self.kick();
        assert_eq!(self.answered(1), [0]);
        assert_eq!(self.status(0), 0);
    }

    /// The configuration space's byte at `offset`.
    pub fn config_byte(&self, offset: u32) -> u8 {
        let mut payload = [offset, 1, 0].map(u32::to_ne_bytes).concat();
        payload.push(0);
        assert!(self.send(GET_CONFIG, 0, &payload, &[]));
        self.receive().unwrap().0[12]
    }
}
