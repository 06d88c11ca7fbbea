//! Channel measurement (SET CHANNEL MONITOR): the counts of starts in measurement blocks. No times are measured, which
//! the blocks say by zeroes.

use vm_memory::{Bytes, GuestAddress};

use super::format::{Pmcw, Schib};
use crate::GuestMemory;

/// Length of a format-0 block in bytes.
const BLOCK_0_BYTES: u64 = 32;

/// What SET CHANNEL MONITOR has set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Measurement {
    /// Where the format-0 blocks begin, while they are updated.
    pub origin: Option<u64>,
}

/// Adds one to the start count of the subchannel's block. Blocks that are not in memory are not updated, as the
/// architecture has it for a measurement that fails.
pub(super) fn count_start(mem: &GuestMemory, measurement: Measurement, schib: &Schib) {
    if !schib.pmcw.has(Pmcw::MEASURE) {
        return;
    }
    let Some(origin) = measurement.origin else {
        return;
    };
    if schib.pmcw.characteristics & Pmcw::MEASURE_FORMAT_1 != 0 {
        let at = GuestAddress(schib.measurement_block);
        if let Ok(count) = mem.read_obj::<[u8; 4]>(at) {
            let count = u32::from_be_bytes(count).wrapping_add(1);
            let _ = mem.write_obj(count.to_be_bytes(), at);
        }
        return;
    }
    let index = u64::from(schib.pmcw.measurement_index);
    let Some(at) = origin.checked_add(index * BLOCK_0_BYTES).map(GuestAddress) else {
        return;
    };
    if let Ok(count) = mem.read_obj::<[u8; 2]>(at) {
        let count = u16::from_be_bytes(count).wrapping_add(1);
        let _ = mem.write_obj(count.to_be_bytes(), at);
    }
}
