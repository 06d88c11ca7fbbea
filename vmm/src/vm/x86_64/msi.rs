//! MSI-X vectors and kicks of PCI functions in KVM.
//!
//! A vector is an irqfd on a GSI of its own; where the GSI leads is an entry of the VM's routing table. KVM takes that table
//! only whole, so it is kept here, with the entries of the interrupt controllers that KVM makes by itself.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use arch::layout::IOAPIC_PINS;
use arch::routing::irqchip_routes;
use devices::virtio::pci::{MsiMessage, PciHost};
use kvm_bindings::{
    KVM_IRQ_ROUTING_MSI, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1,
    kvm_irq_routing_msi,
};
use kvm_ioctls::{Cap, IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Why a function gets no vectors.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The routing table has an end.
    #[error("this KVM routes {0} interrupts, the disks need more; give fewer disks or queues=")]
    Full(u32),
    /// No eventfd.
    #[error("eventfd: {0}")]
    EventFd(io::Error),
    /// KVM does not take an eventfd.
    #[error("KVM_IRQFD: {0}")]
    IrqFd(kvm_ioctls::Error),
}

/// The routing table of a VM.
#[derive(Debug)]
pub struct MsiRoutes {
    vm: Arc<VmFd>,
    table: Mutex<Table>,
}

#[derive(Debug)]
struct Table {
    /// Where each GSI leads, once the guest has said so.
    messages: BTreeMap<u32, MsiMessage>,
    next_gsi: u32,
    end_gsi: u32,
}

impl MsiRoutes {
    /// A table without MSIs.
    pub fn new(vm: Arc<VmFd>) -> Self {
        // KVM_CAP_IRQ_ROUTING is the number of GSIs that can be routed.
        let end_gsi = u32::try_from(vm.check_extension_int(Cap::IrqRouting)).unwrap_or(0);
        Self {
            vm,
            table: Mutex::new(Table {
                messages: BTreeMap::new(),
                next_gsi: IOAPIC_PINS,
                end_gsi,
            }),
        }
    }

    /// GSIs and irqfds for `count` vectors of a new function, and the function's way to KVM.
    pub fn add_function(
        self: &Arc<Self>,
        count: usize,
    ) -> Result<(Vec<EventFd>, Arc<dyn PciHost>), Error> {
        let gsis = self.reserve(count)?;
        let irqfds = gsis
            .clone()
            .map(|gsi| {
                let irqfd = EventFd::new(EFD_NONBLOCK).map_err(Error::EventFd)?;
                self.vm.register_irqfd(&irqfd, gsi).map_err(Error::IrqFd)?;
                Ok(irqfd)
            })
            .collect::<Result<_, _>>()?;
        let host = Function {
            routes: self.clone(),
            gsis,
        };
        Ok((irqfds, Arc::new(host)))
    }

    fn reserve(&self, count: usize) -> Result<Range<u32>, Error> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let start = table.next_gsi;
        let end = u32::try_from(count)
            .ok()
            .and_then(|count| start.checked_add(count));
        match end.filter(|end| *end <= table.end_gsi) {
            Some(end) => {
                table.next_gsi = end;
                Ok(start..end)
            }
            None => Err(Error::Full(table.end_gsi)),
        }
    }

    fn set(&self, gsi: u32, message: MsiMessage) -> io::Result<()> {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        if table.messages.insert(gsi, message) == Some(message) {
            return Ok(());
        }
        let msis = table
            .messages
            .iter()
            .map(|(gsi, message)| msi_route(*gsi, *message));
        let entries: Vec<_> = irqchip_routes().into_iter().chain(msis).collect();
        let routing = KvmIrqRouting::from_entries(&entries)
            .map_err(|error| io::Error::other(format!("routing table: {error:?}")))?;
        // Under the lock: an older table must not come last.
        self.vm.set_gsi_routing(&routing).map_err(into_io)
    }
}

fn msi_route(gsi: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            msi: kvm_irq_routing_msi {
                // The halves of a 64-bit address.
                address_lo: message.address as u32,
                address_hi: (message.address >> 32) as u32,
                data: message.data,
                ..Default::default()
            },
        },
        ..Default::default()
    }
}

fn into_io(error: kvm_ioctls::Error) -> io::Error {
    io::Error::from_raw_os_error(error.errno())
}

/// One function's part of the table.
struct Function {
    routes: Arc<MsiRoutes>,
    gsis: Range<u32>,
}

impl PciHost for Function {
    fn route(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        match self.gsis.clone().nth(vector.into()) {
            Some(gsi) => self.routes.set(gsi, message),
            None => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        }
    }

    fn add_kick(&self, address: u64, eventfd: &EventFd) -> io::Result<()> {
        let address = IoEventAddress::Mmio(address);
        self.routes
            .vm
            .register_ioevent(eventfd, &address, NoDatamatch)
            .map_err(into_io)
    }

    fn remove_kick(&self, address: u64, eventfd: &EventFd) -> io::Result<()> {
        let address = IoEventAddress::Mmio(address);
        self.routes
            .vm
            .unregister_ioevent(eventfd, &address, NoDatamatch)
            .map_err(into_io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routes() -> Option<Arc<MsiRoutes>> {
        let Ok(kvm) = kvm_ioctls::Kvm::new() else {
            eprintln!("skipped: needs /dev/kvm");
            return None;
        };
        let vm = kvm.create_vm().unwrap();
        arch::vm::setup_vm(&vm).unwrap();
        Some(Arc::new(MsiRoutes::new(Arc::new(vm))))
    }

    #[test]
    fn every_vector_has_a_gsi_of_its_own_and_kvm_takes_its_route() {
        let Some(routes) = routes() else { return };
        let message = MsiMessage {
            address: 0xfee0_0000,
            data: 0x31,
        };
        for function in 0..3 {
            let (irqfds, host) = routes.add_function(4).unwrap();
            assert_eq!(irqfds.len(), 4);
            host.route(3, message).unwrap();
            host.route(3, message).unwrap();
            assert!(host.route(4, message).is_err());
            let gsi = IOAPIC_PINS + function * 4 + 3;
            assert!(routes.table.lock().unwrap().messages.contains_key(&gsi));
        }
    }

    #[test]
    fn more_vectors_than_kvm_routes_are_refused() {
        let Some(routes) = routes() else { return };
        let end = routes.table.lock().unwrap().end_gsi;
        assert!(matches!(routes.reserve(end as usize), Err(Error::Full(most)) if most == end));
        assert_eq!(
            routes.reserve((end - IOAPIC_PINS) as usize).unwrap().end,
            end
        );
        assert!(routes.reserve(1).is_err());
    }

    #[test]
    fn kicks_come_and_go() {
        let Some(routes) = routes() else { return };
        let (_irqfds, host) = routes.add_function(1).unwrap();
        let kick = EventFd::new(EFD_NONBLOCK).unwrap();
        host.add_kick(0xc000_3000, &kick).unwrap();
        assert!(
            host.add_kick(0xc000_3000, &kick).is_err(),
            "twice at one address"
        );
        host.remove_kick(0xc000_3000, &kick).unwrap();
        host.add_kick(0xc000_3000, &kick).unwrap();
    }
}
