//! A virtio-blk device behind either of its transports (VIRTIO 1.2, sections 4.1, 4.2 and 5.2).

use core::mem::MaybeUninit;

use crate::cpu;
use crate::options::{MAX_DISKS, MmioDevice};
use crate::pci::Function;
use crate::phys::{self, Addr, Shared};

/// Device status bits.
pub const ACKNOWLEDGE: u8 = 1;
pub const DRIVER: u8 = 2;
pub const DRIVER_OK: u8 = 4;
pub const FEATURES_OK: u8 = 8;
pub const NEEDS_RESET: u8 = 64;

/// Feature bits.
pub const F_SEG_MAX: u64 = 1 << 2;
pub const F_RO: u64 = 1 << 5;
pub const F_BLK_SIZE: u64 = 1 << 6;
pub const F_FLUSH: u64 = 1 << 9;
pub const F_TOPOLOGY: u64 = 1 << 10;
pub const F_CONFIG_WCE: u64 = 1 << 11;
pub const F_MQ: u64 = 1 << 12;
pub const F_DISCARD: u64 = 1 << 13;
pub const F_WRITE_ZEROES: u64 = 1 << 14;
pub const F_INDIRECT: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
pub const F_VERSION_1: u64 = 1 << 32;
/// What this driver can use.
pub const KNOWN_FEATURES: u64 = F_SEG_MAX
    | F_RO
    | F_BLK_SIZE
    | F_FLUSH
    | F_TOPOLOGY
    | F_CONFIG_WCE
    | F_MQ
    | F_DISCARD
    | F_WRITE_ZEROES
    | F_INDIRECT
    | F_EVENT_IDX
    | F_VERSION_1;

/// Request types.
pub const T_IN: u32 = 0;
pub const T_OUT: u32 = 1;
pub const T_FLUSH: u32 = 4;
pub const T_GET_ID: u32 = 8;
pub const T_DISCARD: u32 = 11;
pub const T_WRITE_ZEROES: u32 = 13;

/// Offsets in the configuration space.
pub const CONFIG_CAPACITY: u32 = 0;
pub const CONFIG_SEG_MAX: u32 = 12;
pub const CONFIG_BLK_SIZE: u32 = 20;
pub const CONFIG_WCE: u32 = 32;
pub const CONFIG_NUM_QUEUES: u32 = 34;
pub const CONFIG_MAX_DISCARD_SECTORS: u32 = 36;
pub const CONFIG_MAX_WRITE_ZEROES_SECTORS: u32 = 48;

/// virtio-mmio registers.
mod mmio {
    pub const MAGIC: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const DEVICE_ID: u64 = 0x08;
    pub const DEVICE_FEATURES: u64 = 0x10;
    pub const DEVICE_FEATURES_SEL: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SEL: u64 = 0x24;
    pub const QUEUE_SEL: u64 = 0x30;
    pub const QUEUE_NUM_MAX: u64 = 0x34;
    pub const QUEUE_NUM: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const QUEUE_NOTIFY: u64 = 0x50;
    pub const INTERRUPT_STATUS: u64 = 0x60;
    pub const INTERRUPT_ACK: u64 = 0x64;
    pub const STATUS: u64 = 0x70;
    pub const QUEUE_DESC: u64 = 0x80;
    pub const QUEUE_DRIVER: u64 = 0x90;
    pub const QUEUE_DEVICE: u64 = 0xa0;
    pub const CONFIG: u64 = 0x100;
}

/// Fields of the virtio-pci common configuration.
mod common {
    pub const DEVICE_FEATURE_SELECT: u64 = 0;
    pub const DEVICE_FEATURE: u64 = 4;
    pub const DRIVER_FEATURE_SELECT: u64 = 8;
    pub const DRIVER_FEATURE: u64 = 12;
    pub const CONFIG_MSIX_VECTOR: u64 = 16;
    pub const DEVICE_STATUS: u64 = 20;
    pub const QUEUE_SELECT: u64 = 22;
    pub const QUEUE_SIZE: u64 = 24;
    pub const QUEUE_MSIX_VECTOR: u64 = 26;
    pub const QUEUE_ENABLE: u64 = 28;
    pub const QUEUE_NOTIFY_OFF: u64 = 30;
    pub const QUEUE_DESC: u64 = 32;
    pub const QUEUE_DRIVER: u64 = 40;
    pub const QUEUE_DEVICE: u64 = 48;
}

const IOAPIC: Addr = 0xfec0_0000;
/// QEMU's microvm may have a second one for the interrupts after the first one's.
const IOAPIC2: Addr = 0xfec1_0000;
const IOAPIC_PINS: u32 = 24;
/// "No vector" in the MSI-X fields.
const NO_VECTOR: u16 = 0xffff;

#[derive(Clone, Copy)]
pub enum Transport {
    Mmio {
        base: Addr,
        irq: u32,
    },
    Pci {
        function: u8,
        common: Addr,
        notify: Addr,
        notify_multiplier: u32,
        config: Addr,
        /// MSI-X table, and how many entries it has.
        msix: Addr,
        msix_len: u16,
    },
}

/// A disk, as it was found.
#[derive(Clone, Copy)]
pub struct Disk {
    pub transport: Transport,
    pub features: u64,
    pub capacity_sectors: u64,
    pub queues: u16,
    pub queue_size: u16,
}

/// Where a queue's three parts are; addresses that a hostile driver chooses freely.
#[derive(Clone, Copy)]
pub struct Rings {
    pub size: u16,
    pub desc: Addr,
    pub avail: Addr,
    pub used: Addr,
}

/// How to notify the device of a queue.
#[derive(Clone, Copy)]
pub struct Doorbell {
    addr: Addr,
    value: u32,
    wide: bool,
    from_cpl0: bool,
}

impl Doorbell {
    /// The same register with another queue's number.
    pub fn with_value(self, value: u32) -> Doorbell {
        Doorbell { value, ..self }
    }

    #[inline(always)]
    pub fn ring(&self) {
        match (self.wide, self.from_cpl0) {
            (true, true) => cpu::store32(self.addr, self.value),
            (true, false) => phys::write32(self.addr, self.value),
            (false, true) => cpu::store16(self.addr, self.value as u16),
            (false, false) => phys::write16(self.addr, self.value as u16),
        }
    }
}

// The first CPU finds the disks before any other CPU uses them; from then on they are read only.
static DISKS: Shared<[MaybeUninit<Disk>; MAX_DISKS]> =
    Shared::new([MaybeUninit::uninit(); MAX_DISKS]);
static DISK_COUNT: Shared<usize> = Shared::new(0);

/// The disks in the order in which they were found.
pub fn disks() -> impl Iterator<Item = Disk> {
    // SAFETY: `DISK_COUNT` disks are set.
    unsafe { DISKS.get()[..*DISK_COUNT.get()].assume_init_ref() }
        .iter()
        .copied()
}

pub fn disk(index: usize) -> Option<Disk> {
    disks().nth(index)
}

fn add(transport: Transport) {
    let count = DISK_COUNT.get();
    let mut disk = Disk {
        transport,
        features: 0,
        capacity_sectors: 0,
        queues: 1,
        queue_size: 0,
    };
    disk.reset();
    disk.set_status(ACKNOWLEDGE | DRIVER);
    disk.features = disk.read_features();
    disk.capacity_sectors = disk.config64(CONFIG_CAPACITY);
    if disk.features & F_MQ != 0 {
        disk.queues = disk.config16(CONFIG_NUM_QUEUES).max(1);
    }
    disk.queue_size = disk.max_queue_size(0);
    disk.reset();
    if *count == MAX_DISKS {
        panic!("more than 256 disks");
    }
    DISKS.get()[*count].write(disk);
    *count += 1;
}

/// Adds the virtio-mmio device at `device`, if there is one and it is a disk.
pub fn probe_mmio(device: MmioDevice) {
    const VIRT: u32 = 0x7472_6976;
    const BLOCK: u32 = 2;
    let base = device.base;
    if phys::read32(base + mmio::MAGIC) == VIRT
        && phys::read32(base + mmio::VERSION) == 2
        && phys::read32(base + mmio::DEVICE_ID) == BLOCK
    {
        add(Transport::Mmio {
            base,
            irq: device.irq,
        });
    }
}

/// Adds the virtio-pci device `function`.
pub fn probe_pci(function: Function) {
    const VENDOR_SPECIFIC: u8 = 9;
    const MSIX: u8 = 0x11;
    const KINDS: usize = 5;
    let bars = function.enable();
    let bar = |index: u8| bars.get(usize::from(index)).copied().unwrap_or(0);
    // By kind: common 1, notify 2, ISR 3, device configuration 4.
    let mut structures = [0; KINDS];
    let mut notify_multiplier = 0;
    for at in function.capabilities(VENDOR_SPECIFIC) {
        let kind = usize::from(function.read8(at + 3));
        let base = bar(function.read8(at + 4));
        if base == 0 || !(1..KINDS).contains(&kind) || structures[kind] != 0 {
            continue;
        }
        structures[kind] = base + u64::from(function.read32(at + 8));
        if kind == 2 {
            notify_multiplier = function.read32(at + 16);
        }
    }
    let (mut msix, mut msix_len) = (0, 0);
    if let Some(at) = function.capabilities(MSIX).next() {
        let control = function.read16(at + 2);
        let table = function.read32(at + 4);
        msix = bar((table & 7) as u8) + u64::from(table & !7);
        msix_len = (control & 0x7ff) + 1;
        const ENABLE: u16 = 1 << 15;
        const MASK_ALL: u16 = 1 << 14;
        function.write16(at + 2, control & !MASK_ALL | ENABLE);
    }
    let [_, common, notify, _, config] = structures;
    // A transitional device without the modern structures is not one of ours.
    if common != 0 && notify != 0 && config != 0 {
        add(Transport::Pci {
            function: function.number,
            common,
            notify,
            notify_multiplier,
            config,
            msix,
            msix_len,
        });
    }
}

impl Disk {
    pub fn status(&self) -> u8 {
        match self.transport {
            Transport::Mmio { base, .. } => phys::read32(base + mmio::STATUS) as u8,
            Transport::Pci { common, .. } => phys::read8(common + common::DEVICE_STATUS),
        }
    }

    pub fn set_status(&self, status: u8) {
        match self.transport {
            Transport::Mmio { base, .. } => phys::write32(base + mmio::STATUS, u32::from(status)),
            Transport::Pci { common, .. } => phys::write8(common + common::DEVICE_STATUS, status),
        }
    }

    /// Resets the device and waits until it has done so; false if it does not within 10 s.
    pub fn reset(&self) -> bool {
        self.set_status(0);
        let end = cpu::tsc() + cpu::ns_to_ticks(10_000_000_000);
        while self.status() != 0 {
            if cpu::tsc() > end {
                return false;
            }
        }
        true
    }

    fn read_features(&self) -> u64 {
        let half = |select: u32| match self.transport {
            Transport::Mmio { base, .. } => {
                phys::write32(base + mmio::DEVICE_FEATURES_SEL, select);
                phys::read32(base + mmio::DEVICE_FEATURES)
            }
            Transport::Pci { common, .. } => {
                phys::write32(common + common::DEVICE_FEATURE_SELECT, select);
                phys::read32(common + common::DEVICE_FEATURE)
            }
        };
        u64::from(half(0)) | u64::from(half(1)) << 32
    }

    fn write_features(&self, features: u64) {
        for (select, half) in [(0, features as u32), (1, (features >> 32) as u32)] {
            match self.transport {
                Transport::Mmio { base, .. } => {
                    phys::write32(base + mmio::DRIVER_FEATURES_SEL, select);
                    phys::write32(base + mmio::DRIVER_FEATURES, half);
                }
                Transport::Pci { common, .. } => {
                    phys::write32(common + common::DRIVER_FEATURE_SELECT, select);
                    phys::write32(common + common::DRIVER_FEATURE, half);
                }
            }
        }
    }

    /// Resets the device and offers it `features`. Returns whether it took them.
    pub fn negotiate(&self, features: u64) -> bool {
        if !self.reset() {
            return false;
        }
        self.set_status(ACKNOWLEDGE);
        self.set_status(ACKNOWLEDGE | DRIVER);
        self.write_features(features);
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        self.status() & FEATURES_OK != 0
    }

    /// The last step of the initialisation.
    pub fn driver_ok(&self) {
        self.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    }

    fn config_addr(&self, offset: u32) -> Addr {
        let base = match self.transport {
            Transport::Mmio { base, .. } => base + mmio::CONFIG,
            Transport::Pci { config, .. } => config,
        };
        base + u64::from(offset)
    }

    pub fn config8(&self, offset: u32) -> u8 {
        phys::read8(self.config_addr(offset))
    }

    pub fn set_config8(&self, offset: u32, value: u8) {
        phys::write8(self.config_addr(offset), value);
    }

    pub fn config16(&self, offset: u32) -> u16 {
        phys::read16(self.config_addr(offset))
    }

    pub fn config32(&self, offset: u32) -> u32 {
        phys::read32(self.config_addr(offset))
    }

    pub fn config64(&self, offset: u32) -> u64 {
        u64::from(self.config32(offset)) | u64::from(self.config32(offset + 4)) << 32
    }

    fn select_queue(&self, queue: u16) {
        match self.transport {
            Transport::Mmio { base, .. } => phys::write32(base + mmio::QUEUE_SEL, u32::from(queue)),
            Transport::Pci { common, .. } => phys::write16(common + common::QUEUE_SELECT, queue),
        }
    }

    fn max_queue_size(&self, queue: u16) -> u16 {
        self.select_queue(queue);
        match self.transport {
            Transport::Mmio { base, .. } => phys::read32(base + mmio::QUEUE_NUM_MAX) as u16,
            Transport::Pci { common, .. } => phys::read16(common + common::QUEUE_SIZE),
        }
    }

    /// Hands a queue's rings to the device and makes the queue ready.
    pub fn set_up_queue(&self, queue: u16, rings: &Rings) {
        self.select_queue(queue);
        match self.transport {
            Transport::Mmio { base, .. } => {
                phys::write32(base + mmio::QUEUE_NUM, u32::from(rings.size));
                for (register, value) in [
                    (mmio::QUEUE_DESC, rings.desc),
                    (mmio::QUEUE_DRIVER, rings.avail),
                    (mmio::QUEUE_DEVICE, rings.used),
                ] {
                    phys::write32(base + register, value as u32);
                    phys::write32(base + register + 4, (value >> 32) as u32);
                }
                phys::write32(base + mmio::QUEUE_READY, 1);
            }
            Transport::Pci { common, .. } => {
                phys::write16(common + common::QUEUE_SIZE, rings.size);
                for (field, value) in [
                    (common::QUEUE_DESC, rings.desc),
                    (common::QUEUE_DRIVER, rings.avail),
                    (common::QUEUE_DEVICE, rings.used),
                ] {
                    phys::write32(common + field, value as u32);
                    phys::write32(common + field + 4, (value >> 32) as u32);
                }
                phys::write16(common + common::QUEUE_ENABLE, 1);
            }
        }
    }

    pub fn doorbell(&self, queue: u16, from_cpl0: bool) -> Doorbell {
        match self.transport {
            Transport::Mmio { base, .. } => Doorbell {
                addr: base + mmio::QUEUE_NOTIFY,
                value: u32::from(queue),
                wide: true,
                from_cpl0,
            },
            Transport::Pci {
                common,
                notify,
                notify_multiplier,
                ..
            } => {
                self.select_queue(queue);
                let offset = phys::read16(common + common::QUEUE_NOTIFY_OFF);
                Doorbell {
                    addr: notify + u64::from(offset) * u64::from(notify_multiplier),
                    value: u32::from(queue),
                    wide: false,
                    from_cpl0,
                }
            }
        }
    }

    /// Accesses of odd sizes to odd places of the registers: all must be harmless.
    pub fn poke_registers(&self) {
        let (base, len) = match self.transport {
            Transport::Mmio { base, .. } => (base, 0x200),
            Transport::Pci { common, .. } => (common, 64),
        };
        // Reads only: a write may mean something.
        for at in base..base + len {
            phys::read8(at);
        }
        for at in (base..base + len - 8).step_by(2) {
            phys::read16(at);
        }
        for at in (base..base + len - 8).step_by(8) {
            phys::read64(at);
        }
        let config = self.config_addr(0);
        for at in (config..config + 0x100).step_by(4) {
            phys::write32(at, u32::MAX);
        }
    }

    /// Routes the configuration interrupt to `vector` of `cpu`; on MMIO every interrupt.
    pub fn route_config(&self, vector: u8, cpu: usize) {
        match self.transport {
            Transport::Mmio { irq, .. } => route_ioapic(irq, vector, cpu),
            Transport::Pci { common, .. } => {
                self.set_msix(0, vector, cpu);
                phys::write16(common + common::CONFIG_MSIX_VECTOR, 0);
            }
        }
    }

    /// Routes a queue's interrupt to `vector` of `cpu`. False if the device has no vector left for
    /// it. On MMIO all queues have the one of [`Disk::route_config`].
    pub fn route_queue(&self, queue: u16, vector: u8, cpu: usize) -> bool {
        let Transport::Pci {
            common, msix_len, ..
        } = self.transport
        else {
            return true;
        };
        let entry = queue + 1;
        if entry >= msix_len {
            return false;
        }
        self.set_msix(entry, vector, cpu);
        self.select_queue(queue);
        phys::write16(common + common::QUEUE_MSIX_VECTOR, entry);
        phys::read16(common + common::QUEUE_MSIX_VECTOR) != NO_VECTOR
    }

    fn set_msix(&self, entry: u16, vector: u8, cpu: usize) {
        if let Transport::Pci { msix, msix_len, .. } = self.transport
            && entry < msix_len
        {
            let at = msix + 16 * u64::from(entry);
            phys::write32(at, 0xfee0_0000 | cpu::apic_id(cpu) << 12);
            phys::write32(at + 4, 0);
            phys::write32(at + 8, u32::from(vector));
            phys::write32(at + 12, 0);
        }
    }

    /// Reads and acknowledges the interrupt status: bit 0 a queue, bit 1 the configuration. With
    /// MSI-X there is none to acknowledge.
    pub fn acknowledge(&self) -> u8 {
        match self.transport {
            Transport::Mmio { base, .. } => {
                let status = phys::read32(base + mmio::INTERRUPT_STATUS);
                if status != 0 {
                    phys::write32(base + mmio::INTERRUPT_ACK, status);
                }
                status as u8
            }
            Transport::Pci { .. } => 0,
        }
    }

    pub fn has_shared_interrupt(&self) -> bool {
        matches!(self.transport, Transport::Mmio { .. })
    }
}

/// Programs an I/O APIC pin: edge-triggered, active high, to one CPU.
pub fn route_ioapic(pin: u32, vector: u8, cpu: usize) {
    let (base, pin) = match pin.checked_sub(IOAPIC_PINS) {
        Some(pin) => (IOAPIC2, pin),
        None => (IOAPIC, pin),
    };
    let select = |register: u32, value: u32| {
        phys::write32(base, register);
        phys::write32(base + 0x10, value);
    };
    select(0x10 + 2 * pin + 1, cpu::apic_id(cpu) << 24);
    select(0x10 + 2 * pin, u32::from(vector));
}
