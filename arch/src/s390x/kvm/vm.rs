//! A VM with its floating interrupt controller (FLIC).

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

use vm_memory::{GuestMemoryBackend as _, GuestMemoryRegion as _};

use super::{KvmError, abi, ioctl_number, ioctl_with, vcpu::Vcpu};
use crate::GuestMemory;
use crate::s390x::psw;

/// Where a GSI leads: an adapter's indicators in guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The GSI.
    pub gsi: u32,
    /// Guest address of the indicators.
    pub indicators: u64,
    /// Bit in them, from the most significant one on.
    pub bit: u64,
    /// Guest address of the summary indicator.
    pub summary: u64,
    /// Interruption subclass: there is an adapter for each.
    pub isc: u8,
}

/// Bit of the summary byte: the least significant.
const SUMMARY_BIT: u32 = 7;
/// Machine check for a channel report: its subclass in control register 14, and its code.
const REPORT_SUBCLASS: u32 = 1 << 28;
const REPORT_CODE: u64 = 0x0040_0f1d_4033_0000;

/// A VM.
pub struct Vm {
    fd: OwnedFd,
    flic: OwnedFd,
    vcpu_mmap_bytes: usize,
    routes: Mutex<Vec<Route>>,
    /// Adapters that are registered, a bit for each subclass.
    adapters: Mutex<u8>,
    /// Kept mapped as long as the VM may run.
    _memory: GuestMemory,
}

fn owned(fd: i32) -> OwnedFd {
    // SAFETY: an ioctl has just made the descriptor, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

impl Vm {
    /// Makes a VM with `memory` as its RAM.
    ///
    /// # Errors
    /// KVM refuses something.
    pub fn new(kvm: &OwnedFd, memory: &GuestMemory) -> Result<Self, KvmError> {
        let fd = loop {
            match ioctl_number(kvm, "KVM_CREATE_VM", abi::CREATE_VM, 0) {
                Err(error) if error.source.raw_os_error() == Some(libc::EINTR) => {}
                result => break owned(result?),
            }
        };
        let bytes = ioctl_number(kvm, "KVM_GET_VCPU_MMAP_SIZE", abi::GET_VCPU_MMAP_SIZE, 0)?;
        for (slot, region) in (0..).zip(memory.iter()) {
            let mut region = abi::UserspaceMemoryRegion {
                slot,
                flags: 0,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the mapping stays as long as the VM, which keeps a clone of `memory`.
            unsafe {
                ioctl_with(
                    &fd,
                    "KVM_SET_USER_MEMORY_REGION",
                    abi::SET_USER_MEMORY_REGION,
                    &mut region,
                )
            }?;
        }
        enable(&fd, abi::CAP_S390_IRQCHIP)?;
        ioctl_number(&fd, "KVM_CREATE_IRQCHIP", abi::CREATE_IRQCHIP, 0)?;
        let mut device = abi::CreateDevice {
            type_: abi::DEV_TYPE_FLIC,
            ..Default::default()
        };
        // SAFETY: the structure has no address.
        unsafe { ioctl_with(&fd, "KVM_CREATE_DEVICE", abi::CREATE_DEVICE, &mut device) }?;
        Ok(Self {
            flic: owned(device.fd as RawFd),
            fd,
            vcpu_mmap_bytes: bytes as usize,
            routes: Mutex::default(),
            adapters: Mutex::default(),
            _memory: memory.clone(),
        })
    }

    /// Makes vCPU `index`, reset, with channel I/O left to the VMM.
    ///
    /// # Errors
    /// KVM refuses something.
    pub fn create_vcpu(&self, index: u16) -> Result<Vcpu, KvmError> {
        let fd = ioctl_number(&self.fd, "KVM_CREATE_VCPU", abi::CREATE_VCPU, index.into())?;
        let fd = owned(fd);
        enable(&fd, abi::CAP_S390_CSS_SUPPORT)?;
        ioctl_number(&fd, "KVM_S390_INITIAL_RESET", abi::S390_INITIAL_RESET, 0)?;
        Vcpu::new(File::from(fd), self.vcpu_mmap_bytes)
    }

    fn interrupt(&self, mut interrupt: abi::Interrupt) {
        // SAFETY: the structure has no address.
        let result = unsafe {
            ioctl_with(
                &self.fd,
                "KVM_S390_INTERRUPT",
                abi::S390_INTERRUPT,
                &mut interrupt,
            )
        };
        if let Err(error) = result {
            tracing::warn!("an interruption is lost: {error}");
        }
    }

    /// Makes a subchannel's interruption pending. `word` is its subsystem-identification word.
    pub fn subchannel_interrupt(&self, word: u32, parameter: u32, isc: u8) {
        let set = (word >> 17 & 3) as u8;
        self.interrupt(abi::Interrupt {
            type_: abi::int_io(false, set, word as u16),
            parm: word,
            parm64: u64::from(parameter) << 32 | u64::from(psw::subchannel_identification(isc)),
        });
    }

    /// Makes an adapter's interruption pending.
    pub fn adapter_interrupt(&self, isc: u8) {
        self.interrupt(abi::Interrupt {
            type_: abi::int_io(true, 0, 0),
            parm: 0,
            parm64: psw::adapter_identification(isc).into(),
        });
    }

    /// Makes a service signal pending.
    pub fn service_interrupt(&self, parameter: u32) {
        self.interrupt(abi::Interrupt {
            type_: abi::INT_SERVICE,
            parm: parameter,
            parm64: 0,
        });
    }

    /// Makes the machine check of a channel report pending.
    pub fn channel_report(&self) {
        self.interrupt(abi::Interrupt {
            type_: abi::MACHINE_CHECK,
            parm: REPORT_SUBCLASS,
            parm64: REPORT_CODE,
        });
    }

    /// Takes back a subchannel's interruption that no CPU has taken.
    pub fn withdraw(&self, mut word: u32) {
        let attribute = abi::DeviceAttr {
            group: abi::FLIC_CLEAR_IO_IRQ,
            attr: 4,
            addr: std::ptr::from_mut(&mut word) as u64,
            ..Default::default()
        };
        if let Err(error) = self.flic(attribute) {
            tracing::debug!("an interruption is not taken back: {error}");
        }
    }

    /// `attribute`'s address, if it has one, is of what its group takes, and valid during the call.
    fn flic(&self, mut attribute: abi::DeviceAttr) -> Result<(), KvmError> {
        // SAFETY: as the callers in this file promise.
        unsafe {
            ioctl_with(
                &self.flic,
                "KVM_SET_DEVICE_ATTR",
                abi::SET_DEVICE_ATTR,
                &mut attribute,
            )
        }?;
        Ok(())
    }

    /// Registers an ioeventfd for queue `queue` of the virtio-ccw device `word`.
    ///
    /// # Errors
    /// KVM refuses it.
    pub fn add_kick(&self, word: u32, queue: u64, fd: &impl AsRawFd) -> Result<(), KvmError> {
        let mut kick = abi::IoEventFd {
            datamatch: queue,
            addr: word.into(),
            len: 8,
            fd: fd.as_raw_fd(),
            flags: abi::IOEVENTFD_VIRTIO_CCW_NOTIFY | abi::IOEVENTFD_DATAMATCH,
            pad: [0; 36],
        };
        // SAFETY: the structure's address is the guest's, not this process'.
        unsafe { ioctl_with(&self.fd, "KVM_IOEVENTFD", abi::IOEVENTFD, &mut kick) }?;
        Ok(())
    }

    /// Registers an irqfd for `gsi`.
    ///
    /// # Errors
    /// KVM refuses it.
    pub fn add_irqfd(&self, gsi: u32, fd: &impl AsRawFd) -> Result<(), KvmError> {
        let mut irqfd = abi::Irqfd {
            // Descriptors are not negative.
            fd: fd.as_raw_fd() as u32,
            gsi,
            ..Default::default()
        };
        // SAFETY: the structure has no address.
        unsafe { ioctl_with(&self.fd, "KVM_IRQFD", abi::IRQFD, &mut irqfd) }?;
        Ok(())
    }

    /// Registers the adapter of a subclass, whose number is the subclass', and lets the kernel reach its indicators.
    fn map_adapter(&self, route: &Route) -> Result<(), KvmError> {
        let mut adapters = self.adapters.lock().unwrap_or_else(PoisonError::into_inner);
        let bit = 1 << (route.isc & 7);
        if *adapters & bit == 0 {
            let mut adapter = abi::IoAdapter {
                id: route.isc.into(),
                isc: route.isc,
                maskable: 0,
                // Bits are counted from the most significant one.
                swap: 1,
                flags: abi::ADAPTER_SUPPRESSIBLE,
            };
            self.flic(abi::DeviceAttr {
                group: abi::FLIC_ADAPTER_REGISTER,
                addr: std::ptr::from_mut(&mut adapter) as u64,
                ..Default::default()
            })?;
            *adapters |= bit;
        }
        drop(adapters);
        for addr in [route.indicators, route.summary] {
            let mut request = abi::IoAdapterReq {
                id: route.isc.into(),
                type_: abi::IO_ADAPTER_MAP,
                addr,
                ..Default::default()
            };
            self.flic(abi::DeviceAttr {
                group: abi::FLIC_ADAPTER_MODIFY,
                addr: std::ptr::from_mut(&mut request) as u64,
                ..Default::default()
            })?;
        }
        Ok(())
    }

    /// Lets GSIs lead to `new` routes, instead of where those of the same GSIs led.
    ///
    /// # Errors
    /// KVM refuses it; what was routed before stays.
    pub fn route(&self, new: &[Route]) -> Result<(), KvmError> {
        for route in new {
            self.map_adapter(route)?;
        }
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wanted = routes.clone();
        wanted.retain(|old| new.iter().all(|new| new.gsi != old.gsi));
        wanted.extend(new);
        self.set_routes(&wanted)?;
        *routes = wanted;
        Ok(())
    }

    /// Lets GSIs in `gsis` lead nowhere.
    ///
    /// # Errors
    /// KVM refuses it.
    pub fn unroute(&self, gsis: &std::ops::Range<u32>) -> Result<(), KvmError> {
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wanted = routes.clone();
        wanted.retain(|route| !gsis.contains(&route.gsi));
        self.set_routes(&wanted)?;
        *routes = wanted;
        Ok(())
    }

    fn set_routes(&self, routes: &[Route]) -> Result<(), KvmError> {
        let mut table = routing_table(routes);
        // SAFETY: the table has its number of entries at its head, and they follow.
        unsafe {
            ioctl_with(
                &self.fd,
                "KVM_SET_GSI_ROUTING",
                abi::SET_GSI_ROUTING,
                &mut table[0],
            )
        }?;
        Ok(())
    }
}

/// `kvm_irq_routing`: number and flags, and 48 bytes for each entry, in words of 8 bytes.
fn routing_table(routes: &[Route]) -> Vec<u64> {
    let entry_words = size_of::<abi::AdapterRoutingEntry>() / 8;
    let pair = |high_address: u32, low_address: u32| -> u64 {
        let [a, b, c, d] = high_address.to_ne_bytes();
        let [e, f, g, h] = low_address.to_ne_bytes();
        u64::from_ne_bytes([a, b, c, d, e, f, g, h])
    };
    let mut table = Vec::with_capacity(1 + routes.len() * entry_words);
    table.push(pair(routes.len() as u32, 0));
    for route in routes {
        table.extend([
            pair(route.gsi, abi::IRQ_ROUTING_S390_ADAPTER),
            0,
            route.indicators,
            route.summary,
            route.bit,
            pair(SUMMARY_BIT, route.isc.into()),
        ]);
    }
    table
}

fn enable(fd: &OwnedFd, cap: u32) -> Result<(), KvmError> {
    let mut enable = abi::EnableCap {
        cap,
        flags: 0,
        args: [0; 4],
        pad: [0; 64],
    };
    // SAFETY: the structure has no address.
    unsafe { ioctl_with(fd, "KVM_ENABLE_CAP", abi::ENABLE_CAP, &mut enable) }?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_routing_table_is_laid_out_as_the_kernel_reads_it() {
        let route = Route {
            gsi: 3,
            indicators: 0x1000,
            bit: 9,
            summary: 0x2000,
            isc: 5,
        };
        let table = routing_table(&[route, route]);
        assert_eq!(table.len(), 1 + 2 * 6);
        let bytes: Vec<u8> = table.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        assert_eq!((word(0), word(4)), (2, 0));
        let entry = &bytes[8 + 48..];
        // SAFETY: as many bytes as the structure has, of integers alone.
        let entry = unsafe {
            entry
                .as_ptr()
                .cast::<abi::AdapterRoutingEntry>()
                .read_unaligned()
        };
        assert_eq!((entry.gsi, entry.type_, entry.flags), (3, 3, 0));
        assert_eq!((entry.ind_addr, entry.summary_addr), (0x1000, 0x2000));
        assert_eq!((entry.ind_offset, entry.summary_offset), (9, 7));
        assert_eq!(entry.adapter_id, 5);
    }
}
