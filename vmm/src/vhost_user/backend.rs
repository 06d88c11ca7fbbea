//! What a monitor can ask of disks that are served without a VM: the [`Machine`] behind `--qmp` and
//! `--metrics`.
//!
//! There are no vCPUs to stop and no power button. Sizes do not change: the protocol's message for that
//! goes over a second channel, which the protocol crate cannot send on.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::virtio::block::{BlockEvent, BlockHandle, ErrorPolicy};
use iothread::{IoThread, Remote};

use crate::config;
use crate::qmp::event::{BlockIoError, ErrorAction, IoOperation, ShutdownCause};
use crate::qmp::machine::{
    Ability, DiskView, IoStatus, IoThreadView, MAIN_LOOP_ID, Machine, RunState, Vcpu,
};
use crate::qmp::{Error, Event, Sink};
use crate::seccomp::Filters;
use crate::trace::Tracer;
use crate::vm::control;
use crate::vm::iothreads;
use crate::vm::lifecycle::{Lifecycle, Outcome};

/// The disks and loops of the process.
pub struct Backend {
    lifecycle: Arc<Lifecycle>,
    disks: Vec<BlockHandle>,
    iothreads: Mutex<Vec<IoThread>>,
    main_loop: IoThreadView,
    watchers: Watchers,
    events: Sink,
}

/// What every iothread is put under, also those made later.
pub struct Watchers {
    /// System calls.
    pub filters: Option<Arc<Filters>>,
    /// The record of the loops' events.
    pub tracer: Option<Arc<Tracer>>,
}

impl Backend {
    /// Called in the main thread, whose loop `main_loop` is.
    pub fn new(
        lifecycle: Arc<Lifecycle>,
        disks: Vec<BlockHandle>,
        iothreads: Vec<IoThread>,
        main_loop: Remote,
        watchers: Watchers,
        events: Sink,
    ) -> Arc<Self> {
        for disk in &disks {
            let events = events.clone();
            disk.set_event_callback(Arc::new(move |event| events.emit(&failure(event))));
        }
        Arc::new(Self {
            lifecycle,
            disks,
            iothreads: Mutex::new(iothreads),
            main_loop: IoThreadView {
                id: MAIN_LOOP_ID.to_owned(),
                thread_id: rustix::thread::gettid().as_raw_nonzero().get(),
                remote: main_loop,
            },
            watchers,
            events,
        })
    }

    /// Tells clients that the process ends.
    pub fn ended(&self, by_monitor: bool) {
        let cause = match by_monitor {
            true => ShutdownCause::HostQmpQuit,
            false => ShutdownCause::HostSignal,
        };
        self.events.emit(&Event::Shutdown(cause));
    }

    /// Takes the iothreads out, to end them.
    pub fn take_iothreads(&self) -> Vec<IoThread> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<IoThread>> {
        self.iothreads
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

fn failure(event: BlockEvent) -> Event {
    Event::BlockIoError(BlockIoError {
        qom_path: format!("/machine/peripheral/{}", event.id),
        device: event.id,
        operation: match event.is_read {
            true => IoOperation::Read,
            false => IoOperation::Write,
        },
        action: match event.action {
            ErrorPolicy::Ignore => ErrorAction::Ignore,
            _ => ErrorAction::Report,
        },
        nospace: event.no_space,
        reason: event.reason,
    })
}

/// Who ended the process, when the monitor did.
pub const QUIT: &str = "the monitor's quit command";

fn no_vm<T>() -> Result<T, Error> {
    Err(Error::failed("there is no VM here, only its disks"))
}

impl Machine for Backend {
    fn can(&self, ability: Ability) -> bool {
        match ability {
            Ability::Pause | Ability::Powerdown | Ability::ResizeDisk => false,
            Ability::ChangeIoThreads | Ability::MoveDisk | Ability::DiskStats => true,
        }
    }

    fn run_state(&self) -> RunState {
        match self.lifecycle.has_ended() {
            true => RunState::Shutdown,
            false => RunState::Running,
        }
    }

    fn stop(&self) -> Result<(), Error> {
        no_vm()
    }

    fn cont(&self) -> Result<(), Error> {
        no_vm()
    }

    fn powerdown(&self) -> Result<(), Error> {
        no_vm()
    }

    fn quit(&self) {
        self.lifecycle.end(Outcome::Stopped(QUIT.to_owned()));
    }

    fn vcpus(&self) -> Vec<Vcpu> {
        Vec::new()
    }

    fn iothreads(&self) -> Vec<IoThreadView> {
        self.lock().iter().map(control::view).collect()
    }

    fn tracer(&self) -> Option<&Tracer> {
        self.watchers.tracer.as_deref()
    }

    fn main_loop(&self) -> Option<IoThreadView> {
        Some(self.main_loop.clone())
    }

    fn add_iothread(&self, config: &config::IoThread) -> Result<(), Error> {
        let iothread = iothreads::start(config, &self.lifecycle)
            .map_err(|error| Error::failed(error.to_string()))?;
        if let Some(filters) = &self.watchers.filters {
            iothreads::narrow(&iothread, filters)
                .map_err(|error| Error::failed(error.to_string()))?;
        }
        if let Some(tracer) = &self.watchers.tracer {
            iothreads::trace(&iothread, tracer);
        }
        self.lock().push(iothread);
        Ok(())
    }

    fn remove_iothread(&self, id: &str) -> Result<(), Error> {
        let mut iothreads = self.lock();
        let at = iothreads.iter().position(|iothread| iothread.id() == id);
        let removed = at.map(|at| iothreads.remove(at));
        drop(iothreads);
        if let Some(tracer) = &self.watchers.tracer {
            tracer.remove(id);
        }
        match removed.map(IoThread::stop) {
            None => Err(Error::DeviceNotFound(id.to_owned())),
            Some(Err(panic)) => Err(Error::failed(format!("iothread {id} panicked: {panic}"))),
            Some(Ok(())) => Ok(()),
        }
    }

    fn disks(&self) -> Vec<DiskView> {
        let disks = self.disks.iter();
        disks
            .map(|disk| control::disk_view(disk, IoStatus::Ok))
            .collect()
    }

    fn resize_disk(&self, _id: &str, _size_bytes: u64) -> Result<(), Error> {
        Err(Error::failed("the front end cannot be told of a new size"))
    }

    fn move_disk(&self, id: &str, iothread: Option<&str>) -> Result<(), Error> {
        let disk = self.disks.iter().find(|disk| disk.id() == id);
        let disk = disk.ok_or_else(|| Error::DeviceNotFound(id.to_owned()))?;
        let home = match iothread {
            None => self.main_loop.remote.clone(),
            Some(id) => {
                let iothreads = self.lock();
                let found = iothreads.iter().find(|iothread| iothread.id() == id);
                let found = found.ok_or_else(|| Error::DeviceNotFound(id.to_owned()))?;
                found.remote().clone()
            }
        };
        control::move_to(disk, &home)
    }
}
