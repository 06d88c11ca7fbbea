//! One front end at a disk: what its messages do.
//!
//! Messages come one at a time, in the thread of the disk's socket. A message that is refused ends the
//! connection, and with it everything that the front end has set up; the disk waits for the next one.
//!
//! A queue runs while it is complete (size, addresses, memory, kick) and enabled. It is stopped, its
//! requests answered, when the front end takes its index back, disables it, or changes the memory.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, FromRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use devices::virtio::block::Block;
use devices::virtio::device::{ActiveQueue, Interrupt, VirtioDevice};
use devices::virtio::queue::{Layout, MAX_SIZE, Queue};
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig,
    VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error as ProtocolError, GpuBackend, VhostUserBackendReqHandlerMut};
use vmm_sys_util::eventfd::EventFd;

use super::call::{Calls, is_eventfd};
use super::inflight::{self, Shape, Shared};
use super::memory::{self, MAX_REGIONS, Place, Regions};
use super::sigbus::Alarm;

/// Why a message is refused.
#[derive(Debug, thiserror::Error)]
enum Refused {
    #[error("queue {index}; the disk has {have}")]
    NoQueue { index: usize, have: usize },
    #[error("{what} of queue {index} while it runs")]
    Running { what: &'static str, index: usize },
    #[error("queue size {0}; give a power of two up to {MAX_SIZE}")]
    Size(u32),
    #[error("index {0} of a queue; there are 16 bits")]
    Base(u32),
    #[error("features {0:#x} were not offered")]
    Features(u64),
    #[error("{what} while queues run")]
    Busy { what: &'static str },
    #[error("queue {index} at {address:#x}, which is not in a region")]
    Address { index: usize, address: u64 },
    #[error("queue {index}: {reason}")]
    Queue { index: usize, reason: String },
    #[error("the descriptor for {what} of queue {index} is no eventfd")]
    NoEventFd { what: &'static str, index: usize },
    #[error("queue {0} without a kick: queues that are only polled are not offered")]
    NoKick(usize),
    #[error("{files} descriptors for {regions} regions")]
    Files { files: usize, regions: usize },
    #[error(transparent)]
    Memory(#[from] memory::Error),
    #[error(transparent)]
    Inflight(#[from] inflight::Error),
    #[error("{0}")]
    System(#[from] io::Error),
    #[error("{0} is not offered")]
    NotOffered(&'static str),
}

impl From<Refused> for ProtocolError {
    fn from(refused: Refused) -> Self {
        ProtocolError::ReqHandlerError(io::Error::other(refused.to_string()))
    }
}

type Result<T> = std::result::Result<T, ProtocolError>;

/// A queue as the front end has set it up so far. Addresses are those of its process.
#[derive(Default)]
struct Ring {
    size: u16,
    /// Descriptor table, available ring, used ring.
    addresses: Option<[u64; 3]>,
    base: u16,
    kick: Option<Arc<EventFd>>,
    /// Said by the front end; without the protocol's features a queue is enabled from the start.
    enabled: bool,
    running: bool,
}

/// A disk and what its front end has set up.
pub struct Session {
    block: Block,
    calls: Arc<Calls>,
    rings: Vec<Ring>,
    regions: Regions,
    inflight: Option<Shared>,
    features: u64,
    alarm: Arc<Alarm>,
}

const PROTOCOL_FEATURES: u64 = VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

impl Session {
    /// A disk without a front end.
    pub fn new(block: Block) -> io::Result<Session> {
        let queues = block.queue_max_sizes().len();
        let calls = Arc::new(Calls::new(block.handle().id().to_owned(), queues)?);
        Ok(Session {
            block,
            calls,
            rings: (0..queues).map(|_| Ring::default()).collect(),
            regions: Regions::default(),
            inflight: None,
            features: 0,
            alarm: Alarm::new()?,
        })
    }

    /// A front end has come. The alarm is raised if its memory goes away.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn begin(&mut self) -> io::Result<Arc<Alarm>> {
        self.alarm = Alarm::new()?;
        Ok(self.alarm.clone())
    }

    /// The front end is gone: its requests are finished, so that the next one finds the rings and the
    /// record of requests as they should be, and everything of it is let go.
    pub fn end(&mut self) {
        self.stop_all();
        self.block.reset();
        for ring in &mut self.rings {
            *ring = Ring::default();
        }
        self.calls.clear();
        self.inflight = None;
        self.regions = Regions::default();
        self.features = 0;
    }

    fn ring(&mut self, index: usize) -> std::result::Result<&mut Ring, Refused> {
        let have = self.rings.len();
        let ring = self.rings.get_mut(index);
        ring.ok_or(Refused::NoQueue { index, have })
    }

    /// A queue that is being set up.
    fn idle_ring(
        &mut self,
        index: u32,
        what: &'static str,
    ) -> std::result::Result<&mut Ring, Refused> {
        let index = index as usize;
        let ring = self.ring(index)?;
        match ring.running {
            true => Err(Refused::Running { what, index }),
            false => Ok(ring),
        }
    }

    fn check_idle(&self, what: &'static str) -> std::result::Result<(), Refused> {
        match self.rings.iter().any(|ring| ring.running) {
            true => Err(Refused::Busy { what }),
            false => Ok(()),
        }
    }

    /// Starts a queue if it is complete and enabled.
    fn try_start(&mut self, index: usize) -> std::result::Result<(), Refused> {
        let enabled_by_default = self.features & PROTOCOL_FEATURES == 0;
        let ring = &self.rings[index];
        let (Some(addresses), Some(kick)) = (ring.addresses, &ring.kick) else {
            return Ok(());
        };
        if ring.running
            || ring.size == 0
            || !(ring.enabled || enabled_by_default)
            || self.regions.is_empty()
        {
            return Ok(());
        }
        let mut guest = [0; 3];
        for (guest, address) in guest.iter_mut().zip(addresses) {
            let found = self.regions.guest_address(address);
            *guest = found.ok_or(Refused::Address { index, address })?;
        }
        let [desc, avail, used] = guest;
        let layout = Layout {
            size: ring.size,
            desc,
            avail,
            used,
        };
        let wrong = |reason: String| Refused::Queue { index, reason };
        let mem = self.regions.memory()?;
        let features = self.features & !PROTOCOL_FEATURES;
        let mut queue = Queue::new(&mem, layout, MAX_SIZE, features, ring.base)
            .map_err(|error| wrong(error.to_string()))?;
        queue.continue_used();
        // `rings` has as many entries as the disk has queues, whose number is 16 bits.
        let number = index as u16;
        let record = self.inflight.as_ref();
        if let Some(record) = record.and_then(|shared| shared.queue(number, ring.size)) {
            let tracked = queue.track(record);
            tracked.map_err(|error| wrong(error.to_string()))?;
        }
        let active = ActiveQueue {
            index: number,
            queue,
            notify: kick.clone(),
        };
        let interrupt: Arc<dyn Interrupt> = self.calls.clone();
        let started = self.block.start_queue(features, active, &interrupt);
        started.map_err(|error| wrong(error.to_string()))?;
        self.rings[index].running = true;
        // A predecessor may have published and died before it could tell.
        self.calls.queue(number);
        Ok(())
    }

    /// Stops a queue when its requests are answered.
    fn stop(&mut self, index: usize) {
        if !std::mem::take(&mut self.rings[index].running) {
            return;
        }
        // As many as the disk has queues: 16 bits.
        if let Some(base) = self.block.stop_queue(index as u16) {
            self.rings[index].base = base;
        }
    }

    /// Stops all queues; which ones ran.
    fn stop_all(&mut self) -> Vec<usize> {
        let running: Vec<usize> = (0..self.rings.len())
            .filter(|&index| self.rings[index].running)
            .collect();
        for &index in &running {
            self.stop(index);
        }
        running
    }

    /// Does something to the memory while no queue runs.
    fn change_memory(
        &mut self,
        change: impl FnOnce(&mut Self) -> std::result::Result<(), Refused>,
    ) -> Result<()> {
        let running = self.stop_all();
        change(self)?;
        for index in running {
            self.try_start(index)?;
        }
        Ok(())
    }
}

/// An eventfd that the front end sent.
fn eventfd(file: File, what: &'static str, index: usize) -> std::result::Result<OwnedFd, Refused> {
    let fd = OwnedFd::from(file);
    match is_eventfd(fd.as_fd()) {
        true => Ok(fd),
        false => Err(Refused::NoEventFd { what, index }),
    }
}

fn place(region: &VhostUserMemoryRegion) -> Place {
    Place {
        guest: region.guest_phys_addr,
        size: region.memory_size,
        user: region.user_addr,
        offset: region.mmap_offset,
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    // No longer used by front ends, and to be ignored or to disable all rings: the latter.
    fn reset_owner(&mut self) -> Result<()> {
        self.stop_all();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        self.block.reset();
        self.features = 0;
        for ring in &mut self.rings {
            *ring = Ring::default();
        }
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.block.features() | PROTOCOL_FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let extra = features & !(self.block.features() | PROTOCOL_FEATURES);
        if extra != 0 {
            return Err(Refused::Features(extra).into());
        }
        if features != self.features {
            self.check_idle("features")?;
        }
        self.features = features;
        self.block.features_accepted(features & !PROTOCOL_FEATURES);
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        if files.len() != regions.len() {
            let (files, regions) = (files.len(), regions.len());
            return Err(Refused::Files { files, regions }.into());
        }
        let mut new = Regions::default();
        for (region, file) in regions.iter().zip(files) {
            new.add(place(region), file, &self.alarm)
                .map_err(Refused::from)?;
        }
        self.change_memory(|session| {
            session.regions = new;
            Ok(())
        })?;
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let ring = self.idle_ring(index, "the size")?;
        let size = u16::try_from(num).ok();
        let size = size.filter(|size| size.is_power_of_two() && *size <= MAX_SIZE);
        ring.size = size.ok_or(Refused::Size(num))?;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let ring = self.idle_ring(index, "the addresses")?;
        ring.addresses = Some([descriptor, available, used]);
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let ring = self.idle_ring(index, "the index")?;
        ring.base = u16::try_from(base).map_err(|_| Refused::Base(base))?;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let at = index as usize;
        self.ring(at)?;
        self.stop(at);
        let ring = &mut self.rings[at];
        // It runs again when the front end sends a kick again.
        ring.kick = None;
        Ok(VhostUserVringState::new(index, ring.base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let at = usize::from(index);
        self.ring(at)?;
        let fd = eventfd(fd.ok_or(Refused::NoKick(at))?, "the kick", at)?;
        self.stop(at);
        // SAFETY: the descriptor is open and handed over.
        let kick = unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) };
        self.rings[at].kick = Some(Arc::new(kick));
        Ok(self.try_start(at)?)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let at = usize::from(index);
        let running = self.ring(at)?.running;
        let fd = fd.map(|file| eventfd(file, "the call", at)).transpose()?;
        self.calls.set(at, fd).map_err(Refused::from)?;
        if running {
            // What was told by the old one just now may be lost.
            self.calls.queue(index.into());
        }
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let at = usize::from(index);
        self.ring(at)?;
        let fd = fd.map(|file| eventfd(file, "errors", at)).transpose()?;
        self.calls.set_error(at, fd);
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.get_protocol_features()? | VhostUserProtocolFeatures::REPLY_ACK;
        let extra = features & !offered.bits();
        match extra {
            0 => Ok(()),
            _ => Err(Refused::Features(extra).into()),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        let at = index as usize;
        self.ring(at)?.enabled = enable;
        match enable {
            true => self.try_start(at)?,
            false => self.stop(at),
        }
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        // The protocol has at most 256 bytes, which was checked with the message.
        let mut data = vec![0; size as usize];
        self.block.read_config(offset.into(), &mut data);
        Ok(data)
    }

    fn set_config(&mut self, offset: u32, buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        self.block.write_config(offset.into(), buf);
        Ok(())
    }

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        Err(Refused::NotOffered("a GPU").into())
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Refused::NotOffered("sharing of objects").into())
    }

    fn get_inflight_fd(
        &mut self,
        inflight: &VhostUserInflight,
    ) -> Result<(VhostUserInflight, File)> {
        let shape = Shape {
            queues: inflight.num_queues,
            size: inflight.queue_size,
        };
        let file = inflight::make(shape, self.rings.len()).map_err(Refused::from)?;
        let reply = VhostUserInflight::new(shape.bytes(), 0, shape.queues, shape.size);
        Ok((reply, file))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        self.check_idle("the record of requests")?;
        let shape = Shape {
            queues: inflight.num_queues,
            size: inflight.queue_size,
        };
        let (offset, size) = (inflight.mmap_offset, inflight.mmap_size);
        let have = self.rings.len();
        let shared = Shared::map(shape, have, file, offset, size, &self.alarm);
        self.inflight = Some(shared.map_err(Refused::from)?);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(MAX_REGIONS as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        fd: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<u64>> {
        let place = place(region);
        self.change_memory(|session| Ok(session.regions.add(place, fd, &session.alarm)?))?;
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let place = place(region);
        self.change_memory(|session| {
            Ok(session
                .regions
                .remove(place.guest, place.size, place.user)?)
        })
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(Refused::NotOffered("migration of device state").into())
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Refused::NotOffered("migration of device state").into())
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Refused::NotOffered("shared memory").into())
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(Refused::NotOffered("a log of writes").into())
    }
}
