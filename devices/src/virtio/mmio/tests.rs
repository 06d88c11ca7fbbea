use super::*;
use crate::virtio::features::{EVENT_IDX, VERSION_1};
use crate::virtio::testing::{DriverQueue, ram};
use crate::virtio::testing_device::{Dummy, Log, OFFERED};
use proptest::prelude::*;
use vmm_sys_util::eventfd::EFD_NONBLOCK;

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const NEEDS_RESET: u32 = 0x40;

struct Rig {
    mmio: MmioTransport,
    irq: EventFd,
    log: Arc<Mutex<Log>>,
    mem: GuestMemory,
}

impl Rig {
    fn new() -> Rig {
        let (device, log) = Dummy::new();
        let irq = EventFd::new(EFD_NONBLOCK).unwrap();
        let mem = ram(1 << 20);
        let mmio =
            MmioTransport::new(Box::new(device), mem.clone(), irq.try_clone().unwrap()).unwrap();
        Rig {
            mmio,
            irq,
            log,
            mem,
        }
    }

    fn read(&self, offset: u32) -> u32 {
        let mut data = [0; 4];
        self.mmio.read(offset.into(), &mut data);
        u32::from_le_bytes(data)
    }

    fn write(&self, offset: u32, value: u32) {
        self.mmio.write(offset.into(), &value.to_le_bytes());
    }

    fn accept(&self, features: u64) {
        for half in 0..2 {
            self.write(0x24, half);
            self.write(0x20, (features >> (32 * half)) as u32);
        }
    }

    fn set_up_queue(&self, index: u32, queue: &DriverQueue) {
        self.write(0x30, index);
        self.write(0x38, queue.layout.size.into());
        for (register, address) in [
            (0x80, queue.layout.desc),
            (0x90, queue.layout.avail),
            (0xa0, queue.layout.used),
        ] {
            self.write(register, address as u32);
            self.write(register + 4, (address >> 32) as u32);
        }
        self.write(0x44, 1);
    }

    /// What a driver does up to DRIVER_OK, with one queue.
    fn start(&self) -> DriverQueue {
        let queue = DriverQueue::new(&self.mem, 0x1000, 128);
        self.write(0x70, 0);
        self.write(0x70, ACKNOWLEDGE | DRIVER);
        self.accept(VERSION_1 | EVENT_IDX);
        self.write(0x70, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(self.read(0x70), ACKNOWLEDGE | DRIVER | FEATURES_OK);
        self.set_up_queue(0, &queue);
        self.write(0x70, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        queue
    }
}

#[test]
fn identity_and_absent_registers() {
    let rig = Rig::new();
    assert_eq!(rig.read(0x000), 0x7472_6976);
    assert_eq!(rig.read(0x004), 2);
    assert_eq!(rig.read(0x008), 2);
    assert_eq!(rig.read(0x0fc), 7);
    rig.write(0x0ac, 0);
    for shm in [0xb0, 0xb4, 0xb8, 0xbc] {
        assert_eq!(rig.read(shm), u32::MAX, "no shared memory");
    }
    assert_eq!(rig.read(0x0c0), 0, "no queue reset");
    for width in [1, 2, 8] {
        let mut data = [0xaa; 8];
        rig.mmio.read(0, &mut data[..width]);
        assert!(data[..width].iter().all(|&b| b == 0), "{width} bytes");
    }
}

#[test]
fn features_are_seen_in_halves_and_only_offered_ones_are_accepted() {
    let rig = Rig::new();
    let halves: Vec<u32> = (0..4)
        .map(|half| {
            rig.write(0x14, half);
            rig.read(0x10)
        })
        .collect();
    assert_eq!(halves, [OFFERED as u32, (OFFERED >> 32) as u32, 0, 0]);
    // Not offered; without VERSION_1; a bit in a half that does not exist.
    for features in [VERSION_1 | 1, OFFERED & !VERSION_1, VERSION_1 | 1 << 62] {
        rig.write(0x70, 0);
        rig.accept(features);
        rig.write(0x70, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(rig.read(0x70), ACKNOWLEDGE | DRIVER, "{features:#x}");
    }
    rig.write(0x70, 0);
    rig.accept(VERSION_1);
    rig.write(0x24, 2);
    rig.write(0x20, 1);
    rig.write(0x70, FEATURES_OK);
    assert_eq!(rig.read(0x70), 0);
    // Accepted features do not change any more.
    rig.start();
    rig.accept(VERSION_1);
    assert_eq!(
        rig.log.lock().unwrap().accepted,
        Some(VERSION_1 | EVENT_IDX)
    );
}

#[test]
fn a_driver_starts_the_device_with_the_queues_that_are_ready() {
    let rig = Rig::new();
    let driver = rig.start();
    let log = rig.log.lock().unwrap();
    assert_eq!(log.activations, 1);
    assert_eq!(log.queues.len(), 1);
    assert_eq!(log.queues[0].index, 0);
    assert_eq!(log.queues[0].queue.size(), driver.layout.size);
    drop(log);
    assert_eq!(rig.read(0x44), 1);
    // Set-up is over.
    rig.write(0x44, 0);
    assert_eq!(rig.read(0x44), 1);
    rig.write(0x30, 1);
    assert_eq!((rig.read(0x34), rig.read(0x44)), (64, 0));
    for absent in [2, 0xffff, 0x1_0000, u32::MAX] {
        rig.write(0x30, absent);
        assert_eq!(rig.read(0x34), 0, "{absent:#x}");
        rig.write(0x44, 1);
        assert_eq!(rig.read(0x44), 0);
    }
}

#[test]
fn driver_ok_again_does_not_activate_again() {
    let rig = Rig::new();
    rig.start();
    rig.write(0x70, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    assert_eq!(rig.log.lock().unwrap().activations, 1);
}

#[test]
fn reset_clears_everything_and_the_device_works_again() {
    let rig = Rig::new();
    rig.start();
    let interrupt = rig.log.lock().unwrap().interrupt.clone().unwrap();
    interrupt.queue(0);
    interrupt.needs_reset();
    assert_eq!(rig.read(0x70) & NEEDS_RESET, NEEDS_RESET);
    assert_eq!(rig.read(0x60), 3);
    drop(interrupt);
    let before = rig.log.lock().unwrap().resets;
    rig.write(0x70, 0);
    assert_eq!(rig.log.lock().unwrap().resets, before + 1);
    assert_eq!((rig.read(0x70), rig.read(0x60), rig.read(0x44)), (0, 0, 0));
    rig.start();
    assert_eq!(rig.log.lock().unwrap().activations, 2);
}

#[test]
fn interrupt_bits_are_acknowledged_one_by_one() {
    let rig = Rig::new();
    rig.start();
    let interrupt = rig.log.lock().unwrap().interrupt.clone().unwrap();
    interrupt.queue(0);
    interrupt.config();
    assert_eq!(rig.irq.read().unwrap(), 2);
    assert_eq!(rig.read(0x60), 3);
    // Completed between the driver's read and its acknowledgement: an interrupt of its own.
    interrupt.queue(0);
    rig.write(0x64, 1);
    assert_eq!(rig.irq.read().unwrap(), 1);
    assert_eq!(rig.read(0x60), 2);
    rig.write(0x64, 0xffff_fffd);
    assert_eq!(rig.read(0x60), 2, "only the bits written");
    rig.write(0x64, 2);
    assert_eq!(rig.read(0x60), 0);
}

#[test]
fn broken_queues_need_a_reset() {
    let good = DriverQueue::new(&ram(1 << 20), 0x1000, 128).layout;
    type Change = fn(&Rig);
    let changes: [(&str, Change); 9] = [
        ("size 0", |r| r.write(0x38, 0)),
        ("size 3", |r| r.write(0x38, 3)),
        ("size above the maximum", |r| r.write(0x38, 512)),
        ("size past 16 bits", |r| r.write(0x38, 0x1_0080)),
        ("no rings", |r| {
            for register in [0x80, 0x90, 0xa0] {
                r.write(register, 0xffff_f000);
            }
        }),
        ("descriptors misaligned", |r| r.write(0x80, 0x1008)),
        ("available ring misaligned", |r| r.write(0x90, 0x3001)),
        ("used ring misaligned", |r| r.write(0xa0, 0x3002)),
        ("used ring above RAM", |r| r.write(0xa4, 0x8000_0000)),
    ];
    for (what, change) in changes {
        let rig = Rig::new();
        rig.accept(VERSION_1);
        rig.write(0x70, ACKNOWLEDGE | DRIVER | FEATURES_OK);
        rig.write(0x30, 0);
        rig.write(0x38, good.size.into());
        rig.write(0x80, good.desc as u32);
        rig.write(0x90, good.avail as u32);
        rig.write(0xa0, good.used as u32);
        change(&rig);
        rig.write(0x44, 1);
        rig.write(0x70, ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
        assert_eq!(rig.read(0x70) & NEEDS_RESET, NEEDS_RESET, "{what}");
        assert_eq!(
            rig.irq.read().unwrap(),
            1,
            "{what}: configuration interrupt"
        );
        assert_eq!(rig.read(0x60), 2);
        assert_eq!(rig.log.lock().unwrap().activations, 0);
        rig.start();
        assert_eq!(rig.read(0x70) & NEEDS_RESET, 0, "{what}: works after reset");
        assert_eq!(rig.log.lock().unwrap().activations, 1);
    }
}

#[test]
fn driver_ok_without_features_ok_and_a_device_that_fails_need_a_reset() {
    let rig = Rig::new();
    rig.write(0x70, ACKNOWLEDGE | DRIVER | DRIVER_OK);
    assert_eq!(rig.read(0x70) & NEEDS_RESET, NEEDS_RESET);
    rig.write(0x70, 0);
    assert_eq!(rig.read(0x70), 0);
    rig.log.lock().unwrap().fail = true;
    rig.start();
    assert_eq!(rig.read(0x70) & NEEDS_RESET, NEEDS_RESET);
}

#[test]
fn configuration_space_takes_any_width() {
    let rig = Rig::new();
    let mut data = [0; 12];
    rig.mmio.read(0x100, &mut data);
    assert_eq!(data, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
    let mut past = [0xff; 4];
    rig.mmio.read(0x10a, &mut past);
    assert_eq!(past, [11, 12, 0, 0]);
    rig.mmio.write(0x103, &[0x55]);
    rig.mmio.read(0x103, &mut past[..1]);
    assert_eq!(past[0], 0x55);
}

#[test]
fn kicks_without_an_ioeventfd_arrive() {
    let rig = Rig::new();
    let kicks = rig.mmio.queue_eventfds();
    assert_eq!(kicks.len(), 2);
    assert!(kicks.iter().all(|k| k.offset == 0x50));
    rig.write(0x50, 1);
    rig.write(0x50, 2);
    rig.write(0x50, u32::MAX);
    assert_eq!(kicks[1].datamatch, 1);
    assert_eq!(kicks[1].eventfd.read().unwrap(), 1);
    // The other one was not written to: its count is what is added now.
    kicks[0].eventfd.write(5).unwrap();
    assert_eq!(kicks[0].eventfd.read().unwrap(), 5);
}

proptest! {
    /// Any sequence of accesses: no panic, and after a reset the device starts.
    #[test]
    fn any_accesses_are_survived(
        accesses in prop::collection::vec((0u64..0x220, 1usize..9, any::<u64>(), any::<bool>()), 0..200),
    ) {
        let rig = Rig::new();
        for (offset, width, value, write) in accesses {
            let mut data = value.to_le_bytes();
            if write {
                rig.mmio.write(offset, &data[..width]);
            } else {
                rig.mmio.read(offset, &mut data[..width]);
            }
        }
        rig.start();
        prop_assert_eq!(rig.read(0x70), ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }
}
