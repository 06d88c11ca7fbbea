//! A split virtqueue (VIRTIO 1.2, section 2.7), from the device's side.
//!
//! The rings are validated once, when the driver sets them up, and reached through host pointers
//! from then on. Used elements are written one by one and published together, so that a batch of
//! completions costs one index update, one fence and one decision about the interrupt.
//!
//! Nothing in guest memory is trusted: the driver may change it at any moment, so every value is
//! read once and checked afterwards. What cannot come from a working driver is an [`Error`], after
//! which the queue stays silent; the owner reports it by DEVICE_NEEDS_RESET.

mod chain;
pub mod inflight;

use std::sync::atomic::{AtomicU16, Ordering, fence};

use crate::GuestMemory;
use crate::virtio::ram::Ram;
pub use chain::{Chain, Descriptor};
use inflight::Inflight;

/// The largest queue. A request then has at most 1022 data segments, which with a header and a
/// status is what one `readv` of the host can take (`UIO_MAXIOV`).
pub const MAX_SIZE: u16 = 1024;

const AVAIL_F_NO_INTERRUPT: u16 = 1;
const USED_F_NO_NOTIFY: u16 = 1;
/// Offset of the ring's entries behind flags and index, in both rings.
const RING: usize = 4;

/// What a driver did that no working driver does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The queue size is 0, not a power of two or above what the device offered.
    #[error("queue size {0} is not a power of two within what the device offers")]
    Size(u16),
    /// A ring is misaligned (section 2.7: 16, 2 and 4 bytes).
    #[error("{ring} at {addr:#x} is misaligned")]
    Alignment {
        /// Which of the three areas.
        ring: &'static str,
        /// Its guest address.
        addr: u64,
    },
    /// A ring is not in guest RAM.
    #[error("{ring} at {addr:#x} is not in guest RAM")]
    Outside {
        /// Which of the three areas.
        ring: &'static str,
        /// Its guest address.
        addr: u64,
    },
    /// The available index moved by more than the queue's size.
    #[error("available index jumps from {from} to {to}")]
    AvailJump {
        /// Where the device had got to.
        from: u16,
        /// What the driver wrote.
        to: u16,
    },
    /// A head or a `next` points past the descriptor table.
    #[error("descriptor index {index} is outside the table of {len}")]
    Index {
        /// The index.
        index: u16,
        /// Entries in the table.
        len: u32,
    },
    /// A chain is longer than its table, so it loops, or longer than [`MAX_SIZE`].
    #[error("descriptor chain loops or is too long")]
    Loop,
    /// An indirect descriptor that was not negotiated, is nested, goes on with `next`, or has a
    /// table of an impossible size or place.
    #[error("indirect descriptor is invalid: {0}")]
    Indirect(&'static str),
    /// A device-readable buffer after a device-writable one.
    #[error("a readable descriptor follows a writable one")]
    Order,
    /// No writable byte for the request's status.
    #[error("no writable byte for the status")]
    NoStatus,
    /// A payload that its request type must have is cut short.
    #[error("request payload is too short")]
    ShortPayload,
    /// The request's header is cut short.
    #[error("request header is too short")]
    ShortHeader,
}

/// Where the driver put a queue: guest addresses as it wrote them, not yet validated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Number of descriptors.
    pub size: u16,
    /// Descriptor area.
    pub desc: u64,
    /// Driver area: the available ring.
    pub avail: u64,
    /// Device area: the used ring.
    pub used: u64,
}

/// A split virtqueue.
pub struct Queue {
    size: u16,
    mask: u16,
    event_idx: bool,
    indirect: bool,
    broken: bool,
    /// Next available entry to take.
    next_avail: u16,
    /// The driver's index as last read: entries up to here are known to be there.
    avail_idx: u16,
    /// Next used entry to write.
    next_used: u16,
    /// The used index that the driver sees.
    published: u16,
    /// The used index at the last decision about an interrupt.
    signalled: u16,
    desc: *const u8,
    avail: *const u8,
    used: *mut u8,
    ram: Ram,
    /// vhost-user alone: the chains under way, for a successor.
    inflight: Option<Box<Inflight>>,
}

// SAFETY: the ring pointers point into the mappings that `ram` keeps alive, and `Queue` is used by
// one thread at a time, as all methods that touch its state need `&mut` or are not `Sync`.
unsafe impl Send for Queue {}

impl Queue {
    /// Validates the rings and takes them over, from index `base` on (0 but for vhost-user).
    /// `features` are those that the driver accepted.
    ///
    /// # Errors
    /// A size above `max_size` or no power of two, or rings that are misaligned or outside RAM.
    pub fn new(
        mem: &GuestMemory,
        layout: Layout,
        max_size: u16,
        features: u64,
        base: u16,
    ) -> Result<Queue, Error> {
        let size = layout.size;
        if !size.is_power_of_two() || size > max_size.min(MAX_SIZE) {
            return Err(Error::Size(size));
        }
        let ram = Ram::new(mem);
        let event_idx = features & super::features::EVENT_IDX != 0;
        let entries = u64::from(size);
        // The trailing event field is there only if negotiated (section 2.7.6, 2.7.8).
        let event_bytes = if event_idx { 2 } else { 0 };
        let area = |ring, addr: u64, align: u64, len: u64| {
            if !addr.is_multiple_of(align) {
                return Err(Error::Alignment { ring, addr });
            }
            let host = ram
                .contiguous(addr, len)
                .ok_or(Error::Outside { ring, addr })?;
            // RAM regions are page-aligned on both sides; a host that maps otherwise is refused,
            // as the index fields are accessed atomically.
            if !(host.addr() as u64).is_multiple_of(align) {
                return Err(Error::Alignment { ring, addr });
            }
            Ok(host)
        };
        let desc = area("descriptor table", layout.desc, 16, 16 * entries)?;
        let avail = area(
            "available ring",
            layout.avail,
            2,
            RING as u64 + 2 * entries + event_bytes,
        )?;
        let used = area(
            "used ring",
            layout.used,
            4,
            RING as u64 + 8 * entries + event_bytes,
        )?;
        Ok(Queue {
            size,
            mask: size - 1,
            event_idx,
            indirect: features & super::features::INDIRECT_DESC != 0,
            broken: false,
            next_avail: base,
            avail_idx: base,
            next_used: base,
            published: base,
            signalled: base,
            desc,
            avail,
            used,
            ram,
            inflight: None,
        })
    }

    /// Goes on in the used ring where its index stands, which is not where the available ring is if
    /// a predecessor left chains unanswered.
    pub fn continue_used(&mut self) {
        let idx = u16::from_le(self.used_u16(2).load(Ordering::Acquire));
        self.next_used = idx;
        self.published = idx;
        self.signalled = idx;
    }

    /// Notes every chain in `inflight` from now on. The chains that a predecessor left there are
    /// taken again first, and the available ring is continued behind them. Before anything was taken.
    ///
    /// # Errors
    /// A record that cannot be this queue's.
    pub fn track(&mut self, mut inflight: Inflight) -> Result<(), inflight::Error> {
        let left = inflight.recover(self.published)?;
        self.next_avail = self.published.wrapping_add(left);
        self.avail_idx = self.next_avail;
        self.inflight = Some(Box::new(inflight));
        Ok(())
    }

    /// Takes the queue out, leaving one that is silent for ever.
    pub fn take(&mut self) -> Queue {
        let silent = Queue {
            size: 1,
            mask: 0,
            event_idx: false,
            indirect: false,
            // Nothing looks at the rings of a broken queue.
            broken: true,
            next_avail: 0,
            avail_idx: 0,
            next_used: 0,
            published: 0,
            signalled: 0,
            desc: std::ptr::null(),
            avail: std::ptr::null(),
            used: std::ptr::null_mut(),
            ram: Ram::new(&GuestMemory::new()),
            inflight: None,
        };
        std::mem::replace(self, silent)
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// The guest RAM that descriptors point into.
    pub fn ram(&self) -> &Ram {
        &self.ram
    }

    /// The next available entry that will be taken: vhost-user's vring base.
    pub fn next_avail(&self) -> u16 {
        self.next_avail
    }

    /// Whether an error has silenced the queue.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Silences the queue: nothing is taken from it or published on it any more.
    pub fn set_broken(&mut self) {
        self.broken = true;
    }

    #[inline]
    fn avail_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: `offset` is even and within the available ring (callers: flags, index, a masked
        // entry, the event field when negotiated), which `new` found aligned and in RAM that
        // `self.ram` keeps mapped. The driver's concurrent accesses are those of another agent.
        unsafe { AtomicU16::from_ptr(self.avail.add(offset).cast_mut().cast()) }
    }

    #[inline]
    fn used_u16(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: as for `avail_u16`, within the used ring.
        unsafe { AtomicU16::from_ptr(self.used.add(offset).cast()) }
    }

    #[inline]
    fn load_avail_idx(&self) -> u16 {
        u16::from_le(self.avail_u16(2).load(Ordering::Acquire))
    }

    /// Whether the driver has made something available that was not taken yet. One load: cheap
    /// enough for a polling loop.
    #[inline]
    pub fn has_avail(&self) -> bool {
        !self.broken && self.load_avail_idx() != self.next_avail
    }

    /// Takes the next chain; its head.
    ///
    /// # Errors
    /// An available index or a head that no driver writes. The queue is broken from then on.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<u16>, Error> {
        if self.broken {
            return Ok(None);
        }
        if let Some(inflight) = &mut self.inflight
            && let Some(head) = inflight.take_again()
        {
            return Ok(Some(head));
        }
        if self.next_avail == self.avail_idx {
            let idx = self.load_avail_idx();
            let count = idx.wrapping_sub(self.next_avail);
            if count == 0 {
                return Ok(None);
            }
            if count > self.size {
                self.broken = true;
                return Err(Error::AvailJump {
                    from: self.next_avail,
                    to: idx,
                });
            }
            self.avail_idx = idx;
        }
        let slot = usize::from(self.next_avail & self.mask);
        let head = u16::from_le(self.avail_u16(RING + 2 * slot).load(Ordering::Relaxed));
        if head >= self.size {
            self.broken = true;
            return Err(Error::Index {
                index: head,
                len: u32::from(self.size),
            });
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.taken(head);
        }
        self.next_avail = self.next_avail.wrapping_add(1);
        Ok(Some(head))
    }

    /// The descriptors of the chain that begins at `head`.
    #[inline]
    pub fn chain(&self, head: u16) -> Chain<'_> {
        Chain::new(&self.ram, self.desc, self.size, self.indirect, head)
    }

    /// Writes the used element of a chain, of whose writable part `len` bytes were written. The
    /// driver sees it after [`Queue::publish`].
    #[inline]
    pub fn push_used(&mut self, head: u16, len: u32) {
        if self.broken {
            return;
        }
        let slot = usize::from(self.next_used & self.mask);
        // SAFETY: a masked entry of the used ring that `new` validated; entries are 8 bytes at a
        // 4-byte alignment, hence two writes. Only the device writes them.
        unsafe {
            let entry = self.used.add(RING + 8 * slot).cast::<u32>();
            entry.write_volatile(u32::from(head).to_le());
            entry.add(1).write_volatile(len.to_le());
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.used(head);
        }
        self.next_used = self.next_used.wrapping_add(1);
    }

    /// Makes the used elements written since the last call visible and decides whether the driver
    /// wants an interrupt for them.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.published == self.next_used || self.broken {
            return false;
        }
        self.used_u16(2)
            .store(self.next_used.to_le(), Ordering::Release);
        self.published = self.next_used;
        if let Some(inflight) = &mut self.inflight {
            inflight.published(self.published);
        }
        self.wants_interrupt()
    }

    /// Section 2.7.7.2. The fence orders the index above before the read of the driver's wish
    /// below; the driver does the same the other way round, so one of the two sees the other.
    #[inline]
    fn wants_interrupt(&mut self) -> bool {
        fence(Ordering::SeqCst);
        let old = self.signalled;
        self.signalled = self.published;
        if self.event_idx {
            let offset = RING + 2 * usize::from(self.size);
            let event = u16::from_le(self.avail_u16(offset).load(Ordering::Relaxed));
            let new = self.published;
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            let flags = u16::from_le(self.avail_u16(0).load(Ordering::Relaxed));
            flags & AVAIL_F_NO_INTERRUPT == 0
        }
    }

    /// Asks the driver not to kick. With EVENT_IDX that is done by leaving `avail_event` behind:
    /// nothing to write.
    #[inline]
    pub fn disable_notifications(&mut self) {
        if !self.event_idx && !self.broken {
            self.used_u16(0)
                .store(USED_F_NO_NOTIFY.to_le(), Ordering::Relaxed);
        }
    }

    /// Asks the driver to kick again. True if something was made available meanwhile, for which no
    /// kick will come: the caller looks once more.
    #[inline]
    pub fn enable_notifications(&mut self) -> bool {
        if self.broken {
            return false;
        }
        if self.event_idx {
            let offset = RING + 8 * usize::from(self.size);
            self.used_u16(offset)
                .store(self.next_avail.to_le(), Ordering::Relaxed);
        } else {
            self.used_u16(0).store(0, Ordering::Relaxed);
        }
        // The wish above before the look below; the driver writes its index, fences, and reads the
        // wish (section 2.7.10).
        fence(Ordering::SeqCst);
        self.has_avail()
    }
}

#[cfg(test)]
mod tests;
