//! The disks of an x86_64 machine: registers on the buses, kicks and interrupts by eventfds in KVM.

use std::sync::Arc;

use devices::bus::Bus;
use devices::virtio::block::Block;
use devices::virtio::mmio::MmioTransport;
use kvm_ioctls::{IoEventAddress, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::Buses;
use super::mmio::{self, Slot};
use super::pci::{self, Pci};
use crate::config::{self, Config, Transport, check};
use crate::vm::memory::GuestMemory;

/// Why a disk is not in the machine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// More disks than addresses.
    #[error(transparent)]
    TooMany(#[from] mmio::TooMany),
    /// PCI.
    #[error("{place}: {source}")]
    Pci {
        /// How the user knows the disk.
        place: String,
        /// What is wrong.
        source: pci::Error,
    },
    /// Its address is taken: a mistake of this program.
    #[error("{place}: {source}")]
    Bus {
        /// How the user knows it.
        place: String,
        /// What is wrong.
        source: devices::bus::Error,
    },
    /// No eventfd.
    #[error("{place}: eventfd: {source}")]
    EventFd {
        /// How the user knows it.
        place: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// KVM does not take an eventfd.
    #[error("{place}: {ioctl}: {source}")]
    Kvm {
        /// How the user knows it.
        place: String,
        /// The ioctl.
        ioctl: &'static str,
        /// Its error.
        source: kvm_ioctls::Error,
    },
}

impl Error {
    /// Whether the user asked for a disk that cannot be.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::TooMany(_) => true,
            Self::Pci { source, .. } => source.is_usage(),
            _ => false,
        }
    }
}

/// How each disk is attached, in the order of the configuration.
pub struct Plan {
    /// The slot on virtio-mmio; none is PCI.
    slots: Vec<Option<Slot>>,
}

impl Plan {
    /// Deals out what `config`'s disks need.
    pub fn new(config: &Config) -> Result<Self, mmio::TooMany> {
        let on_mmio = |disk: &config::Disk| check::transport(disk) == Transport::Mmio;
        let count = config.disk.iter().filter(|disk| on_mmio(disk)).count();
        let mut slots = Slot::deal(count)?.into_iter();
        let slot = |disk| if on_mmio(disk) { slots.next() } else { None };
        Ok(Self {
            slots: config.disk.iter().map(slot).collect(),
        })
    }

    /// The slots on virtio-mmio.
    pub fn mmio(&self) -> Vec<Slot> {
        self.slots.iter().copied().flatten().collect()
    }

    /// Whether there must be a PCI bus.
    pub fn needs_pci(&self) -> bool {
        self.slots.iter().any(Option::is_none)
    }
}

/// Puts `blocks` where `plan` says.
pub fn attach(
    blocks: Vec<Block>,
    plan: &Plan,
    vm: &Arc<VmFd>,
    buses: &mut Buses,
    memory: &GuestMemory,
) -> Result<(), Error> {
    let mut pci = plan.needs_pci().then(|| Pci::new(vm.clone()));
    for (block, slot) in blocks.into_iter().zip(&plan.slots) {
        let place = format!("--disk id={}", block.handle().id());
        match (slot, &mut pci) {
            (Some(slot), _) => attach_to_mmio(block, *slot, vm, &mut buses.mmio, memory, &place)?,
            (None, Some(pci)) => pci
                .add(Box::new(block), memory)
                .map_err(|source| Error::Pci { place, source })?,
            (None, None) => unreachable!("a disk without a slot makes a PCI bus necessary"),
        }
    }
    if let Some(pci) = pci {
        let place = "PCI bus".to_owned();
        pci.connect(buses)
            .map_err(|source| Error::Bus { place, source })?;
    }
    Ok(())
}

fn attach_to_mmio(
    block: Block,
    slot: Slot,
    vm: &VmFd,
    mmio: &mut Bus,
    memory: &GuestMemory,
    place: &str,
) -> Result<(), Error> {
    let no_eventfd = |source| Error::EventFd {
        place: place.to_owned(),
        source,
    };
    let refused = |ioctl| {
        move |source| Error::Kvm {
            place: place.to_owned(),
            ioctl,
            source,
        }
    };
    let irqfd = EventFd::new(EFD_NONBLOCK).map_err(no_eventfd)?;
    vm.register_irqfd(&irqfd, slot.gsi)
        .map_err(refused("KVM_IRQFD"))?;
    let transport =
        MmioTransport::new(Box::new(block), memory.clone(), irqfd).map_err(no_eventfd)?;
    for queue in transport.queue_eventfds() {
        let address = IoEventAddress::Mmio(slot.address + queue.offset);
        vm.register_ioevent(&queue.eventfd, &address, queue.datamatch)
            .map_err(refused("KVM_IOEVENTFD"))?;
    }
    mmio.insert(slot.address, MmioTransport::LEN, Arc::new(transport))
        .map_err(|source| Error::Bus {
            place: place.to_owned(),
            source,
        })
}
