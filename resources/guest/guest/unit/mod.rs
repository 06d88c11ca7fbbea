//! One virtqueue of one disk as a job drives it: rings, request slots, and what is in flight.
//!
//! Everything that can be is prepared at the start: a slot's descriptors, header and buffers stay where
//! they are, and a request that is like the slot's last one needs its sector and its place in the
//! available ring written, no more.

mod layout;
mod verify;

use core::sync::atomic::Ordering;

use crate::cpu;
use crate::histogram::Histogram;
use crate::memory;
use crate::options::{Job, Kind, Verify};
use crate::phys::{self, Addr};
use crate::tracker;
use crate::virtio::{self, Disk, Doorbell, Rings};

use layout::{HEADER_BYTES, ID_BYTES};
pub use layout::{INDIRECT, NEXT, NO_STATUS, WRITE, write_descriptor};

pub const SECTOR_BYTES: u64 = 512;

#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Op {
    Read = virtio::T_IN,
    Write = virtio::T_OUT,
    Flush = virtio::T_FLUSH,
    GetId = virtio::T_GET_ID,
    Discard = virtio::T_DISCARD,
    WriteZeroes = virtio::T_WRITE_ZEROES,
}

impl Op {
    /// Whether it concerns a part of the disk.
    fn has_block(self) -> bool {
        !matches!(self, Op::Flush | Op::GetId)
    }
}

/// A request's place: header at `header`, its status at `status`, data at `data`.
#[derive(Clone, Copy)]
struct Slot {
    submitted: u64,
    block: u64,
    generation: u32,
    op: Op,
    in_flight: bool,
    head: u16,
    header: Addr,
    status: Addr,
    data: Addr,
    /// The slot's descriptors: in the queue's table, or its own indirect table.
    table: Addr,
    /// What the device should say it wrote.
    written: u32,
}

/// The first fault that was found in data or in the device's behaviour.
#[derive(Clone, Copy)]
pub struct Fault {
    pub what: &'static str,
    pub disk: u32,
    pub sector: u64,
    pub expected: u64,
    pub found: u64,
}

#[derive(Clone, Copy, Default)]
pub struct Counters {
    pub reads: u64,
    pub writes: u64,
    pub others: u64,
    pub bytes: u64,
    pub errors: u64,
    pub unsupported: u64,
    pub faults: u64,
    pub verified_sectors: u64,
    pub kicks: u64,
    pub interrupts: u64,
    pub used_batches: u64,
}

impl Counters {
    /// Requests that succeeded.
    pub fn ios(&self) -> u64 {
        self.reads + self.writes + self.others
    }

    pub fn add(&mut self, other: &Counters) {
        self.reads += other.reads;
        self.writes += other.writes;
        self.others += other.others;
        self.bytes += other.bytes;
        self.errors += other.errors;
        self.unsupported += other.unsupported;
        self.faults += other.faults;
        self.verified_sectors += other.verified_sectors;
        self.kicks += other.kicks;
        self.interrupts += other.interrupts;
        self.used_batches += other.used_batches;
    }
}

pub struct Unit {
    // What the fast path touches comes first.
    avail: Addr,
    used: Addr,
    mask: u16,
    avail_idx: u16,
    last_used: u16,
    event_idx: bool,
    poll: bool,
    /// Look at the used ring only after an interrupt; and whether there was one.
    strict: bool,
    interrupted: bool,
    doorbell: Doorbell,
    slots: *mut Slot,
    /// Slot of each head descriptor.
    slot_of: Addr,
    /// Free slots: a stack.
    free: Addr,
    free_count: usize,
    depth: usize,
    random: u64,
    pub submitted: u64,
    /// Submit no more than this many.
    pub target: u64,
    kind: Kind,
    verify: Verify,
    block_bytes: u32,
    block_sectors: u64,
    first_block: u64,
    blocks: u64,
    next_block: u64,
    next_generation: u32,
    pub counters: Counters,
    vector: u8,
    seen_interrupts: u64,
    pub disk: Disk,
    pub disk_index: usize,
    pub queue: u16,
    fsync: u64,
    writes_since_flush: u64,
    flush_wanted: bool,
    /// A completed flush, for the report: how many requests were submitted before it.
    pub flushed: Option<u64>,
    read_percent: u64,
    think_ticks: u64,
    think_ios: u64,
    think_left: u64,
    pub paused_until: u64,
    indirect: bool,
    segments: usize,
    odd: bool,
    unmap: bool,
    desc: Addr,
    pub fault: Option<Fault>,
    /// The device's identifier string, after a `getid`.
    pub id: [u8; ID_BYTES as usize],
}

/// The part of a disk that a unit works on.
#[derive(Clone, Copy)]
pub struct Region {
    pub first_block: u64,
    pub blocks: u64,
}

impl Unit {
    /// A unit with all its memory. Fails when the queue is too small or memory is short.
    pub fn new(
        job: &Job,
        disk: Disk,
        disk_index: usize,
        queue: u16,
        features: u64,
        region: Region,
        vector: u8,
    ) -> Result<(Unit, Rings), &'static str> {
        let size = job.queue_size.min(disk.queue_size);
        let indirect = features & virtio::F_INDIRECT != 0;
        let alloc = |len: u64, align| memory::alloc(len, align, job.high).ok_or("out of memory");
        // Header and status are one descriptor each, or cut in two.
        let chain = job.segments + if job.odd { 4 } else { 2 };
        let descriptors = if indirect {
            job.depth
        } else {
            job.depth * chain
        };
        if descriptors > usize::from(size) {
            return Err("the queue is too small for iodepth and segs");
        }
        let entries = u64::from(size);
        let rings = Rings {
            size,
            desc: alloc(16 * entries, 4096)?,
            avail: alloc(6 + 2 * entries, 4096)?,
            used: alloc(6 + 8 * entries, 4096)?,
        };
        let slots = alloc((size_of::<Slot>() * job.depth) as u64, 64)?;
        let free = alloc(2 * job.depth as u64, 64)?;
        let slot_of = alloc(2 * entries, 64)?;
        phys::fill(slot_of, 0xff, 2 * usize::from(size));
        let data_bytes = u64::from(job.block_bytes.max(64)).next_multiple_of(SECTOR_BYTES);
        for index in 0..job.depth {
            // Room for the status of a merged last descriptor after the data.
            let data = alloc(data_bytes + 64, 4096)?;
            let header = alloc(64, 64)?;
            let head = if indirect { index } else { index * chain } as u16;
            let table = if indirect {
                let table = alloc(16 * chain as u64, 16)?;
                write_descriptor(rings.desc, head, table, 16 * chain as u32, INDIRECT, 0);
                table
            } else {
                rings.desc
            };
            phys::write16(slot_of + 2 * u64::from(head), index as u16);
            phys::write16(free + 2 * index as u64, (job.depth - 1 - index) as u16);
            let slot = Slot {
                submitted: 0,
                block: 0,
                generation: 0,
                op: Op::Flush,
                in_flight: false,
                head,
                header,
                status: header + u64::from(HEADER_BYTES),
                data,
                table,
                written: 0,
            };
            // SAFETY: within the area that was allocated for the slots.
            unsafe { (slots as *mut Slot).add(index).write(slot) };
        }
        let base = match job.verify {
            Verify::Generation(generation) => generation,
            _ => tracker::new_generations(),
        };
        let mut unit = Unit {
            avail: rings.avail,
            used: rings.used,
            mask: size - 1,
            avail_idx: 0,
            last_used: 0,
            event_idx: features & virtio::F_EVENT_IDX != 0,
            poll: job.poll,
            strict: job.strict,
            interrupted: false,
            doorbell: disk.doorbell(queue, job.kick_at_cpl0),
            slots: slots as *mut Slot,
            slot_of,
            free,
            free_count: job.depth,
            depth: job.depth,
            random: (job.seed ^ (disk_index as u64) << 32 ^ u64::from(queue) << 16)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                | 1,
            submitted: 0,
            target: u64::MAX,
            kind: job.kind,
            verify: match job.verify {
                Verify::Off if job.kind == Kind::Verify => Verify::Itself,
                verify => verify,
            },
            block_bytes: job.block_bytes,
            block_sectors: u64::from(job.block_bytes) / SECTOR_BYTES,
            first_block: region.first_block,
            blocks: region.blocks,
            next_block: 0,
            next_generation: base,
            counters: Counters::default(),
            vector,
            seen_interrupts: cpu::INTERRUPTS[usize::from(vector)].load(Ordering::Relaxed),
            disk,
            disk_index,
            queue,
            fsync: job.fsync,
            writes_since_flush: 0,
            flush_wanted: false,
            flushed: None,
            read_percent: job.read_percent,
            think_ticks: cpu::ns_to_ticks(job.think_ns),
            think_ios: job.think_ios,
            think_left: job.think_ios,
            paused_until: 0,
            indirect,
            segments: job.segments,
            odd: job.odd,
            unmap: job.unmap,
            desc: rings.desc,
            fault: None,
            id: [0; ID_BYTES as usize],
        };
        if job.poll && !unit.event_idx {
            // No interrupts, please.
            phys::write16(unit.avail, 1);
        }
        let op = unit.op();
        for index in 0..job.depth {
            unit.build(index, op);
        }
        Ok((unit, rings))
    }

    pub fn region_blocks(&self) -> u64 {
        self.blocks
    }

    pub fn in_flight(&self) -> usize {
        self.depth - self.free_count
    }

    /// All submitted that shall be, and all of it completed.
    pub fn is_done(&self) -> bool {
        self.submitted >= self.target && self.in_flight() == 0 && !self.flush_wanted
    }

    fn slot(&mut self, index: usize) -> &mut Slot {
        debug_assert!(index < self.depth);
        // SAFETY: `index` is below `depth`, as the free list and `slot_of` hold nothing else.
        unsafe { &mut *self.slots.add(index) }
    }

    #[inline(always)]
    fn next_random(&mut self) -> u64 {
        // xorshift64*
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        self.random.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// What the next request is.
    #[inline(always)]
    fn op(&mut self) -> Op {
        match self.kind {
            Kind::Write | Kind::RandWrite => Op::Write,
            Kind::Mixed | Kind::RandMixed => {
                if ((self.next_random() >> 32) * 100) >> 32 < self.read_percent {
                    Op::Read
                } else {
                    Op::Write
                }
            }
            Kind::Flush => Op::Flush,
            Kind::Discard => Op::Discard,
            Kind::WriteZeroes => Op::WriteZeroes,
            Kind::GetId => Op::GetId,
            _ => Op::Read,
        }
    }

    /// Fills free slots and tells the device. `now` is a time-stamp.
    #[inline(always)]
    pub fn submit(&mut self, now: u64) {
        let old = self.avail_idx;
        while self.free_count > 0 {
            if self.flush_wanted {
                // A flush makes durable what completed before it, so it goes alone.
                if self.in_flight() == 0 && self.avail_idx == old {
                    self.flush_wanted = false;
                    self.put(Op::Flush, 0, 0, now);
                }
                break;
            }
            if self.submitted >= self.target || now < self.paused_until {
                break;
            }
            let op = self.op();
            let Some((block, generation)) = self.choose_block(op) else {
                break;
            };
            self.submitted += 1;
            self.put(op, block, generation, now);
            if op == Op::Write && self.fsync > 0 {
                self.writes_since_flush += 1;
                if self.writes_since_flush == self.fsync {
                    self.writes_since_flush = 0;
                    self.flush_wanted = true;
                }
            }
            if self.think_ticks > 0 {
                self.think_left -= 1;
                if self.think_left == 0 {
                    self.think_left = self.think_ios;
                    self.paused_until = now + self.think_ticks;
                }
            }
        }
        if self.avail_idx != old {
            self.publish(old);
        }
    }

    /// The block and the generation of the next request; none when all that are tried are busy.
    #[inline(always)]
    fn choose_block(&mut self, op: Op) -> Option<(u64, u32)> {
        let tracked = self.verify == Verify::Track;
        for _ in 0..16 {
            let block = if self.kind.is_random() {
                let random = self.next_random();
                ((u128::from(random) * u128::from(self.blocks)) >> 64) as u64
            } else {
                let block = self.next_block;
                if tracked && tracker::is_busy(self.disk_index, self.sector_of(block)) {
                    return None;
                }
                self.next_block += 1;
                if self.next_block == self.blocks {
                    self.next_block = 0;
                }
                block
            };
            let sector = self.sector_of(block);
            if tracked {
                if tracker::is_busy(self.disk_index, sector) {
                    continue;
                }
                tracker::set_busy(self.disk_index, sector, self.block_sectors, true);
                if op == Op::Write {
                    self.next_generation += 1;
                }
                return Some((block, self.next_generation));
            }
            let generation = self.next_generation;
            if op == Op::Write && block + 1 == self.blocks && !self.kind.is_random() {
                // Each pass over the region has a generation of its own.
                self.next_generation += 1;
            }
            return Some((block, generation));
        }
        None
    }

    #[inline(always)]
    fn sector_of(&self, block: u64) -> u64 {
        (self.first_block + block) * self.block_sectors
    }

    #[inline(always)]
    fn put(&mut self, op: Op, block: u64, generation: u32, now: u64) {
        self.free_count -= 1;
        let index = usize::from(phys::read16(self.free + 2 * self.free_count as u64));
        if self.slot(index).op != op {
            self.build(index, op);
        }
        let sector = self.sector_of(block);
        let slot = self.slot(index);
        slot.submitted = now;
        slot.block = block;
        slot.generation = generation;
        slot.in_flight = true;
        let (header, head) = (slot.header, slot.head);
        match op {
            Op::Read | Op::Write => phys::write64(header + 8, sector),
            _ => self.fill_other(index, op, sector),
        }
        if op == Op::Write && self.verify != Verify::Off {
            self.fill_data(index, sector, generation);
        }
        let at = self.avail + 4 + 2 * u64::from(self.avail_idx & self.mask);
        phys::write16(at, head);
        self.avail_idx = self.avail_idx.wrapping_add(1);
    }

    #[inline(always)]
    fn publish(&mut self, old: u16) {
        // x86 keeps stores in order.
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::Release);
        phys::write16(self.avail + 2, self.avail_idx);
        phys::fence();
        let size = u64::from(self.mask) + 1;
        let kick = if self.event_idx {
            let event = phys::read16(self.used + 4 + 8 * size);
            self.avail_idx.wrapping_sub(event).wrapping_sub(1) < self.avail_idx.wrapping_sub(old)
        } else {
            phys::read16(self.used) & 1 == 0
        };
        if kick {
            self.counters.kicks += 1;
            self.doorbell.ring();
        }
    }

    /// Notifies the device of nothing, and records what that took.
    pub fn notify(&mut self, latencies: &mut Histogram) {
        let begin = cpu::tsc();
        self.doorbell.ring();
        latencies.record(cpu::tsc() - begin);
        self.counters.kicks += 1;
        self.counters.others += 1;
        self.submitted += 1;
    }

    pub fn is_notifier(&self) -> bool {
        self.kind == Kind::Notify
    }

    /// True if the device has completed something.
    #[inline(always)]
    pub fn has_used(&self) -> bool {
        phys::read16(self.used + 2) != self.last_used
    }

    /// True if the used ring is to be looked at now and has something.
    #[inline(always)]
    pub fn has_work(&self) -> bool {
        (!self.strict || self.interrupted) && self.has_used()
    }

    /// Takes note of the vector's interrupts. True if there was one.
    pub fn count_interrupts(&mut self) -> bool {
        let interrupts = cpu::INTERRUPTS[usize::from(self.vector)].load(Ordering::Relaxed);
        let new = interrupts - self.seen_interrupts;
        self.counters.interrupts += new;
        self.seen_interrupts = interrupts;
        self.interrupted |= new > 0;
        new > 0
    }

    /// Strict only: a completion has been there for long, and no interrupt.
    pub fn miss_interrupt(&mut self) {
        if self.strict && !self.interrupted && self.has_used() {
            self.interrupted = true;
            self.note_fault("completion without an interrupt", 0, 1, 0);
        }
    }

    /// Strict only: takes everything, and leaves the next completion to an interrupt.
    #[cold]
    pub fn rearm(&mut self, latencies: &mut Histogram) {
        while self.arm() {
            self.reap(cpu::tsc(), latencies);
        }
        self.interrupted = false;
    }

    pub fn is_strict(&self) -> bool {
        self.strict
    }

    /// Takes all completions. `now` is a time-stamp.
    #[inline(always)]
    pub fn reap(&mut self, now: u64, latencies: &mut Histogram) {
        let end = phys::read16(self.used + 2);
        core::sync::atomic::compiler_fence(core::sync::atomic::Ordering::Acquire);
        self.counters.used_batches += 1;
        if usize::from(end.wrapping_sub(self.last_used)) > self.in_flight() {
            self.note_fault(
                "more used than available",
                0,
                self.in_flight() as u64,
                u64::from(end),
            );
            self.last_used = end;
            return;
        }
        while self.last_used != end {
            let element = self.used + 4 + 8 * u64::from(self.last_used & self.mask);
            self.last_used = self.last_used.wrapping_add(1);
            self.complete(
                phys::read32(element),
                phys::read32(element + 4),
                now,
                latencies,
            );
        }
        if self.poll && self.event_idx {
            // An index that has passed: no interrupt.
            let size = u64::from(self.mask) + 1;
            phys::write16(self.avail + 4 + 2 * size, self.last_used.wrapping_sub(1));
        }
    }

    #[inline(always)]
    fn complete(&mut self, id: u32, len: u32, now: u64, latencies: &mut Histogram) {
        let index = match id <= u32::from(self.mask) {
            true => usize::from(phys::read16(self.slot_of + 2 * u64::from(id))),
            false => usize::MAX,
        };
        if index >= self.depth || !self.slot(index).in_flight {
            self.note_fault("used element that was not in flight", 0, 0, u64::from(id));
            return;
        }
        let slot = self.slot(index);
        slot.in_flight = false;
        let (status, op, submitted, written) = (
            phys::read8(slot.status),
            slot.op,
            slot.submitted,
            slot.written,
        );
        phys::write8(slot.status, NO_STATUS);
        phys::write16(self.free + 2 * self.free_count as u64, index as u16);
        self.free_count += 1;
        latencies.record(now.saturating_sub(submitted));
        if status != 0 {
            self.failed(index, status);
            return;
        }
        if len != written {
            let sector = self.slot_sector(index);
            self.note_fault("used length", sector, u64::from(written), u64::from(len));
        }
        match op {
            Op::Read => {
                self.counters.reads += 1;
                self.counters.bytes += u64::from(self.block_bytes);
            }
            Op::Write => {
                self.counters.writes += 1;
                self.counters.bytes += u64::from(self.block_bytes);
            }
            _ => self.other_done(index, op),
        }
        if self.verify != Verify::Off {
            self.verify_done(index, op);
        }
    }

    fn slot_sector(&mut self, index: usize) -> u64 {
        let block = self.slot(index).block;
        self.sector_of(block)
    }

    #[cold]
    fn failed(&mut self, index: usize, status: u8) {
        const UNSUPPORTED: u8 = 2;
        let sector = self.slot_sector(index);
        match status {
            UNSUPPORTED => self.counters.unsupported += 1,
            NO_STATUS => self.note_fault("no status written", sector, 0, u64::from(status)),
            _ => self.counters.errors += 1,
        }
        let op = self.slot(index).op;
        if self.verify == Verify::Track && op.has_block() {
            if op != Op::Read {
                // It may have been done or not.
                tracker::forget(self.disk_index, sector, self.block_sectors);
            }
            tracker::set_busy(self.disk_index, sector, self.block_sectors, false);
        }
    }

    #[cold]
    fn note_fault(&mut self, what: &'static str, sector: u64, expected: u64, found: u64) {
        self.counters.faults += 1;
        self.fault.get_or_insert(Fault {
            what,
            disk: self.disk_index as u32,
            sector,
            expected,
            found,
        });
    }

    fn other_done(&mut self, index: usize, op: Op) {
        self.counters.others += 1;
        match op {
            Op::Flush => self.flushed = Some(self.submitted),
            Op::GetId => {
                let data = self.slot(index).data;
                self.id
                    .copy_from_slice(phys::bytes(data, ID_BYTES as usize));
            }
            _ => self.counters.bytes += u64::from(self.block_bytes),
        }
    }

    /// Asks for an interrupt at the next completion. True if there is one already.
    #[inline(always)]
    pub fn arm(&mut self) -> bool {
        if self.event_idx {
            let size = u64::from(self.mask) + 1;
            phys::write16(self.avail + 4 + 2 * size, self.last_used);
            phys::fence();
        }
        self.has_used()
    }
}
