//! The embedded guest: a program for a bare x86_64 machine that drives virtio-blk disks.
//!
//! It boots by PVH or by Linux' 64-bit protocol ([`boot`]), goes to CPL 3, finds its memory, its CPUs
//! and its disks, runs the jobs of its command line ([`options`]) and prints one line of JSON for each
//! on the first serial port. Then it powers off ([`exit`]).
//!
//! Lines: first `{"guest":"pollux",…}` with what was found, then one a job, at last
//! `{"done":true,"failed":N}`. A mistake, a panic or an exception ends it earlier, with a line that has
//! `error`, `panic` or `exception`.
#![no_std]
#![no_main]

mod acpi;
mod boot;
mod cpu;
mod exit;
mod histogram;
mod hostile;
mod job;
mod memory;
mod options;
#[path = "../src/pattern.rs"]
mod pattern;
mod pci;
mod phys;
mod runtime;
mod text;
mod tracker;
mod unit;
mod virtio;
mod worker;

use options::{Exit, Options, Pci};
use phys::Shared;
use text::Json;

/// Power off by hardware-reduced ACPI: SLP_EN and sleep type 5.
const POWER_OFF: u8 = 1 << 5 | 5 << 2;
/// The port of QEMU's isa-debug-exit, and of a panic register, when none is given.
const DEBUG_EXIT_PORT: u64 = 0xf4;
const PANIC_PORT: u64 = 0x505;

// The first CPU's; the jobs are read by all once it is filled.
static OPTIONS: Shared<Options<'static>> = Shared::new(Options::EMPTY);

/// Runs on the first CPU, at CPL 3. `info` is what the boot protocol handed over.
extern "C" fn guest_main(info: u32, protocol: u32) -> ! {
    cpu::fill_idt();
    text::init();
    // The interrupts of the old PIC, where there is one, would come besides those of the I/O APIC.
    cpu::out8(0x21, 0xff);
    cpu::out8(0xa1, 0xff);
    let boot = memory::init(u64::from(info), protocol);
    let acpi = acpi::read(boot.rsdp);
    let options = OPTIONS.get();
    let parsed = options.parse(boot.command_line);
    configure_exit(options, &acpi);
    if let Err(error) = parsed {
        job::report_bad_option(&error);
        exit::failure();
    }
    let tsc_source = cpu::find_tsc_hz(options.tsc_hz);
    cpu::note_first_cpu();
    let expected = if options.cpus != 0 {
        options.cpus
    } else {
        acpi.cpus
    };
    let cpus = cpu::start_others(expected);
    for &device in &options.mmio[..options.mmio_count] {
        virtio::probe_mmio(device);
    }
    let ecam = if options.ecam != 0 {
        options.ecam
    } else {
        acpi.ecam
    };
    let pci = match options.pci {
        Pci::Off => None,
        Pci::Auto if ecam != 0 => Some(pci::Config::Ecam(ecam)),
        Pci::Ecam if ecam != 0 => Some(pci::Config::Ecam(ecam)),
        Pci::Ecam => panic!("pci=ecam without ecam= and without ACPI's MCFG"),
        Pci::Auto | Pci::Cf8 => Some(pci::Config::Cf8),
    };
    if let Some(config) = pci {
        pci::find_disks(config, virtio::probe_pci);
    }
    job::report_machine(&boot, tsc_source, cpus, ecam);
    let failed = job::run_all(options.jobs(), cpus);
    let mut json = Json::new();
    json.flag("done", true);
    json.number("failed", failed as u64);
    json.print();
    match failed {
        0 => exit::success(),
        _ => exit::failure(),
    }
}

fn configure_exit(options: &Options, acpi: &acpi::Acpi) {
    let kind = options.exit.unwrap_or(match acpi.sleep_control {
        0 => Exit::Reset,
        _ => Exit::Acpi,
    });
    let register = options.exit_register.unwrap_or(match kind {
        Exit::Debug => DEBUG_EXIT_PORT,
        Exit::Panic => PANIC_PORT,
        _ => acpi.sleep_control,
    });
    exit::configure(kind, register, options.exit_value.unwrap_or(POWER_OFF));
}
