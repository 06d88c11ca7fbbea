//! ACPI tables for a hardware-reduced machine (ACPI specification 6.5, 4.1): RSDP, XSDT, FADT,
//! MADT, DSDT and, with PCI, MCFG.
//!
//! Addresses and interrupts come from the caller; the tables go where a guest without a pointer
//! looks for them (`layout::ACPI`).

mod dsdt;
mod fadt;
mod madt;
mod mcfg;
pub(crate) mod reset_vector;

use std::ops::Range;

use acpi_tables::Aml;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;
use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemory;
use crate::x86_64::error::{Error, Result};
use crate::x86_64::layout::ACPI;

const OEM_ID: [u8; 6] = *b"POLLUX";
const OEM_TABLE_ID: [u8; 8] = *b"POLLUXVM";
const OEM_REVISION: u32 = 1;

/// SLP_TYPx value of the soft-off state, as the `\_S5` object announces it.
const S5_SLEEP_TYPE: u8 = 5;
/// What a guest writes to the sleep control register to power off: SLP_TYPx in bits 2 to 4, and
/// SLP_EN, bit 5 (ACPI 6.5, 4.8.3.7).
pub const SLEEP_CONTROL_POWER_OFF: u8 = S5_SLEEP_TYPE << 2 | 1 << 5;

/// What the tables announce, and the registers behind it.
#[derive(Clone, Debug)]
pub struct AcpiConfig {
    /// vCPUs; their APIC ids count from 0.
    pub cpus: u8,
    /// Serial ports, `COM1` first.
    pub serial: Vec<SerialPort>,
    /// virtio-mmio devices.
    pub virtio_mmio: Vec<VirtioMmio>,
    /// Registers for poweroff and reset.
    pub power: PowerRegisters,
    /// Interrupt (edge triggered) that presses the power button, where there is one.
    pub power_button_gsi: Option<u32>,
    /// A PCI Express host bridge, where there is one.
    pub pci: Option<PciHostBridge>,
    /// Whether there is an i8042 (keyboard controller) at ports 0x60 and 0x64. Linux then looks for
    /// a keyboard behind it; the reset through port 0x64 works without this.
    pub i8042: bool,
}

/// A 16550 serial port (`PNP0501`).
#[derive(Clone, Copy, Debug)]
pub struct SerialPort {
    /// First of eight I/O ports.
    pub port: u16,
    /// Interrupt, edge triggered.
    pub gsi: u32,
}

/// A virtio-mmio device (`LNRO0005`).
#[derive(Clone, Copy, Debug)]
pub struct VirtioMmio {
    /// Address of its registers, below 4 GiB.
    pub address: u32,
    /// Length of its registers.
    pub len_bytes: u32,
    /// Interrupt, edge triggered, active high.
    pub gsi: u32,
    /// Whether another device has the same interrupt.
    pub shared: bool,
}

/// I/O ports of one byte each.
#[derive(Clone, Copy, Debug)]
pub struct PowerRegisters {
    /// Sleep control register: [`SLEEP_CONTROL_POWER_OFF`] is written to it for poweroff.
    pub sleep_control: u16,
    /// Sleep status register: the guest writes and reads it; zero will do.
    pub sleep_status: u16,
    /// Reset register.
    pub reset: u16,
    /// What is written to it for reset.
    pub reset_value: u8,
}

/// A PCI Express host bridge without I/O ports and without legacy interrupts: devices use MSI.
#[derive(Clone, Debug)]
pub struct PciHostBridge {
    /// Address of the configuration space: 1 MiB for each bus.
    pub ecam: u64,
    /// Number of its last bus.
    pub last_bus: u8,
    /// Addresses for 32-bit BARs.
    pub mmio32: Range<u32>,
    /// Addresses for 64-bit BARs.
    pub mmio64: Option<Range<u64>>,
}

impl PciHostBridge {
    /// Addresses of the configuration space.
    pub fn ecam_range(&self) -> Range<u64> {
        self.ecam..self.ecam + ((u64::from(self.last_bus) + 1) << 20)
    }
}

/// Writes the tables, and code at the PC's reset vector that uses the same reset register. Returns
/// the address of the RSDP, for [`BootConfig::rsdp`](crate::BootConfig).
///
/// # Errors
/// [`Error::AcpiTooLarge`] with more devices than the tables' area holds.
pub fn write_tables(mem: &GuestMemory, config: &AcpiConfig) -> Result<u64> {
    let tables = build_tables(config, ACPI.start);
    let room_bytes = (reset_vector::ADDRESS - ACPI.start) as usize;
    if tables.len() > room_bytes {
        return Err(Error::AcpiTooLarge {
            size_bytes: tables.len(),
            room_bytes,
        });
    }
    mem.write_slice(&tables, GuestAddress(ACPI.start))
        .map_err(Error::write("the ACPI tables", ACPI.start))?;
    let reset = reset_vector::code(config.power.reset, config.power.reset_value);
    mem.write_slice(&reset, GuestAddress(reset_vector::ADDRESS))
        .map_err(Error::write("the reset vector", reset_vector::ADDRESS))?;
    Ok(ACPI.start)
}

/// The tables as they lie in memory from `base` on, the RSDP first.
pub fn build_tables(config: &AcpiConfig, base: u64) -> Vec<u8> {
    let mut area = Area {
        base,
        bytes: vec![0; Rsdp::len()],
    };
    let dsdt = area.add(&dsdt::build(config));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    xsdt.add_entry(area.add(&fadt::build(config, dsdt)));
    xsdt.add_entry(area.add(&madt::build(config)));
    if let Some(pci) = &config.pci {
        xsdt.add_entry(area.add(&mcfg::build(pci)));
    }
    let xsdt = area.add(&xsdt);
    let mut rsdp = Vec::with_capacity(Rsdp::len());
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    area.bytes[..rsdp.len()].copy_from_slice(&rsdp);
    area.bytes
}

/// Memory that is filled from its start.
struct Area {
    base: u64,
    bytes: Vec<u8>,
}

impl Area {
    /// Appends a table on a 16-byte boundary and returns its address.
    fn add(&mut self, table: &dyn Aml) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let address = self.base + self.bytes.len() as u64;
        table.to_aml_bytes(&mut self.bytes);
        address
    }
}

#[cfg(test)]
mod tests;
