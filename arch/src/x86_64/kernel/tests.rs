use std::io::Write;

use linux_loader::bootparam::boot_params;
use linux_loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use proptest::prelude::*;
use vm_memory::{ByteValued, GuestMemoryBackend, GuestMemoryRegion};

use super::*;
use crate::x86_64::elf::pvh_entry_of;
use crate::x86_64::layout::{HIMEM_START, HOLE_START, memory_regions};
use crate::x86_64::testing::{BzImage, Load, elf, note, pvh_note};

const MIB: u64 = 1 << 20;
const NO_INITRD: Option<&[u8]> = None;

fn memory(size: u64) -> GuestMemory {
    GuestMemory::from_ranges(&memory_regions(size)).unwrap()
}

fn read<T: ByteValued>(mem: &GuestMemory, address: u64) -> T {
    mem.read_obj(GuestAddress(address)).unwrap()
}

fn bytes(mem: &GuestMemory, address: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    mem.read_slice(&mut out, GuestAddress(address)).unwrap();
    out
}

fn load(mem: &GuestMemory, kernel: &[u8], initrd: Option<&[u8]>, cmdline: &str) -> Result<Boot> {
    let config = BootConfig {
        rsdp: Some(0xe0000),
        reserved: vec![],
    };
    load_images(mem, kernel, initrd, cmdline.as_bytes(), &config)
}

fn error(mem: &GuestMemory, kernel: &[u8]) -> Error {
    load(mem, kernel, NO_INITRD, "").expect_err("refused")
}

fn pvh_kernel(code: &[u8]) -> Vec<u8> {
    let load = Load {
        address: MIB,
        bytes: code,
        memory_bytes: 0x3000,
    };
    elf(0x1234, &[load], &pvh_note(MIB as u32 + 4))
}

#[test]
fn case_21_bzimage_is_loaded_where_it_wants_and_described_in_the_zero_page() {
    let mem = memory(64 * MIB);
    let image = BzImage::default();
    let initrd = vec![0x5a; 5000];
    let boot = load(&mem, &image.build(), Some(&initrd), "console=ttyS0").unwrap();
    assert_eq!(boot.format, Format::BzImage);
    assert_eq!(boot.protocol, Protocol::LinuxBoot64);
    assert_eq!(boot.entry, 16 * MIB + 0x200);
    assert_eq!(boot.kernel, 16 * MIB..20 * MIB);
    assert_eq!(boot.version.as_deref(), Some(BzImage::VERSION));
    assert_eq!(bytes(&mem, 16 * MIB, image.code.len()), image.code);

    let params: boot_params = read(&mem, boot.boot_data);
    let range = boot.initrd.unwrap();
    assert_eq!(range, 64 * MIB - 8192..64 * MIB - 8192 + 5000);
    assert_eq!(bytes(&mem, range.start, 5000), initrd);
    assert_eq!({ params.hdr.ramdisk_image }, range.start as u32);
    assert_eq!({ params.hdr.ramdisk_size }, 5000);
    assert_eq!({ params.hdr.header }, u32::from_le_bytes(*b"HdrS"));
    assert_eq!({ params.hdr.type_of_loader }, 0xff);
    assert_eq!({ params.hdr.init_size }, image.init_size);
    // The header ends where it says: what follows in the file is code.
    assert_eq!({ params.hdr.kernel_info_offset }, 0);
    assert_eq!({ params._pad7 }, [0; 36]);
    assert_eq!({ params.acpi_rsdp_addr }, 0xe0000);
    let cmdline = u64::from(params.hdr.cmd_line_ptr);
    assert_eq!(bytes(&mem, cmdline, 14), b"console=ttyS0\0");

    let map: Vec<_> = params.e820_table[..usize::from(params.e820_entries)]
        .iter()
        .map(|e| ({ e.addr }, { e.size }, { e.r#type }))
        .collect();
    assert!(map.contains(&(0, 0x9fc00, 1)), "{map:x?}");
    assert!(map.contains(&(0xe0000, 0x20000, 3)), "{map:x?}");
    assert!(map.contains(&(MIB, 63 * MIB, 1)), "{map:x?}");
}

#[test]
fn bzimage_alignment_is_respected() {
    let image = BzImage {
        pref_address: 17 * MIB,
        ..Default::default()
    };
    let boot = load(&memory(64 * MIB), &image.build(), NO_INITRD, "").unwrap();
    assert_eq!(boot.kernel.start, 18 * MIB);
    let fixed = BzImage {
        relocatable_kernel: 0,
        ..image
    };
    let boot = load(&memory(64 * MIB), &fixed.build(), NO_INITRD, "").unwrap();
    assert_eq!(boot.kernel.start, 17 * MIB);
}

#[test]
fn initrd_stays_below_the_kernels_limit_and_below_the_hole() {
    let image = BzImage {
        initrd_addr_max: (40 * MIB - 1) as u32,
        ..Default::default()
    };
    let boot = load(&memory(64 * MIB), &image.build(), Some(&[1; 4096]), "").unwrap();
    assert_eq!(boot.initrd.unwrap().end, 40 * MIB);
    // Memory on both sides of the hole; nothing is touched that is not needed.
    let image = BzImage {
        initrd_addr_max: u32::MAX,
        ..Default::default()
    };
    let mem = memory(HOLE_START + 64 * MIB);
    let boot = load(&mem, &image.build(), Some(&[1; 4096]), "").unwrap();
    assert_eq!(boot.initrd.unwrap().end, HOLE_START);
}

#[test]
fn bzimages_that_cannot_be_booted_say_why() {
    let mem = memory(64 * MIB);
    let default = BzImage::default;
    for (image, part) in [
        (
            BzImage {
                loadflags: 0,
                ..default()
            },
            "zImage",
        ),
        (
            BzImage {
                xloadflags: 0,
                ..default()
            },
            "no 64-bit entry",
        ),
        (
            BzImage {
                version: 0x0204,
                ..default()
            },
            "no 64-bit entry",
        ),
        (
            BzImage {
                payload_length: 1 << 20,
                ..default()
            },
            "cut short",
        ),
        (
            BzImage {
                code: vec![0; 0x200],
                payload_length: 0,
                ..default()
            },
            "cut short",
        ),
        (
            BzImage {
                pref_address: 0x1000,
                kernel_alignment: 1,
                ..default()
            },
            "above 1 MiB",
        ),
        (
            BzImage {
                pref_address: u64::MAX,
                ..default()
            },
            "above 1 MiB",
        ),
        (
            BzImage {
                pref_address: u64::MAX - 1,
                relocatable_kernel: 0,
                ..default()
            },
            "out of range",
        ),
    ] {
        let error = error(&mem, &image.build());
        assert!(error.to_string().contains(part), "{part}: {error}");
        assert!(error.to_string().starts_with("a bzImage"), "{error}");
        assert_eq!(error.option(), Some("--kernel"));
    }
}

#[test]
fn kernel_and_initrd_that_do_not_fit_name_the_memory_needed() {
    let image = BzImage {
        init_size: 100 << 20,
        ..Default::default()
    };
    let e = error(&memory(64 * MIB), &image.build());
    assert_eq!(
        e.to_string(),
        "the kernel needs memory from 0x1000000 to 0x7400000, but low memory ends at 0x4000000: \
         give at least --memory 116M"
    );
    assert_eq!(e.option(), Some("--memory"));
    assert!(load(&memory(116 * MIB), &image.build(), NO_INITRD, "").is_ok());

    let small = BzImage::default().build();
    let initrd = vec![1; (44 * MIB + 1) as usize];
    let e = load(&memory(64 * MIB), &small, Some(&initrd), "").unwrap_err();
    assert!(e.to_string().contains("give at least --memory 65M"), "{e}");
    assert_eq!(e.option(), Some("--initrd"));
    assert!(load(&memory(65 * MIB), &small, Some(&initrd), "").is_ok());
    let e = load(&memory(64 * MIB), &small, Some(&[]), "").unwrap_err();
    assert!(matches!(e, Error::EmptyInitrd));
    assert!(matches!(
        error(&memory(MIB), &small),
        Error::MemoryTooSmall(_)
    ));
}

#[test]
fn command_line_is_limited_by_the_kernel() {
    let mem = memory(64 * MIB);
    let image = BzImage {
        cmdline_size: 100,
        ..Default::default()
    }
    .build();
    assert!(load(&mem, &image, NO_INITRD, &"x".repeat(100)).is_ok());
    let e = load(&mem, &image, NO_INITRD, &"x".repeat(101)).unwrap_err();
    assert_eq!(
        e.to_string(),
        "the kernel command line is 101 bytes long, a bzImage takes at most 100: shorten it"
    );
    assert_eq!(e.option(), Some("--cmdline"));
    let pvh = pvh_kernel(b"code");
    assert!(load(&mem, &pvh, NO_INITRD, &"x".repeat(2047)).is_ok());
    let e = load(&mem, &pvh, NO_INITRD, &"x".repeat(2048)).unwrap_err();
    assert!(
        e.to_string().contains("a PVH kernel takes at most 2047"),
        "{e}"
    );
    let e = load(&mem, &pvh, NO_INITRD, "a\0b").unwrap_err();
    assert!(matches!(e, Error::CommandLineNul(1)));
}

#[test]
fn case_22_pvh_kernel_gets_start_info_memory_map_and_initrd() {
    let mem = memory(64 * MIB);
    // Memory is used a second time: what the file does not fill must be cleared.
    mem.write_slice(&[0xee; 0x4000], GuestAddress(MIB)).unwrap();
    let initrd = [7; 100];
    let boot = load(&mem, &pvh_kernel(b"code"), Some(&initrd), "hello").unwrap();
    assert_eq!(boot.protocol, Protocol::Pvh);
    assert_eq!(boot.format, Format::Pvh);
    assert_eq!(boot.entry, MIB + 4);
    assert_eq!(bytes(&mem, MIB, 5), b"code\0");
    assert_eq!(bytes(&mem, MIB + 4, 0x3000 - 4), vec![0; 0x3000 - 4]);
    assert_eq!(bytes(&mem, MIB + 0x3000, 1), [0xee]);

    let info: hvm_start_info = read(&mem, boot.boot_data);
    assert_eq!(info.magic, 0x336e_c578);
    assert_eq!(info.version, 1);
    assert_eq!(info.rsdp_paddr, 0xe0000);
    assert_eq!(bytes(&mem, info.cmdline_paddr, 6), b"hello\0");
    assert_eq!(info.nr_modules, 1);
    let module: hvm_modlist_entry = read(&mem, info.modlist_paddr);
    assert_eq!(module.size, 100);
    assert_eq!(module.paddr, boot.initrd.unwrap().start);
    assert_eq!(bytes(&mem, module.paddr, 100), initrd);
    let first: hvm_memmap_table_entry = read(&mem, info.memmap_paddr);
    assert_eq!((first.addr, first.size, first.type_), (0, 0x9fc00, 1));
    let ram: u64 = (0..u64::from(info.memmap_entries))
        .map(|i| read::<hvm_memmap_table_entry>(&mem, info.memmap_paddr + 24 * i))
        .filter(|e| e.type_ == 1)
        .map(|e| e.size)
        .sum();
    assert_eq!(ram, 63 * MIB + 0x9fc00);
}

#[test]
fn vmlinux_without_note_starts_at_its_64_bit_entry() {
    let mem = memory(64 * MIB);
    let loads = || {
        [(16 * MIB, &b"text"[..], 4096), (20 * MIB, b"data", MIB)].map(
            |(address, bytes, memory_bytes)| Load {
                address,
                bytes,
                memory_bytes,
            },
        )
    };
    let other_note = note(b"GNU\0", 3, b"build id");
    let kernel = elf(16 * MIB + 2, &loads(), &other_note);
    let boot = load(&mem, &kernel, NO_INITRD, "").unwrap();
    assert_eq!(boot.protocol, Protocol::LinuxBoot64);
    assert_eq!(boot.entry, 16 * MIB + 2);
    assert_eq!(boot.kernel, 16 * MIB..21 * MIB);
    assert_eq!(bytes(&mem, 20 * MIB, 4), b"data");
    let params: boot_params = read(&mem, boot.boot_data);
    assert_eq!({ params.hdr.boot_flag }, 0xaa55);
    assert_eq!({ params.hdr.header }, u32::from_le_bytes(*b"HdrS"));
    // Not in any segment.
    let e = error(&mem, &elf(30 * MIB, &loads(), &other_note));
    assert!(e.to_string().contains("entry 0x1e00000"), "{e}");
}

#[test]
fn elf_files_that_cannot_be_booted_say_why() {
    let mem = memory(64 * MIB);
    let one = |address, memory_bytes| Load {
        address,
        bytes: b"code",
        memory_bytes,
    };
    for (file, part) in [
        (elf(0, &[], &[]), "no program headers"),
        (elf(0, &[], &pvh_note(4)), "nothing to load"),
        (elf(0x7000, &[one(0x7000, 4)], &[]), "below 1 MiB"),
        (elf(MIB, &[one(MIB, 3)], &[]), "damaged"),
        (elf(MIB, &[one(MIB, u64::MAX)], &[]), "damaged"),
        (elf(MIB, &[one(MIB, 8), one(MIB + 7, 4)], &[]), "overlap"),
        (elf(MIB, &[one(MIB, 8)], &pvh_note(8)), "entry 0x8"),
        (
            elf(MIB, &[one(MIB, 8)], &[])[..64 + 57].to_vec(),
            "cut short",
        ),
        (
            elf(MIB, &[one(MIB, 8)], &[])[..64 + 20].to_vec(),
            "cut short",
        ),
    ] {
        let e = error(&mem, &file);
        assert!(e.to_string().contains(part), "{part}: {e}");
    }
    // A program of this system: an interpreter, or thread-local data.
    for kind in [3u32, 7, 0x6474_e552] {
        let mut program = elf(MIB, &[one(MIB, 8), one(2 * MIB, 4)], &[]);
        program[64 + 56..64 + 60].copy_from_slice(&kind.to_le_bytes());
        let e = error(&mem, &program);
        assert!(e.to_string().contains("user program"), "{e}");
    }
    let e = error(&mem, &elf(MIB, &[one(MIB, 64 * MIB)], &[]));
    assert!(e.to_string().contains("give at least --memory 65M"), "{e}");
    let e = error(&mem, &elf(MIB, &[one(MIB, 1 << 40)], &[]));
    assert!(e.to_string().contains("use a smaller file"), "{e}");
}

#[test]
fn pvh_note_is_found_among_others() {
    let others = [note(b"GNU\0", 18, &[1; 4]), note(b"Linux\0", 1, &[2; 7])].concat();
    let wide = note(b"Xen\0", 18, &0x10_0000u64.to_le_bytes());
    let too_high = note(b"Xen\0", 18, &0x1_0010_0000u64.to_le_bytes());
    assert_eq!(pvh_entry_of(&others, 4), None);
    assert_eq!(
        pvh_entry_of(&[others.clone(), pvh_note(9)].concat(), 4),
        Some(9)
    );
    assert_eq!(pvh_entry_of(&[others, wide].concat(), 4), Some(0x10_0000));
    assert_eq!(pvh_entry_of(&too_high, 4), None);
    assert_eq!(pvh_entry_of(&note(b"Xen\0", 18, &[1, 2]), 4), None);
    assert_eq!(pvh_entry_of(&pvh_note(9)[..15], 4), None);
}

#[test]
fn files_are_loaded_as_slices_are() {
    let mem = memory(64 * MIB);
    let mut kernel = tempfile::tempfile().unwrap();
    kernel.write_all(&BzImage::default().build()).unwrap();
    let mut initrd = tempfile::tempfile().unwrap();
    initrd.write_all(&[0x77; 10_000]).unwrap();
    let boot = load_kernel(
        &mem,
        &kernel,
        Some(&initrd),
        "quiet",
        &BootConfig::default(),
    )
    .unwrap();
    let code = BzImage::default().code;
    assert_eq!(bytes(&mem, boot.kernel.start, code.len()), code);
    assert_eq!(
        bytes(&mem, boot.initrd.unwrap().start, 10_000),
        [0x77; 10_000]
    );
}

#[test]
fn a_refused_kernel_leaves_memory_alone() {
    let mem = memory(64 * MIB);
    let initrd = vec![1; (60 * MIB) as usize];
    load(&mem, &BzImage::default().build(), Some(&initrd), "x").unwrap_err();
    for (address, len) in [(0, HIMEM_START), (16 * MIB, 0x3000)] {
        assert!(bytes(&mem, address, len as usize).iter().all(|b| *b == 0));
    }
}

/// Guest memory with bytes around it, to see that nothing is written outside.
fn check_any(kernel: &[u8], initrd: Option<&[u8]>, cmdline: &[u8]) {
    let mem = memory(8 * MIB);
    match load_images(&mem, kernel, initrd, cmdline, &BootConfig::default()) {
        Ok(boot) => {
            assert!(boot.kernel.start >= HIMEM_START && boot.kernel.end <= 8 * MIB);
            assert!(boot.kernel.contains(&boot.entry));
            if let Some(initrd) = boot.initrd {
                assert!(initrd.start >= boot.kernel.end && initrd.end <= 8 * MIB);
            }
        }
        Err(e) => {
            assert!(!e.to_string().contains('\n'));
            // Refused, so nothing was written; regions are the whole of guest memory.
            for region in mem.iter() {
                let start = region.start_addr().0;
                let len = region.len() as usize;
                // Compared whole: a loop over the bytes is slow in a debug build.
                assert!(bytes(&mem, start, len) == vec![0; len], "{e}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_are_loaded_or_refused(kernel in prop::collection::vec(any::<u8>(), 0..2000)) {
        check_any(&kernel, None, b"");
    }

    /// Headers that look right, with any number in any field.
    #[test]
    fn damaged_bzimages_are_loaded_or_refused(
        changes in prop::collection::vec((0x1f1usize..0x270, any::<u8>()), 0..6),
        cut in 0usize..20_000,
        initrd in prop::option::of(prop::collection::vec(any::<u8>(), 0..100)),
    ) {
        let mut file = BzImage { pref_address: 2 * MIB, ..Default::default() }.build();
        for (at, value) in changes {
            file[at] = value;
        }
        file.truncate(cut);
        check_any(&file, initrd.as_deref(), b"x");
    }

    #[test]
    fn damaged_elf_files_are_loaded_or_refused(
        changes in prop::collection::vec((0usize..300, any::<u8>()), 0..6),
        cut in 100usize..400,
    ) {
        let loads = [MIB, 2 * MIB].map(|address| Load { address, bytes: b"0123456789", memory_bytes: 64 });
        let mut file = elf(MIB, &loads, &pvh_note(MIB as u32));
        for (at, value) in changes {
            if let Some(byte) = file.get_mut(at) {
                *byte = value;
            }
        }
        file.truncate(cut);
        check_any(&file, None, b"x");
    }

    #[test]
    fn any_notes_give_an_entry_or_none(notes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = pvh_entry_of(&notes, 4);
        let _ = pvh_entry_of(&notes, 8);
    }

    #[test]
    fn any_numbers_in_a_program_header_are_safe(
        offset in any::<u64>(), address in any::<u64>(), file_bytes in any::<u64>(), memory_bytes in any::<u64>(),
    ) {
        let mut file = pvh_kernel(b"code");
        for (at, value) in [(8, offset), (24, address), (32, file_bytes), (40, memory_bytes)] {
            file[64 + at..64 + at + 8].copy_from_slice(&value.to_le_bytes());
        }
        check_any(&file, None, b"");
    }
}
