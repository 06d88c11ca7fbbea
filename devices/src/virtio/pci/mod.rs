//! virtio over PCI, modern devices only (VIRTIO 1.2, section 4.1), on one ECAM bus.
//!
//! [`bus::PciBus`] is the root bus: configuration space by ECAM or by the old ports, and the window
//! in which BARs lie. [`transport::VirtioPci`] is a function on it. Interrupts are MSI-X messages:
//! an irqfd a vector, whose route in KVM the VMM keeps as the guest programs it. Kicks are
//! ioeventfds of length 0 at one address a queue, which the VMM moves when the guest moves the BAR.
//!
//! ```no_run
//! # fn example(host: std::sync::Arc<dyn devices::virtio::pci::PciHost>,
//! #     block: devices::virtio::block::Block, mem: devices::GuestMemory,
//! #     irqfds: Vec<vmm_sys_util::eventfd::EventFd>) -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use devices::bus::Bus;
//! use devices::virtio::pci::{PciBus, VirtioPci};
//!
//! // Functions get their BARs from this window; ACPI's `_CRS` announces it.
//! let mut pci = PciBus::new(0xc000_0000, 0x1000_0000);
//! // `irqfds`: `VirtioPci::vectors_of(&block)` of them, each registered with KVM_IRQFD.
//! let function = VirtioPci::new(Box::new(block), mem, irqfds, host)?;
//! pci.add(Arc::new(function))?;
//! let pci = Arc::new(pci);
//! let (mut mmio, mut pio) = (Bus::new(), Bus::new());
//! mmio.insert(0xe000_0000, PciBus::ECAM_LEN, pci.ecam())?;
//! mmio.insert(pci.window().0, pci.window().1, pci.memory())?;
//! pio.insert(0xcf8, 8, pci.ports())?;
//! # Ok(())
//! # }
//! ```

mod bus;
mod config;
mod msix;
mod transport;

use std::io;

use vmm_sys_util::eventfd::EventFd;

pub use bus::{PciBus, PciError, PciFunction};
pub use transport::VirtioPci;

/// An MSI message: what a vector writes where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Address in the guest.
    pub address: u64,
    /// What is written.
    pub data: u32,
}

/// What the VMM does for a PCI function. Called by vCPU threads while the guest configures it,
/// never on the data path.
pub trait PciHost: Send + Sync {
    /// From now on the irqfd of `vector` delivers `message`.
    ///
    /// # Errors
    /// The hypervisor refuses; the guest gets no such interrupts.
    fn route(&self, vector: u16, message: MsiMessage) -> io::Result<()>;

    /// From now on any write to guest address `address` is a write to `eventfd` (an ioeventfd of
    /// length 0).
    ///
    /// # Errors
    /// The hypervisor refuses; kicks arrive by the bus then, slower.
    fn add_kick(&self, address: u64, eventfd: &EventFd) -> io::Result<()>;

    /// Undoes [`PciHost::add_kick`].
    ///
    /// # Errors
    /// The hypervisor refuses.
    fn remove_kick(&self, address: u64, eventfd: &EventFd) -> io::Result<()>;
}
