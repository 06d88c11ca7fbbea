//! Registers: any access in any order, and queues at any place, before a driver that does it right.

use std::cell::RefCell;
use std::sync::Arc;

use arbitrary::{Arbitrary, Unstructured};
use devices::bus::{Bus, BusDevice};
use devices::virtio::pci::{MsiMessage, PciBus, PciHost, VirtioPci};
use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::machine::{self, DESC, Descriptor, End, Machine};

/// Most steps of an input.
const MAX_STEPS: usize = 64;

thread_local! {
    static MACHINE: RefCell<Machine> = RefCell::default();
}

#[derive(Debug, Arbitrary)]
enum Step {
    /// A queue's size and the places of its three parts.
    Queue {
        size: u16,
        places: [u64; 3],
        ready: bool,
    },
    Features(u64),
    Status(u8),
    /// Anything in guest memory, mostly where rings are put.
    Memory(u16, u64),
    Kick(u8),
}

/// The target for a queue's geometry.
pub fn geometry(input: &[u8]) {
    let Ok(steps) = Vec::<Step>::arbitrary_take_rest(Unstructured::new(input)) else {
        return;
    };
    MACHINE.with_borrow_mut(|machine| {
        machine.reset();
        for step in steps.iter().take(MAX_STEPS) {
            take(machine, step);
        }
        check_works(machine);
    });
}

fn take(machine: &Machine, step: &Step) {
    match *step {
        Step::Queue {
            size,
            places,
            ready,
        } => {
            machine.set(reg::VIRTIO_MMIO_QUEUE_SEL, 0);
            machine.set(reg::VIRTIO_MMIO_QUEUE_NUM, size.into());
            let registers = [
                reg::VIRTIO_MMIO_QUEUE_DESC_LOW,
                reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW,
                reg::VIRTIO_MMIO_QUEUE_USED_LOW,
            ];
            for (register, place) in registers.into_iter().zip(places) {
                machine.set(register, place as u32);
                machine.set(register + 4, (place >> 32) as u32);
            }
            machine.set(reg::VIRTIO_MMIO_QUEUE_READY, ready.into());
        }
        Step::Features(bits) => {
            for half in [0, 1] {
                machine.set(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
                machine.set(
                    reg::VIRTIO_MMIO_DRIVER_FEATURES,
                    (bits >> (32 * half)) as u32,
                );
            }
        }
        Step::Status(status) => machine.set(reg::VIRTIO_MMIO_STATUS, status.into()),
        Step::Memory(at, value) => {
            let at = GuestAddress(u64::from(at));
            machine.mem.write_obj(value, at).unwrap();
        }
        Step::Kick(queue) => machine.set(reg::VIRTIO_MMIO_QUEUE_NOTIFY, queue.into()),
    }
}

/// Whatever was done, a driver that resets the device is served.
fn check_works(machine: &mut Machine) {
    machine.start(true);
    let flush = [4u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    machine
        .mem
        .write_slice(&flush, GuestAddress(0xa000))
        .unwrap();
    machine.mem.write_obj(0xffu8, GuestAddress(0xb000)).unwrap();
    let header = Descriptor {
        address: 0xa000,
        len: 16,
        flags: 1,
        next: 1,
    };
    let status = Descriptor {
        address: 0xb000,
        len: 1,
        flags: 2,
        next: 0,
    };
    machine.describe(DESC, 0, header);
    machine.describe(DESC, 1, status);
    machine.offer(0, 0);
    assert_eq!(machine.wait(), End::Used);
    assert_eq!(machine.mem.read_obj::<u8>(GuestAddress(0xb000)).unwrap(), 0);
    machine.reset();
}

#[derive(Debug, Arbitrary)]
struct Access {
    place: u8,
    offset: u64,
    len: u8,
    /// What is written; nothing for a read.
    value: Option<u64>,
}

/// Reads or writes up to eight bytes, at least one.
fn access(device: &dyn BusDevice, offset: u64, access: &Access) {
    let len = usize::from(access.len % 8) + 1;
    match access.value {
        Some(value) => device.write(offset, &value.to_le_bytes()[..len]),
        None => device.read(offset, &mut [0; 8][..len]),
    }
}

/// The target for virtio-mmio's registers.
pub fn mmio(input: &[u8]) {
    let Ok(steps) = Vec::<Access>::arbitrary_take_rest(Unstructured::new(input)) else {
        return;
    };
    MACHINE.with_borrow_mut(|machine| {
        machine.reset();
        for step in steps.iter().take(MAX_STEPS) {
            // Mostly where there is something.
            let offset = match step.place % 4 {
                0 => step.offset % 0x1000,
                _ => step.offset % 0x120,
            };
            access(&machine.transport, offset, step);
        }
        check_works(machine);
    });
}

struct Host;

impl PciHost for Host {
    fn route(&self, _: u16, _: MsiMessage) -> std::io::Result<()> {
        Ok(())
    }
    fn add_kick(&self, _: u64, _: &EventFd) -> std::io::Result<()> {
        Ok(())
    }
    fn remove_kick(&self, _: u64, _: &EventFd) -> std::io::Result<()> {
        Ok(())
    }
}

const WINDOW: (u64, u64) = (0xc000_0000, 0x100_0000);
const ECAM: u64 = 0xe000_0000;
const PORTS: u64 = 0xcf8;
/// Where the first function's configuration space begins in ECAM, and its length.
const FUNCTION: u64 = 1 << 15;
const FUNCTION_BYTES: u64 = 4096;

/// The target for configuration space, BARs and the old ports.
pub fn pci(input: &[u8]) {
    let Ok(steps) = Vec::<Access>::arbitrary_take_rest(Unstructured::new(input)) else {
        return;
    };
    let (_image, iothread, block) = machine::disk();
    let vectors = VirtioPci::vectors_of(&block);
    let irqfds = (0..vectors).map(|_| EventFd::new(0).unwrap()).collect();
    let function = VirtioPci::new(Box::new(block), machine::ram(), irqfds, Arc::new(Host));
    let mut pci = PciBus::new(WINDOW.0, WINDOW.1);
    pci.add(Arc::new(function.unwrap())).unwrap();
    let pci = Arc::new(pci);
    let (mut memory, mut ports) = (Bus::new(), Bus::new());
    memory.insert(ECAM, PciBus::ECAM_LEN, pci.ecam()).unwrap();
    memory.insert(WINDOW.0, WINDOW.1, pci.memory()).unwrap();
    ports.insert(PORTS, 8, pci.ports()).unwrap();
    for step in steps.iter().take(MAX_STEPS) {
        let len = usize::from(step.len % 8) + 1;
        let (bus, address) = match step.place % 4 {
            0 => (&memory, ECAM + FUNCTION + step.offset % FUNCTION_BYTES),
            1 => (&memory, WINDOW.0 + step.offset % 0x4000),
            2 => (&ports, PORTS + step.offset % 8),
            _ => (
                &memory,
                WINDOW.0 + step.offset % (PciBus::ECAM_LEN + ECAM - WINDOW.0),
            ),
        };
        let _ = match step.value {
            Some(value) => bus.write(address, &value.to_le_bytes()[..len]),
            None => bus.read(address, &mut [0; 8][..len]),
        };
    }
    drop((memory, ports, pci));
    iothread.stop().unwrap();
}
