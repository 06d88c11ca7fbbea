//! Reading a chain into a slot: header, data segments, status byte, wherever the driver has cut them.

use libc::iovec;

use super::{Free, Parsed, Place, Rejected, Requests, Status};
use crate::virtio::queue::{self, Queue};

/// Bytes of the header that every request begins with (VIRTIO 1.2, section 5.2.6): type, reserved,
/// sector.
const HEADER_BYTES: usize = 16;

/// The header and the data segments of a chain while it is walked.
struct Walk {
    header: [u8; HEADER_BYTES],
    header_len: usize,
    readable: u64,
    writable: u64,
    split: usize,
    segments: usize,
    // The last writable segment is where the status goes, if it could be translated.
    status_reachable: bool,
    any_writable: bool,
    bad: Option<queue::Error>,
}

impl Requests {
    /// Reads the chain at `head` into the slot.
    ///
    /// # Errors
    /// Malformed chains, answered with IOERR if they have a byte for it.
    #[inline]
    pub(in super::super) fn parse(
        &mut self,
        free: Free,
        queue: &Queue,
        head: u16,
    ) -> Result<Parsed, Rejected> {
        let token = free.0;
        {
            let slot = &mut self.slots[usize::from(token)];
            slot.place = Place::Inline;
            slot.head = head;
        }
        let mut walk = Walk {
            header: [0; HEADER_BYTES],
            header_len: 0,
            readable: 0,
            writable: 0,
            split: 0,
            segments: 0,
            status_reachable: false,
            any_writable: false,
            bad: None,
        };
        for descriptor in queue.chain(head) {
            match descriptor {
                Ok(descriptor) => self.collect(token, queue, descriptor, &mut walk),
                // Where the chain goes on is unknown, and so is its status byte.
                Err(error) => return Err(Rejected::Broken(error, free)),
            }
        }
        if !walk.status_reachable || walk.writable == 0 {
            return Err(Rejected::Broken(queue::Error::NoStatus, free));
        }
        self.split_off_status(token, &mut walk);
        if walk.header_len < HEADER_BYTES {
            walk.bad.get_or_insert(queue::Error::ShortHeader);
        }
        if let Some(error) = walk.bad {
            tracing::debug!(%error, "virtio-blk request refused");
            return Err(Rejected::Answer(self.finish_token(token, Status::IoErr, 1)));
        }
        let word = |at: usize| -> [u8; 4] { std::array::from_fn(|i| walk.header[at + i]) };
        let sector: [u8; 8] = std::array::from_fn(|i| walk.header[8 + i]);
        Ok(Parsed {
            token,
            request_type: u32::from_le_bytes(word(0)),
            sector: u64::from_le_bytes(sector),
            readable: walk.readable,
            writable: walk.writable,
            split: walk.split as u16,
            segments: walk.segments as u16,
        })
    }

    #[inline]
    fn collect(
        &mut self,
        token: u16,
        queue: &Queue,
        descriptor: queue::Descriptor,
        walk: &mut Walk,
    ) {
        let mut addr = descriptor.addr;
        let mut left = u64::from(descriptor.len);
        if descriptor.writable {
            if !walk.any_writable {
                walk.any_writable = true;
                walk.split = walk.segments;
            }
        } else if walk.any_writable {
            walk.bad.get_or_insert(queue::Error::Order);
            return;
        }
        while left > 0 {
            let Some((host, count)) = queue.ram().part(addr, left) else {
                walk.bad.get_or_insert(queue::Error::Outside {
                    ring: "buffer",
                    addr,
                });
                // The status is the last byte of the last writable buffer: not this one now.
                walk.status_reachable &= !descriptor.writable;
                walk.writable += if descriptor.writable { left } else { 0 };
                return;
            };
            let mut segment = iovec {
                iov_base: host.cast(),
                iov_len: count as usize,
            };
            if !descriptor.writable && walk.header_len < HEADER_BYTES {
                take_header(&mut segment, walk);
            }
            if segment.iov_len > 0 {
                if self.push(token, walk.segments, segment) {
                    walk.segments += 1;
                    if descriptor.writable {
                        walk.status_reachable = true;
                    }
                } else {
                    walk.bad.get_or_insert(queue::Error::Loop);
                    walk.status_reachable &= !descriptor.writable;
                }
            }
            if descriptor.writable {
                walk.writable += count;
            } else {
                walk.readable += segment.iov_len as u64;
            }
            left -= count;
            // No overflow: `part` found all of `count` bytes; past the end of the address space
            // nothing is left.
            addr = addr.wrapping_add(count);
        }
    }

    #[inline]
    fn split_off_status(&mut self, token: u16, walk: &mut Walk) {
        let base = self.segments_base(token);
        // SAFETY: a reachable status means that at least one segment was pushed at `base`.
        let last = unsafe { &mut *base.add(walk.segments - 1) };
        last.iov_len -= 1;
        let status = last.iov_base.cast::<u8>().wrapping_add(last.iov_len);
        walk.segments -= usize::from(last.iov_len == 0);
        walk.writable -= 1;
        self.slots[usize::from(token)].status = status;
    }
}

/// Copies header bytes from the front of a readable segment, which it shortens.
#[inline]
fn take_header(segment: &mut iovec, walk: &mut Walk) {
    let count = segment.iov_len.min(HEADER_BYTES - walk.header_len);
    let from = segment.iov_base.cast::<u8>();
    // SAFETY: the segment is guest RAM of at least `count` bytes; the header has room for them.
    unsafe {
        let to = walk.header.as_mut_ptr().add(walk.header_len);
        std::ptr::copy_nonoverlapping(from, to, count);
    }
    walk.header_len += count;
    segment.iov_base = from.wrapping_add(count).cast();
    segment.iov_len -= count;
}
