//! Patterns: written before a write, checked after a read.

use crate::options::Verify;
use crate::pattern::{self, SECTOR_WORDS, Tag};
use crate::phys;
use crate::tracker;

use super::{Op, SECTOR_BYTES, Unit};

impl Unit {
    pub(super) fn verify_done(&mut self, index: usize, op: Op) {
        let sector = self.slot_sector(index);
        let (data, generation) = (self.slot(index).data, self.slot(index).generation);
        let disk = self.disk_index;
        if op == Op::Read {
            for i in 0..self.block_sectors {
                let words = phys::words(data + i * SECTOR_BYTES, SECTOR_WORDS);
                let words: &mut [u64; SECTOR_WORDS] =
                    words.try_into().unwrap_or_else(|_| unreachable!());
                self.verify_sector(words, sector + i);
            }
        }
        if self.verify == Verify::Track && op.has_block() {
            match op {
                Op::Write => tracker::wrote(disk, sector, self.block_sectors, generation),
                Op::WriteZeroes | Op::Discard => tracker::forget(disk, sector, self.block_sectors),
                _ => (),
            }
            tracker::set_busy(disk, sector, self.block_sectors, false);
        }
    }

    fn verify_sector(&mut self, words: &[u64; SECTOR_WORDS], sector: u64) {
        let expected = match self.verify {
            Verify::Zero => {
                self.counters.verified_sectors += 1;
                if let Some(word) = words.iter().find(|&&w| w != 0) {
                    self.note_fault("sector is not zero", sector, 0, *word);
                }
                return;
            }
            Verify::Generation(generation) => Some(generation),
            Verify::Track => match tracker::generation(self.disk_index, sector) {
                None => return,
                known => known,
            },
            Verify::Itself | Verify::Off => None,
        };
        self.counters.verified_sectors += 1;
        match pattern::check(words) {
            Err(pattern::Damage::NoTag) => {
                self.note_fault("sector without a tag", sector, 0, words[0])
            }
            Err(pattern::Damage::Body(at)) => {
                self.note_fault("sector is damaged", sector, at as u64, words[at])
            }
            Ok(tag) if tag.sector != sector => {
                self.note_fault("another sector's data", sector, sector, tag.sector)
            }
            Ok(tag) if tag.disk != self.disk_index as u32 => {
                self.note_fault(
                    "another disk's data",
                    sector,
                    self.disk_index as u64,
                    u64::from(tag.disk),
                );
            }
            Ok(tag) => {
                if let Some(generation) = expected
                    && tag.generation != generation
                {
                    self.note_fault(
                        "wrong generation",
                        sector,
                        u64::from(generation),
                        u64::from(tag.generation),
                    );
                }
            }
        }
    }

    pub(super) fn fill_data(&mut self, index: usize, sector: u64, generation: u32) {
        let data = self.slot(index).data;
        for i in 0..self.block_sectors {
            let words = phys::words(data + i * SECTOR_BYTES, SECTOR_WORDS);
            let words: &mut [u64; SECTOR_WORDS] =
                words.try_into().unwrap_or_else(|_| unreachable!());
            let tag = Tag {
                sector: sector + i,
                disk: self.disk_index as u32,
                generation,
            };
            pattern::fill(words, tag);
        }
    }
}
