use super::*;

fn with(offset: usize, magic: &[u8]) -> Vec<u8> {
    let mut head = vec![0xa5; 0x9000];
    head[offset..offset + magic.len()].copy_from_slice(magic);
    head
}

fn elf(class: u8, data: u8, kind: u16, machine: u16) -> Vec<u8> {
    let mut head = vec![0; 64];
    head[..4].copy_from_slice(b"\x7fELF");
    head[4] = class;
    head[5] = data;
    let half = |v: u16| {
        if data == 2 {
            v.to_be_bytes()
        } else {
            v.to_le_bytes()
        }
    };
    head[16..18].copy_from_slice(&half(kind));
    head[18..20].copy_from_slice(&half(machine));
    head
}

fn what(head: &[u8]) -> String {
    identify_head(head).expect_err("no kernel").to_string()
}

#[test]
fn bootable_formats_are_recognised() {
    assert_eq!(identify_head(&elf(2, 1, 2, 62)), Ok(Container::Elf64));
    assert_eq!(identify_head(&elf(2, 1, 3, 62)), Ok(Container::Elf64));
    assert_eq!(identify_head(&with(0x202, b"HdrS")), Ok(Container::BzImage));
    // Debian's vmlinuz is a PE file as well, for EFI.
    let mut efi_stub = with(0x202, b"HdrS");
    efi_stub[..2].copy_from_slice(b"MZ");
    assert_eq!(identify_head(&efi_stub), Ok(Container::BzImage));
}

#[test]
fn foreign_elf_files_are_named_by_machine_and_width() {
    for (class, data, machine, name) in [
        (1, 1, 3, "32-bit ELF for x86 (i386)"),
        (1, 1, 62, "32-bit ELF for x86_64"),
        (1, 1, 40, "32-bit ELF for Arm"),
        (2, 1, 183, "64-bit ELF for Arm (arm64)"),
        (2, 2, 22, "64-bit ELF for s390"),
        (2, 1, 9999, "64-bit ELF for machine 9999"),
    ] {
        let text = what(&elf(class, data, 2, machine));
        assert!(text.contains(name), "{text}");
    }
    assert!(what(&elf(2, 1, 1, 62)).contains("object file"));
    assert!(what(&elf(2, 1, 4, 62)).contains("core dump"));
    assert!(what(b"\x7fELF\x02").contains("cut short"));
}

#[test]
fn case_21_each_magic_gives_its_own_name() {
    for (offset, magic, name, remedy) in MAGICS {
        let text = what(&with(*offset, magic));
        assert!(text.contains(name), "{name}: {text}");
        assert!(text.ends_with(remedy), "{remedy}: {text}");
    }
}

#[test]
fn an_arm64_image_that_is_also_a_pe_file_is_named_arm64() {
    let mut head = with(56, b"ARM\x64");
    head[..2].copy_from_slice(b"MZ");
    assert!(what(&head).contains("arm64"));
}

#[test]
fn files_without_a_magic_are_described() {
    assert!(what(b"").contains("is empty"));
    assert!(what(&[0; 512]).contains("all zeroes"));
    assert!(what("Grüße, Kernel\n".as_bytes()).contains("text file"));
    assert!(what(b"#!/bin/sh\n").contains("script"));
    assert!(what(b"MZ\x90\0").contains("EFI or Windows"));
    assert!(what(&with(510, b"\x55\xaa")).contains("boot sector"));
    assert!(what(&[0xa5; 9]).contains("begins with a5 a5 a5 a5 a5 a5 a5 a5)"));
}

#[test]
fn every_message_is_one_line() {
    for head in [&b""[..], b"#!x\n", &[0xa5; 9], b"\x7fELF\x02", &[7]] {
        assert!(!what(head).contains('\n'));
    }
}
