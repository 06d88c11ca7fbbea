//! How a guest ends: ACPI's sleep and reset registers, the keyboard controller's reset line, and a
//! register by which a panicking guest says so.
//!
//! The registers are bytes, on port I/O or MMIO alike. What happens then is the VMM's affair: each
//! device calls the callback it was given, in the vCPU thread that made the access.

use std::sync::Arc;

use crate::bus::BusDevice;

/// What the guest asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerEvent {
    /// Sleep state S5: power off.
    PowerOff,
    /// A reset, by ACPI or by the keyboard controller.
    Reset,
    /// The guest's kernel panicked and went no further.
    Panicked,
    /// The guest's kernel panicked and loads its crash kernel.
    CrashLoaded,
}

/// Receives [`PowerEvent`]s; must not block the vCPU thread that calls it.
pub type PowerCallback = Arc<dyn Fn(PowerEvent) + Send + Sync>;

/// The registers of hardware-reduced ACPI (ACPI 6.5, section 4.8.3.7 and 4.8.3.6): sleep control at
/// offset 0, sleep status at offset 1, reset at offset 2.
pub struct AcpiPower {
    callback: PowerCallback,
}

impl AcpiPower {
    /// Length of the register block in bytes.
    pub const LEN: u64 = 3;
    /// Offset of SLEEP_CONTROL_REG.
    pub const SLEEP_CONTROL: u64 = 0;
    /// Offset of SLEEP_STATUS_REG.
    pub const SLEEP_STATUS: u64 = 1;
    /// Offset of RESET_REG.
    pub const RESET: u64 = 2;
    /// The RESET_VALUE that resets.
    pub const RESET_VALUE: u8 = 1;
    /// The SLP_TYP value that the DSDT's `\_S5` must name.
    pub const S5: u8 = 5;

    /// SLP_EN of the sleep control register.
    const SLEEP_ENABLE: u8 = 1 << 5;
    const SLEEP_TYPE_SHIFT: u8 = 2;
    const SLEEP_TYPE_MASK: u8 = 7;

    /// Registers whose writes end in `callback`.
    pub fn new(callback: PowerCallback) -> AcpiPower {
        AcpiPower { callback }
    }
}

impl BusDevice for AcpiPower {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // Control reads as zero; status has WAK_STS clear, as the machine never woke up.
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        for (offset, &value) in (offset..).zip(data) {
            let sleep_type = (value >> Self::SLEEP_TYPE_SHIFT) & Self::SLEEP_TYPE_MASK;
            if offset == Self::SLEEP_CONTROL
                && value & Self::SLEEP_ENABLE != 0
                && sleep_type == Self::S5
            {
                (self.callback)(PowerEvent::PowerOff);
            } else if offset == Self::RESET && value == Self::RESET_VALUE {
                (self.callback)(PowerEvent::Reset);
            }
        }
    }
}

/// The reset half of an i8042 keyboard controller: ports 0x60 to 0x64.
pub struct I8042 {
    callback: PowerCallback,
}

impl I8042 {
    /// The first port of the controller.
    pub const BASE: u64 = 0x60;
    /// Length of the port range in bytes.
    pub const LEN: u64 = 5;
    /// Offset of the command and status port.
    const COMMAND: u64 = 4;
    /// "Pulse output line 0": the line that resets the CPU.
    const PULSE_RESET: u8 = 0xfe;

    /// A controller without a keyboard.
    pub fn new(callback: PowerCallback) -> I8042 {
        I8042 { callback }
    }
}

impl BusDevice for I8042 {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        // Status 0: input buffer free, so a driver goes on to write its command; nothing to read.
        data.fill(0);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == Self::COMMAND && data.first() == Some(&Self::PULSE_RESET) {
            (self.callback)(PowerEvent::Reset);
        }
    }
}

/// The one-byte register by which Linux' `pvpanic` driver reports a panic (ACPI device `QEMU0001`).
pub struct PanicRegister {
    callback: PowerCallback,
}

impl PanicRegister {
    /// Length of the register in bytes.
    pub const LEN: u64 = 1;
    /// Event bit: the guest panicked.
    const PANICKED: u8 = 1 << 0;
    /// Event bit: the guest panicked and boots its crash kernel.
    const CRASH_LOADED: u8 = 1 << 1;

    /// A register whose writes end in `callback`.
    pub fn new(callback: PowerCallback) -> PanicRegister {
        PanicRegister { callback }
    }
}

impl BusDevice for PanicRegister {
    fn read(&self, _offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(events) = data.first_mut() {
            *events = Self::PANICKED | Self::CRASH_LOADED;
        }
    }

    fn write(&self, _offset: u64, data: &[u8]) {
        let event = data.first().copied().unwrap_or(0);
        if event & Self::PANICKED != 0 {
            (self.callback)(PowerEvent::Panicked);
        } else if event & Self::CRASH_LOADED != 0 {
            (self.callback)(PowerEvent::CrashLoaded);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn recorder() -> (PowerCallback, Arc<Mutex<Vec<PowerEvent>>>) {
        let events = Arc::new(Mutex::new(Vec::new()));
        let sink = events.clone();
        (Arc::new(move |e| sink.lock().unwrap().push(e)), events)
    }

    #[test]
    fn only_s5_with_sleep_enable_powers_off() {
        let (callback, events) = recorder();
        let acpi = AcpiPower::new(callback);
        acpi.write(AcpiPower::SLEEP_CONTROL, &[5 << 2]);
        acpi.write(AcpiPower::SLEEP_CONTROL, &[1 << 5 | 3 << 2]);
        acpi.write(AcpiPower::SLEEP_STATUS, &[1 << 5 | 5 << 2]);
        assert!(events.lock().unwrap().is_empty());
        acpi.write(AcpiPower::SLEEP_CONTROL, &[1 << 5 | 5 << 2]);
        assert_eq!(*events.lock().unwrap(), [PowerEvent::PowerOff]);
        let mut status = [0xaa];
        acpi.read(AcpiPower::SLEEP_STATUS, &mut status);
        assert_eq!(status, [0]);
    }

    #[test]
    fn reset_register_and_keyboard_controller_reset() {
        let (callback, events) = recorder();
        let acpi = AcpiPower::new(callback.clone());
        acpi.write(AcpiPower::RESET, &[0]);
        acpi.write(AcpiPower::RESET, &[AcpiPower::RESET_VALUE]);
        let i8042 = I8042::new(callback);
        i8042.write(0, &[0xfe]);
        i8042.write(4, &[0xd1]);
        i8042.write(4, &[0xfe]);
        i8042.write(4, &[]);
        assert_eq!(
            *events.lock().unwrap(),
            [PowerEvent::Reset, PowerEvent::Reset]
        );
        let mut status = [0xff];
        i8042.read(4, &mut status);
        assert_eq!(status, [0], "a driver polling for a free buffer goes on");
    }

    #[test]
    fn panic_register_announces_and_reports_its_events() {
        let (callback, events) = recorder();
        let register = PanicRegister::new(callback);
        let mut supported = [0];
        register.read(0, &mut supported);
        assert_eq!(supported, [3]);
        register.write(0, &[0]);
        register.write(0, &[2]);
        register.write(0, &[1]);
        assert_eq!(
            *events.lock().unwrap(),
            [PowerEvent::CrashLoaded, PowerEvent::Panicked]
        );
    }
}
