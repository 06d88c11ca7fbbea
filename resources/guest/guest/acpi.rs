//! The few things that ACPI's static tables tell: processors, the PCI configuration space, and the
//! sleep register of hardware-reduced ACPI.

use crate::phys::{self, Addr};

/// What was found; zero means not announced.
#[derive(Default)]
pub struct Acpi {
    /// Enabled processors in the MADT.
    pub cpus: usize,
    /// Base of the ECAM for segment 0 (MCFG).
    pub ecam: Addr,
    /// SLEEP_CONTROL_REG of the FADT: an I/O port or a memory address.
    pub sleep_control: Addr,
}

/// Reads the tables behind the RSDP at `rsdp`, 0 for none.
pub fn read(rsdp: Addr) -> Acpi {
    let mut found = Acpi::default();
    if rsdp == 0 || phys::bytes(rsdp, 8) != b"RSD PTR " {
        return found;
    }
    let (root, entry_bytes) = match phys::read8(rsdp + 15) {
        0 | 1 => (u64::from(phys::le32(rsdp + 16)), 4),
        _ => (phys::le64(rsdp + 24), 8),
    };
    for entry in (root + 36..root + len(root)).step_by(entry_bytes) {
        let table = match entry_bytes {
            4 => u64::from(phys::le32(entry)),
            _ => phys::le64(entry),
        };
        match phys::bytes(table, 4) {
            b"APIC" => found.cpus = processors(table),
            b"MCFG" if len(table) >= 60 => found.ecam = phys::le64(table + 44),
            // The sleep control register: a generic address structure of 12 bytes at 244.
            b"FACP" if len(table) >= 256 => found.sleep_control = phys::le64(table + 244 + 4),
            _ => (),
        }
    }
    found
}

/// A table's length, from its header.
fn len(table: Addr) -> u64 {
    u64::from(phys::le32(table + 4))
}

fn processors(madt: Addr) -> usize {
    let end = madt + len(madt);
    let mut at = madt + 44;
    let mut count = 0;
    while at + 2 <= end {
        let (kind, size) = (phys::read8(at), u64::from(phys::read8(at + 1)));
        // Local APIC has its flags at 4, local x2APIC at 8; bit 0 is "enabled".
        let enabled = match kind {
            0 => phys::read8(at + 4) & 1 != 0,
            9 => phys::read8(at + 8) & 1 != 0,
            _ => false,
        };
        count += usize::from(enabled);
        if size < 2 {
            break;
        }
        at += size;
    }
    count
}
