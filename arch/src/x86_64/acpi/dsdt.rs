//! Differentiated System Description Table (ACPI 6.5, 5.2.11.1): the devices, in AML.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Arg, CreateDWordField, Device, EISAName, Equal, IO, If,
    Interrupt, Memory32Fixed, Method, Name, Notify, ONE, Or, Package, Path, ResourceTemplate,
    Return, Scope, Uuid, ZERO,
};
use acpi_tables::sdt::Sdt;

use crate::x86_64::acpi::{
    AcpiConfig, OEM_ID, OEM_REVISION, OEM_TABLE_ID, PciHostBridge, S5_SLEEP_TYPE, SerialPort,
    VirtioMmio,
};

/// Length of a table's header.
const HEADER_BYTES: u32 = 36;
/// 2 and above: integers have 64 bits.
const DSDT_REVISION: u8 = 6;
/// `Notify` value of a pressed power button (ACPI 6.5, table 5.154).
const BUTTON_PRESSED: u8 = 0x80;
/// What `_OSC` of a PCI host bridge is asked with (PCI Firmware specification 3.3, 4.5.1).
const PCI_OSC_UUID: &str = "33DB4D5B-1FF7-401C-9657-7441C03DD766";
/// Error bit in the first word that `_OSC` returns: unknown UUID.
const OSC_UNKNOWN_UUID: u8 = 1 << 2;

pub(super) fn build(config: &AcpiConfig) -> Sdt {
    let mut devices = Vec::new();
    for cpu in 0..config.cpus {
        add_cpu(&mut devices, cpu);
    }
    for (i, serial) in config.serial.iter().enumerate() {
        add_serial(&mut devices, i, serial);
    }
    for (i, virtio) in config.virtio_mmio.iter().enumerate() {
        add_virtio_mmio(&mut devices, i, virtio);
    }
    if let Some(gsi) = config.power_button_gsi {
        add_power_button(&mut devices, gsi);
    }
    if let Some(pci) = &config.pci {
        add_pci(&mut devices, pci);
    }
    let mut table = Sdt::new(
        *b"DSDT",
        HEADER_BYTES,
        DSDT_REVISION,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    );
    table.append_slice(&Scope::raw("\\_SB_".into(), devices));
    let mut s5 = Vec::new();
    Name::new(
        "\\_S5_".into(),
        &Package::new(vec![&S5_SLEEP_TYPE, &ZERO, &ZERO, &ZERO]),
    )
    .to_aml_bytes(&mut s5);
    table.append_slice(&s5);
    table
}

/// A name of four characters: `prefix` and as many hexadecimal digits as it needs.
fn numbered(prefix: &str, number: usize) -> Path {
    let digits = 4 - prefix.len();
    Path::new(&format!("{prefix}{number:0digits$X}"))
}

fn name(path: &str, value: &dyn Aml) -> Name {
    Name::new(path.into(), value)
}

/// An edge-triggered, active-high interrupt that the device consumes.
fn interrupt(gsi: u32, shared: bool) -> Interrupt {
    Interrupt::new(true, true, false, shared, gsi)
}

fn add_cpu(out: &mut Vec<u8>, cpu: u8) {
    Device::new(
        numbered("C", cpu.into()),
        vec![&name("_HID", &"ACPI0007"), &name("_UID", &cpu)],
    )
    .to_aml_bytes(out);
}

fn add_serial(out: &mut Vec<u8>, index: usize, serial: &SerialPort) {
    Device::new(
        numbered("COM", index + 1),
        vec![
            &name("_HID", &EISAName::new("PNP0501")),
            &name("_UID", &index),
            &name(
                "_CRS",
                &ResourceTemplate::new(vec![
                    &IO::new(serial.port, serial.port, 1, 8),
                    &interrupt(serial.gsi, false),
                ]),
            ),
        ],
    )
    .to_aml_bytes(out);
}

fn add_virtio_mmio(out: &mut Vec<u8>, index: usize, virtio: &VirtioMmio) {
    Device::new(
        numbered("V", index),
        vec![
            &name("_HID", &"LNRO0005"),
            &name("_UID", &index),
            // Its DMA is coherent with the processors' caches.
            &name("_CCA", &ONE),
            &name(
                "_CRS",
                &ResourceTemplate::new(vec![
                    &Memory32Fixed::new(true, virtio.address, virtio.len_bytes),
                    &interrupt(virtio.gsi, virtio.shared),
                ]),
            ),
        ],
    )
    .to_aml_bytes(out);
}

/// The button, and the Generic Event Device (ACPI 6.5, 5.6.9) whose interrupt presses it.
fn add_power_button(out: &mut Vec<u8>, gsi: u32) {
    Device::new(
        "PWRB".into(),
        vec![
            &name("_HID", &EISAName::new("PNP0C0C")),
            &name("_UID", &ZERO),
        ],
    )
    .to_aml_bytes(out);
    Device::new(
        "GED_".into(),
        vec![
            &name("_HID", &"ACPI0013"),
            &name("_UID", &ZERO),
            &name("_CRS", &ResourceTemplate::new(vec![&interrupt(gsi, false)])),
            &Method::new(
                "_EVT".into(),
                1,
                true,
                vec![&If::new(
                    &Equal::new(&Arg(0), &gsi),
                    vec![&Notify::new(&Path::new("PWRB"), &BUTTON_PRESSED)],
                )],
            ),
        ],
    )
    .to_aml_bytes(out);
}

fn add_pci(out: &mut Vec<u8>, pci: &PciHostBridge) {
    let buses = AddressSpace::new_bus_number(0u16, pci.last_bus.into());
    let mmio32 = memory_window(pci.mmio32.start, pci.mmio32.end - 1);
    let mmio64 = pci
        .mmio64
        .as_ref()
        .map(|range| memory_window(range.start, range.end - 1));
    let mut resources: Vec<&dyn Aml> = vec![&buses, &mmio32];
    if let Some(mmio64) = &mmio64 {
        resources.push(mmio64);
    }
    let capabilities = Path::new("CDW1");
    Device::new(
        "PCI0".into(),
        vec![
            &name("_HID", &EISAName::new("PNP0A08")),
            &name("_CID", &EISAName::new("PNP0A03")),
            &name("_UID", &ZERO),
            &name("_SEG", &ZERO),
            &name("_BBN", &ZERO),
            &name("_CCA", &ONE),
            &name("_CRS", &ResourceTemplate::new(resources)),
            // The guest may control everything it asks for: nothing here does it in its place.
            &Method::new(
                "_OSC".into(),
                4,
                true,
                vec![
                    &If::new(
                        &Equal::new(&Arg(0), &Uuid::new(PCI_OSC_UUID)),
                        vec![&Return::new(&Arg(3))],
                    ),
                    &CreateDWordField::new(&capabilities, &Arg(3), &ZERO),
                    &Or::new(&capabilities, &capabilities, &OSC_UNKNOWN_UUID),
                    &Return::new(&Arg(3)),
                ],
            ),
        ],
    )
    .to_aml_bytes(out);

    // Linux uses the configuration space only where a motherboard resource claims it.
    let ecam = pci.ecam_range();
    Device::new(
        "MBRD".into(),
        vec![
            &name("_HID", &EISAName::new("PNP0C02")),
            &name("_UID", &ZERO),
            &name(
                "_CRS",
                &ResourceTemplate::new(vec![&AddressSpace::new_memory(
                    AddressSpaceCacheable::NotCacheable,
                    true,
                    ecam.start,
                    ecam.end - 1,
                    None,
                )]),
            ),
        ],
    )
    .to_aml_bytes(out);
}

fn memory_window<T: Default>(first: T, last: T) -> AddressSpace<T> {
    AddressSpace::new_memory(AddressSpaceCacheable::NotCacheable, true, first, last, None)
}
