//! virtio over channel I/O (VIRTIO 1.2, section 4.3): a control unit that the driver sets up by channel commands.
//!
//! Revisions 1 and 2 are offered; there is no legacy interface. Interruptions come by adapter indicators or by the classic
//! ones, as the driver chooses. Structures of the transport are big-endian; features, configuration space and queues are
//! little-endian, as everywhere in virtio 1.

mod indicators;

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use super::device::VirtioDevice;
use super::transport::{NeedsReset, Transport};
use crate::GuestMemory;
use crate::channel::program::Data;
use crate::channel::{Attention, CommandError, ControlUnit, SenseId};
pub use indicators::{AdapterIndicators, CcwHost, NoIrqfds};
use indicators::{CcwInterrupt, Target};

/// Type of the control unit (section 4.3.1.1).
pub const UNIT_TYPE: u16 = 0x3832;
/// The newest revision here (section 4.3.2.1): READ_STATUS is its gift.
const MAX_REVISION: u16 = 2;
/// The first revision without the legacy interface.
const MIN_REVISION: u16 = 1;
/// Longest configuration space that is transferred.
const MAX_CONFIG_BYTES: u32 = 256;

/// Channel commands (section 4.3.1.2).
pub mod command {
    #![allow(missing_docs)] // Each is what the specification calls it.
    pub const WRITE_FEAT: u8 = 0x11;
    pub const READ_FEAT: u8 = 0x12;
    pub const SET_VQ: u8 = 0x13;
    pub const WRITE_CONF: u8 = 0x21;
    pub const READ_CONF: u8 = 0x22;
    pub const WRITE_STATUS: u8 = 0x31;
    pub const READ_VQ_CONF: u8 = 0x32;
    pub const VDEV_RESET: u8 = 0x33;
    pub const SET_IND: u8 = 0x43;
    pub const SET_CONF_IND: u8 = 0x53;
    pub const READ_STATUS: u8 = 0x72;
    pub const SET_IND_ADAPTER: u8 = 0x73;
    pub const SET_VIRTIO_REV: u8 = 0x83;
}

/// A queue's kick, to be registered as a KVM ioeventfd on the bus of virtio-ccw notifications.
pub struct QueueEventFd {
    /// The value to match, 64 bits wide: the queue's index.
    pub datamatch: u64,
    /// What to write to.
    pub eventfd: Arc<EventFd>,
}

/// A virtio device behind a control unit.
pub struct VirtioCcw {
    device_type: u32,
    state: Mutex<State>,
    interrupt: Arc<CcwInterrupt>,
}

struct State {
    transport: Transport,
    /// As the driver has chosen it.
    revision: Option<u16>,
}

impl VirtioCcw {
    /// Puts `device` behind a control unit. `host` gives irqfds for adapter indicators, where there are some.
    ///
    /// # Errors
    /// No eventfd could be made.
    pub fn new(
        device: Box<dyn VirtioDevice>,
        mem: GuestMemory,
        host: Box<dyn CcwHost>,
    ) -> io::Result<Self> {
        let needs_reset = NeedsReset::default();
        let interrupt = Arc::new(CcwInterrupt::new(mem.clone(), needs_reset.clone(), host));
        let device_type = device.device_type();
        let transport = Transport::new(device, mem, interrupt.clone(), needs_reset)?;
        Ok(Self {
            device_type,
            state: Mutex::new(State {
                transport,
                revision: None,
            }),
            interrupt,
        })
    }

    /// Connects the device with the subchannel it was added as. Only the first call counts.
    pub fn connect(&self, attention: Attention) {
        self.interrupt.connect(attention);
    }

    /// The queues' kicks. Without an ioeventfd they arrive by [`VirtioCcw::notify`] and work too.
    pub fn queue_eventfds(&self) -> Vec<QueueEventFd> {
        let state = self.lock();
        let queues = (0..).zip(&state.transport.queues);
        queues
            .map(|(datamatch, queue)| QueueEventFd {
                datamatch,
                eventfd: queue.notify.clone(),
            })
            .collect()
    }

    /// A kick by DIAGNOSE 0x500: false if there is no such queue.
    pub fn notify(&self, queue: u64) -> bool {
        let state = self.lock();
        let Some(queue) = u32::try_from(queue).ok().filter(|queue| {
            usize::try_from(*queue).is_ok_and(|queue| queue < state.transport.queues.len())
        }) else {
            return false;
        };
        state.transport.notify(queue);
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reset_device(&self, state: &mut State) {
        state.transport.set_status(0);
        // After the device has stopped: it sets no indicators any more.
        self.interrupt.clear();
    }

    fn set_indicators(&self, data: &mut Data<'_>, code: u8) -> Result<(), CommandError> {
        match code {
            command::SET_IND => {
                data.expect(8)?;
                let address = u64::from_be_bytes(data.take()?);
                self.interrupt.set_queues(Target::Classic(address))
            }
            command::SET_CONF_IND => {
                data.expect(8)?;
                let address = u64::from_be_bytes(data.take()?);
                self.interrupt.set_config(address)
            }
            _ => {
                data.expect(25)?;
                let area = AdapterIndicators {
                    summary: u64::from_be_bytes(data.take()?),
                    indicators: u64::from_be_bytes(data.take()?),
                    first_bit: u64::from_be_bytes(data.take()?),
                    isc: data.take::<1>()?[0],
                };
                self.interrupt.set_queues(Target::Adapter(area))
            }
        }
    }
}

impl State {
    fn set_revision(&mut self, data: &mut Data<'_>) -> Result<(), CommandError> {
        // Once, and before everything else (section 4.3.2.1).
        if self.revision.is_some() {
            return Err(CommandError::Rejected);
        }
        let revision = u16::from_be_bytes(data.peek(0)?);
        let len = u16::from_be_bytes(data.peek(2)?);
        data.expect(4 + u32::from(len))?;
        // No revision here has data of its own.
        if len != 0 || !(MIN_REVISION..=MAX_REVISION).contains(&revision) {
            return Err(CommandError::Rejected);
        }
        data.take::<4>()?;
        self.revision = Some(revision);
        Ok(())
    }

    fn set_queue(&mut self, data: &mut Data<'_>) -> Result<(), CommandError> {
        data.expect(32)?;
        let desc = u64::from_be_bytes(data.take()?);
        data.take::<4>()?;
        let index = u16::from_be_bytes(data.take()?);
        let size = u16::from_be_bytes(data.take()?);
        let avail = u64::from_be_bytes(data.take()?);
        let used = u64::from_be_bytes(data.take()?);
        self.transport.queue_select = index;
        let queue = self.transport.selected_mut();
        let queue = queue.ok_or(CommandError::Rejected)?;
        if size > queue.max_size {
            return Err(CommandError::Rejected);
        }
        // A queue at address 0 is taken back.
        queue.ready = desc != 0;
        queue.layout.desc = desc;
        queue.layout.avail = avail;
        queue.layout.used = used;
        queue.layout.size = size;
        Ok(())
    }

    fn read_features(&mut self, data: &mut Data<'_>) -> Result<(), CommandError> {
        data.expect(5)?;
        let [index] = data.peek(4)?;
        self.transport.device_features_select = index.into();
        data.store(&self.transport.device_features().to_le_bytes())?;
        data.store(&[index])
    }

    fn write_features(&mut self, data: &mut Data<'_>) -> Result<(), CommandError> {
        data.expect(5)?;
        let features = u32::from_le_bytes(data.take()?);
        let [index] = data.take()?;
        self.transport.driver_features_select = index.into();
        self.transport.set_driver_features(features);
        Ok(())
    }

    fn read_queue_size(&mut self, data: &mut Data<'_>) -> Result<(), CommandError> {
        data.expect(4)?;
        let index: [u8; 2] = data.peek(0)?;
        let queue = self
            .transport
            .queues
            .get(usize::from(u16::from_be_bytes(index)));
        let size = queue.map_or(0, |queue| queue.max_size);
        data.store(&index)?;
        data.store(&size.to_be_bytes())
    }

    fn read_config(&mut self, data: &mut Data<'_>) -> Result<(), CommandError> {
        data.at_most(MAX_CONFIG_BYTES);
        let mut config = vec![0; data.len().min(MAX_CONFIG_BYTES) as usize];
        self.transport.device.read_config(0, &mut config);
        data.store(&config)
    }

    fn write_config(&mut self, data: &mut Data<'_>) -> Result<(), CommandError> {
        data.at_most(MAX_CONFIG_BYTES);
        let mut config = vec![0; data.len().min(MAX_CONFIG_BYTES) as usize];
        data.read(&mut config)?;
        // Always from the start of the space (section 4.3.2.5).
        self.transport.device.write_config(0, &config);
        Ok(())
    }
}

impl ControlUnit for VirtioCcw {
    fn sense_id(&self) -> SenseId {
        SenseId {
            unit_type: UNIT_TYPE,
            // Device IDs of virtio are small numbers.
            unit_model: self.device_type as u8,
        }
    }

    fn command(&self, code: u8, data: &mut Data<'_>) -> Result<(), CommandError> {
        let mut state = self.lock();
        if state.revision.is_none()
            && !matches!(code, command::SET_VIRTIO_REV | command::VDEV_RESET)
        {
            // Only the legacy interface begins without a revision.
            return Err(CommandError::Rejected);
        }
        match code {
            command::SET_VIRTIO_REV => state.set_revision(data),
            command::VDEV_RESET => {
                self.reset_device(&mut state);
                Ok(())
            }
            command::READ_FEAT => state.read_features(data),
            command::WRITE_FEAT => state.write_features(data),
            command::SET_VQ => state.set_queue(data),
            command::READ_VQ_CONF => state.read_queue_size(data),
            command::READ_CONF => state.read_config(data),
            command::WRITE_CONF => state.write_config(data),
            command::READ_STATUS if state.revision >= Some(2) => {
                data.expect(1)?;
                // One byte, as the driver's field is.
                data.store(&[state.transport.status() as u8])
            }
            command::WRITE_STATUS => {
                data.expect(1)?;
                let [status] = data.take()?;
                match status {
                    0 => self.reset_device(&mut state),
                    _ => {
                        state.transport.set_status(status.into());
                    }
                }
                Ok(())
            }
            command::SET_IND | command::SET_CONF_IND | command::SET_IND_ADAPTER => {
                self.set_indicators(data, code)
            }
            _ => Err(CommandError::Rejected),
        }
    }

    fn reset(&self) {
        let mut state = self.lock();
        self.reset_device(&mut state);
        state.revision = None;
    }

    fn disabled(&self) {
        // The next driver chooses its own.
        self.lock().revision = None;
    }
}

#[cfg(test)]
mod tests;
