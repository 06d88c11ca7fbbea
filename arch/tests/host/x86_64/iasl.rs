//! ACPICA's own disassembler and compiler read the tables.

use std::path::Path;
use std::process::Command;

use arch::acpi::{AcpiConfig, PciHostBridge, PowerRegisters, SerialPort, VirtioMmio, build_tables};
use arch::layout;

pub const TESTS: &[(&str, fn())] = &[
    ("iasl_accepts_the_smallest_machine", smallest),
    ("iasl_accepts_the_largest_machine", largest),
];

pub fn is_there() -> bool {
    Command::new("iasl").arg("-v").output().is_ok()
}

fn config(cpus: u8, disks: u32) -> AcpiConfig {
    AcpiConfig {
        cpus,
        serial: vec![SerialPort {
            port: layout::SERIAL_PORT,
            gsi: layout::SERIAL_GSI,
        }],
        virtio_mmio: (0..disks)
            .map(|i| VirtioMmio {
                address: layout::VIRTIO_MMIO.start as u32 + 0x1000 * i,
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
        power_button_gsi: None,
        pci: None,
        i8042: false,
    }
}

fn smallest() {
    accepts(&config(1, 0));
}

fn largest() {
    accepts(&AcpiConfig {
        power_button_gsi: Some(23),
        pci: Some(PciHostBridge {
            ecam: layout::ECAM.start,
            last_bus: 255,
            mmio32: 0xc000_0000..0xd000_0000,
            mmio64: Some(4 << 30..20 << 30),
        }),
        i8042: true,
        ..config(layout::MAX_CPUS, 64)
    });
}

fn accepts(config: &AcpiConfig) {
    let dir = tempfile::tempdir().unwrap();
    let tables = split(&build_tables(config, 0));
    let found: Vec<&str> = tables.iter().map(|(name, _)| name.as_str()).collect();
    for name in ["DSDT", "FACP", "APIC", "XSDT"] {
        assert!(found.contains(&name), "{found:?}");
    }
    for (name, table) in tables {
        let binary = dir.path().join(&name).with_extension("dat");
        std::fs::write(&binary, table).unwrap();
        let text = iasl("-d", &binary);
        assert!(!text.contains("rror"), "{text}");
        // Warnings count as errors: the source that iasl made of it must be without fault.
        let text = iasl("-we", &binary.with_extension("dsl"));
        assert!(text.contains(" 0 Errors, 0 Warnings"), "{text}");
    }
}

/// The tables, which lie one after the other on 16-byte boundaries behind the RSDP.
fn split(bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut tables = Vec::new();
    let mut at = 48;
    while at < bytes.len() {
        let len = u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
        let name = String::from_utf8(bytes[at..at + 4].to_vec()).unwrap();
        tables.push((name, bytes[at..at + len].to_vec()));
        at = (at + len).next_multiple_of(16);
    }
    tables
}

fn iasl(option: &str, file: &Path) -> String {
    let out = Command::new("iasl").arg(option).arg(file).output().unwrap();
    let text = String::from_utf8_lossy(&[out.stdout, out.stderr].concat()).into_owned();
    assert!(out.status.success(), "iasl {option} {file:?}: {text}");
    text
}
