//! How the guest ends.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::cpu;
use crate::options::Exit;
use crate::phys;

static KIND: AtomicU32 = AtomicU32::new(0);
static REGISTER: AtomicU64 = AtomicU64::new(0);
static VALUE: AtomicU32 = AtomicU32::new(0);

/// An address below this is an I/O port, as the TSS opens them.
const PORTS: u64 = 0x1000;

/// Sets how the guest ends. For [`Exit::Acpi`], `register` is the sleep control register, 0 for none;
/// for [`Exit::Debug`] the port of QEMU's isa-debug-exit; `value` is what is written.
pub fn configure(exit: Exit, register: u64, value: u8) {
    KIND.store(exit as u32, Ordering::Relaxed);
    REGISTER.store(register, Ordering::Relaxed);
    VALUE.store(u32::from(value), Ordering::Relaxed);
}

fn write(value: u8) {
    match REGISTER.load(Ordering::Relaxed) {
        0 => (),
        port @ 1..PORTS => cpu::out8(port as u16, value),
        addr => phys::write8(addr, value),
    }
}

/// Ends the guest after everything went well.
pub fn success() -> ! {
    end(0)
}

/// Ends the guest after an error that was printed.
pub fn failure() -> ! {
    end(1)
}

fn end(status: u8) -> ! {
    let kind = KIND.load(Ordering::Relaxed);
    if kind == Exit::Acpi as u32 {
        write(VALUE.load(Ordering::Relaxed) as u8);
    } else if kind == Exit::Debug as u32 {
        // QEMU ends with status * 2 + 1.
        write(status);
    } else if kind == Exit::Halt as u32 {
        cpu::halt();
    } else if kind == Exit::Reset as u32 {
        const PULSE_RESET_LINE: u8 = 0xfe;
        cpu::out8(0x64, PULSE_RESET_LINE);
    } else if kind == Exit::Fault as u32 {
        // Within the address width, and mapped by nobody.
        const NOWHERE: phys::Addr = 0x7fff_ffff_f000;
        configure(Exit::Triple, 0, 0);
        phys::read8(NOWHERE);
    } else if kind == Exit::Panic as u32 {
        const PANICKED: u8 = 1;
        write(PANICKED);
        // As Linux without panic=: it reports, and goes no further.
        cpu::halt();
    }
    // A power-off may take a moment to strike; when nothing ends the guest, a triple fault does.
    cpu::spin_ns(200_000_000);
    cpu::triple_fault()
}
