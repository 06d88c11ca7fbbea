//! The block device as its transport and the VMM see it: features, configuration space, lifecycle.
//!
//! Two sides act on a disk: the guest through the transport (activate, reset), in a vCPU's thread,
//! and the user through [`BlockHandle`] (move, resize, continue), in the main thread. A step of the
//! lifecycle calls into the queues' home threads and waits, and one of these may be the main thread
//! itself. So no lock is held while a step runs: it marks the disk as busy, the transport's side
//! waits for that to end, and the user's side is refused and may try again.

mod handle;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, MutexGuard, PoisonError};

use iothread::Remote;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vmm_sys_util::eventfd::EventFd;

use super::check::MAX_SECTORS;
use super::config::{ConfigError, DiskConfig, EngineKind};
use super::disk::Disk;
use super::features as blk;
use super::image::{Image, ImageError};
use super::worker::{self, Carried, Setup};
use crate::sync::Mutex;
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, Interrupt, VirtioDevice};
use crate::virtio::features::{EVENT_IDX, INDIRECT_DESC, VERSION_1};
pub use handle::BlockHandle;

/// Bytes of `struct virtio_blk_config` up to the write-zeroes fields.
const CONFIG_BYTES: usize = 60;
/// Offset of its `writeback` byte.
const WRITEBACK: u64 = 32;

/// Why a disk cannot be made or changed. Messages name the option, its value and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// An option's value.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The file.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The placement has another number of queues than the disk.
    #[error("disk {id} has {queues} queues but {given} iothreads were assigned")]
    Placement {
        /// The disk.
        id: String,
        /// Its queues.
        queues: u16,
        /// Entries of the placement.
        given: usize,
    },
    /// The engine asked for is not there.
    #[error("{0}; give another engine= or leave it out")]
    Engine(String),
    /// The guest is resetting the disk, or another change is under way.
    #[error("disk {0} is being reset or changed; try again")]
    Busy(String),
    /// A thread that should run the disk has ended.
    #[error("disk {id}: iothread {iothread} has ended")]
    Ended {
        /// The disk.
        id: String,
        /// The thread.
        iothread: String,
    },
    /// A queue could not be set up in its thread.
    #[error("disk {id}, queue {queue}: {reason}")]
    Queue {
        /// The disk.
        id: String,
        /// The queue.
        queue: u16,
        /// What failed.
        reason: String,
    },
}

/// Where each queue of a disk runs.
#[derive(Clone)]
pub struct Placement {
    homes: Vec<Remote>,
}

impl Placement {
    /// One entry a queue; None is the main loop, unpolled.
    pub fn new(main: &Remote, queues: impl IntoIterator<Item = Option<Remote>>) -> Placement {
        let home = |remote: Option<Remote>| remote.unwrap_or_else(|| main.clone());
        Placement {
            homes: queues.into_iter().map(home).collect(),
        }
    }

    /// All of a disk's queues on one loop.
    pub fn single(home: &Remote, queues: u16) -> Placement {
        Placement {
            homes: vec![home.clone(); queues.into()],
        }
    }

    /// The name of each queue's loop.
    pub fn names(&self) -> Vec<String> {
        self.homes.iter().map(|h| h.name().to_owned()).collect()
    }
}

struct Running {
    index: u16,
    home: Remote,
    worker: u64,
    notify: Arc<EventFd>,
}

/// What the driver set up, while it is ready.
struct Active {
    features: u64,
    interrupt: Arc<dyn Interrupt>,
    queues: Vec<Running>,
}

struct Life {
    busy: bool,
    placement: Placement,
    active: Option<Active>,
}

struct Inner {
    disk: Arc<Disk>,
    life: Mutex<Life>,
    idle: Condvar,
}

/// A step of the lifecycle is under way until this is dropped.
struct Step<'a>(&'a Inner);

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.0.lock().busy = false;
        self.0.idle.notify_all();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Life> {
        self.life.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a step as soon as no other is under way.
    fn wait_step(&self) -> Step<'_> {
        let mut life = self
            .idle
            .wait_while(self.lock(), |life| life.busy)
            .unwrap_or_else(PoisonError::into_inner);
        life.busy = true;
        Step(self)
    }

    /// Begins a step unless another is under way.
    fn try_step(&self) -> Result<Step<'_>, BlockError> {
        let mut life = self.lock();
        if life.busy {
            return Err(BlockError::Busy(self.disk.config.id.clone()));
        }
        life.busy = true;
        Ok(Step(self))
    }

    fn start(
        &self,
        home: &Remote,
        index: u16,
        features: u64,
        interrupt: &Arc<dyn Interrupt>,
        notify: &Arc<EventFd>,
        carried: Carried,
    ) -> Result<Running, (BlockError, Option<Box<Carried>>)> {
        let setup = Setup {
            disk: self.disk.clone(),
            index,
            features,
            notify: notify.clone(),
            interrupt: interrupt.clone(),
            carried,
        };
        let id = || self.disk.config.id.clone();
        match home.call(move |ctx| worker::attach(ctx, setup)) {
            Ok(Ok(worker)) => Ok(Running {
                index,
                home: home.clone(),
                worker,
                notify: notify.clone(),
            }),
            Ok(Err((reason, carried))) => Err((
                BlockError::Queue {
                    id: id(),
                    queue: index,
                    reason,
                },
                Some(carried),
            )),
            Err(_) => Err((
                BlockError::Ended {
                    id: id(),
                    iothread: home.name().to_owned(),
                },
                None,
            )),
        }
    }

    /// Stops a queue. A home thread that has ended has stopped it already, and nothing is left.
    fn stop(running: &Running, forget: bool) -> Option<Carried> {
        let worker = running.worker;
        running
            .home
            .call(move |ctx| worker::detach(ctx, worker, forget))
            .ok()
            .flatten()
    }

    fn reset(&self) {
        let _step = self.wait_step();
        let active = self.lock().active.take();
        for running in active.iter().flat_map(|active| &active.queues) {
            drop(Inner::stop(running, true));
        }
        self.disk.broken.store(false, Ordering::Release);
        self.disk.restore_cache_mode();
    }

    fn each_running(&self, mut f: impl FnMut(&Remote, u64)) {
        let running: Vec<(Remote, u64)> = self
            .lock()
            .active
            .iter()
            .flat_map(|active| &active.queues)
            .map(|running| (running.home.clone(), running.worker))
            .collect();
        for (home, worker) in running {
            f(&home, worker);
        }
    }
}

/// A disk, as its transport sees it. Make it, take a [`BlockHandle`], give it to a transport.
pub struct Block {
    inner: Arc<Inner>,
    offered: u64,
    accepted: u64,
}

impl Block {
    /// Opens the image of `config` and prepares the disk to run where `placement` says. To be
    /// called in the main loop's thread.
    ///
    /// # Errors
    /// Options that cannot be, an image that cannot, an engine that is not there.
    pub fn new(config: DiskConfig, placement: Placement) -> Result<Block, BlockError> {
        config.validate()?;
        check_placement(&config, &placement)?;
        check_engine(&config, &placement)?;
        let image = Image::open(&config)?;
        if config.engine == Some(EngineKind::Native) && !image.direct() {
            tracing::warn!(
                "disk {}: engine=native without O_DIRECT waits for each request in the iothread; \
                 give direct=on or another engine",
                config.id
            );
        }
        let disk = Disk::new(config, image);
        let offered = offered_features(&disk);
        let inner = Inner {
            disk: Arc::new(disk),
            life: Mutex::new(Life {
                busy: false,
                placement,
                active: None,
            }),
            idle: Condvar::new(),
        };
        Ok(Block {
            inner: Arc::new(inner),
            offered,
            accepted: 0,
        })
    }

    /// Starts one queue, where the transport starts and stops queues one by one (vhost-user). The
    /// first one settles the features until all have been stopped.
    ///
    /// # Errors
    /// The queue does not exist, runs already, or cannot be set up.
    pub fn start_queue(
        &mut self,
        features: u64,
        queue: ActiveQueue,
        interrupt: &Arc<dyn Interrupt>,
    ) -> Result<(), ActivateError> {
        let inner = &*self.inner;
        let _step = inner.wait_step();
        let (home, idle) = {
            let life = inner.lock();
            let running = life.active.iter().flat_map(|active| &active.queues);
            if running.into_iter().any(|r| r.index == queue.index) {
                return Err(ActivateError(format!("queue {} runs already", queue.index)));
            }
            let home = life.placement.homes.get(usize::from(queue.index));
            (home.cloned(), life.active.is_none())
        };
        let home =
            home.ok_or_else(|| ActivateError(format!("queue {} does not exist", queue.index)))?;
        if idle {
            self.settle_cache_mode(features);
        }
        let running = inner
            .start(
                &home,
                queue.index,
                features,
                interrupt,
                &queue.notify,
                Carried::new(queue.queue),
            )
            .map_err(|(error, _)| ActivateError(error.to_string()))?;
        let mut life = inner.lock();
        let active = life.active.get_or_insert_with(|| Active {
            features,
            interrupt: interrupt.clone(),
            queues: Vec::new(),
        });
        active.queues.push(running);
        Ok(())
    }

    /// Stops one queue that [`Block::start_queue`] started, when its requests have been answered.
    /// The next available entry that it would have taken, or none if it did not run.
    pub fn stop_queue(&mut self, index: u16) -> Option<u16> {
        let inner = &*self.inner;
        let _step = inner.wait_step();
        let running = {
            let mut life = inner.lock();
            let active = life.active.as_mut()?;
            let at = active.queues.iter().position(|r| r.index == index)?;
            active.queues.swap_remove(at)
        };
        let carried = Inner::stop(&running, false);
        let mut life = inner.lock();
        if life.active.as_ref().is_some_and(|a| a.queues.is_empty()) {
            life.active = None;
            inner.disk.broken.store(false, Ordering::Release);
        }
        drop(life);
        let carried = carried?;
        Some(carried.next_avail())
    }

    /// A driver that cannot flush must not need to (section 5.2.6.2).
    fn settle_cache_mode(&self, features: u64) {
        if features & blk::CONFIG_WCE == 0 && features & blk::FLUSH == 0 {
            self.inner.disk.set_writeback(false);
        }
    }

    /// The VMM's handle to this disk.
    pub fn handle(&self) -> BlockHandle {
        BlockHandle(self.inner.clone())
    }

    fn config_space(&self) -> [u8; CONFIG_BYTES] {
        let disk = &self.inner.disk;
        let config = &disk.config;
        let mut space = [0; CONFIG_BYTES];
        let mut put = |offset: usize, bytes: &[u8]| {
            space[offset..offset + bytes.len()].copy_from_slice(bytes);
        };
        let discard = disk.image.discard();
        let logical = config.logical_block_size;
        let physical_exponent = (disk.image.physical_block_size() / logical).trailing_zeros();
        put(0, &disk.capacity_sectors().to_le_bytes());
        // size_max 0: no limit of a segment's size is meant, and the feature is not offered.
        put(12, &u32::from(config.queue_size - 2).to_le_bytes());
        put(20, &logical.to_le_bytes());
        put(24, &[physical_exponent as u8]);
        // alignment_offset 0, min_io_size one block, opt_io_size 0: none known.
        put(26, &1u16.to_le_bytes());
        put(32, &[u8::from(disk.writeback())]);
        put(34, &config.queues.to_le_bytes());
        if self.offered & blk::DISCARD != 0 {
            put(36, &MAX_SECTORS.to_le_bytes());
            put(40, &1u32.to_le_bytes());
            let granularity = discard.granularity_bytes.max(logical) / 512;
            put(44, &granularity.to_le_bytes());
        }
        if self.offered & blk::WRITE_ZEROES != 0 {
            put(48, &MAX_SECTORS.to_le_bytes());
            put(52, &1u32.to_le_bytes());
            put(56, &[u8::from(self.offered & blk::DISCARD != 0)]);
        }
        space
    }
}

fn check_placement(config: &DiskConfig, placement: &Placement) -> Result<(), BlockError> {
    if placement.homes.len() != usize::from(config.queues) {
        return Err(BlockError::Placement {
            id: config.id.clone(),
            queues: config.queues,
            given: placement.homes.len(),
        });
    }
    Ok(())
}

/// An engine asked for by name must be there; found out now rather than when the guest starts.
fn check_engine(config: &DiskConfig, placement: &Placement) -> Result<(), BlockError> {
    if config.engine != Some(EngineKind::IoUring) {
        return Ok(());
    }
    for home in &placement.homes {
        let iothread = || home.name().to_owned();
        match home.call(|ctx| ctx.has_ring()) {
            Ok(true) => {}
            Ok(false) => {
                return Err(BlockError::Engine(format!(
                    "engine=io_uring: iothread {} has no io_uring",
                    iothread()
                )));
            }
            Err(_) => {
                return Err(BlockError::Ended {
                    id: config.id.clone(),
                    iothread: iothread(),
                });
            }
        }
    }
    Ok(())
}

fn offered_features(disk: &Disk) -> u64 {
    let mut features = VERSION_1
        | EVENT_IDX
        | INDIRECT_DESC
        | blk::SEG_MAX
        | blk::BLK_SIZE
        | blk::TOPOLOGY
        | blk::FLUSH
        | blk::CONFIG_WCE
        | blk::MQ;
    if disk.config.readonly {
        features |= blk::RO;
    } else {
        // Zeroes can always be written, if need be one by one.
        features |= blk::WRITE_ZEROES;
        if disk.config.discard && disk.image.discard().discard {
            features |= blk::DISCARD;
        }
    }
    features
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn name(&self) -> String {
        format!("disk {}", self.inner.disk.config.id)
    }

    fn features(&self) -> u64 {
        self.offered
    }

    fn queue_max_sizes(&self) -> Vec<u16> {
        let config = &self.inner.disk.config;
        vec![config.queue_size; config.queues.into()]
    }

    fn config_generation(&self) -> u32 {
        self.inner.disk.generation()
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let space = self.config_space();
        for (at, byte) in (offset..).zip(data) {
            let value = usize::try_from(at).ok().and_then(|at| space.get(at));
            *byte = value.copied().unwrap_or(0);
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        let Some(&value) = WRITEBACK
            .checked_sub(offset)
            .and_then(|at| data.get(usize::try_from(at).ok()?))
        else {
            return;
        };
        if self.accepted & blk::CONFIG_WCE != 0 {
            self.inner.disk.set_writeback(value & 1 != 0);
        }
    }

    fn features_accepted(&mut self, features: u64) {
        self.accepted = features;
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let inner = &*self.inner;
        let _step = inner.wait_step();
        let features = activation.features;
        self.settle_cache_mode(features);
        let homes = inner.lock().placement.homes.clone();
        let mut queues: Vec<Running> = Vec::new();
        for queue in activation.queues {
            let home = homes
                .get(usize::from(queue.index))
                .ok_or_else(|| ActivateError(format!("queue {} does not exist", queue.index)))?;
            let started = inner.start(
                home,
                queue.index,
                features,
                &activation.interrupt,
                &queue.notify,
                Carried::new(queue.queue),
            );
            match started {
                Ok(running) => queues.push(running),
                Err((error, _)) => {
                    for running in &queues {
                        drop(Inner::stop(running, true));
                    }
                    return Err(ActivateError(error.to_string()));
                }
            }
        }
        inner.lock().active = Some(Active {
            features,
            interrupt: activation.interrupt,
            queues,
        });
        Ok(())
    }

    fn reset(&mut self) {
        self.inner.reset();
        self.accepted = 0;
    }
}
