//! The image in other clothes. The ELF is our own, so its headers are taken at their word.

/// Sectors of the real-mode part: the boot sector and one of setup.
const SETUP_SECTORS: usize = 2;
const SECTOR_BYTES: usize = 512;
const PT_NOTE: u64 = 4;
const PT_NULL: u8 = 0;

fn field(bytes: &[u8], offset: usize, len: usize) -> u64 {
    let mut value = [0; 8];
    value[..len].copy_from_slice(&bytes[offset..offset + len]);
    u64::from_le_bytes(value)
}

/// Offsets of the program headers (Elf64_Phdr).
fn program_headers(elf: &[u8]) -> impl Iterator<Item = usize> {
    let (table, size, count) = (field(elf, 32, 8), field(elf, 54, 2), field(elf, 56, 2));
    (0..count).map(move |i| (table + i * size) as usize)
}

/// The one loadable segment: its bytes, load address and size in memory.
fn segment(elf: &[u8]) -> (&[u8], u64, u64) {
    const PT_LOAD: u64 = 1;
    let mut loadable = program_headers(elf).filter(|&at| field(elf, at, 4) == PT_LOAD);
    let at = loadable.next().unwrap_or_default();
    let (offset, addr) = (field(elf, at + 8, 8) as usize, field(elf, at + 24, 8));
    let (file_size, memory_size) = (field(elf, at + 32, 8) as usize, field(elf, at + 40, 8));
    (&elf[offset..offset + file_size], addr, memory_size)
}

pub(crate) fn wrap(elf: &[u8]) -> Vec<u8> {
    let (payload, addr, memory_size) = segment(elf);
    let mut image = vec![0; SETUP_SECTORS * SECTOR_BYTES];
    let mut put =
        |offset: usize, bytes: &[u8]| image[offset..offset + bytes.len()].copy_from_slice(bytes);
    let paragraphs = payload.len().div_ceil(16) as u32;
    put(0x1f1, &[SETUP_SECTORS as u8 - 1]);
    put(0x1f4, &paragraphs.to_le_bytes());
    put(0x1fe, &[0x55, 0xaa]);
    // A jump over the header, where a real-mode loader would begin.
    put(0x200, &[0xeb, 0x66]);
    put(0x202, b"HdrS");
    put(0x206, &0x020c_u16.to_le_bytes());
    put(0x211, &[1]); // loadflags: LOADED_HIGH
    put(0x214, &(addr as u32).to_le_bytes());
    put(0x22c, &0x7fff_ffff_u32.to_le_bytes()); // initrd_addr_max
    put(0x230, &0x20_0000_u32.to_le_bytes()); // kernel_alignment
    put(0x236, &1_u16.to_le_bytes()); // xloadflags: XLF_KERNEL_64
    put(0x238, &0x3fff_u32.to_le_bytes()); // cmdline_size
    put(0x258, &addr.to_le_bytes()); // pref_address
    put(0x260, &(memory_size as u32).to_le_bytes()); // init_size
    image.extend_from_slice(payload);
    image.resize(SETUP_SECTORS * SECTOR_BYTES + 16 * paragraphs as usize, 0);
    image
}

pub(crate) fn without_note(elf: &[u8]) -> Vec<u8> {
    let mut bytes = elf.to_vec();
    for at in program_headers(elf).filter(|&at| field(elf, at, 4) == PT_NOTE) {
        bytes[at] = PT_NULL;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_64_bit_entry_is_where_the_protocol_wants_it() {
        let Some(elf) = crate::elf() else {
            return; // No guest for this processor.
        };
        let (payload, addr, memory_size) = segment(elf);
        assert_eq!(
            (addr, field(elf, 24, 8)),
            (0x10_0000, addr + 0x200),
            "load address, entry"
        );
        assert!(memory_size >= payload.len() as u64);
        let image = wrap(elf);
        let setup_bytes = (field(&image, 0x1f1, 1) as usize + 1) * SECTOR_BYTES;
        assert_eq!(&image[setup_bytes..][..payload.len()], payload);
        assert_eq!(
            field(&image, 0x1f4, 4) * 16,
            (image.len() - setup_bytes) as u64
        );
    }

    #[test]
    fn only_the_note_is_taken_away() {
        let Some(elf) = crate::elf() else {
            return; // No guest for this processor.
        };
        let is_note = |bytes: &[u8]| {
            program_headers(bytes)
                .filter(|&at| field(bytes, at, 4) == PT_NOTE)
                .count()
        };
        let other = without_note(elf);
        assert_eq!((is_note(elf), is_note(&other)), (1, 0));
        let changed = elf.iter().zip(&other).filter(|(a, b)| a != b).count();
        assert_eq!(changed, 1);
    }
}
