//! A guest whose first instructions print a word, and which halts behind it. Both VMMs boot it.

/// What it prints, with a line's end.
pub(super) const WORD: &str = "!";

/// The file.
pub(super) fn elf() -> Vec<u8> {
    let mut code = vec![0x66, 0xba, 0xf8, 0x03]; // mov dx, 0x3f8
    for byte in WORD.bytes().chain([b'\n']) {
        code.extend([0xb0, byte, 0xee]); // mov al, byte; out dx, al
    }
    code.extend([0xfa, 0xf4, 0xeb, 0xfd]); // cli; hlt; jmp to the hlt
    guest_image::pvh::elf(&code)
}
