//! PCI configuration space: finding virtio-blk functions, their capabilities and BARs.

use crate::cpu;
use crate::memory;
use crate::phys::{self, Addr};

/// How configuration space is reached.
#[derive(Clone, Copy)]
pub enum Config {
    /// Ports 0xcf8 and 0xcfc.
    Cf8,
    /// Memory-mapped, from this address.
    Ecam(Addr),
}

/// One function of a device on bus 0.
#[derive(Clone, Copy)]
pub struct Function {
    config: Config,
    /// Device * 8 + function.
    pub number: u8,
}

const VENDOR_VIRTIO: u16 = 0x1af4;
const DEVICE_BLOCK_MODERN: u16 = 0x1042;
const DEVICE_BLOCK_TRANSITIONAL: u16 = 0x1001;
const COMMAND: u16 = 4;
const COMMAND_MEMORY: u16 = 2;
const COMMAND_MASTER: u16 = 4;
const COMMAND_INTX_OFF: u16 = 1 << 10;
const HEADER_TYPE: u16 = 14;
const BAR0: u16 = 0x10;
const CAPABILITIES: u16 = 0x34;

/// BARs that nobody has assigned get addresses from here: unused space below the hole's devices on
/// Pollux and on QEMU's microvm alike.
const BAR_WINDOW: core::ops::Range<u32> = 0xc000_0000..0xd000_0000;
/// Where MSI-X and the capabilities' structures may be: six BARs.
const BARS: usize = 6;

impl Function {
    fn read32_at(self, offset: u16) -> u32 {
        let offset = offset & 0xffc;
        match self.config {
            Config::Cf8 => {
                cpu::out32(
                    0xcf8,
                    1 << 31 | u32::from(self.number) << 8 | u32::from(offset),
                );
                cpu::in32(0xcfc)
            }
            Config::Ecam(base) => {
                phys::read32(base + u64::from(self.number) * 4096 + u64::from(offset))
            }
        }
    }

    pub fn read32(self, offset: u16) -> u32 {
        self.read32_at(offset)
    }

    pub fn read16(self, offset: u16) -> u16 {
        (self.read32_at(offset) >> ((offset & 2) * 8)) as u16
    }

    pub fn read8(self, offset: u16) -> u8 {
        (self.read32_at(offset) >> ((offset & 3) * 8)) as u8
    }

    pub fn write32(self, offset: u16, value: u32) {
        match self.config {
            Config::Cf8 => {
                cpu::out32(
                    0xcf8,
                    1 << 31 | u32::from(self.number) << 8 | u32::from(offset),
                );
                cpu::out32(0xcfc, value);
            }
            Config::Ecam(base) => {
                phys::write32(
                    base + u64::from(self.number) * 4096 + u64::from(offset),
                    value,
                );
            }
        }
    }

    pub fn write16(self, offset: u16, value: u16) {
        let shift = (offset & 2) * 8;
        let old = self.read32_at(offset) & !(0xffff << shift);
        self.write32(offset & 0xffc, old | u32::from(value) << shift);
    }

    /// Offsets of the capabilities with this identifier.
    pub fn capabilities(self, id: u8) -> impl Iterator<Item = u16> {
        let mut at = u16::from(self.read8(CAPABILITIES)) & 0xfc;
        let mut left = 48;
        core::iter::from_fn(move || {
            while at != 0 && left > 0 {
                let here = at;
                left -= 1;
                at = u16::from(self.read8(here + 1)) & 0xfc;
                if self.read8(here) == id {
                    return Some(here);
                }
            }
            None
        })
    }

    /// Turns on memory access and bus mastering, gives addresses to BARs that have none, and maps
    /// them. Returns the BARs' addresses.
    pub fn enable(self) -> [Addr; BARS] {
        let mut bars = [0; BARS];
        self.write16(COMMAND, COMMAND_INTX_OFF);
        let mut index = 0;
        while index < BARS {
            let register = BAR0 + 4 * index as u16;
            let low = self.read32(register);
            let is_64bit = low & 7 == 4;
            // Memory BARs only; size by writing ones.
            if low & 1 == 0 {
                self.write32(register, u32::MAX);
                let mask = self.read32(register) & !0xf;
                if mask != 0 {
                    let mut base = u64::from(low & !0xf);
                    let mut size = u64::from(!mask) + 1;
                    if is_64bit {
                        let high = self.read32(register + 4);
                        self.write32(register + 4, u32::MAX);
                        let mask = u64::from(self.read32(register + 4)) << 32 | u64::from(mask);
                        size = (!mask).wrapping_add(1);
                        base |= u64::from(high) << 32;
                    }
                    if base == 0 {
                        base = u64::from(assign(size as u32));
                    }
                    self.write32(register, base as u32);
                    if is_64bit {
                        self.write32(register + 4, (base >> 32) as u32);
                    }
                    memory::map(base, base + size);
                    bars[index] = base;
                }
            }
            index += 1 + usize::from(is_64bit);
        }
        self.write16(COMMAND, COMMAND_MEMORY | COMMAND_MASTER | COMMAND_INTX_OFF);
        bars
    }
}

/// The next free address for a BAR of `size` bytes, a power of two.
fn assign(size: u32) -> u32 {
    // The first CPU alone configures devices.
    static NEXT: phys::Shared<u32> = phys::Shared::new(BAR_WINDOW.start);
    let next = NEXT.get();
    let at = next.next_multiple_of(size);
    *next = at + size;
    if *next > BAR_WINDOW.end {
        panic!("no address space left for PCI BARs");
    }
    at
}

/// Calls `found` with every virtio-blk function of bus 0.
pub fn find_disks(config: Config, mut found: impl FnMut(Function)) {
    if let Config::Ecam(base) = config {
        memory::map(base, base + (1 << 20));
    }
    for device in 0..32 {
        for index in 0..8 {
            let function = Function {
                config,
                number: device * 8 + index,
            };
            let id = function.read32(0);
            if id as u16 == VENDOR_VIRTIO
                && [DEVICE_BLOCK_MODERN, DEVICE_BLOCK_TRANSITIONAL].contains(&((id >> 16) as u16))
            {
                found(function);
            }
            if index == 0 && (id == u32::MAX || function.read8(HEADER_TYPE) & 0x80 == 0) {
                break;
            }
        }
    }
}
