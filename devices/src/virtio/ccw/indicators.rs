//! How a device on virtio-ccw reaches its driver: bits in guest memory, and an interruption (VIRTIO 1.2, section 4.3.3.1).

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock};

use vm_memory::{GuestAddress, GuestMemoryBackend as _};
use vmm_sys_util::eventfd::EventFd;

use crate::GuestMemory;
use crate::channel::{Attention, CommandError};
use crate::virtio::device::Interrupt;
use crate::virtio::transport::NeedsReset;

/// Queues that classic indicators can tell apart.
const CLASSIC_QUEUES: u16 = 64;

/// Where the driver wants adapter indicators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterIndicators {
    /// Address of the summary indicator, a byte.
    pub summary: u64,
    /// Address of the indicators.
    pub indicators: u64,
    /// Bit of queue 0 in them, counted from the most significant one of the first byte.
    pub first_bit: u64,
    /// Interruption subclass, 0 to 7.
    pub isc: u8,
}

/// Gives irqfds that do in the kernel what setting indicators and raising the interruption is.
pub trait CcwHost: Send + Sync {
    /// The driver wants adapter indicators there, for as many queues as the device has. Without irqfds (`None`) the
    /// device sets them itself.
    ///
    /// # Errors
    /// The kernel does not take the route.
    fn route(&self, at: AdapterIndicators) -> io::Result<Option<Vec<EventFd>>>;

    /// The driver wants them no more.
    fn unroute(&self);
}

/// A host without irqfds: the device sets indicators itself.
pub struct NoIrqfds;

impl CcwHost for NoIrqfds {
    fn route(&self, _: AdapterIndicators) -> io::Result<Option<Vec<EventFd>>> {
        Ok(None)
    }
    fn unroute(&self) {}
}

/// Indicators of queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// The address of 64 bits, one a queue, for interruptions of the subchannel.
    Classic(u64),
    /// Adapter indicators.
    Adapter(AdapterIndicators),
}

#[derive(Default)]
struct Wanted {
    queues: Option<Target>,
    irqfds: Vec<EventFd>,
    config: Option<u64>,
}

pub(super) struct CcwInterrupt {
    mem: GuestMemory,
    needs_reset: NeedsReset,
    host: Box<dyn CcwHost>,
    attention: OnceLock<Attention>,
    wanted: RwLock<Wanted>,
}

impl CcwInterrupt {
    pub(super) fn new(mem: GuestMemory, needs_reset: NeedsReset, host: Box<dyn CcwHost>) -> Self {
        Self {
            mem,
            needs_reset,
            host,
            attention: OnceLock::new(),
            wanted: RwLock::default(),
        }
    }

    pub(super) fn connect(&self, attention: Attention) {
        // A second subchannel for one device is a mistake that changes nothing.
        let _ = self.attention.set(attention);
    }

    pub(super) fn set_queues(&self, target: Target) -> Result<(), CommandError> {
        let mut irqfds = Vec::new();
        match target {
            Target::Classic(address) => {
                // Zero takes them back.
                if address != 0 && !self.in_memory(address, 8) {
                    return Err(CommandError::Rejected);
                }
            }
            Target::Adapter(at) => {
                if at.isc > 7
                    || !self.in_memory(at.summary, 1)
                    || self.adapter_byte(&at, 0).is_none()
                {
                    return Err(CommandError::Rejected);
                }
                match self.host.route(at) {
                    Ok(routed) => irqfds = routed.unwrap_or_default(),
                    Err(error) => {
                        tracing::warn!(%error, "adapter interruptions of virtio-ccw: no irqfd, done by hand");
                    }
                }
            }
        }
        let mut wanted = self.wanted.write().unwrap_or_else(PoisonError::into_inner);
        wanted.queues = match target {
            Target::Classic(0) => None,
            target => Some(target),
        };
        wanted.irqfds = irqfds;
        Ok(())
    }

    pub(super) fn set_config(&self, address: u64) -> Result<(), CommandError> {
        if address != 0 && !self.in_memory(address, 8) {
            return Err(CommandError::Rejected);
        }
        let mut wanted = self.wanted.write().unwrap_or_else(PoisonError::into_inner);
        wanted.config = (address != 0).then_some(address);
        Ok(())
    }

    pub(super) fn clear(&self) {
        let mut wanted = self.wanted.write().unwrap_or_else(PoisonError::into_inner);
        if matches!(wanted.queues, Some(Target::Adapter(_))) {
            self.host.unroute();
        }
        *wanted = Wanted::default();
    }

    fn in_memory(&self, address: u64, len: usize) -> bool {
        self.mem.check_range(GuestAddress(address), len)
    }

    /// Address and mask of a queue's adapter indicator, if it is in memory.
    fn adapter_byte(&self, at: &AdapterIndicators, queue: u16) -> Option<(u64, u8)> {
        let bit = at.first_bit.checked_add(queue.into())?;
        let address = at.indicators.checked_add(bit / 8)?;
        self.in_memory(address, 1)
            .then_some((address, 0x80 >> (bit % 8)))
    }

    /// Sets bits of a byte in guest memory; what was there before, or nothing if it is no memory.
    fn set(&self, address: u64, mask: u8) -> Option<u8> {
        let slice = self.mem.get_slice(GuestAddress(address), 1).ok()?;
        let guard = slice.ptr_guard_mut();
        // SAFETY: the guard's pointer is to one byte of guest memory, mapped as long as `self.mem` is. Guest and devices
        // change it concurrently, which an atomic access is made for.
        let byte = unsafe { AtomicU8::from_ptr(guard.as_ptr()) };
        // Release: what the bit tells of is visible to the vCPU that sees it.
        Some(byte.fetch_or(mask, Ordering::AcqRel))
    }

    fn attention(&self) {
        if let Some(attention) = self.attention.get() {
            attention.raise();
        }
    }
}

impl Interrupt for CcwInterrupt {
    fn queue(&self, index: u16) {
        let wanted = self.wanted.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(irqfd) = wanted.irqfds.get(usize::from(index)) {
            if let Err(error) = irqfd.write(1) {
                tracing::warn!(%error, "virtio-ccw interruption failed");
            }
            return;
        }
        match wanted.queues {
            Some(Target::Classic(address)) if index < CLASSIC_QUEUES => {
                // Bit 0 of the 64 is the least significant, in the last byte.
                let byte = 7 - u64::from(index / 8);
                if self.set(address + byte, 1 << (index % 8)).is_some() {
                    self.attention();
                }
            }
            Some(Target::Adapter(at)) => {
                let Some((address, mask)) = self.adapter_byte(&at, index) else {
                    return;
                };
                self.set(address, mask);
                // A summary that is set already has its interruption under way.
                if self.set(at.summary, 1) == Some(0)
                    && let Some(attention) = self.attention.get()
                {
                    attention.interruptions().adapter(at.isc);
                }
            }
            _ => {}
        }
    }

    fn config(&self) {
        let wanted = self.wanted.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = wanted.config
            && self.set(address + 7, 1).is_some()
        {
            self.attention();
        }
    }

    fn needs_reset(&self) {
        self.needs_reset.set();
        self.config();
    }
}
