//! The running virtual machine: [`builder`] puts it together, [`Vm::run`] runs it to its end.

pub mod builder;
pub mod console;
pub mod control;
pub mod disks;
mod error;
pub mod gate;
pub mod hypervisor;
pub mod iothreads;
pub mod kvm;
pub mod lifecycle;
pub mod limits;
pub mod main_loop;
pub mod memory;
pub mod signals;
pub mod statistics;
pub mod terminal;
pub mod vcpu;

pub mod s390x;
#[cfg(target_arch = "s390x")]
pub use s390x as platform;
#[cfg(target_arch = "x86_64")]
pub mod x86_64;
#[cfg(target_arch = "x86_64")]
pub use x86_64 as platform;

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use iothread::Context;

use self::console::Console;
use self::control::Control;
use self::disks::Disks;
pub use self::error::Error;
use self::hypervisor::GuestConsole;
use self::lifecycle::{Lifecycle, Outcome};
use self::main_loop::MainLoop;
use self::signals::Signals;
use self::vcpu::Vcpus;
use crate::metrics::Writer;
use crate::qmp::Server;
use crate::qmp::machine::Machine as _;
use crate::seccomp::{self, Filters};
use crate::trace::Tracer;

/// How long the guest's last output may take to be written.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A VM that is ready to run.
pub struct Vm {
    vcpus: Vcpus,
    disks: Disks,
    /// Has the iothreads.
    control: Arc<Control>,
    monitor: Option<Server>,
    metrics: Option<Writer>,
    tracer: Option<Arc<Tracer>>,
    context: Context,
    guest_console: Arc<dyn GuestConsole>,
    console: Console,
    signals: Signals,
    lifecycle: Arc<Lifecycle>,
    print_statistics: bool,
    filters: Option<Arc<Filters>>,
    /// Kept until the vCPUs are gone and the disks are quiet.
    _keep: Box<dyn Any>,
}

impl Vm {
    /// Runs the guest until it ends or somebody ends it.
    pub fn run(mut self) -> Result<Outcome, Error> {
        if let Some(filters) = &self.filters {
            filters.narrow(seccomp::Thread::Main)?;
        }
        self.control.start();
        let outcome = main_loop::run(MainLoop {
            signals: self.signals,
            console: self.console,
            guest_console: self.guest_console.clone(),
            lifecycle: self.lifecycle.clone(),
            control: self.control.clone(),
            context: self.context.clone(),
        });
        if let Some(outcome) = self.lifecycle.outcome() {
            self.control.ended(&outcome);
        }
        // A command of the monitor or a vCPU may be waiting for a disk that the main thread serves.
        let serve = || while self.context.dispatch() {};
        if let Some(monitor) = self.monitor {
            monitor.stop(serve);
        }
        if let Err(stuck) = self.vcpus.stop(serve) {
            tracing::error!("{stuck}");
        }
        let iothreads = self.control.iothreads();
        let loops = statistics::loops(&self.context, &iothreads);
        self.disks.shut_down();
        // A last time, with all requests finished.
        drop(self.metrics);
        if !self.guest_console.drain(LAST_WORDS) {
            tracing::warn!("the console takes no output; the guest's last words are lost");
        }
        if self.print_statistics {
            eprint!("{loops}{}", statistics::disks(self.disks.handles()));
        }
        for iothread in self.control.take_iothreads() {
            // A panic in it has ended the run already and is its outcome.
            let _ = iothread.stop();
        }
        if let Some(tracer) = self.tracer {
            tracer.finish();
        }
        Ok(outcome?)
    }
}
