use super::*;
use crate::bus::Bus;
use crate::virtio::features::{EVENT_IDX, VERSION_1};
use crate::virtio::pci::{MsiMessage, PciBus, PciError};
use crate::virtio::testing::{DriverQueue, ram};
use crate::virtio::testing_device::{Dummy, Log, OFFERED};
use proptest::prelude::*;
use std::collections::HashMap;
use vmm_sys_util::eventfd::EFD_NONBLOCK;

const ECAM: u64 = 0xe000_0000;
const WINDOW: u64 = 0xc000_0000;

/// What the VMM would have told KVM.
#[derive(Default)]
struct Host {
    routes: Mutex<HashMap<u16, MsiMessage>>,
    kicks: Mutex<Vec<u64>>,
}

impl PciHost for Host {
    fn route(&self, vector: u16, message: MsiMessage) -> io::Result<()> {
        self.routes.lock().unwrap().insert(vector, message);
        Ok(())
    }
    fn add_kick(&self, address: u64, _: &EventFd) -> io::Result<()> {
        self.kicks.lock().unwrap().push(address);
        Ok(())
    }
    fn remove_kick(&self, address: u64, _: &EventFd) -> io::Result<()> {
        let mut kicks = self.kicks.lock().unwrap();
        let before = kicks.len();
        kicks.retain(|&kick| kick != address);
        assert_eq!(kicks.len() + 1, before, "{address:#x} was not registered");
        Ok(())
    }
}

struct Rig {
    mmio: Bus,
    pio: Bus,
    host: Arc<Host>,
    irqs: Vec<EventFd>,
    log: Arc<Mutex<Log>>,
    mem: GuestMemory,
}

fn function(host: &Arc<Host>, mem: &GuestMemory) -> (VirtioPci, Vec<EventFd>, Arc<Mutex<Log>>) {
    let (device, log) = Dummy::new();
    assert_eq!(VirtioPci::vectors_of(&device), 3);
    let irqs: Vec<EventFd> = (0..3)
        .map(|_| EventFd::new(EFD_NONBLOCK).unwrap())
        .collect();
    let clones = irqs.iter().map(|fd| fd.try_clone().unwrap()).collect();
    let function = VirtioPci::new(Box::new(device), mem.clone(), clones, host.clone()).unwrap();
    (function, irqs, log)
}

impl Rig {
    fn new() -> Rig {
        let host = Arc::new(Host::default());
        let mem = ram(1 << 20);
        let (function, irqs, log) = function(&host, &mem);
        let mut pci = PciBus::new(WINDOW, 0x1000_0000);
        assert_eq!(pci.add(Arc::new(function)), Ok(8));
        let pci = Arc::new(pci);
        let (mut mmio, mut pio) = (Bus::new(), Bus::new());
        mmio.insert(ECAM, PciBus::ECAM_LEN, pci.ecam()).unwrap();
        let (base, len) = pci.window();
        mmio.insert(base, len, pci.memory()).unwrap();
        pio.insert(0xcf8, 8, pci.ports()).unwrap();
        Rig {
            mmio,
            pio,
            host,
            irqs,
            log,
            mem,
        }
    }

    fn read(&self, addr: u64, width: usize) -> u64 {
        let mut data = [0; 8];
        self.mmio.read(addr, &mut data[..width]);
        u64::from_le_bytes(data)
    }

    fn write(&self, addr: u64, width: usize, value: u64) {
        self.mmio.write(addr, &value.to_le_bytes()[..width]);
    }

    /// A register of the function's configuration space.
    fn config(&self, register: u64) -> u64 {
        ECAM + (8 << 12) + register
    }

    /// The capabilities: id, and offset in configuration space.
    fn capabilities(&self) -> Vec<(u8, u64)> {
        let mut found = Vec::new();
        let mut at = self.read(self.config(0x34), 1);
        while at != 0 {
            assert!(at.is_multiple_of(4) && found.len() < 16);
            found.push((self.read(self.config(at), 1) as u8, at));
            at = self.read(self.config(at + 1), 1);
        }
        found
    }

    fn msix(&self) -> u64 {
        let all = self.capabilities();
        all.iter().find(|(id, _)| *id == 0x11).unwrap().1
    }

    /// Offset in the BAR of a virtio structure.
    fn structure(&self, kind: u64) -> u64 {
        let found = self
            .capabilities()
            .into_iter()
            .find(|&(id, at)| id == 0x09 && self.read(self.config(at + 3), 1) == kind);
        self.read(self.config(found.unwrap().1 + 8), 4)
    }

    fn enable(&self) -> u64 {
        self.write(self.config(0x04), 2, 6);
        let low = self.read(self.config(0x10), 4);
        assert_eq!(low & 0xf, 4, "a 64-bit memory BAR");
        (low & !0xf) | self.read(self.config(0x14), 4) << 32
    }

    fn enable_msix(&self, bar: u64) {
        let control = self.config(self.msix() + 2);
        self.write(control, 2, 0xc000);
        for vector in 0..3 {
            let entry = bar + MSIX_TABLE + 16 * vector;
            self.write(entry, 4, 0xfee0_0000 + 0x1000 * vector);
            self.write(entry + 4, 4, 0);
            self.write(entry + 8, 4, 0x20 + vector);
            self.write(entry + 12, 4, 0);
        }
        self.write(control, 2, 0x8000);
    }

    fn start(&self) -> u64 {
        let bar = self.enable();
        self.enable_msix(bar);
        let common = bar + self.structure(1);
        self.write(common + 0x14, 1, 0);
        self.write(common + 0x14, 1, 3);
        for half in 0..2 {
            self.write(common + 8, 4, half);
            let features = VERSION_1 | EVENT_IDX;
            self.write(common + 0xc, 4, (features >> (32 * half)) & 0xffff_ffff);
        }
        self.write(common + 0x14, 1, 0xb);
        assert_eq!(self.read(common + 0x14, 1), 0xb);
        self.write(common + 0x10, 2, 0);
        for (index, base) in [(0u64, 0x1000u64), (1, 0x8000)] {
            let queue = DriverQueue::new(&self.mem, base, 64);
            self.write(common + 0x16, 2, index);
            self.write(common + 0x18, 2, 64);
            self.write(common + 0x1a, 2, index + 1);
            assert_eq!(self.read(common + 0x1a, 2), index + 1);
            self.write(common + 0x20, 8, queue.layout.desc);
            self.write(common + 0x28, 4, queue.layout.avail);
            self.write(common + 0x2c, 4, 0);
            self.write(common + 0x30, 4, queue.layout.used);
            self.write(common + 0x34, 4, 0);
            self.write(common + 0x1c, 2, 1);
        }
        self.write(common + 0x14, 1, 0xf);
        assert_eq!(self.read(common + 0x14, 1), 0xf);
        bar
    }
}

#[test]
fn the_bus_is_found_by_ecam_and_by_ports() {
    let rig = Rig::new();
    assert_eq!(rig.read(ECAM, 4), 0x0008_1b36, "host bridge");
    assert_eq!(rig.read(rig.config(0), 4), 0x1042_1af4, "virtio-blk");
    assert_eq!(rig.read(rig.config(8), 4), 0x0180_0001);
    assert_eq!(rig.read(rig.config(0x0e), 1), 0);
    assert_eq!(rig.read(rig.config(0x06), 2) & 0x10, 0x10);
    assert_eq!(
        rig.read(rig.config(0x100), 4),
        0,
        "no extended capabilities"
    );
    assert_eq!(rig.read(ECAM + (9 << 12), 4), 0xffff_ffff, "nothing there");
    let port = |register: u32| {
        let address = 0x8000_0000 | 8 << 8 | register;
        rig.pio.write(0xcf8, &address.to_le_bytes());
        let mut data = [0; 4];
        rig.pio.read(0xcfc, &mut data);
        u32::from_le_bytes(data)
    };
    assert_eq!(port(0), 0x1042_1af4);
    let mut device = [0; 2];
    rig.pio.read(0xcfe, &mut device);
    assert_eq!(u16::from_le_bytes(device), 0x1042);
    rig.pio.write(0xcf8, &0x8001_0000u32.to_le_bytes());
    let mut data = [0; 4];
    rig.pio.read(0xcfc, &mut data);
    assert_eq!(data, [0xff; 4], "no other bus");
}

#[test]
fn capabilities_lie_within_the_bar_and_do_not_overlap() {
    let rig = Rig::new();
    let capabilities = rig.capabilities();
    assert_eq!(capabilities.len(), 6);
    let mut ranges = vec![(MSIX_TABLE, 3 * 16), (MSIX_PENDING, 8)];
    for (id, at) in capabilities {
        if id == 0x09 {
            let kind = rig.read(rig.config(at + 3), 1);
            assert_eq!(rig.read(rig.config(at + 4), 1), 0, "BAR 0");
            let offset = rig.read(rig.config(at + 8), 4);
            let len = rig.read(rig.config(at + 12), 4);
            match kind {
                1 => assert!(len >= 56),
                2 => {
                    assert_eq!(rig.read(rig.config(at + 16), 4), 4);
                    assert_eq!(len, 8);
                }
                5 => continue,
                _ => assert!(len >= 1),
            }
            ranges.push((offset, len));
        }
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{ranges:x?}");
    }
    let last = ranges.last().unwrap();
    assert!(last.0 + last.1 <= BAR_LEN);
    let msix = rig.msix();
    assert_eq!(rig.read(rig.config(msix + 2), 2), 2, "three vectors");
}

#[test]
fn the_bar_is_sized_moved_and_switched_and_the_kicks_follow() {
    let rig = Rig::new();
    let bar = rig.read(rig.config(0x10), 4) & !0xf;
    assert_eq!(bar, WINDOW, "placed in the window");
    assert!(rig.host.kicks.lock().unwrap().is_empty());
    assert_eq!(rig.read(bar, 4), 0xffff_ffff, "off");
    // Sizing, as every kernel does it.
    rig.write(rig.config(0x10), 4, 0xffff_ffff);
    rig.write(rig.config(0x14), 4, 0xffff_ffff);
    assert_eq!(rig.read(rig.config(0x10), 4), 0xffff_0004);
    assert_eq!(rig.read(rig.config(0x14), 4), 0xffff_ffff);
    rig.write(rig.config(0x10), 4, bar);
    rig.write(rig.config(0x14), 4, 0);
    rig.write(rig.config(0x04), 2, 2);
    assert_eq!(
        *rig.host.kicks.lock().unwrap(),
        [bar + NOTIFY, bar + NOTIFY + 4]
    );
    let moved = WINDOW + 0x100_0000;
    rig.write(rig.config(0x10), 4, moved);
    assert_eq!(
        *rig.host.kicks.lock().unwrap(),
        [moved + NOTIFY, moved + NOTIFY + 4]
    );
    assert_eq!(rig.read(bar + 0x12, 2), 0xffff);
    assert_eq!(rig.read(moved + 0x12, 2), 2, "num_queues");
    rig.write(rig.config(0x04), 2, 0);
    assert!(rig.host.kicks.lock().unwrap().is_empty());
    // Registers that are not the guest's.
    rig.write(rig.config(0x00), 4, 0);
    assert_eq!(rig.read(rig.config(0), 4), 0x1042_1af4);
}

#[test]
fn a_driver_starts_the_device_and_gets_its_interrupts() {
    let rig = Rig::new();
    let bar = rig.start();
    let (accepted, interrupt) = {
        let log = rig.log.lock().unwrap();
        assert_eq!(log.queues.len(), 2);
        (log.accepted, log.interrupt.clone().unwrap())
    };
    assert_eq!(accepted, Some(VERSION_1 | EVENT_IDX));
    let routes = rig.host.routes.lock().unwrap().clone();
    for vector in 0..3u16 {
        let message = routes[&vector];
        assert_eq!(message.address, 0xfee0_0000 + 0x1000 * u64::from(vector));
        assert_eq!(message.data, 0x20 + u32::from(vector));
    }
    interrupt.queue(0);
    interrupt.queue(1);
    interrupt.queue(1);
    interrupt.config();
    let counts: Vec<u64> = rig.irqs.iter().map(|irq| irq.read().unwrap()).collect();
    assert_eq!(counts, [1, 1, 2]);
    interrupt.needs_reset();
    assert_eq!(rig.irqs[0].read().unwrap(), 1);
    let common = bar + rig.structure(1);
    assert_eq!(rig.read(common + 0x14, 1), 0x4f);
    assert_eq!(rig.read(common + 0x15, 1), 7, "generation");
    // Device configuration by any width.
    let device = bar + rig.structure(4);
    assert_eq!(rig.read(device, 8), 0x0807_0605_0403_0201);
    assert_eq!(rig.read(device + 11, 1), 12);
    drop(interrupt);
    rig.write(common + 0x14, 1, 0);
    assert_eq!(rig.read(common + 0x14, 1), 0);
    assert_eq!(rig.read(common + 0x10, 2), 0xffff, "vectors are forgotten");
    rig.start();
    assert_eq!(rig.log.lock().unwrap().activations, 2);
}

#[test]
fn masked_vectors_keep_their_interrupt_pending() {
    let rig = Rig::new();
    let bar = rig.start();
    let interrupt = rig.log.lock().unwrap().interrupt.clone().unwrap();
    let entry = bar + MSIX_TABLE + 16;
    rig.write(entry + 12, 4, 1);
    interrupt.queue(0);
    interrupt.queue(0);
    assert!(rig.irqs[1].read().is_err());
    assert_eq!(rig.read(bar + MSIX_PENDING, 8), 0b10);
    // The guest changes the message while it is masked: the interrupt goes where it says now.
    rig.write(entry + 8, 4, 0x77);
    assert_eq!(rig.host.routes.lock().unwrap()[&1].data, 0x21);
    rig.write(entry + 12, 4, 0);
    assert_eq!(rig.host.routes.lock().unwrap()[&1].data, 0x77);
    assert_eq!(rig.irqs[1].read().unwrap(), 1);
    assert_eq!(rig.read(bar + MSIX_PENDING, 8), 0);
    // The function mask and the enable bit mask all.
    for off in [0xc000, 0] {
        let control = rig.config(rig.msix() + 2);
        rig.write(control, 2, off);
        interrupt.queue(1);
        interrupt.config();
        assert_eq!(rig.read(bar + MSIX_PENDING, 8), 0b101);
        assert!(rig.irqs.iter().all(|irq| irq.read().is_err()));
        rig.write(control, 2, 0x8000);
        assert_eq!(rig.irqs[0].read().unwrap(), 1);
        assert_eq!(rig.irqs[2].read().unwrap(), 1);
    }
}

#[test]
fn a_vector_that_is_not_there_reads_back_as_none() {
    let rig = Rig::new();
    let bar = rig.start();
    let common = bar + rig.structure(1);
    for wrong in [3, 100, 0xfffe] {
        rig.write(common + 0x10, 2, wrong);
        assert_eq!(rig.read(common + 0x10, 2), 0xffff);
        rig.write(common + 0x16, 2, 1);
        rig.write(common + 0x1a, 2, wrong);
        assert_eq!(rig.read(common + 0x1a, 2), 0xffff);
    }
    let interrupt = rig.log.lock().unwrap().interrupt.clone().unwrap();
    interrupt.queue(1);
    interrupt.config();
    assert!(rig.irqs.iter().all(|irq| irq.read().is_err()));
    let isr = bar + rig.structure(3);
    assert_eq!(rig.read(isr, 1), 3);
    assert_eq!(rig.read(isr, 1), 0, "reading clears");
}

#[test]
fn absent_queues_and_broken_ones() {
    let rig = Rig::new();
    let bar = rig.enable();
    let common = bar + rig.structure(1);
    for absent in [2, 0xffff] {
        rig.write(common + 0x16, 2, absent);
        assert_eq!(rig.read(common + 0x18, 2), 0);
        rig.write(common + 0x1c, 2, 1);
        assert_eq!(rig.read(common + 0x1c, 2), 0);
    }
    // Enabled without rings in RAM.
    rig.write(common + 8, 4, 1);
    rig.write(common + 0xc, 4, 1);
    rig.write(common + 0x14, 1, 0xb);
    rig.write(common + 0x16, 2, 0);
    rig.write(common + 0x20, 8, !0xf);
    rig.write(common + 0x1c, 2, 1);
    rig.write(common + 0x14, 1, 0xf);
    assert_eq!(rig.read(common + 0x14, 1), 0x4f);
    assert_eq!(rig.log.lock().unwrap().activations, 0);
    rig.start();
    assert_eq!(rig.log.lock().unwrap().activations, 1);
}

#[test]
fn kicks_without_an_ioeventfd_arrive() {
    let rig = Rig::new();
    let bar = rig.start();
    let notify = bar + rig.structure(2);
    rig.write(notify + 4, 2, 1);
    let queue_1 = rig.log.lock().unwrap().queues[1].notify.clone();
    assert_eq!(queue_1.read().unwrap(), 1);
    rig.write(notify + 8, 2, 2);
    rig.write(notify + 0xffc, 4, 0);
}

#[test]
fn the_bar_is_reachable_through_configuration_space() {
    let rig = Rig::new();
    let pci = rig
        .capabilities()
        .into_iter()
        .find(|&(id, at)| id == 0x09 && rig.read(rig.config(at + 3), 1) == 5)
        .unwrap()
        .1;
    let access = |offset: u64, len: u64| {
        rig.write(rig.config(pci + 4), 1, 0);
        rig.write(rig.config(pci + 8), 4, offset);
        rig.write(rig.config(pci + 12), 4, len);
        rig.config(pci + 16)
    };
    // Works while the BAR is switched off: that is what it is for.
    assert_eq!(rig.read(access(0x12, 2), 2), 2);
    rig.write(access(0x00, 4), 4, 1);
    assert_eq!(rig.read(access(0x04, 4), 4), OFFERED >> 32);
    for (offset, len) in [(0, 3), (1, 4), (BAR_LEN, 4), (u64::from(u32::MAX), 1)] {
        rig.read(access(offset, len), 4);
    }
}

#[test]
fn thirty_two_disks_and_more_fit_and_no_more_than_the_bus_has() {
    let host = Arc::new(Host::default());
    let mem = ram(0x1000);
    let mut pci = PciBus::new(WINDOW, 0x1000_0000);
    let mut numbers = Vec::new();
    for _ in 0..62 {
        numbers.push(pci.add(Arc::new(function(&host, &mem).0)).unwrap());
    }
    assert_eq!(&numbers[..3], [8, 16, 24]);
    assert_eq!(numbers[31], 9, "then the devices' second functions");
    let pci = Arc::new(pci);
    let ecam = pci.ecam();
    let mut header = [0; 1];
    ecam.read((8 << 12) + 0x0e, &mut header);
    assert_eq!(header, [0x80], "multifunction");
    let mut bars = std::collections::HashSet::new();
    for number in numbers {
        let mut bar = [0; 4];
        ecam.read((u64::from(number) << 12) + 0x10, &mut bar);
        assert!(bars.insert(u32::from_le_bytes(bar)));
    }
    let mut small = PciBus::new(WINDOW, 0x1_8000);
    small.add(Arc::new(function(&host, &mem).0)).unwrap();
    assert_eq!(
        small.add(Arc::new(function(&host, &mem).0)),
        Err(PciError::Window {
            len: 0x1_8000,
            bar: 0x1_0000
        })
    );
}

proptest! {
    /// Any accesses to BAR and configuration space: no panic, kicks are never registered twice,
    /// and the device starts afterwards.
    #[test]
    fn any_accesses_are_survived(
        accesses in prop::collection::vec(
            (any::<bool>(), 0u64..0x9000, 1usize..9, any::<u64>(), any::<bool>()),
            0..200,
        ),
    ) {
        let rig = Rig::new();
        rig.enable();
        for (config, offset, width, value, write) in accesses {
            let addr = if config { rig.config(offset % 0x110) } else { WINDOW + offset };
            if write {
                rig.write(addr, width, value);
            } else {
                rig.read(addr, width);
            }
            let kicks = rig.host.kicks.lock().unwrap();
            prop_assert!(kicks.is_empty() || kicks.len() == 2);
        }
        rig.write(rig.config(0x04), 2, 0);
        rig.write(rig.config(0x10), 4, WINDOW);
        rig.write(rig.config(0x14), 4, 0);
        let before = rig.log.lock().unwrap().activations;
        rig.start();
        prop_assert_eq!(rig.log.lock().unwrap().activations, before + 1);
    }
}
