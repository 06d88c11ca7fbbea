//! What the guest writes when it is to be verified: every 512-byte sector says which sector of which
//! disk it is and in which generation it was written, and fills itself from these.
//!
//! ```text
//! word 0      MAGIC ^ sector
//! word 1      disk << 32 | generation
//! word 2..64  hash(sector, disk, generation) ^ index * ODD
//! ```
//! Words are 64 bits, little-endian.

/// Words of 64 bits in a sector.
pub const SECTOR_WORDS: usize = 64;

const MAGIC: u64 = 0x706f_6c6c_7578_2a2a;
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// What a sector says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// Sector number on the disk.
    pub sector: u64,
    /// Index of the disk as the guest counts.
    pub disk: u32,
    /// Generation of the write.
    pub generation: u32,
}

/// A sector that is not as any write left it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Damage {
    /// No tag: never written, or overwritten by something else.
    NoTag,
    /// A tag whose rest does not follow from it: torn, mixed or flipped; index of the first wrong word.
    Body(usize),
}

fn hash(tag: Tag) -> u64 {
    let mut h =
        tag.sector.wrapping_mul(ODD) ^ (u64::from(tag.disk) << 32 | u64::from(tag.generation));
    h = (h ^ (h >> 31)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    h ^ (h >> 29)
}

/// Writes the sector that `tag` describes.
pub fn fill(words: &mut [u64; SECTOR_WORDS], tag: Tag) {
    let seed = hash(tag);
    for (i, word) in words.iter_mut().enumerate() {
        *word = (seed ^ (i as u64).wrapping_mul(ODD)).to_le();
    }
    words[0] = (MAGIC ^ tag.sector).to_le();
    words[1] = (u64::from(tag.disk) << 32 | u64::from(tag.generation)).to_le();
}

/// Reads a sector's tag and checks the rest of it. Whether the tag is the expected one is the caller's
/// to decide.
///
/// # Errors
/// [`Damage`], if it is not a whole sector of this pattern.
pub fn check(words: &[u64; SECTOR_WORDS]) -> Result<Tag, Damage> {
    let second = u64::from_le(words[1]);
    let tag = Tag {
        sector: u64::from_le(words[0]) ^ MAGIC,
        disk: (second >> 32) as u32,
        generation: second as u32,
    };
    // No disk has so many sectors: whatever this is, it is no tag.
    if tag.sector >= 1 << 48 {
        return Err(Damage::NoTag);
    }
    let seed = hash(tag);
    let mut wrong = 0;
    for (i, &word) in words.iter().enumerate().skip(2) {
        wrong |= u64::from_le(word) ^ seed ^ (i as u64).wrapping_mul(ODD);
    }
    if wrong == 0 {
        return Ok(tag);
    }
    let first = (2..SECTOR_WORDS)
        .find(|&i| u64::from_le(words[i]) != seed ^ (i as u64).wrapping_mul(ODD))
        .unwrap_or(2);
    Err(Damage::Body(first))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_bit_is_seen() {
        let tag = Tag {
            sector: 12345,
            disk: 3,
            generation: 7,
        };
        let mut words = [0; SECTOR_WORDS];
        fill(&mut words, tag);
        assert_eq!(check(&words), Ok(tag));
        for bit in 0..SECTOR_WORDS * 64 {
            words[bit / 64] ^= 1 << (bit % 64);
            assert_ne!(check(&words), Ok(tag), "bit {bit}");
            assert!(check(&words).is_err(), "bit {bit}");
            words[bit / 64] ^= 1 << (bit % 64);
        }
    }

    #[test]
    fn zeroes_and_half_written_sectors_are_damage() {
        assert_eq!(check(&[0; SECTOR_WORDS]), Err(Damage::NoTag));
        let tag = |generation| Tag {
            sector: 9,
            disk: 0,
            generation,
        };
        let (mut old, mut new) = ([0; SECTOR_WORDS], [0; SECTOR_WORDS]);
        fill(&mut old, tag(1));
        fill(&mut new, tag(2));
        new[32..].copy_from_slice(&old[32..]);
        assert_eq!(check(&new), Err(Damage::Body(32)));
    }
}
