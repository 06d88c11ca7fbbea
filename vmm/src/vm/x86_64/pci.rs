//! The PCI bus: one root bus with its configuration space in ECAM, for devices with MSI-X.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use arch::acpi::PciHostBridge;
use arch::layout::{ECAM, PCI_MMIO32};
use devices::bus;
use devices::virtio::device::VirtioDevice;
use devices::virtio::pci::{PciBus, PciError, VirtioPci};
use kvm_ioctls::VmFd;

use super::Buses;
use super::msi::{self, MsiRoutes};
use crate::vm::memory::GuestMemory;

/// Ports of the configuration mechanism that is older than ECAM.
const CONFIG_PORTS: Range<u64> = 0xcf8..0xd00;

/// Why a function is not on the bus.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No place.
    #[error("{0}; give fewer disks")]
    Bus(#[from] PciError),
    /// No vectors.
    #[error(transparent)]
    Msi(#[from] msi::Error),
    /// The function itself.
    #[error("{0}")]
    Function(#[from] io::Error),
}

impl Error {
    /// Whether the user asked for more than there is.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Bus(_) | Self::Msi(msi::Error::Full(_)))
    }
}

/// The bus while it is filled.
pub struct Pci {
    bus: PciBus,
    routes: Arc<MsiRoutes>,
}

impl Pci {
    /// An empty bus.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self {
            bus: PciBus::new(PCI_MMIO32.start, PCI_MMIO32.end - PCI_MMIO32.start),
            routes: Arc::new(MsiRoutes::new(vm)),
        }
    }

    /// Adds a virtio device as a function of its own.
    pub fn add(
        &mut self,
        device: Box<dyn VirtioDevice>,
        memory: &GuestMemory,
    ) -> Result<(), Error> {
        let vectors = VirtioPci::vectors_of(&*device);
        let (irqfds, host) = self.routes.add_function(vectors)?;
        let function = VirtioPci::new(device, memory.clone(), irqfds, host)?;
        self.bus.add(Arc::new(function))?;
        Ok(())
    }

    /// Puts configuration space and BARs where the guest finds them.
    pub fn connect(self, buses: &mut Buses) -> Result<(), bus::Error> {
        let bus = Arc::new(self.bus);
        let (window, len) = bus.window();
        buses
            .mmio
            .insert(ECAM.start, PciBus::ECAM_LEN, bus.ecam())?;
        buses.mmio.insert(window, len, bus.memory())?;
        let ports = CONFIG_PORTS.end - CONFIG_PORTS.start;
        buses.pio.insert(CONFIG_PORTS.start, ports, bus.ports())
    }
}

/// The bus as ACPI announces it.
pub fn host_bridge() -> PciHostBridge {
    PciHostBridge {
        ecam: ECAM.start,
        last_bus: 0,
        // Both ends are below 4 GiB, as the layout has them.
        mmio32: PCI_MMIO32.start as u32..PCI_MMIO32.end as u32,
        mmio64: None,
    }
}
