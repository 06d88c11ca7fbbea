//! The root bus: functions, their configuration space, and the window their BARs lie in.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError};

use super::config::{ConfigSpace, Identity};
use crate::bus::BusDevice;
use crate::sync::Mutex;

/// Devices of a bus, and functions of a device.
const DEVICES: usize = 32;
const FUNCTIONS: usize = 8;
/// Bytes of a function's configuration space in ECAM.
const FUNCTION_BYTES: u64 = 4096;
/// The old address port's enable bit.
const PORT_ENABLE: u32 = 1 << 31;

/// A function on a [`PciBus`].
pub trait PciFunction: Send + Sync {
    /// Reads configuration space.
    fn read_config(&self, offset: usize, data: &mut [u8]);

    /// Writes configuration space.
    fn write_config(&self, offset: usize, data: &[u8]);

    /// Length of its BAR in bytes, a power of two.
    fn bar_len(&self) -> u64;

    /// Places its BAR, as firmware would.
    fn set_bar(&self, base: u64);

    /// Where its BAR is, if the guest has switched it on.
    fn bar(&self) -> Option<u64>;

    /// Reads its BAR.
    fn read_bar(&self, offset: u64, data: &mut [u8]);

    /// Writes its BAR.
    fn write_bar(&self, offset: u64, data: &[u8]);

    /// Its device has further functions.
    fn set_multifunction(&self);
}

/// Why a function could not be added.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PciError {
    /// No place on the bus.
    #[error("the PCI bus has no room for more than {} functions", DEVICES * FUNCTIONS - FUNCTIONS)]
    Full,
    /// No place in the window.
    #[error("the PCI memory window of {len:#x} bytes has no room for another {bar:#x}")]
    Window {
        /// Length of the window.
        len: u64,
        /// Length of the BAR.
        bar: u64,
    },
}

/// The host bridge at 00.0: identity and nothing else.
struct HostBridge(Mutex<ConfigSpace>);

/// See the module. Filled while the VM is built, unchanged afterwards.
pub struct PciBus {
    functions: Vec<Option<Arc<dyn PciFunction>>>,
    bridge: HostBridge,
    window: (u64, u64),
    next_bar: u64,
}

impl PciBus {
    /// Bytes of ECAM for one bus.
    pub const ECAM_LEN: u64 = (DEVICES * FUNCTIONS) as u64 * FUNCTION_BYTES;

    /// A bus with a host bridge, whose functions get their BARs from the window at `base`.
    pub fn new(base: u64, len: u64) -> PciBus {
        let identity = Identity {
            // Red Hat's generic PCI Express host bridge.
            vendor: 0x1b36,
            device: 0x0008,
            revision: 0,
            class: [0x06, 0x00, 0x00],
            subsystem_vendor: 0,
            subsystem: 0,
        };
        PciBus {
            functions: vec![None; DEVICES * FUNCTIONS],
            bridge: HostBridge(Mutex::new(ConfigSpace::new(identity))),
            window: (base, len),
            next_bar: base,
        }
    }

    /// Adds a function and places its BAR; its device and function number (`device << 3 |
    /// function`). Devices come first, then their further functions.
    ///
    /// # Errors
    /// No room on the bus or in the window.
    pub fn add(&mut self, function: Arc<dyn PciFunction>) -> Result<u8, PciError> {
        let number = (0..FUNCTIONS)
            .flat_map(|function| (1..DEVICES).map(move |device| device * FUNCTIONS + function))
            .find(|&number| self.functions[number].is_none())
            .ok_or(PciError::Full)?;
        let bar = function.bar_len();
        let (base, len) = self.window;
        let room = PciError::Window { len, bar };
        let at = self
            .next_bar
            .checked_next_multiple_of(bar)
            .ok_or(PciError::Window { len, bar })?;
        let end = at.checked_add(bar).filter(|end| *end - base <= len);
        self.next_bar = end.ok_or(room)?;
        function.set_bar(at);
        if number % FUNCTIONS != 0
            && let Some(first) = &self.functions[number / FUNCTIONS * FUNCTIONS]
        {
            first.set_multifunction();
        }
        self.functions[number] = Some(function);
        Ok(number as u8)
    }

    /// First address and length of the BARs' window.
    pub fn window(&self) -> (u64, u64) {
        self.window
    }

    /// Configuration space by ECAM: [`PciBus::ECAM_LEN`] bytes of MMIO.
    pub fn ecam(self: &Arc<PciBus>) -> Arc<dyn BusDevice> {
        Arc::new(Ecam(self.clone()))
    }

    /// Configuration space by the ports 0xcf8 (address) and 0xcfc (data): 8 ports.
    pub fn ports(self: &Arc<PciBus>) -> Arc<dyn BusDevice> {
        Arc::new(Ports {
            bus: self.clone(),
            address: AtomicU32::new(0),
        })
    }

    /// The BARs' window.
    pub fn memory(self: &Arc<PciBus>) -> Arc<dyn BusDevice> {
        Arc::new(Window(self.clone()))
    }

    fn read_config(&self, number: usize, offset: usize, data: &mut [u8]) {
        if number == 0 {
            let bridge = self.bridge.0.lock();
            return bridge
                .unwrap_or_else(PoisonError::into_inner)
                .read(offset, data);
        }
        match self.functions.get(number).and_then(Option::as_ref) {
            Some(function) => function.read_config(offset, data),
            None => data.fill(0xff),
        }
    }

    fn write_config(&self, number: usize, offset: usize, data: &[u8]) {
        if number == 0 {
            let bridge = self.bridge.0.lock();
            return bridge
                .unwrap_or_else(PoisonError::into_inner)
                .write(offset, data);
        }
        if let Some(function) = self.functions.get(number).and_then(Option::as_ref) {
            function.write_config(offset, data);
        }
    }

    /// The function whose BAR holds all of `len` bytes at `addr`, and the offset in it.
    fn find(&self, addr: u64, len: usize) -> Option<(&dyn PciFunction, u64)> {
        self.functions.iter().flatten().find_map(|function| {
            let offset = addr.checked_sub(function.bar()?)?;
            let end = offset.checked_add(len as u64)?;
            (end <= function.bar_len()).then_some((&**function, offset))
        })
    }
}

struct Ecam(Arc<PciBus>);

/// Function number and register of an ECAM offset.
fn ecam_target(offset: u64) -> (usize, usize) {
    let number = usize::try_from(offset / FUNCTION_BYTES).unwrap_or(usize::MAX);
    (number, (offset % FUNCTION_BYTES) as usize)
}

impl BusDevice for Ecam {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let (number, register) = ecam_target(offset);
        self.0.read_config(number, register, data);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        let (number, register) = ecam_target(offset);
        self.0.write_config(number, register, data);
    }
}

struct Ports {
    bus: Arc<PciBus>,
    address: AtomicU32,
}

impl Ports {
    /// Function number and register that the data port stands for, `lane` bytes into it.
    fn target(&self, lane: u64) -> Option<(usize, usize)> {
        let address = self.address.load(Ordering::SeqCst);
        let on_this_bus = address & PORT_ENABLE != 0 && address & 0xff_0000 == 0;
        let number = (address >> 8) as usize & 0xff;
        let register = (address & 0xfc) as usize + lane as usize;
        on_this_bus.then_some((number, register))
    }
}

impl BusDevice for Ports {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        if offset == 0 && data.len() == 4 {
            let address = self.address.load(Ordering::SeqCst);
            data.copy_from_slice(&address.to_le_bytes());
        } else if let Some((number, register)) = offset.checked_sub(4).and_then(|l| self.target(l))
        {
            self.bus.read_config(number, register, data);
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if offset == 0
            && let Ok(bytes) = data.try_into()
        {
            let address = u32::from_le_bytes(bytes);
            self.address.store(address, Ordering::SeqCst);
        } else if let Some((number, register)) = offset.checked_sub(4).and_then(|l| self.target(l))
        {
            self.bus.write_config(number, register, data);
        }
    }
}

struct Window(Arc<PciBus>);

impl BusDevice for Window {
    fn read(&self, offset: u64, data: &mut [u8]) {
        match self.0.find(self.0.window.0 + offset, data.len()) {
            Some((function, offset)) => function.read_bar(offset, data),
            None => data.fill(0xff),
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        if let Some((function, offset)) = self.0.find(self.0.window.0 + offset, data.len()) {
            function.write_bar(offset, data);
        }
    }
}
