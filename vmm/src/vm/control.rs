//! What a monitor does to the running VM: the [`Machine`] behind QMP and the metrics.
//!
//! Its calls come from the monitor's thread, and from iothreads whose requests failed. The state is guarded by a lock that
//! is held only to look and to change it; what takes time (stopping vCPUs, draining disks) is serialised by another, which
//! iothreads never take.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use devices::virtio::block::{
    BlockError, BlockEvent, BlockHandle, CacheMode, ErrorPolicy, Placement,
};
use iothread::{IoThread, Remote};

use super::hypervisor::PowerButton;
use super::iothreads;
use super::lifecycle::{Lifecycle, Outcome};
use super::vcpu::VcpuControl;
use crate::config::{self, Cache};
use crate::qmp::event::{BlockIoError, ErrorAction, IoOperation, PanicAction, ShutdownCause};
use crate::qmp::machine::{
    Ability, DiskView, IoStatus, IoThreadView, MAIN_LOOP_ID, Machine, RunState, Vcpu,
};
use crate::qmp::{Error, Event, Sink};
use crate::seccomp::Filters;
use crate::trace::Tracer;

/// Longest wait for a guest that resets a disk.
const PATIENCE: Duration = Duration::from_secs(10);

/// The parts of a VM that can be looked at and changed while it runs.
pub struct Control {
    lifecycle: Arc<Lifecycle>,
    vcpus: VcpuControl,
    disks: Vec<BlockHandle>,
    iothreads: Mutex<Vec<IoThread>>,
    main_loop: IoThreadView,
    power_button: PowerButton,
    filters: Option<Arc<Filters>>,
    tracer: Option<Arc<Tracer>>,
    events: Sink,
    state: Mutex<State>,
    /// Held by whoever changes whether the guest runs.
    transition: Mutex<()>,
}

struct State {
    run: RunState,
    /// Disks whose requests failed and stopped the VM.
    failed: HashMap<String, IoStatus>,
}

/// What [`Control`] is made of.
pub struct Parts {
    /// The end of the run.
    pub lifecycle: Arc<Lifecycle>,
    /// The vCPUs.
    pub vcpus: VcpuControl,
    /// The disks, in the order of the configuration.
    pub disks: Vec<BlockHandle>,
    /// The iothreads, in the order of the configuration.
    pub iothreads: Vec<IoThread>,
    /// The loop of the main thread, which is the caller's.
    pub main_loop: Remote,
    /// Asks the guest to power off.
    pub power_button: PowerButton,
    /// What system calls new threads are left with.
    pub filters: Option<Arc<Filters>>,
    /// Records what the loops do.
    pub tracer: Option<Arc<Tracer>>,
    /// Where events go.
    pub events: Sink,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    /// Takes control of a VM that has not started. Called in the main thread.
    pub fn new(parts: Parts) -> Arc<Self> {
        let control = Arc::new(Self {
            lifecycle: parts.lifecycle,
            vcpus: parts.vcpus,
            disks: parts.disks,
            iothreads: Mutex::new(parts.iothreads),
            main_loop: IoThreadView {
                id: MAIN_LOOP_ID.to_owned(),
                thread_id: rustix::thread::gettid().as_raw_nonzero().get(),
                remote: parts.main_loop,
            },
            power_button: parts.power_button,
            filters: parts.filters,
            tracer: parts.tracer,
            events: parts.events,
            state: Mutex::new(State {
                run: RunState::Prelaunch,
                failed: HashMap::new(),
            }),
            transition: Mutex::new(()),
        });
        for disk in &control.disks {
            // Weak: the disks' callbacks must not keep alive what keeps the disks.
            let weak = Arc::downgrade(&control);
            disk.set_event_callback(Arc::new(move |event| {
                if let Some(control) = weak.upgrade() {
                    control.disk_failed(event);
                }
            }));
        }
        control
    }

    /// Lets the guest run for the first time.
    pub fn start(&self) {
        let _transition = lock(&self.transition);
        self.resume();
    }

    fn resume(&self) {
        let mut state = lock(&self.state);
        state.run = RunState::Running;
        state.failed.clear();
        self.events.emit(&Event::Resume);
        // Within the lock: a disk that fails again must find the gate open to close it.
        self.vcpus.release();
    }

    /// The guest's kernel says that it has failed; the VM ends soon.
    pub fn guest_panicked(&self) {
        let mut state = lock(&self.state);
        if state.run != RunState::GuestPanicked {
            state.run = RunState::GuestPanicked;
            let action = PanicAction::Poweroff;
            self.events.emit(&Event::GuestPanicked(action));
        }
    }

    /// Tells clients that the run has ended.
    pub fn ended(&self, outcome: &Outcome) {
        if *outcome == Outcome::GuestPanic {
            self.guest_panicked();
        }
        lock(&self.state).run = RunState::Shutdown;
        let cause = cause(outcome);
        if cause == ShutdownCause::GuestReset {
            // What the guest did; what comes of it is that the run ends.
            self.events.emit(&Event::Reset(cause));
        }
        self.events.emit(&Event::Shutdown(cause));
    }

    /// Takes the iothreads out, to end them. They are no longer shown.
    pub fn take_iothreads(&self) -> Vec<IoThread> {
        std::mem::take(&mut *lock(&self.iothreads))
    }

    /// A request of a disk failed on the host. Called in the disk's iothread.
    fn disk_failed(&self, event: BlockEvent) {
        let stops = event.action == ErrorPolicy::Stop;
        self.events.emit(&Event::BlockIoError(BlockIoError {
            qom_path: format!("/machine/peripheral/{}", event.id),
            device: event.id.clone(),
            operation: match event.is_read {
                true => IoOperation::Read,
                false => IoOperation::Write,
            },
            action: match event.action {
                ErrorPolicy::Ignore => ErrorAction::Ignore,
                ErrorPolicy::Stop => ErrorAction::Stop,
                _ => ErrorAction::Report,
            },
            nospace: event.no_space,
            reason: event.reason,
        }));
        if !stops {
            return;
        }
        let mut state = lock(&self.state);
        let status = match event.no_space {
            true => IoStatus::Nospace,
            false => IoStatus::Failed,
        };
        state.failed.entry(event.id).or_insert(status);
        if state.run == RunState::Running {
            state.run = RunState::IoError;
            // They stop on their own; waiting for them here would keep a vCPU that waits for this iothread.
            self.vcpus.hold();
            self.events.emit(&Event::Stop);
        }
    }

    fn disk(&self, id: &str) -> Result<&BlockHandle, Error> {
        let mut disks = self.disks.iter();
        let disk = disks.find(|disk| disk.id() == id);
        disk.ok_or_else(|| Error::DeviceNotFound(id.to_owned()))
    }

    /// Refuses what needs a VM that has not ended.
    fn check_alive(&self) -> Result<(), Error> {
        match self.lifecycle.has_ended() {
            true => Err(Error::failed("the VM has ended")),
            false => Ok(()),
        }
    }
}

fn cause(outcome: &Outcome) -> ShutdownCause {
    match outcome {
        Outcome::PowerOff => ShutdownCause::GuestShutdown,
        Outcome::Reboot | Outcome::TripleFault(_) => ShutdownCause::GuestReset,
        Outcome::GuestPanic => ShutdownCause::GuestPanic,
        Outcome::Stopped(by) if by == QUIT => ShutdownCause::HostQmpQuit,
        Outcome::Stopped(_) => ShutdownCause::HostSignal,
        Outcome::VcpuFailed(_) | Outcome::ThreadDied(_) => ShutdownCause::HostError,
    }
}

/// Who stopped the VM, when the monitor did.
const QUIT: &str = "the monitor's quit command";

impl Machine for Control {
    fn can(&self, ability: Ability) -> bool {
        match ability {
            Ability::Pause
            | Ability::Powerdown
            | Ability::ChangeIoThreads
            | Ability::ResizeDisk
            | Ability::MoveDisk
            | Ability::DiskStats => true,
        }
    }

    fn run_state(&self) -> RunState {
        lock(&self.state).run
    }

    fn stop(&self) -> Result<(), Error> {
        self.check_alive()?;
        let _transition = lock(&self.transition);
        if lock(&self.state).run != RunState::Running {
            return Ok(());
        }
        if let Err(stuck) = self.vcpus.pause() {
            self.vcpus.release();
            return Err(Error::failed(stuck.to_string()));
        }
        for disk in &self.disks {
            disk.drain();
        }
        let mut state = lock(&self.state);
        // A disk that failed meanwhile has told already.
        if state.run == RunState::Running {
            state.run = RunState::Paused;
            self.events.emit(&Event::Stop);
        }
        Ok(())
    }

    fn cont(&self) -> Result<(), Error> {
        self.check_alive()?;
        let _transition = lock(&self.transition);
        if !matches!(self.run_state(), RunState::Paused | RunState::IoError) {
            return Ok(());
        }
        self.resume();
        for disk in &self.disks {
            disk.resume();
        }
        Ok(())
    }

    fn powerdown(&self) -> Result<(), Error> {
        self.check_alive()?;
        (self.power_button)()
            .map_err(|error| Error::failed(format!("the power button's interrupt: {error}")))?;
        self.events.emit(&Event::Powerdown);
        Ok(())
    }

    fn quit(&self) {
        self.lifecycle.end(Outcome::Stopped(QUIT.to_owned()));
    }

    fn vcpus(&self) -> Vec<Vcpu> {
        let ids = self.vcpus.thread_ids().into_iter();
        (0..)
            .zip(ids)
            .map(|(index, thread_id)| Vcpu { index, thread_id })
            .collect()
    }

    fn iothreads(&self) -> Vec<IoThreadView> {
        lock(&self.iothreads).iter().map(view).collect()
    }

    fn main_loop(&self) -> Option<IoThreadView> {
        Some(self.main_loop.clone())
    }

    fn tracer(&self) -> Option<&Tracer> {
        self.tracer.as_deref()
    }

    fn add_iothread(&self, config: &config::IoThread) -> Result<(), Error> {
        self.check_alive()?;
        let iothread = iothreads::start(config, &self.lifecycle)
            .map_err(|error| Error::failed(error.to_string()))?;
        if let Some(filters) = &self.filters {
            iothreads::narrow(&iothread, filters)
                .map_err(|error| Error::failed(error.to_string()))?;
        }
        if let Some(tracer) = &self.tracer {
            iothreads::trace(&iothread, tracer);
        }
        lock(&self.iothreads).push(iothread);
        Ok(())
    }

    fn remove_iothread(&self, id: &str) -> Result<(), Error> {
        let mut iothreads = lock(&self.iothreads);
        let at = iothreads.iter().position(|iothread| iothread.id() == id);
        let removed = at.map(|at| iothreads.remove(at));
        drop(iothreads);
        if let Some(tracer) = &self.tracer {
            tracer.remove(id);
        }
        match removed.map(IoThread::stop) {
            None => Err(Error::DeviceNotFound(id.to_owned())),
            Some(Err(panic)) => Err(Error::failed(format!("iothread {id} panicked: {panic}"))),
            Some(Ok(())) => Ok(()),
        }
    }

    fn disks(&self) -> Vec<DiskView> {
        let failed = lock(&self.state).failed.clone();
        let status = |disk: &BlockHandle| failed.get(disk.id()).copied().unwrap_or_default();
        self.disks
            .iter()
            .map(|disk| disk_view(disk, status(disk)))
            .collect()
    }

    fn resize_disk(&self, id: &str, size_bytes: u64) -> Result<(), Error> {
        self.check_alive()?;
        let resized = self.disk(id)?.resize(size_bytes);
        resized.map_err(|error| Error::failed(error.to_string()))
    }

    fn move_disk(&self, id: &str, iothread: Option<&str>) -> Result<(), Error> {
        self.check_alive()?;
        let disk = self.disk(id)?;
        let home = match iothread {
            None => self.main_loop.remote.clone(),
            Some(id) => {
                let iothreads = lock(&self.iothreads);
                let found = iothreads.iter().find(|iothread| iothread.id() == id);
                let found = found.ok_or_else(|| Error::DeviceNotFound(id.to_owned()))?;
                found.remote().clone()
            }
        };
        move_to(disk, &home)
    }
}

/// Moves all queues of a disk to one loop; a reset by the guest that is under way is waited for.
pub(crate) fn move_to(disk: &BlockHandle, home: &Remote) -> Result<(), Error> {
    let begun = Instant::now();
    loop {
        let placement = Placement::single(home, disk.config().queues);
        match disk.change_placement(placement) {
            Ok(()) => return Ok(()),
            // The guest resets the disk at this moment: that ends soon.
            Err(BlockError::Busy(_)) if begun.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => return Err(Error::failed(error.to_string())),
        }
    }
}

/// An iothread as the monitor shows it.
pub(crate) fn view(iothread: &IoThread) -> IoThreadView {
    IoThreadView {
        id: iothread.id().to_owned(),
        thread_id: iothread.thread_id(),
        remote: iothread.remote().clone(),
    }
}

/// A disk as the monitor shows it.
pub(crate) fn disk_view(disk: &BlockHandle, io_status: IoStatus) -> DiskView {
    let config = disk.config();
    let named = |name: String| (name != MAIN_LOOP_ID).then_some(name);
    DiskView {
        id: disk.id().to_owned(),
        path: config.path.clone(),
        readonly: config.readonly,
        direct: disk.image().direct(),
        cache: match (config.cache, disk.writeback()) {
            (CacheMode::Unsafe, _) => Cache::Unsafe,
            // The guest may have switched it.
            (_, true) => Cache::Writeback,
            (_, false) => Cache::Writethrough,
        },
        size_bytes: disk.capacity_bytes(),
        queues: disk.iothreads().into_iter().map(named).collect(),
        io_status,
        stats: disk.stats(),
    }
}
