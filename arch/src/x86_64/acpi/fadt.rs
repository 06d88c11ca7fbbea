//! Fixed ACPI Description Table (ACPI 6.5, 5.2.9): what kind of machine it is, poweroff and reset.

use acpi_tables::fadt::{FADT, FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};

use crate::x86_64::acpi::{AcpiConfig, OEM_ID, OEM_REVISION, OEM_TABLE_ID};

/// IA-PC boot architecture flags (ACPI 6.5, table 5.11).
const BOOT_8042: u16 = 1 << 1;
const BOOT_NO_VGA: u16 = 1 << 2;
const BOOT_NO_ASPM: u16 = 1 << 4;
const BOOT_NO_CMOS_RTC: u16 = 1 << 5;

pub(super) fn build(config: &AcpiConfig, dsdt: u64) -> FADT {
    let power = &config.power;
    let mut table = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .preferred_pm_profile(PmProfile::PerformanceServer)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        // Set means that these are no fixed hardware: the button is a device, a sleep button and a
        // clock there are not.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::FixRtc)
        .flag(Flags::Headless);
    table.sleep_control_reg = port(power.sleep_control);
    table.sleep_status_reg = port(power.sleep_status);
    table.reset_reg = port(power.reset);
    table.reset_value = power.reset_value;
    let i8042 = if config.i8042 { BOOT_8042 } else { 0 };
    table.iapc_boot_arch = (i8042 | BOOT_NO_VGA | BOOT_NO_ASPM | BOOT_NO_CMOS_RTC).into();
    table.finalize()
}

/// One byte in I/O space.
fn port(address: u16) -> GAS {
    GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        address.into(),
    )
}
