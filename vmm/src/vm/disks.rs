//! The disks: opened as the configuration says, each queue on its loop, and put where the guest finds them.

use std::fmt::Write as _;
use std::sync::Arc;

use arch::acpi::VirtioMmio;
use arch::layout::{DEVICE_GSI, VIRTIO_MMIO, VIRTIO_MMIO_SIZE_BYTES};
use devices::bus::{Bus, BusDevice};
use devices::virtio::block::{Block, BlockError, BlockHandle, DiskConfig, Placement};
use devices::virtio::mmio::MmioTransport;
use iothread::{IoThread, Remote};
use kvm_ioctls::{IoEventAddress, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::memory::GuestMemory;
use crate::config::{self, Config, check, placement};

/// Offset of the virtio-mmio register of the device status (VIRTIO 1.2, 4.2.2).
const STATUS_REGISTER: u64 = 0x70;

/// Why there is a disk less than wanted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// More disks than addresses.
    #[error("--disk: {given} disks on virtio-mmio, there is room for {most}; give fewer")]
    TooMany {
        /// Number given.
        given: usize,
        /// Number possible.
        most: usize,
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
            Self::TooMany { .. } => true,
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

/// Where a device on virtio-mmio is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    address: u64,
    gsi: u32,
    /// Another device has the same interrupt.
    shared: bool,
}

impl Slot {
    /// Slots for `count` devices. Interrupts are dealt out in turn, so that they are shared only when there are more
    /// devices than pins.
    pub fn deal(count: usize) -> Result<Vec<Self>, Error> {
        let most = ((VIRTIO_MMIO.end - VIRTIO_MMIO.start) / VIRTIO_MMIO_SIZE_BYTES) as usize;
        if count > most {
            return Err(Error::TooMany { given: count, most });
        }
        let pins = DEVICE_GSI.len();
        let addresses = (VIRTIO_MMIO.start..).step_by(VIRTIO_MMIO_SIZE_BYTES as usize);
        let slots = addresses.zip(DEVICE_GSI.cycle()).take(count).enumerate();
        Ok(slots
            .map(|(index, (address, gsi))| Self {
                address,
                gsi,
                shared: index + pins < count || index >= pins,
            })
            .collect())
    }

    /// The slot as ACPI announces it.
    pub fn acpi(&self) -> VirtioMmio {
        VirtioMmio {
            // Below 4 GiB, as the layout has it.
            address: self.address as u32,
            len_bytes: VIRTIO_MMIO_SIZE_BYTES as u32,
            gsi: self.gsi,
            shared: self.shared,
        }
    }
}

/// The slots as Linux takes them on its command line, where it has no ACPI.
pub fn cmdline(slots: &[Slot]) -> String {
    slots.iter().fold(String::new(), |mut text, slot| {
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "virtio_mmio.device={}K@{:#x}:{} ",
            VIRTIO_MMIO_SIZE_BYTES >> 10,
            slot.address,
            slot.gsi
        );
        text
    })
}

/// Opens all disks of `config`. Nothing of the guest is touched yet.
pub fn open(config: &Config, main: &Remote, iothreads: &[IoThread]) -> Result<Vec<Block>, Error> {
    let ids = check::disk_ids(&config.disk);
    let disks = config.disk.iter().zip(ids);
    disks
        .map(|(disk, id)| {
            let queues = check::queues(disk);
            let homes = placement::place(disk, queues, &config.iothread).unwrap_or_default();
            let homes = homes
                .into_iter()
                .map(|home| home.map(|at| iothreads[at].remote().clone()));
            Block::new(disk_config(disk, id), Placement::new(main, homes)).map_err(|source| {
                Error::Disk {
                    place: check::disk_place(disk),
                    source,
                }
            })
        })
        .collect()
}

/// The disk's options as the device takes them.
pub fn disk_config(disk: &config::Disk, id: String) -> DiskConfig {
    let mut device = DiskConfig::new(id, &disk.path);
    device.readonly = disk.readonly;
    device.direct = disk.direct;
    device.engine = disk.engine.map(Into::into);
    device.cache = disk.cache.into();
    device.serial = disk.serial.clone().unwrap_or_default();
    device.queues = check::queues(disk);
    device.queue_size = disk.queue_size;
    device.logical_block_size = disk.logical_block_size.unwrap_or(device.logical_block_size);
    device.physical_block_size = disk.physical_block_size;
    device.discard = disk.discard;
    device.rerror = disk.rerror.into();
    device.werror = disk.werror.into();
    device.locking = disk.locking;
    device
}

/// The disks in the machine.
pub struct Disks {
    handles: Vec<BlockHandle>,
    transports: Vec<Arc<MmioTransport>>,
}

impl Disks {
    /// Puts `blocks` at `slots`: registers on the bus, kicks and interrupts by eventfds in KVM.
    pub fn attach(
        blocks: Vec<Block>,
        slots: &[Slot],
        vm: &VmFd,
        mmio: &mut Bus,
        memory: &GuestMemory,
    ) -> Result<Self, Error> {
        let mut disks = Self {
            handles: Vec::new(),
            transports: Vec::new(),
        };
        for (block, slot) in blocks.into_iter().zip(slots) {
            let handle = block.handle();
            let place = || format!("--disk id={}", handle.id());
            let failed = |source| Error::EventFd {
                place: place(),
                source,
            };
            let kvm_failed = |ioctl| {
                move |(place, source)| Error::Kvm {
                    place,
                    ioctl,
                    source,
                }
            };

            let irqfd = EventFd::new(EFD_NONBLOCK).map_err(failed)?;
            vm.register_irqfd(&irqfd, slot.gsi)
                .map_err(|source| kvm_failed("KVM_IRQFD")((place(), source)))?;
            let transport =
                MmioTransport::new(Box::new(block), memory.clone(), irqfd).map_err(failed)?;
            for queue in transport.queue_eventfds() {
                let address = IoEventAddress::Mmio(slot.address + queue.offset);
                vm.register_ioevent(&queue.eventfd, &address, queue.datamatch)
                    .map_err(|source| kvm_failed("KVM_IOEVENTFD")((place(), source)))?;
            }
            let transport = Arc::new(transport);
            mmio.insert(slot.address, MmioTransport::LEN, transport.clone())
                .map_err(|source| Error::Bus {
                    place: place(),
                    source,
                })?;
            disks.handles.push(handle);
            disks.transports.push(transport);
        }
        Ok(disks)
    }

    /// The disks, in the order of the configuration.
    pub fn handles(&self) -> &[BlockHandle] {
        &self.handles
    }

    /// Finishes the requests that are under way and stops the disks. The vCPUs have stopped.
    pub fn shut_down(&self) {
        for transport in &self.transports {
            // As a driver resets its device, which waits for what is under way.
            transport.write(STATUS_REGISTER, &0u32.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_shared_only_when_there_are_more_disks_than_pins() {
        let slots = Slot::deal(18).unwrap();
        assert!(slots.iter().all(|slot| !slot.shared));
        let gsis: std::collections::BTreeSet<u32> = slots.iter().map(|slot| slot.gsi).collect();
        assert_eq!(gsis.len(), 18);

        let slots = Slot::deal(20).unwrap();
        let shared: Vec<usize> = (0..20).filter(|at| slots[*at].shared).collect();
        assert_eq!(shared, [0, 1, 18, 19]);
        for slot in &slots {
            let same = slots.iter().filter(|other| other.gsi == slot.gsi).count();
            assert_eq!(slot.shared, same > 1);
        }
    }

    #[test]
    fn every_slot_has_its_own_address_and_there_is_an_end() {
        let slots = Slot::deal(256).unwrap();
        for pair in slots.windows(2) {
            assert_eq!(pair[1].address - pair[0].address, VIRTIO_MMIO_SIZE_BYTES);
        }
        assert!(slots[255].address < VIRTIO_MMIO.end);
        let error = Slot::deal(257).unwrap_err();
        assert!(error.to_string().contains("257 disks") && error.is_usage());
    }

    #[test]
    fn the_command_line_announces_all() {
        let text = cmdline(&Slot::deal(2).unwrap());
        assert_eq!(
            text,
            "virtio_mmio.device=4K@0xd0000000:5 virtio_mmio.device=4K@0xd0001000:6 "
        );
    }
}
