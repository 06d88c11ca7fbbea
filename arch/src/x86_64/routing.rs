//! How the pins of KVM's interrupt controllers are wired, for a VMM that replaces the routing table.

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE,
    kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1, kvm_irq_routing_irqchip,
};

use crate::x86_64::layout::IOAPIC_PINS;

/// Pins of one 8259A.
const PIC_PINS: u32 = 8;

/// The routes that KVM_CREATE_IRQCHIP makes: each GSI below 24 to the I/O APIC's pin of that number,
/// and those below 16 to the pair of PICs as well. KVM_SET_GSI_ROUTING takes a whole table, so
/// whoever adds an MSI must repeat them.
pub fn irqchip_routes() -> Vec<kvm_irq_routing_entry> {
    let ioapic = (0..IOAPIC_PINS).map(|gsi| route(gsi, KVM_IRQCHIP_IOAPIC, gsi));
    let master = (0..PIC_PINS).map(|gsi| route(gsi, KVM_IRQCHIP_PIC_MASTER, gsi));
    let slave = (0..PIC_PINS).map(|pin| route(PIC_PINS + pin, KVM_IRQCHIP_PIC_SLAVE, pin));
    ioapic.chain(master).chain(slave).collect()
}

fn route(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            irqchip: kvm_irq_routing_irqchip { irqchip, pin },
        },
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pin_is_wired_once_and_kvm_takes_the_table() {
        let routes = irqchip_routes();
        assert_eq!(routes.len(), 24 + 16);
        for gsi in 0..IOAPIC_PINS {
            let wires = routes.iter().filter(|route| route.gsi == gsi).count();
            assert_eq!(wires, if gsi < 16 { 2 } else { 1 });
        }
        let Ok(kvm) = kvm_ioctls::Kvm::new() else {
            eprintln!("skipped: every_pin_is_wired_once_and_kvm_takes_the_table needs /dev/kvm");
            return;
        };
        let vm = kvm.create_vm().unwrap();
        crate::x86_64::vm::setup_vm(&vm).unwrap();
        let table = kvm_bindings::KvmIrqRouting::from_entries(&routes).unwrap();
        vm.set_gsi_routing(&table).unwrap();
    }
}
