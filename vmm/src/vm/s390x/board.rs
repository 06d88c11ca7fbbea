//! The machine around the CPUs: channel subsystem with its disks, service processor with the console. Whoever runs the
//! CPUs gives it a way to interrupt them.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arch::s390x::sclp::{Inventory, Sclp};
use devices::channel::{ChannelSubsystem, Full, Interruptions, IoInterruption, SubchannelId};
use devices::serial::Output;
use devices::virtio::ccw::{CcwHost, QueueEventFd, VirtioCcw};
use devices::virtio::device::VirtioDevice;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::vm::hypervisor::GuestConsole;
use crate::vm::memory::GuestMemory;

/// Interruptions that any CPU takes.
pub trait Floating: Interruptions {
    /// A service signal with this parameter.
    fn service(&self, parameter: u32);
}

/// Why a device is not in the machine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No number is left.
    #[error(transparent)]
    Full(#[from] Full),
    /// No eventfd.
    #[error("eventfd: {0}")]
    EventFd(#[from] io::Error),
}

/// All that instructions reach.
pub struct Board {
    /// Subchannels and their devices.
    pub channels: ChannelSubsystem,
    /// The service processor.
    pub sclp: Arc<Sclp>,
    /// The way to the CPUs.
    pub floating: Arc<dyn Floating>,
    /// Guest RAM.
    pub memory: GuestMemory,
    /// CPUs, with addresses from 0 on.
    pub cpus: u16,
    /// Devices by their subsystem-identification word.
    units: BTreeMap<u32, Arc<VirtioCcw>>,
}

impl Board {
    /// A machine without devices.
    pub fn new(
        memory: GuestMemory,
        cpus: u16,
        sclp: Arc<Sclp>,
        floating: Arc<impl Floating + 'static>,
    ) -> Self {
        Self {
            channels: ChannelSubsystem::new(memory.clone(), floating.clone()),
            sclp,
            floating,
            memory,
            cpus,
            units: BTreeMap::new(),
        }
    }

    /// Attaches a virtio device. Its subsystem-identification word, and its queues' kicks.
    ///
    /// # Errors
    /// There is no room, or no eventfd.
    pub fn attach(
        &mut self,
        device: Box<dyn VirtioDevice>,
        host: Box<dyn CcwHost>,
    ) -> Result<(u32, Vec<QueueEventFd>), Error> {
        let unit = Arc::new(VirtioCcw::new(device, self.memory.clone(), host)?);
        let attention = self.channels.add(unit.clone())?;
        let word = attention.id().word();
        unit.connect(attention);
        let kicks = unit.queue_eventfds();
        self.units.insert(word, unit);
        Ok((word, kicks))
    }

    /// A kick by DIAGNOSE: false if there is no such queue.
    pub fn notify(&self, subchannel: u32, queue: u64) -> bool {
        let unit = self.units.get(&subchannel);
        unit.is_some_and(|unit| unit.notify(queue))
    }

    /// Makes an interruption pending again that was taken back for a status which then was not taken.
    pub fn interrupt_again(&self, subchannel: u32, parameter: u32, isc: u8) {
        if let Ok(subchannel) = SubchannelId::from_word(subchannel)
            && self.channels.is_pending(subchannel)
        {
            self.floating.subchannel(IoInterruption {
                subchannel,
                parameter,
                isc,
            });
        }
    }

    /// Resets all but the CPUs.
    pub fn reset(&self) {
        self.channels.reset();
        self.sclp.reset();
    }
}

/// Console output that is shared with whoever waits for its end.
#[derive(Clone)]
struct SharedOutput(Arc<Mutex<Output>>);

impl SharedOutput {
    fn lock(&self) -> MutexGuard<'_, Output> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Write for SharedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.lock().flush()
    }
}

/// The service processor's console, as the main loop sees it.
pub struct SclpConsole {
    sclp: Arc<Sclp>,
    floating: Arc<dyn Floating>,
    output: SharedOutput,
    room: Arc<EventFd>,
}

impl SclpConsole {
    /// A service processor whose console writes to `output`.
    ///
    /// # Errors
    /// No eventfd or thread could be made.
    pub fn new(
        inventory: Inventory,
        output: Box<dyn Write + Send>,
        floating: Arc<dyn Floating>,
    ) -> io::Result<(Arc<Sclp>, Self)> {
        let room = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let output = SharedOutput(Arc::new(Mutex::new(Output::new(output)?)));
        let signal = room.clone();
        let sclp = Arc::new(Sclp::new(
            inventory,
            Box::new(output.clone()),
            Box::new(move || {
                // It can only fail when the counter is full, and then it is readable.
                let _ = signal.write(1);
            }),
        ));
        let console = Self {
            sclp: sclp.clone(),
            floating,
            output,
            room,
        };
        Ok((sclp, console))
    }

    /// Asks the guest to shut down.
    ///
    /// # Errors
    /// It does not listen.
    pub fn quiesce(&self) -> io::Result<()> {
        if !self.sclp.quiesce() {
            return Err(io::Error::other("the guest does not listen to it"));
        }
        self.floating.service(self.sclp.pending());
        Ok(())
    }
}

impl GuestConsole for SclpConsole {
    fn input(&self, bytes: &[u8]) -> usize {
        let taken = self.sclp.input(bytes);
        if taken > 0 {
            self.floating.service(self.sclp.pending());
        }
        taken
    }

    fn input_room(&self) -> &EventFd {
        &self.room
    }

    fn drain(&self, timeout: Duration) -> bool {
        self.output.lock().drain(timeout)
    }
}
