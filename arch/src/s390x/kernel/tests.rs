use proptest::prelude::*;

use super::*;

const NONE: Option<&[u8]> = None;

fn memory(bytes: usize) -> GuestMemory {
    GuestMemory::from_ranges(&[(GuestAddress(0), bytes)]).unwrap()
}

fn flat(len: usize) -> Vec<u8> {
    let mut image = vec![0x11; len];
    image[MAGIC_AT as usize..][..6].copy_from_slice(MAGIC);
    image[0x1_0400..0x1_0480].fill(0);
    image
}

/// An ELF file with one segment at `address`.
fn elf(address: u64, contents: &[u8], memory_bytes: u64) -> Vec<u8> {
    let mut file = vec![0; 120];
    file[..6].copy_from_slice(b"\x7fELF\x02\x02");
    file[18..20].copy_from_slice(&22u16.to_be_bytes());
    file[24..32].copy_from_slice(&0x1234u64.to_be_bytes());
    file[32..40].copy_from_slice(&64u64.to_be_bytes());
    file[54..56].copy_from_slice(&56u16.to_be_bytes());
    file[56..58].copy_from_slice(&1u16.to_be_bytes());
    file[67] = 1;
    file[72..80].copy_from_slice(&120u64.to_be_bytes());
    file[88..96].copy_from_slice(&address.to_be_bytes());
    file[96..104].copy_from_slice(&(contents.len() as u64).to_be_bytes());
    file[104..112].copy_from_slice(&memory_bytes.to_be_bytes());
    file.extend(contents);
    file
}

#[test]
fn a_flat_kernel_with_all_that_belongs_to_it() {
    let mem = memory(16 << 20);
    let kernel = flat(0x2_0000);
    let initrd = vec![7; 5000];
    let boot = load_images(&mem, &kernel[..], Some(&initrd[..]), b"root=/dev/vda").unwrap();
    assert_eq!(
        (boot.format, boot.entry, boot.end),
        (Format::Flat, 0x1_0000, 0x2_0000)
    );
    assert_eq!(boot.initrd, Some(0x80_0000..0x80_0000 + 5000));
    let word = |at| u64::from_be_bytes(mem.read_obj(GuestAddress(at)).unwrap());
    assert_eq!(word(INITRD_START_AT), 0x80_0000);
    assert_eq!(word(INITRD_SIZE_AT), 5000);
    let mut text = [0; 14];
    mem.read_slice(&mut text, GuestAddress(CMDLINE_AT)).unwrap();
    assert_eq!(&text, b"root=/dev/vda\0");
    let last: u8 = mem.read_obj(GuestAddress(0x80_0000 + 4999)).unwrap();
    assert_eq!(last, 7);
}

#[test]
fn an_initrd_keeps_clear_of_a_large_kernel() {
    let mem = memory(16 << 20);
    let kernel = flat(9 << 20);
    let boot = load_images(&mem, &kernel[..], Some(&[1u8; 8][..]), b"").unwrap();
    assert_eq!(boot.initrd, Some(0xa0_0000..0xa0_0008));
}

#[test]
fn an_elf_kernel_is_entered_where_it_says_unless_it_is_linux() {
    let mem = memory(1 << 20);
    let file = elf(0x2000, b"code", 0x1000);
    mem.write_slice(&[9; 0x1000], GuestAddress(0x2000)).unwrap();
    let boot = load_images(&mem, &file[..], NONE, b"").unwrap();
    assert_eq!(
        (boot.format, boot.entry, boot.end),
        (Format::Elf, 0x1234, 0x3000)
    );
    let start: [u8; 8] = mem.read_obj(GuestAddress(0x2000)).unwrap();
    assert_eq!(&start, b"code\0\0\0\0");
    let refused = load_images(&mem, &file[..], NONE, b"x").unwrap_err();
    assert!(matches!(refused, Error::NoParameters));
    let linux = elf(0, &flat(0x2_0000), 0x2_0000);
    let boot = load_images(&mem, &linux[..], NONE, b"x").unwrap();
    assert_eq!(boot.entry, 0x1_0000);
}

#[test]
fn what_cannot_be_is_refused_with_its_option() {
    let mem = memory(2 << 20);
    let good = flat(0x2_0000);
    let load = |kernel: &[u8], initrd: Option<&[u8]>, cmdline: &[u8]| {
        load_images(&mem, kernel, initrd, cmdline).unwrap_err()
    };
    let cases = [
        (load(b"", None, b""), "--kernel"),
        (load(b"MZ something", None, b""), "--kernel"),
        (load(&flat(3 << 20), None, b""), "--memory"),
        (load(&good, Some(b""), b""), "--initrd"),
        (load(&good, Some(b"x"), b""), "--memory"),
        (load(&good, None, &[b'x'; 896]), "--cmdline"),
        (load(&good, None, b"a\0b"), "--cmdline"),
    ];
    for (error, option) in cases {
        assert_eq!(error.option(), Some(option), "{error}");
        assert_eq!(error.to_string().lines().count(), 1);
    }
    // A kernel tells how much it takes.
    let mut roomy = good.clone();
    roomy[0x1_0430..0x1_0438].copy_from_slice(&4096u64.to_be_bytes());
    assert!(load_images(&mem, &roomy[..], NONE, &[b'x'; 4095]).is_ok());
    assert!(load_images(&mem, &roomy[..], NONE, &[b'x'; 4096]).is_err());
}

#[test]
fn damaged_elf_files_are_refused() {
    let mem = memory(1 << 20);
    let good = elf(0x2000, b"code", 0x1000);
    let damage: [(&str, usize, &[u8]); 8] = [
        ("32 bits", 4, &[1]),
        ("little-endian", 5, &[1]),
        ("x86", 18, &[0, 62]),
        ("entry size", 54, &[0, 1]),
        ("many", 56, &[0xff, 0xff]),
        ("none to load", 67, &[2]),
        ("table outside", 32, &[0xff; 8]),
        ("file part beyond memory part", 104, &[0; 8]),
    ];
    for (what, at, bytes) in damage {
        let mut file = good.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        let refused = load_images(&mem, &file[..], NONE, b"");
        assert!(matches!(refused, Err(Error::NotAKernel(_))), "{what}");
    }
    for len in [5, 63, 119, 122] {
        assert!(load_images(&mem, &good[..len], NONE, b"").is_err(), "{len}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// No file makes the loader panic, or write where there is no memory.
    #[test]
    fn any_elf_is_loaded_or_refused(
        edits in prop::collection::vec((0usize..124, any::<u8>()), 0..12),
    ) {
        let mem = memory(1 << 20);
        let mut file = elf(0x2000, b"code", 0x1000);
        for (at, byte) in edits {
            file[at] = byte;
        }
        let _ = load_images(&mem, &file[..], NONE, b"");
    }
}
