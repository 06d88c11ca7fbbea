//! PCI Express memory-mapped configuration space (PCI Firmware specification 3.3, 4.1.2).

use acpi_tables::mcfg::MCFG;

use crate::x86_64::acpi::{OEM_ID, OEM_REVISION, OEM_TABLE_ID, PciHostBridge};

pub(super) fn build(pci: &PciHostBridge) -> MCFG {
    let mut table = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    table.add_ecam(pci.ecam, 0, 0, pci.last_bus);
    table
}
