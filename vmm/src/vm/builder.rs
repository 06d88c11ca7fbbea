//! Puts a VM together, in an order in which everything the user may have got wrong is found before anything is made.
//!
//! Configuration → /dev/kvm → boot files → memory → kernel and tables in memory → iothreads and disks → the VM and its
//! devices → console → vCPU threads, which hold until [`Vm::run`].

use std::fs::File;
use std::sync::Arc;
use std::time::Duration;

use arch::acpi::{AcpiConfig, PowerRegisters, SerialPort};
use arch::error::FileRole;
use arch::{BootConfig, Cpuid, layout};
use devices::bus::Bus;
use devices::reset::{AcpiPower, I8042, PanicRegister};
use devices::serial::Serial;
use iothread::IoThread;
use kvm_ioctls::{VcpuFd, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::console::Console;
use super::control::{self, Control};
use super::disks::{self, Buses, Disks, Plan};
use super::error::Error;
use super::gate::RunGate;
use super::lifecycle::Lifecycle;
use super::memory::{self, GuestMemory};
use super::mmio::{self, Slot};
use super::signals::Signals;
use super::vcpu::{Machine, Vcpus};
use super::{Vm, iothreads, kvm, pci, power, reset_flag};
use crate::config::{self, Config};
use crate::metrics::Writer;
use crate::qmp::{self, Listener, Monitor, Server, event};
use crate::sandbox;
use crate::seccomp::Filters;
use crate::trace::Tracer;

/// First port of the ACPI power registers.
const POWER_PORT: u16 = 0x600;
/// Where QEMU's guests have the panic register.
const PANIC_PORT: u16 = 0x505;

/// Builds the VM that `config` describes. Call it from the main thread before any other thread is started.
pub fn build(config: &Config) -> Result<Vm, Error> {
    let signals = Signals::take().map_err(Error::system("signals"))?;
    let filters = Filters::compile(config.seccomp)?;
    let switch = sandbox::enter(config)?;
    let kvm = kvm::open()?;
    arch::vm::check_capabilities(&kvm)?;
    let cpus = arch::vm::check_cpu_count(&kvm, config.cpus as usize)?;
    let cpuid = Cpuid::new(&kvm, &config.cpu, cpus)?;
    let files = BootFiles::open(config)?;
    let memory = map_memory(config, &cpuid)?;
    reset_flag::arm(&memory)?;

    let plan = Plan::new(config)?;
    let boot = load(config, cpus, &plan, &files, &memory)?;
    tracing::info!("kernel: {boot}");

    let listener = match &config.qmp {
        Some(socket) => Some(Listener::bind(&socket.0)?),
        None => None,
    };
    let lifecycle = Arc::new(Lifecycle::new().map_err(Error::system("eventfd"))?);
    let context = iothreads::main_context()?;
    let iothreads = iothreads::start_all(config, &lifecycle)?;
    let tracer = config.trace.as_ref().map(Tracer::start).transpose()?;
    let tracer = tracer.map(Arc::new);
    if let Some(tracer) = &tracer {
        tracer.add(&context.remote(), "main");
        for iothread in &iothreads {
            iothreads::trace(iothread, tracer);
        }
    }
    let blocks = disks::open(config, &context.remote(), &iothreads)?;

    let vm = Arc::new(kvm::create_vm(&kvm).map_err(Error::ioctl("KVM_CREATE_VM"))?);
    arch::vm::setup_vm(&vm)?;
    memory::register(&vm, &memory)?;
    let vcpus = (0..cpus)
        .map(|index| create_vcpu(&vm, index, &cpuid, &memory, &boot))
        .collect::<Result<Vec<_>, _>>()?;

    let mut buses = Buses::default();
    add_power(&mut buses.pio, &lifecycle, &memory)?;
    let power_button = EventFd::new(EFD_NONBLOCK).map_err(Error::system("eventfd"))?;
    vm.register_irqfd(&power_button, layout::POWER_BUTTON_GSI)
        .map_err(Error::ioctl("KVM_IRQFD"))?;
    let disks = Disks::attach(blocks, &plan, &vm, &mut buses, &memory)?;
    let (serial, console) = add_serial(&mut buses.pio, &vm, &config.serial)?;

    let machine = Arc::new(Machine {
        pio: buses.pio,
        mmio: buses.mmio,
        memory,
        lifecycle: lifecycle.clone(),
        gate: RunGate::default(),
        filters: filters.clone(),
    });
    let vcpus = Vcpus::start(machine, vcpus).map_err(Error::system("starting a vCPU thread"))?;
    if let (Some(listener), Some((user, group))) = (&listener, switch.user()) {
        listener.give_to(user, group)?;
    }
    switch.apply()?;
    if let Some(filters) = &filters {
        install(filters, &iothreads)?;
    }
    let (events, queue) = event::channel().map_err(Error::system("eventfd"))?;
    let control = Control::new(control::Parts {
        lifecycle: lifecycle.clone(),
        vcpus: vcpus.control().clone(),
        disks: disks.handles().to_vec(),
        iothreads,
        main_loop: context.remote(),
        power_button,
        filters: filters.clone(),
        tracer: tracer.clone(),
        // Without a monitor nobody takes them.
        events: listener.as_ref().map(|_| events).unwrap_or_default(),
    });
    let monitor =
        listener.map(|listener| Server::start(listener, Monitor::new(control.clone()), queue));
    let monitor = monitor
        .transpose()
        .map_err(Error::system("starting the monitor's thread"))?;
    let metrics = config
        .metrics
        .as_ref()
        .map(|metrics| start_metrics(metrics, control.clone()));
    Ok(Vm {
        vcpus,
        disks,
        control,
        monitor,
        metrics: metrics.transpose()?,
        tracer,
        context,
        serial,
        console,
        signals,
        lifecycle,
        print_statistics: config.stats,
        filters,
        _vm: vm,
    })
}

/// From here on no thread can do more than it needs: everything is open, and the guest has not run yet. Threads that are
/// started later are born with the filter of the one that starts them.
fn install(filters: &Arc<Filters>, iothreads: &[IoThread]) -> Result<(), Error> {
    filters.install()?;
    filters.narrow_workers();
    for iothread in iothreads {
        iothreads::narrow(iothread, filters)?;
    }
    Ok(())
}

/// Writes the numbers of `machine` to the file that the configuration names.
pub(crate) fn start_metrics(
    metrics: &config::Metrics,
    machine: Arc<dyn qmp::Machine>,
) -> Result<Writer, Error> {
    let file = metrics.file.clone();
    let interval = Duration::from_secs(metrics.interval.into());
    Writer::start(file.clone(), interval, machine).map_err(|error| Error::Metrics { file, error })
}

struct BootFiles {
    kernel: File,
    initrd: Option<File>,
}

impl BootFiles {
    fn open(config: &Config) -> Result<Self, Error> {
        let kernel = config.kernel.as_deref().ok_or_else(|| {
            config::Error::new(
                "--kernel",
                "missing; name the kernel to boot: --kernel FILE",
            )
        })?;
        let kernel = arch::image::open(FileRole::Kernel, kernel)?;
        let initrd = match &config.initrd {
            Some(path) => Some(arch::image::open(FileRole::Initrd, path)?),
            None => None,
        };
        Ok(Self { kernel, initrd })
    }
}

fn map_memory(config: &Config, cpuid: &Cpuid) -> Result<GuestMemory, Error> {
    let size = config.memory.size;
    let bits = cpuid.physical_address_bits();
    if layout::memory_end(size.0) > 1u64.checked_shl(bits).unwrap_or(u64::MAX) {
        return Err(memory::Error::BeyondAddressing(size, bits).into());
    }
    Ok(memory::map(&config.memory, &arch::memory_regions(size.0))?)
}

/// Kernel, command line, tables: everything that the guest finds in memory.
fn load(
    config: &Config,
    cpus: u8,
    plan: &Plan,
    files: &BootFiles,
    memory: &GuestMemory,
) -> Result<arch::Boot, Error> {
    let slots = plan.mmio();
    let pci = plan.needs_pci().then(pci::host_bridge);
    // Linux uses the configuration space only where the memory map has it as reserved.
    let reserved = pci.iter().map(|pci| pci.ecam_range()).collect();
    let acpi = AcpiConfig {
        cpus,
        serial: vec![SerialPort {
            port: layout::SERIAL_PORT,
            gsi: layout::SERIAL_GSI,
        }],
        virtio_mmio: slots.iter().map(Slot::acpi).collect(),
        power: PowerRegisters {
            sleep_control: POWER_PORT + AcpiPower::SLEEP_CONTROL as u16,
            sleep_status: POWER_PORT + AcpiPower::SLEEP_STATUS as u16,
            reset: POWER_PORT + AcpiPower::RESET as u16,
            reset_value: AcpiPower::RESET_VALUE,
        },
        power_button_gsi: Some(layout::POWER_BUTTON_GSI),
        pci,
        i8042: false,
    };
    let rsdp = arch::acpi::write_tables(memory, &acpi)?;
    let boot = BootConfig {
        rsdp: Some(rsdp),
        reserved,
    };
    let cmdline = cmdline(config, &slots);
    arch::load_kernel(
        memory,
        &files.kernel,
        files.initrd.as_ref(),
        &cmdline,
        &boot,
    )
    .map_err(|error| Error::refused_file(error, config))
}

/// The user's command line with ours in front, so that the user's options win, and those after `--` stay last.
fn cmdline(config: &Config, slots: &[Slot]) -> String {
    let cmdline = format!(
        "{} {}{}",
        reset_flag::CMDLINE,
        mmio::cmdline(slots),
        config.cmdline
    );
    cmdline.trim_end().to_owned()
}

fn create_vcpu(
    vm: &VmFd,
    index: u8,
    cpuid: &Cpuid,
    memory: &GuestMemory,
    boot: &arch::Boot,
) -> Result<VcpuFd, Error> {
    let vcpu = vm
        .create_vcpu(index.into())
        .map_err(Error::ioctl("KVM_CREATE_VCPU"))?;
    arch::configure_vcpu(&vcpu, index, cpuid, memory, boot)?;
    Ok(vcpu)
}

fn add_power(pio: &mut Bus, lifecycle: &Arc<Lifecycle>, memory: &GuestMemory) -> Result<(), Error> {
    let callback = power::callback(lifecycle.clone(), memory.clone());
    let acpi = Arc::new(AcpiPower::new(callback.clone()));
    pio.insert(POWER_PORT.into(), AcpiPower::LEN, acpi)?;
    pio.insert(
        I8042::BASE,
        I8042::LEN,
        Arc::new(I8042::new(callback.clone())),
    )?;
    let panic = Arc::new(PanicRegister::new(callback));
    pio.insert(PANIC_PORT.into(), PanicRegister::LEN, panic)?;
    Ok(())
}

fn add_serial(
    pio: &mut Bus,
    vm: &VmFd,
    config: &config::Serial,
) -> Result<(Arc<Serial>, Console), Error> {
    let irq = EventFd::new(EFD_NONBLOCK).map_err(Error::system("eventfd"))?;
    vm.register_irqfd(&irq, layout::SERIAL_GSI)
        .map_err(Error::ioctl("KVM_IRQFD"))?;
    let (output, console) = Console::open(config)?;
    let serial =
        Serial::new(irq, output).map_err(Error::system("starting the console's thread"))?;
    let serial = Arc::new(serial);
    pio.insert(layout::SERIAL_PORT.into(), Serial::LEN, serial.clone())?;
    Ok((serial, console))
}
