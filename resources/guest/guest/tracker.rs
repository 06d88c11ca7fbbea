//! What each sector was last written with, for `verify=track`, and which sectors have a request in
//! flight, so that no two requests touch one sector at a time and every read has one right answer.
//!
//! Kept for the guest's life, so that a later job can check what an earlier one wrote.

use core::sync::atomic::{AtomicU32, Ordering};

use crate::memory;
use crate::options::MAX_DISKS;
use crate::phys::{self, Addr, Shared};

/// The top bit of an entry: a request is in flight. Below: generation, 0 for unknown.
const BUSY: u32 = 1 << 31;

/// Tables of 4 bytes a sector. Made by the first CPU; a sector's entry is used by the CPU whose unit
/// has the sector in its region.
static TABLES: Shared<[(Addr, u64); MAX_DISKS]> = Shared::new([(0, 0); MAX_DISKS]);

/// Makes the table for a disk, if it has none.
pub fn prepare(disk: usize, sectors: u64) -> Result<(), &'static str> {
    let table = &mut TABLES.get()[disk];
    if table.0 == 0 {
        let bytes = 4 * sectors;
        let addr = memory::alloc(bytes, 4096, true)
            .or_else(|| memory::alloc(bytes, 4096, false))
            .ok_or("not enough memory to track a disk of this size")?;
        *table = (addr, sectors);
    }
    Ok(())
}

/// A range of 2^20 generations that no write had yet. 0 is none.
pub fn new_generations() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    NEXT.fetch_add(1 << 20, Ordering::Relaxed) & !BUSY
}

fn entry(disk: usize, sector: u64) -> Addr {
    assert!(disk < MAX_DISKS);
    // SAFETY: within the array; while several CPUs run, nobody writes to it.
    let (addr, sectors) = unsafe { (*TABLES.as_ptr())[disk] };
    assert!(sector < sectors);
    addr + 4 * sector
}

/// Whether the block that begins at `sector` is busy. All requests of a job have the same size and
/// alignment, so its first sector speaks for it.
pub fn is_busy(disk: usize, sector: u64) -> bool {
    phys::read32(entry(disk, sector)) & BUSY != 0
}

pub fn set_busy(disk: usize, sector: u64, sectors: u64, busy: bool) {
    for sector in sector..sector + sectors {
        let at = entry(disk, sector);
        let value = phys::read32(at) & !BUSY;
        phys::write32(at, value | if busy { BUSY } else { 0 });
    }
}

/// Notes a completed write.
pub fn wrote(disk: usize, sector: u64, sectors: u64, generation: u32) {
    for sector in sector..sector + sectors {
        phys::write32(entry(disk, sector), generation & !BUSY);
    }
}

/// Notes that the contents are not known.
pub fn forget(disk: usize, sector: u64, sectors: u64) {
    wrote(disk, sector, sectors, 0);
}

/// The generation that a sector must have, if known.
pub fn generation(disk: usize, sector: u64) -> Option<u32> {
    match phys::read32(entry(disk, sector)) & !BUSY {
        0 => None,
        generation => Some(generation),
    }
}
