//! A queue in the raw: every field can be written with anything.

use crate::cpu;
use crate::memory;
use crate::phys::{self, Addr};
use crate::unit::{NEXT, NO_STATUS, WRITE, write_descriptor};
use crate::virtio::{
    self, Disk, Doorbell, F_RO, KNOWN_FEATURES, NEEDS_RESET, Rings, T_GET_ID, T_IN, T_OUT,
};

use super::interrupts;

pub const SECTOR: u32 = 512;
pub const QUEUE_SIZE: u16 = 64;
/// Room for headers and status bytes: one of each for 64 requests.
const SMALL_BYTES: u64 = 32;
/// Data of all requests together, and the canaries before and after it.
pub const DATA_BYTES: u64 = 64 << 10;
const CANARY_BYTES: u64 = 4096;
const CANARY: u8 = 0xa5;
/// What a buffer is filled with that must not change.
const GUARD: u8 = 0x5c;

/// Where a case's vectors are: no job's unit uses them at the same time on this CPU.
const CONFIG_VECTOR: u8 = 0xf0;
const QUEUE_VECTOR: u8 = 0xf1;

#[derive(Clone, Copy, Default)]
pub struct Answer {
    pub status: u8,
    pub len: u32,
}

/// Used elements as they came.
#[derive(Clone, Default)]
pub struct Answers {
    first: [Answer; 4],
    count: usize,
}

impl Answers {
    pub fn count(&self) -> usize {
        self.count
    }

    pub fn first(&self) -> &[Answer] {
        &self.first[..self.count.min(self.first.len())]
    }

    pub fn clear(&mut self) {
        *self = Answers::default();
    }
}

pub struct Raw {
    pub disk: Disk,
    pub features: u64,
    pub rings: Rings,
    pub doorbell: Doorbell,
    /// What the device sees as the available index.
    pub avail_idx: u16,
    used_idx: u16,
    small: Addr,
    pub data: Addr,
    /// An indirect table of 1024 descriptors.
    pub table: Addr,
    pub answers: Answers,
    /// How many answers the case waits for.
    pub wanted_answers: usize,
    pub config_interrupts: u64,
    pub queue_interrupts: u64,
    seen: [u64; 2],
}

impl Raw {
    pub fn new(disk: Disk) -> Result<Raw, &'static str> {
        let alloc = |len, align| memory::alloc(len, align, false).ok_or("out of memory");
        let entries = u64::from(QUEUE_SIZE);
        let rings = Rings {
            size: QUEUE_SIZE,
            desc: alloc(16 * entries, 4096)?,
            avail: alloc(6 + 2 * entries, 4096)?,
            used: alloc(6 + 8 * entries, 4096)?,
        };
        if disk.queue_size < QUEUE_SIZE {
            return Err("the queue has less than 64 entries");
        }
        let small = alloc(SMALL_BYTES * entries, 4096)?;
        let data = alloc(DATA_BYTES + 2 * CANARY_BYTES, 4096)? + CANARY_BYTES;
        Ok(Raw {
            disk,
            features: disk.features & KNOWN_FEATURES,
            rings,
            doorbell: disk.doorbell(0, false),
            avail_idx: 0,
            used_idx: 0,
            small,
            data,
            table: alloc(16 * 1024, 4096)?,
            answers: Answers::default(),
            wanted_answers: 1,
            config_interrupts: 0,
            queue_interrupts: 0,
            seen: [interrupts(CONFIG_VECTOR), interrupts(QUEUE_VECTOR)],
        })
    }

    /// Resets the device and sets it up as a good driver does, with empty rings.
    pub fn start(&mut self) -> bool {
        let rings = self.rings;
        self.start_with(&rings)
    }

    /// As [`Raw::start`], with rings of the caller's.
    pub fn start_with(&mut self, rings: &Rings) -> bool {
        if !self.disk.negotiate(self.features) {
            return false;
        }
        self.clear_rings();
        self.disk.route_config(CONFIG_VECTOR, 0);
        self.disk.route_queue(0, QUEUE_VECTOR, 0);
        self.disk.set_up_queue(0, rings);
        self.disk.driver_ok();
        true
    }

    /// Zeroes the rings and what is counted of them, and draws the canaries.
    pub fn clear_rings(&mut self) {
        let entries = usize::from(QUEUE_SIZE);
        phys::fill(self.rings.desc, 0, 16 * entries);
        phys::fill(self.rings.avail, 0, 6 + 2 * entries);
        phys::fill(self.rings.used, 0, 6 + 8 * entries);
        phys::fill(self.data - CANARY_BYTES, CANARY, CANARY_BYTES as usize);
        phys::fill(self.data + DATA_BYTES, CANARY, CANARY_BYTES as usize);
        self.avail_idx = 0;
        self.used_idx = 0;
    }

    pub fn canary_is_whole(&self) -> bool {
        let is_canary = |addr| {
            phys::bytes(addr, CANARY_BYTES as usize)
                .iter()
                .all(|&b| b == CANARY)
        };
        is_canary(self.data - CANARY_BYTES) && is_canary(self.data + DATA_BYTES)
    }

    /// Fills the data and the rings that the device writes with what must not change.
    pub fn guard(&self) {
        phys::fill(self.data, GUARD, DATA_BYTES as usize);
        phys::fill(self.rings.used, GUARD, 6 + 8 * usize::from(QUEUE_SIZE));
    }

    pub fn is_guarded(&self) -> bool {
        let is_guard = |addr, len| phys::bytes(addr, len).iter().all(|&b| b == GUARD);
        is_guard(self.data, DATA_BYTES as usize)
            && is_guard(self.rings.used, 6 + 8 * usize::from(QUEUE_SIZE))
    }

    /// Whether a read, and a write where allowed, succeed.
    pub fn works(&mut self) -> bool {
        let last = self.disk.capacity_sectors - 1;
        let mut requests = [(T_IN, 0), (T_IN, last), (T_OUT, last), (T_GET_ID, 0)].into_iter();
        requests.all(|(kind, sector)| {
            if kind == T_OUT && self.disk.features & F_RO != 0 {
                return true;
            }
            // The write puts back what the read before it has fetched.
            let len = if kind == T_GET_ID { 20 } else { SECTOR };
            self.answers.clear();
            self.put(0, kind, sector, len);
            self.kick();
            self.wait(5_000_000_000, |raw| raw.answers.count() == 1);
            self.answers
                .first()
                .first()
                .is_some_and(|answer| answer.status == 0)
        })
    }

    pub fn header(&self, request: u16) -> Addr {
        self.small + SMALL_BYTES * u64::from(request)
    }

    pub fn status(&self, request: u16) -> Addr {
        self.header(request) + 16
    }

    pub fn set_header(&self, request: u16, kind: u32, sector: u64) {
        let header = self.header(request);
        phys::write32(header, kind);
        phys::write32(header + 4, 0);
        phys::write64(header + 8, sector);
        phys::write8(self.status(request), NO_STATUS);
    }

    pub fn desc(&self, number: u16, addr: Addr, len: u32, flags: u16, next: u16) {
        write_descriptor(self.rings.desc, number, addr, len, flags, next);
    }

    /// A request like a good driver's in descriptors `head`, +1 and +2, and makes it available.
    pub fn put(&mut self, head: u16, kind: u32, sector: u64, len: u32) {
        self.build(head, kind, sector, len);
        self.offer(head);
    }

    /// As [`Raw::put`], not yet available.
    pub fn build(&self, head: u16, kind: u32, sector: u64, len: u32) {
        let data_flags = match kind {
            T_IN | T_GET_ID => NEXT | WRITE,
            _ => NEXT,
        };
        self.set_header(head, kind, sector);
        self.desc(head, self.header(head), 16, NEXT, head + 1);
        self.desc(head + 1, self.data, len, data_flags, head + 2);
        self.desc(head + 2, self.status(head), 1, WRITE, 0);
    }

    /// A read of `len` bytes from `sector`.
    pub fn put_read(&mut self, sector: u64, len: u32) {
        self.put(0, T_IN, sector, len);
    }

    /// Makes a chain available.
    pub fn offer(&mut self, head: u16) {
        let at = self.rings.avail + 4 + 2 * u64::from(self.avail_idx % QUEUE_SIZE);
        phys::write16(at, head);
        self.set_avail(self.avail_idx.wrapping_add(1));
    }

    /// Sets the available index to anything.
    pub fn set_avail(&mut self, index: u16) {
        self.avail_idx = index;
        phys::fence();
        phys::write16(self.rings.avail + 2, index);
        phys::fence();
    }

    pub fn kick(&self) {
        self.doorbell.ring();
    }

    pub fn needs_reset(&self) -> bool {
        self.disk.status() & NEEDS_RESET != 0
    }

    /// Notes interrupts and what they were for.
    pub fn acknowledge(&mut self) {
        let now = [interrupts(CONFIG_VECTOR), interrupts(QUEUE_VECTOR)];
        if self.disk.has_shared_interrupt() {
            let status = self.disk.acknowledge();
            self.queue_interrupts += u64::from(status & 1);
            self.config_interrupts += u64::from(status >> 1 & 1);
        } else {
            self.config_interrupts += now[0] - self.seen[0];
            self.queue_interrupts += now[1] - self.seen[1];
        }
        self.seen = now;
    }

    fn collect(&mut self) {
        let end = phys::read16(self.rings.used + 2);
        while self.used_idx != end {
            let at = self.rings.used + 4 + 8 * u64::from(self.used_idx % QUEUE_SIZE);
            let (id, len) = (phys::read32(at), phys::read32(at + 4));
            self.used_idx = self.used_idx.wrapping_add(1);
            let status = match u16::try_from(id) {
                Ok(id) if id < QUEUE_SIZE => phys::read8(self.status(id)),
                _ => NO_STATUS,
            };
            if let Some(answer) = self.answers.first.get_mut(self.answers.count) {
                *answer = Answer { status, len };
            }
            self.answers.count += 1;
        }
        // The next answer shall interrupt.
        if self.features & virtio::F_EVENT_IDX != 0 {
            phys::write16(
                self.rings.avail + 4 + 2 * u64::from(QUEUE_SIZE),
                self.used_idx,
            );
        }
    }

    /// Takes answers and interrupts until `done` or until the time is over.
    pub fn wait(&mut self, ns: u64, done: impl Fn(&Raw) -> bool) {
        let end = cpu::tsc() + cpu::ns_to_ticks(ns);
        loop {
            self.collect();
            self.acknowledge();
            if done(self) || cpu::tsc() > end {
                return;
            }
            cpu::wait();
        }
    }
}
