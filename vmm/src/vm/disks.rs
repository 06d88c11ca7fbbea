//! The disks: opened as the configuration says, each queue on its loop, and put where the guest finds them.

use std::sync::Arc;

use devices::bus::Bus;
use devices::virtio::block::{Block, BlockError, BlockHandle, DiskConfig, Placement};
use devices::virtio::mmio::MmioTransport;
use iothread::{IoThread, Remote};
use kvm_ioctls::{IoEventAddress, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::memory::GuestMemory;
use super::mmio::{self, Slot};
use super::pci::{self, Pci};
use crate::config::{self, Config, Transport, check, placement};

/// Why there is a disk less than wanted.
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
    /// The disk itself.
    #[error("{place}: {source}")]
    Disk {
        /// How the user knows it.
        place: String,
        /// What is wrong.
        source: BlockError,
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
            Self::Disk { source, .. } => {
                matches!(
                    source,
                    BlockError::Config(_) | BlockError::Image(_) | BlockError::Engine(_)
                )
            }
            _ => false,
        }
    }
}

/// Opens all disks of `config`. Nothing of the guest is touched yet.
pub fn open(config: &Config, main: &Remote, iothreads: &[IoThread]) -> Result<Vec<Block>, Error> {
    let ids = check::disk_ids(&config.disk);
    let disks = config.disk.iter().zip(ids);
    disks
        .map(|(disk, id)| {
            let queues = check::queues(disk, config.cpus);
            let homes = placement::place(disk, queues, &config.iothread).unwrap_or_default();
            let homes = homes
                .into_iter()
                .map(|home| home.map(|at| iothreads[at].remote().clone()));
            Block::new(disk_config(disk, id, queues), Placement::new(main, homes)).map_err(
                |source| Error::Disk {
                    place: check::disk_place(disk),
                    source,
                },
            )
        })
        .collect()
}

/// The disk's options as the device takes them.
pub fn disk_config(disk: &config::Disk, id: String, queues: u16) -> DiskConfig {
    let mut device = DiskConfig::new(id, &disk.path);
    device.readonly = disk.readonly;
    device.direct = disk.direct;
    device.engine = disk.engine.map(Into::into);
    device.cache = disk.cache.into();
    device.serial = disk.serial.clone().unwrap_or_default();
    device.queues = queues;
    device.queue_size = disk.queue_size;
    device.logical_block_size = disk.logical_block_size.unwrap_or(device.logical_block_size);
    device.physical_block_size = disk.physical_block_size;
    device.discard = disk.discard;
    device.rerror = disk.rerror.into();
    device.werror = disk.werror.into();
    device.locking = disk.locking;
    device
}

/// How each disk is attached, in the order of the configuration.
pub struct Plan {
    /// The slot on virtio-mmio; none is PCI.
    slots: Vec<Option<Slot>>,
}

impl Plan {
    /// Deals out what `config`'s disks need.
    pub fn new(config: &Config) -> Result<Self, Error> {
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

/// The address spaces of the machine, while it is put together.
#[derive(Default)]
pub struct Buses {
    /// Port I/O.
    pub pio: Bus,
    /// Memory-mapped I/O.
    pub mmio: Bus,
}

/// The disks in the machine.
pub struct Disks {
    handles: Vec<BlockHandle>,
}

impl Disks {
    /// Puts `blocks` where `plan` says: registers on the buses, kicks and interrupts by eventfds in KVM.
    pub fn attach(
        blocks: Vec<Block>,
        plan: &Plan,
        vm: &Arc<VmFd>,
        buses: &mut Buses,
        memory: &GuestMemory,
    ) -> Result<Self, Error> {
        let handles = blocks.iter().map(Block::handle).collect();
        let mut pci = plan.needs_pci().then(|| Pci::new(vm.clone()));
        for (block, slot) in blocks.into_iter().zip(&plan.slots) {
            let place = format!("--disk id={}", block.handle().id());
            match (slot, &mut pci) {
                (Some(slot), _) => {
                    attach_to_mmio(block, *slot, vm, &mut buses.mmio, memory, &place)?
                }
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
        Ok(Self { handles })
    }

    /// The disks, in the order of the configuration.
    pub fn handles(&self) -> &[BlockHandle] {
        &self.handles
    }

    /// Finishes the requests that are under way and stops the disks. The vCPUs have stopped.
    pub fn shut_down(&self) {
        for handle in &self.handles {
            handle.shut_down();
        }
    }
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
