//! The machine by KVM. It compiles on every 64-bit host, and was never run for want of an s390x host.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use arch::s390x::kvm::{Vm, capability};
use arch::s390x::psw::mask;
use arch::s390x::sclp::Inventory;
use arch::s390x::{self, kvm::REQUIRED_CAPABILITIES};
use devices::channel::{Interruptions, IoInterruption, SubchannelId};
use devices::virtio::ccw::{AdapterIndicators, CcwHost};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::board::{Board, Floating, SclpConsole};
use super::routes::Routes;
use super::vcpu::KvmVcpu;
use crate::config::{self, Config};
use crate::vm::console::Console;
use crate::vm::error::Error;
use crate::vm::hypervisor::{BootFiles, Hardware, Hypervisor, Parts, Vcpu};
use crate::vm::kvm;
use crate::vm::memory::{self, GuestMemory};

/// Why a disk is not in the machine.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {source}")]
pub struct AttachError {
    /// How the user knows the disk.
    place: String,
    /// What is wrong.
    source: super::board::Error,
}

impl AttachError {
    /// Whether the user asked for a disk that cannot be.
    pub fn is_usage(&self) -> bool {
        matches!(self.source, super::board::Error::Full(_))
    }
}

/// The machine while it is put together.
pub struct Machine {
    kvm: OwnedFd,
    /// Once the kernel is loaded.
    entry: Option<u64>,
}

/// What `arch` found wrong, with the option that it is about where this is the processor that the program is built for.
pub fn refused(error: s390x::Error, config: &Config) -> Error {
    #[cfg(target_arch = "s390x")]
    return Error::refused_file(error, config);
    #[cfg(not(target_arch = "s390x"))]
    {
        let _ = config;
        Error::System("loading the kernel", io::Error::other(error))
    }
}

fn refused_by_kvm(error: s390x::kvm::KvmError) -> Error {
    Error::System(error.name, error.source)
}

/// Floating interruptions by KVM.
struct KvmFloating(Arc<Vm>);

impl Interruptions for KvmFloating {
    fn subchannel(&self, interruption: IoInterruption) {
        let word = interruption.subchannel.word();
        self.0
            .subchannel_interrupt(word, interruption.parameter, interruption.isc);
    }

    fn withdraw(&self, subchannel: SubchannelId) {
        self.0.withdraw(subchannel.word());
    }

    fn adapter(&self, isc: u8) {
        self.0.adapter_interrupt(isc);
    }

    fn channel_report(&self) {
        self.0.channel_report();
    }
}

impl Floating for KvmFloating {
    fn service(&self, parameter: u32) {
        self.0.service_interrupt(parameter);
    }
}

/// A device's irqfds: one a queue, each on a GSI of its own that leads to an adapter's indicator.
struct KvmIrqfds {
    vm: Arc<Vm>,
    routes: Routes,
    irqfds: Vec<EventFd>,
}

impl CcwHost for KvmIrqfds {
    fn route(&self, at: AdapterIndicators) -> io::Result<Option<Vec<EventFd>>> {
        self.vm
            .route(&self.routes.to(at))
            .map_err(io::Error::other)?;
        let irqfds = self.irqfds.iter().map(EventFd::try_clone);
        irqfds.collect::<io::Result<_>>().map(Some)
    }

    fn unroute(&self) {
        if let Err(error) = self.vm.unroute(&self.routes.gsis()) {
            tracing::warn!("adapter interruptions are still routed: {error}");
        }
    }
}

impl Hypervisor for Machine {
    fn open(config: &Config) -> Result<Self, Error> {
        let kvm = kvm::open()?;
        if let Some((_, name)) = missing(&kvm) {
            let reason = format!("this host's KVM lacks {name}: it needs a newer kernel");
            return Err(Error::System("/dev/kvm", io::Error::other(reason)));
        }
        if config.cpus != 1 {
            let problem = "more vCPUs than one are not supported on s390x; give --cpus 1";
            return Err(config::Error::new(format!("--cpus {}", config.cpus), problem).into());
        }
        Ok(Self { kvm, entry: None })
    }

    fn map_memory(&self, config: &Config) -> Result<GuestMemory, Error> {
        let regions = s390x::memory_regions(config.memory.size.0);
        Ok(memory::map(&config.memory, &regions)?)
    }

    fn load(
        &mut self,
        config: &Config,
        files: &BootFiles,
        memory: &GuestMemory,
    ) -> Result<String, Error> {
        let cmdline = config.cmdline.as_bytes();
        let boot = s390x::load_images(memory, &files.kernel, files.initrd.as_ref(), cmdline)
            .map_err(|error| refused(error, config))?;
        self.entry = Some(boot.entry);
        Ok(boot.to_string())
    }

    fn assemble(self, parts: Parts<'_>) -> Result<Hardware, Error> {
        let entry = self.entry.ok_or(Error::NotLoaded)?;
        let Parts {
            config,
            blocks,
            memory,
            ..
        } = parts;
        let vm = Arc::new(Vm::new(&self.kvm, memory).map_err(refused_by_kvm)?);
        let mut fd = vm.create_vcpu(0).map_err(refused_by_kvm)?;
        fd.set_psw(mask::AMODE_64, entry);

        let floating = Arc::new(KvmFloating(vm.clone()));
        let (output, console) = Console::open(&config.serial)?;
        let inventory = Inventory {
            memory_bytes: config.memory.size.0,
            cpus: 1,
        };
        let (sclp, guest_console) = SclpConsole::new(inventory, output, floating.clone())
            .map_err(Error::system("starting the console's thread"))?;
        let mut board = Board::new(memory.clone(), 1, sclp, floating);
        attach(&mut board, &vm, blocks)?;

        let board = Arc::new(board);
        let guest_console = Arc::new(guest_console);
        let quiesce = guest_console.clone();
        let vcpu: Box<dyn Vcpu> = Box::new(KvmVcpu::new(fd, board.clone()));
        Ok(Hardware {
            vcpus: vec![vcpu],
            guest_console,
            console,
            power_button: Box::new(move || quiesce.quiesce()),
            keep: Box::new((board, vm)),
        })
    }
}

fn no_disk(error: AttachError) -> Error {
    #[cfg(target_arch = "s390x")]
    return error.into();
    #[cfg(not(target_arch = "s390x"))]
    Error::System("attaching a disk", io::Error::other(error))
}

fn missing(kvm: &OwnedFd) -> Option<(u32, &'static str)> {
    let capabilities = REQUIRED_CAPABILITIES.iter().copied();
    let mut missing = capabilities.filter(|(number, _)| capability(kvm, *number) <= 0);
    missing.next()
}

fn attach(
    board: &mut Board,
    vm: &Arc<Vm>,
    blocks: Vec<devices::virtio::block::Block>,
) -> Result<(), Error> {
    let mut next_gsi = 0;
    for block in blocks {
        let place = format!("--disk id={}", block.handle().id());
        let queues = devices::virtio::device::VirtioDevice::queue_max_sizes(&block).len();
        let routes = Routes::new(next_gsi, queues);
        next_gsi = routes.gsis().end;
        let mut irqfds = Vec::new();
        for gsi in routes.gsis() {
            let irqfd = EventFd::new(EFD_NONBLOCK).map_err(Error::system("eventfd"))?;
            vm.add_irqfd(gsi, &irqfd).map_err(refused_by_kvm)?;
            irqfds.push(irqfd);
        }
        let host = KvmIrqfds {
            vm: vm.clone(),
            routes,
            irqfds,
        };
        let attached = board.attach(Box::new(block), Box::new(host));
        let (word, kicks) = attached.map_err(|source| no_disk(AttachError { place, source }))?;
        for kick in kicks {
            vm.add_kick(word, kick.datamatch, &*kick.eventfd)
                .map_err(refused_by_kvm)?;
        }
    }
    Ok(())
}

/// What this host's KVM can do, for `pollux check`.
pub mod probe {
    use super::*;

    /// Looks at /dev/kvm: one line for each thing that is good, or an error for one that makes a VM impossible.
    ///
    /// # Errors
    /// There is no KVM.
    pub fn probe() -> Result<Vec<Result<String, String>>, kvm::Error> {
        let kvm = kvm::open()?;
        let capabilities = match missing(&kvm) {
            None => Ok("KVM has all capabilities that are needed".to_owned()),
            Some((_, name)) => Err(format!(
                "this host's KVM lacks {name}: it needs a newer kernel"
            )),
        };
        Ok(vec![capabilities])
    }
}
