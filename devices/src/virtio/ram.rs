//! Guest addresses to host addresses, for the data path.
//!
//! `vm-memory` answers this question for one access at a time. A request asks it for every
//! descriptor and hands the result to the kernel, so the regions are looked up here from a copy of
//! their bounds, starting with the region that matched last.

use std::cell::Cell;

use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};

use crate::GuestMemory;

struct Region {
    start: u64,
    // Inclusive, so that a region may end with the address space.
    last: u64,
    host: *mut u8,
}

/// The guest's RAM as this process sees it.
pub struct Ram {
    regions: Vec<Region>,
    recent: Cell<usize>,
    // Keeps the mappings alive that `regions` points into.
    mem: GuestMemory,
}

// SAFETY: the pointers are addresses of mappings that `mem` keeps alive and that any thread may
// access; nothing in them belongs to the thread that made them.
unsafe impl Send for Ram {}

impl Ram {
    /// The bounds of `mem`'s regions.
    pub fn new(mem: &GuestMemory) -> Ram {
        let regions = mem
            .iter()
            .filter(|region| region.len() != 0)
            .map(|region| Region {
                start: region.start_addr().raw_value(),
                last: region.last_addr().raw_value(),
                host: region.as_ptr(),
            })
            .collect();
        Ram {
            regions,
            recent: Cell::new(0),
            mem: mem.clone(),
        }
    }

    /// The memory that this looks into.
    pub fn memory(&self) -> &GuestMemory {
        &self.mem
    }

    /// The host address of guest address `addr`, and how many bytes from there on, `len` at most,
    /// are contiguous in one mapping. None outside RAM.
    #[inline]
    pub fn part(&self, addr: u64, len: u64) -> Option<(*mut u8, u64)> {
        let recent = self.recent.get();
        let region = match self.regions.get(recent) {
            Some(region) if region.start <= addr && addr <= region.last => region,
            _ => {
                let index = self
                    .regions
                    .iter()
                    .position(|r| r.start <= addr && addr <= r.last)?;
                self.recent.set(index);
                &self.regions[index]
            }
        };
        let offset = addr - region.start;
        let left = region.last - addr;
        // `left` is one less than what is there, so that a whole address space does not overflow.
        let count = if len == 0 { 0 } else { (len - 1).min(left) + 1 };
        // SAFETY: `offset` is within the region's mapping, as `addr` is within its bounds.
        Some((unsafe { region.host.add(offset as usize) }, count))
    }

    /// The host address of `len` bytes at `addr` if all of them are RAM in one mapping.
    #[inline]
    pub fn contiguous(&self, addr: u64, len: u64) -> Option<*mut u8> {
        let (host, count) = self.part(addr, len)?;
        (count == len).then_some(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::{Bytes, GuestAddress};

    #[test]
    fn parts_end_with_their_mapping_and_nothing_is_found_outside() {
        let mem = GuestMemory::from_ranges(&[
            (GuestAddress(0x1000), 0x1000),
            (GuestAddress(0x2000), 0x1000),
            (GuestAddress(0x8000), 0x1000),
        ])
        .unwrap();
        mem.write_obj(0x5au8, GuestAddress(0x8fff)).unwrap();
        let ram = Ram::new(&mem);
        for addr in [0, 0xfff, 0x3000, 0x7fff, 0x9000, u64::MAX] {
            assert!(ram.part(addr, 1).is_none(), "{addr:#x}");
        }
        assert_eq!(ram.part(0x1ff0, 0x20).unwrap().1, 0x10);
        assert_eq!(ram.part(0x1000, u64::MAX).unwrap().1, 0x1000);
        assert_eq!(ram.part(0x2000, 0).unwrap().1, 0);
        assert!(ram.contiguous(0x1ff0, 0x11).is_none());
        assert!(ram.contiguous(0x8000, 0x1001).is_none());
        let (host, count) = ram.part(0x8fff, 100).unwrap();
        assert_eq!(count, 1);
        // SAFETY: `part` says that one byte of RAM is there.
        assert_eq!(unsafe { host.read_volatile() }, 0x5a);
    }
}
