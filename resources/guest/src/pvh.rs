//! Kernels of a few bytes: any program as an ELF file that is entered by PVH (`hvm/start_info.h` of Xen), in
//! 32-bit mode without page tables or interrupts.

/// Where the program is loaded and entered.
pub const BASE: u32 = 0x10_0000;

/// XEN_ELFNOTE_PHYS32_ENTRY.
const NOTE_PHYS32_ENTRY: u32 = 18;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
/// Sizes of an ELF64 header and a program header.
const HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;

/// The file with `program`, machine code for [`BASE`].
pub fn elf(program: &[u8]) -> Vec<u8> {
    let mut note = Vec::new();
    for word in [4, 4, NOTE_PHYS32_ENTRY] {
        note.extend(u32::to_le_bytes(word));
    }
    note.extend(b"Xen\0");
    note.extend(BASE.to_le_bytes());

    let note_at = HEADER + 2 * PROGRAM_HEADER;
    let code_at = note_at + note.len() as u64;
    let mut file = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for half in [2u16, 62] {
        file.extend(half.to_le_bytes()); // ET_EXEC, EM_X86_64
    }
    file.extend(1u32.to_le_bytes());
    for long in [u64::from(BASE), HEADER, 0] {
        file.extend(long.to_le_bytes()); // entry, program headers, no sections
    }
    file.extend(0u32.to_le_bytes());
    for half in [HEADER as u16, PROGRAM_HEADER as u16, 2, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    for (kind, at, address, size) in [
        (PT_LOAD, code_at, u64::from(BASE), program.len() as u64),
        (PT_NOTE, note_at, 0, note.len() as u64),
    ] {
        for word in [kind, 7] {
            file.extend(word.to_le_bytes());
        }
        for long in [at, address, address, size, size, 4] {
            file.extend(long.to_le_bytes());
        }
    }
    file.extend(note);
    file.extend(program);
    file
}
