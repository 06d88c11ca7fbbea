//! Multiple APIC Description Table (ACPI 6.5, 5.2.12): processors and interrupt controllers.
//!
//! There are no interrupt source overrides: KVM's default routing connects each GSI to the I/O
//! APIC's pin of the same number, the timer's included, which is what a guest assumes.

use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};

use crate::x86_64::acpi::{AcpiConfig, OEM_ID, OEM_REVISION, OEM_TABLE_ID};
use crate::x86_64::layout::{IOAPIC_BASE, LAPIC_BASE};

/// KVM's I/O APIC says that this is its id.
const IOAPIC_ID: u8 = 0;

pub(super) fn build(config: &AcpiConfig) -> MADT {
    let mut table = MADT::new(
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
        LocalInterruptController::Address(LAPIC_BASE as u32),
    );
    for cpu in 0..config.cpus {
        table.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    table.add_structure(IoApic::new(IOAPIC_ID, IOAPIC_BASE as u32, 0));
    table
}
