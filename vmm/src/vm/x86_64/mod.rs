//! The machine of an x86_64 guest: a PC without a chipset, described by ACPI.

pub mod attach;
pub mod kvm;
pub mod mmio;
pub mod msi;
pub mod pci;
pub mod power;
pub mod probe;
pub mod reset_flag;
pub mod vcpu;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use arch::acpi::{AcpiConfig, PowerRegisters, SerialPort};
use arch::{BootConfig, Cpuid, layout};
use devices::bus::Bus;
use devices::reset::{AcpiPower, I8042, PanicRegister};
use devices::serial::Serial;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub use self::attach::Error as AttachError;
use self::attach::Plan;
use self::mmio::Slot;
use self::vcpu::KvmVcpu;
use crate::config::{self, Config};
use crate::vm::console::Console;
use crate::vm::error::Error;
use crate::vm::hypervisor::{BootFiles, GuestConsole, Hardware, Hypervisor, Parts, Vcpu};
use crate::vm::lifecycle::Lifecycle;
use crate::vm::memory::{self, GuestMemory};

/// First port of the ACPI power registers.
const POWER_PORT: u16 = 0x600;
/// Where QEMU's guests have the panic register.
const PANIC_PORT: u16 = 0x505;

/// The address spaces of the machine.
#[derive(Default)]
pub struct Buses {
    /// Port I/O.
    pub pio: Bus,
    /// Memory-mapped I/O.
    pub mmio: Bus,
}

/// The machine while it is put together.
pub struct Machine {
    kvm: Arc<Kvm>,
    cpus: u8,
    cpuid: Cpuid,
    loaded: Option<Loaded>,
}

/// What there is once the kernel is loaded.
struct Loaded {
    plan: Plan,
    boot: arch::Boot,
    vm: JoinHandle<Result<VmFd, Error>>,
}

impl Hypervisor for Machine {
    fn open(config: &Config) -> Result<Self, Error> {
        let kvm = Arc::new(kvm::open()?);
        arch::vm::check_capabilities(&kvm)?;
        let cpus = arch::vm::check_cpu_count(&kvm, config.cpus as usize)?;
        let cpuid = Cpuid::new(&kvm, &config.cpu, cpus)?;
        Ok(Self {
            kvm,
            cpus,
            cpuid,
            loaded: None,
        })
    }

    fn map_memory(&self, config: &Config) -> Result<GuestMemory, Error> {
        let size = config.memory.size;
        let bits = self.cpuid.physical_address_bits();
        if layout::memory_end(size.0) > 1u64.checked_shl(bits).unwrap_or(u64::MAX) {
            return Err(memory::Error::BeyondAddressing(size, bits).into());
        }
        Ok(memory::map(&config.memory, &arch::memory_regions(size.0))?)
    }

    fn load(
        &mut self,
        config: &Config,
        files: &BootFiles,
        memory: &GuestMemory,
    ) -> Result<String, Error> {
        // The kernel waits for grace periods of RCU when a VM gets its timer and its memory: for milliseconds, in
        // which there is enough else to do.
        let vm = {
            let (kvm, memory) = (self.kvm.clone(), memory.clone());
            std::thread::Builder::new()
                .name("vm".to_owned())
                .spawn(move || create_vm(&kvm, &memory))
                .map_err(Error::system("starting a thread"))?
        };
        reset_flag::arm(memory)?;
        let plan = Plan::new(config).map_err(AttachError::from)?;
        let boot = load(config, self.cpus, &plan, files, memory)?;
        let line = boot.to_string();
        self.loaded = Some(Loaded { plan, boot, vm });
        Ok(line)
    }

    fn assemble(self, parts: Parts<'_>) -> Result<Hardware, Error> {
        let Loaded { plan, boot, vm } = self.loaded.ok_or(Error::NotLoaded)?;
        let Parts {
            config,
            blocks,
            memory,
            lifecycle,
        } = parts;
        let vm = vm
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let vm = Arc::new(vm);
        let vcpus = (0..self.cpus)
            .map(|index| create_vcpu(&vm, index, &self.cpuid, memory, &boot))
            .collect::<Result<Vec<_>, _>>()?;

        let mut buses = Buses::default();
        add_power(&mut buses.pio, lifecycle, memory)?;
        let power_button = EventFd::new(EFD_NONBLOCK).map_err(Error::system("eventfd"))?;
        vm.register_irqfd(&power_button, layout::POWER_BUTTON_GSI)
            .map_err(Error::ioctl("KVM_IRQFD"))?;
        attach::attach(blocks, &plan, &vm, &mut buses, memory)?;
        let (serial, console) = add_serial(&mut buses.pio, &vm, &config.serial)?;

        let buses = Arc::new(buses);
        let vcpus = (0..).zip(vcpus).map(|(index, fd)| -> Box<dyn Vcpu> {
            Box::new(KvmVcpu {
                fd,
                index,
                buses: buses.clone(),
                memory: memory.clone(),
            })
        });
        Ok(Hardware {
            vcpus: vcpus.collect(),
            guest_console: serial,
            console,
            power_button: Box::new(move || power_button.write(1)),
            // The devices too: the last vCPU's thread must not be the one that drops them and waits for their I/O.
            keep: Box::new((buses, vm)),
        })
    }
}

impl GuestConsole for Serial {
    fn input(&self, bytes: &[u8]) -> usize {
        self.input(bytes)
    }

    fn input_room(&self) -> &EventFd {
        self.input_room()
    }

    fn drain(&self, timeout: Duration) -> bool {
        self.drain(timeout)
    }
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

/// A VM with its interrupt controllers, its timer and its memory.
fn create_vm(kvm: &Kvm, memory: &GuestMemory) -> Result<VmFd, Error> {
    let vm = kvm::create_vm(kvm).map_err(Error::ioctl("KVM_CREATE_VM"))?;
    arch::vm::setup_vm(&vm)?;
    kvm::register(&vm, memory)?;
    Ok(vm)
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
