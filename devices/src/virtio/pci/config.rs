//! A function's configuration space: 256 bytes, a mask of what the guest may change, and a list of
//! capabilities.

/// Bytes of conventional configuration space. What ECAM shows beyond reads as zero: no extended
/// capabilities.
const BYTES: usize = 256;

const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const HEADER_TYPE: usize = 0x0e;
const BAR0: usize = 0x10;
const CAPABILITIES: usize = 0x34;
const FIRST_CAPABILITY: usize = 0x40;

/// Command register: memory space.
const COMMAND_MEMORY: u8 = 1 << 1;
/// Command register: what can be set beside that: bus master.
const COMMAND_MASTER: u8 = 1 << 2;
/// Upper byte of the command register: interrupt disable.
const COMMAND_NO_INTX: u8 = 1 << 2;
/// Status register: there is a capability list.
const STATUS_CAPABILITIES: u8 = 1 << 4;
/// A BAR's low bits: memory, 64 bits wide.
const BAR_MEMORY_64: u8 = 0b100;

/// Identity of a function.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    pub(super) vendor: u16,
    pub(super) device: u16,
    pub(super) revision: u8,
    /// Base class, subclass, interface.
    pub(super) class: [u8; 3],
    pub(super) subsystem_vendor: u16,
    pub(super) subsystem: u16,
}

/// See the module.
pub(super) struct ConfigSpace {
    bytes: [u8; BYTES],
    writable: [u8; BYTES],
    next_capability: usize,
    // Where the pointer to the next capability goes.
    link: usize,
}

impl ConfigSpace {
    pub(super) fn new(identity: Identity) -> ConfigSpace {
        let mut space = ConfigSpace {
            bytes: [0; BYTES],
            writable: [0; BYTES],
            next_capability: FIRST_CAPABILITY,
            link: CAPABILITIES,
        };
        space.set(0x00, &identity.vendor.to_le_bytes());
        space.set(0x02, &identity.device.to_le_bytes());
        space.set(0x08, &[identity.revision]);
        let [base, sub, interface] = identity.class;
        space.set(0x09, &[interface, sub, base]);
        space.set(0x2c, &identity.subsystem_vendor.to_le_bytes());
        space.set(0x2e, &identity.subsystem.to_le_bytes());
        space.writable[COMMAND] = COMMAND_MEMORY | COMMAND_MASTER;
        space.writable[COMMAND + 1] = COMMAND_NO_INTX;
        // Interrupt line: a scratch byte for the guest.
        space.writable[0x3c] = 0xff;
        space
    }

    pub(super) fn set(&mut self, offset: usize, bytes: &[u8]) {
        self.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn allow(&mut self, offset: usize, mask: &[u8]) {
        self.writable[offset..offset + mask.len()].copy_from_slice(mask);
    }

    /// BARs 0 and 1 become one 64-bit memory BAR of `len` bytes, a power of two.
    pub(super) fn add_bar(&mut self, len: u64) {
        let mut mask = (!(len - 1)).to_le_bytes();
        mask[0] &= !0xf;
        self.allow(BAR0, &mask);
        self.bytes[BAR0] = BAR_MEMORY_64;
    }

    pub(super) fn set_bar(&mut self, base: u64) {
        let mut bytes = base.to_le_bytes();
        bytes[0] |= BAR_MEMORY_64;
        self.set(BAR0, &bytes);
    }

    /// Where the BAR is, if the guest has switched it on.
    pub(super) fn bar(&self) -> Option<u64> {
        let bytes: [u8; 8] = std::array::from_fn(|i| self.bytes[BAR0 + i]);
        let enabled = self.bytes[COMMAND] & COMMAND_MEMORY != 0;
        enabled.then_some(u64::from_le_bytes(bytes) & !0xf)
    }

    /// Adds a capability: its id, and its bytes behind id and next pointer. Its offset.
    pub(super) fn add_capability(&mut self, id: u8, body: &[u8]) -> usize {
        let offset = self.next_capability;
        self.bytes[STATUS] |= STATUS_CAPABILITIES;
        self.bytes[self.link] = offset as u8;
        self.link = offset + 1;
        self.set(offset, &[id, 0]);
        self.set(offset + 2, body);
        self.next_capability = (offset + 2 + body.len()).next_multiple_of(4);
        offset
    }

    /// The function is one of several of its device.
    pub(super) fn set_multifunction(&mut self) {
        self.bytes[HEADER_TYPE] |= 0x80;
    }

    pub(super) fn get(&self, offset: usize) -> u8 {
        self.bytes.get(offset).copied().unwrap_or(0)
    }

    pub(super) fn get_u16(&self, offset: usize) -> u16 {
        u16::from_le_bytes([self.get(offset), self.get(offset + 1)])
    }

    pub(super) fn get_u32(&self, offset: usize) -> u32 {
        u32::from_le_bytes(std::array::from_fn(|i| self.get(offset + i)))
    }

    pub(super) fn read(&self, offset: usize, data: &mut [u8]) {
        for (at, byte) in (offset..).zip(data) {
            *byte = self.get(at);
        }
    }

    pub(super) fn write(&mut self, offset: usize, data: &[u8]) {
        for (at, &value) in (offset..).zip(data) {
            if let (Some(byte), Some(&mask)) = (self.bytes.get_mut(at), self.writable.get(at)) {
                *byte = (*byte & !mask) | (value & mask);
            }
        }
    }
}
