use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::x86_64::layout::{ECAM, IOAPIC_BASE, LAPIC_BASE, memory_regions};

const BASE: u64 = ACPI.start;

fn config(cpus: u8, disks: u32, pci: bool) -> AcpiConfig {
    AcpiConfig {
        cpus,
        serial: vec![SerialPort {
            port: 0x3f8,
            gsi: 4,
        }],
        virtio_mmio: (0..disks)
            .map(|i| VirtioMmio {
                address: 0xd000_0000 + 0x1000 * i,
                len_bytes: 0x1000,
                gsi: 5 + i % 19,
                shared: i >= 19,
            })
            .collect(),
        power: PowerRegisters {
            sleep_control: 0x600,
            sleep_status: 0x601,
            reset: 0x602,
            reset_value: 1,
        },
        power_button_gsi: Some(23),
        pci: pci.then_some(PciHostBridge {
            ecam: ECAM.start,
            last_bus: 255,
            mmio32: 0xc000_0000..0xd000_0000,
            mmio64: Some(4 << 30..20 << 30),
        }),
        i8042: false,
    }
}

fn sum(bytes: &[u8]) -> u8 {
    bytes.iter().fold(0, |sum, b| sum.wrapping_add(*b))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Follows the pointers from the RSDP as a guest does, checking each table on the way.
fn tables(bytes: &[u8]) -> HashMap<String, Vec<u8>> {
    let table = |address: u64| {
        let at = (address - BASE) as usize;
        let len = u32_at(bytes, at + 4) as usize;
        let table = bytes[at..at + len].to_vec();
        let signature = String::from_utf8(table[..4].to_vec()).unwrap();
        assert_eq!(sum(&table), 0, "{signature}");
        assert_eq!(&table[10..16], b"POLLUX", "{signature}");
        (signature, table)
    };
    assert_eq!(&bytes[..8], b"RSD PTR ");
    assert_eq!(sum(&bytes[..20]), 0);
    assert_eq!(sum(&bytes[..36]), 0);
    assert_eq!(bytes[15], 2);
    let (signature, xsdt) = table(u64_at(bytes, 24));
    assert_eq!(signature, "XSDT");
    let mut found: HashMap<_, _> = xsdt[36..]
        .chunks_exact(8)
        .map(|entry| table(u64_at(entry, 0)))
        .collect();
    let (signature, dsdt) = table(u64_at(&found["FACP"], 140));
    found.insert(signature, dsdt);
    found
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

#[test]
fn fadt_says_hardware_reduced_with_poweroff_and_reset() {
    let fadt = &tables(&build_tables(&config(1, 1, false), BASE))["FACP"];
    assert_eq!(fadt.len(), 276);
    assert_eq!(fadt[8], 6);
    let flags = u32_at(fadt, 112);
    // HW_REDUCED_ACPI, RESET_REG_SUP, no fixed power and sleep buttons.
    for bit in [20, 10, 4, 5] {
        assert_ne!(flags & 1 << bit, 0, "bit {bit}");
    }
    // No VGA, no CMOS clock, no i8042.
    assert_eq!(fadt[109], 1 << 2 | 1 << 4 | 1 << 5);
    // Reset register: I/O space, 8 bits, byte access, and its value.
    assert_eq!(fadt[116..120], [1, 8, 0, 1]);
    assert_eq!(u64_at(fadt, 120), 0x602);
    assert_eq!(fadt[128], 1);
    assert_eq!(fadt[244..248], [1, 8, 0, 1]);
    assert_eq!(u64_at(fadt, 248), 0x600);
    assert_eq!(u64_at(fadt, 260), 0x601);
    let with_8042 = AcpiConfig {
        i8042: true,
        ..config(1, 1, false)
    };
    let fadt = &tables(&build_tables(&with_8042, BASE))["FACP"];
    assert_ne!(fadt[109] & 1 << 1, 0);
}

#[test]
fn madt_lists_every_cpu_and_the_io_apic() {
    let madt = &tables(&build_tables(&config(64, 1, false), BASE))["APIC"];
    assert_eq!(u64::from(u32_at(madt, 36)), LAPIC_BASE);
    let mut at = 44;
    let mut cpus = Vec::new();
    let mut io_apics = Vec::new();
    while at < madt.len() {
        let entry = &madt[at..at + usize::from(madt[at + 1])];
        match entry[0] {
            0 => {
                assert_eq!(u32_at(entry, 4), 1, "enabled");
                cpus.push((entry[2], entry[3]));
            }
            1 => io_apics.push((u32_at(entry, 4), u32_at(entry, 8))),
            other => panic!("entry of type {other}"),
        }
        at += entry.len();
    }
    assert_eq!(cpus, (0..64).map(|i| (i, i)).collect::<Vec<_>>());
    assert_eq!(io_apics, [(IOAPIC_BASE as u32, 0)]);
}

#[test]
fn mcfg_is_there_with_pci_only() {
    let found = tables(&build_tables(&config(1, 1, true), BASE));
    let mcfg = &found["MCFG"];
    assert_eq!(u64_at(mcfg, 44), ECAM.start);
    assert_eq!(mcfg[52..56], [0, 0, 0, 255]);
    assert_eq!(u64::from(mcfg[55]) + 1, (ECAM.end - ECAM.start) >> 20);
    assert!(contains(&found["DSDT"], b"PCI0"));
    let found = tables(&build_tables(&config(1, 1, false), BASE));
    assert!(!found.contains_key("MCFG"));
    assert!(!contains(&found["DSDT"], b"PCI0"));
}

#[test]
fn case_20_dsdt_announces_devices_with_their_resources() {
    let dsdt = &tables(&build_tables(&config(2, 21, false), BASE))["DSDT"];
    for name in [
        &b"C000"[..],
        b"C001",
        b"COM1",
        b"V000",
        b"V014",
        b"PWRB",
        b"GED_",
        b"_S5_",
    ] {
        assert!(contains(dsdt, name), "{}", String::from_utf8_lossy(name));
    }
    assert!(!contains(dsdt, b"C002"));
    // Memory32Fixed, read and write, of the second device.
    let memory = [
        &[0x86, 9, 0, 1][..],
        &0xd000_1000u32.to_le_bytes(),
        &0x1000u32.to_le_bytes(),
    ];
    assert!(contains(dsdt, &memory.concat()));
    // Interrupt: consumer, edge, active high, exclusive or shared.
    let interrupt = |flags, gsi: u32| [&[0x89, 6, 0, flags, 1][..], &gsi.to_le_bytes()].concat();
    assert!(contains(dsdt, &interrupt(0b0011, 6)));
    assert!(contains(dsdt, &interrupt(0b1011, 5)));
    assert!(contains(dsdt, &interrupt(0b0011, 4)));
}

#[test]
fn tables_are_written_where_a_guest_looks() {
    let mem = GuestMemory::from_ranges(&memory_regions(64 << 20)).unwrap();
    let config = config(64, 200, true);
    let rsdp = write_tables(&mem, &config).unwrap();
    assert_eq!(rsdp % 16, 0);
    let expected = build_tables(&config, rsdp);
    let mut bytes = vec![0; expected.len()];
    mem.read_slice(&mut bytes, GuestAddress(rsdp)).unwrap();
    assert_eq!(bytes, expected);
    tables(&bytes);
    let error = write_tables(&mem, &self::config(64, 4000, true)).unwrap_err();
    assert!(matches!(error, Error::AcpiTooLarge { .. }), "{error}");
}

#[test]
fn power_off_value_is_sleep_type_and_enable() {
    assert_eq!(SLEEP_CONTROL_POWER_OFF, 0x34);
}

proptest! {
    #[test]
    fn checksums_and_lengths_hold_for_any_machine(cpus in 1u8..=64, disks in 0u32..64, pci: bool) {
        let bytes = build_tables(&config(cpus, disks, pci), BASE);
        prop_assert_eq!(tables(&bytes).len(), if pci { 4 } else { 3 });
    }
}
