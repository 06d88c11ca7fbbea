//! A guest whose first instructions print a word: a PVH kernel of a few bytes.
//!
//! PVH enters in 32-bit mode (`hvm/start_info.h`); both VMMs boot it. It has no page tables and no
//! interrupts, and halts behind its word.

/// What it prints, with a line's end.
pub(super) const WORD: &str = "!";

/// Where it is loaded and entered.
const BASE: u32 = 0x10_0000;
/// XEN_ELFNOTE_PHYS32_ENTRY.
const NOTE_PHYS32_ENTRY: u32 = 18;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
/// Sizes of an ELF64 header and a program header.
const HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;

/// The file.
pub(super) fn elf() -> Vec<u8> {
    let mut code = vec![0x66, 0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    for byte in WORD.bytes().chain([b'\n']) {
        code.extend([0xb0, byte, 0xee]); // mov al, byte; out dx, al
    }
    code.extend([0xfa, 0xf4, 0xeb, 0xfd]); // cli; hlt; jmp to the hlt

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
        (PT_LOAD, code_at, u64::from(BASE), code.len() as u64),
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
    file.extend(code);
    file
}
