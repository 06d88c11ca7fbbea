//! The running virtual machine: [`builder`] puts it together, [`Vm::run`] runs it to its end.

pub mod builder;
pub mod console;
mod error;
pub mod kvm;
pub mod lifecycle;
pub mod main_loop;
pub mod memory;
pub mod power;
pub mod reset_flag;
pub mod signals;
pub mod terminal;
pub mod vcpu;

use std::sync::Arc;
use std::time::Duration;

use devices::serial::Serial;
use kvm_ioctls::VmFd;

use self::console::Console;
pub use self::error::Error;
use self::lifecycle::{Lifecycle, Outcome};
use self::main_loop::MainLoop;
use self::signals::Signals;
use self::vcpu::Vcpus;

/// How long the guest's last output may take to be written.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A VM that is ready to run.
pub struct Vm {
    vcpus: Vcpus,
    lifecycle: Arc<Lifecycle>,
    signals: Signals,
    console: Console,
    serial: Arc<Serial>,
    /// Kept until the vCPUs are gone.
    _vm: VmFd,
}

impl Vm {
    /// Runs the guest until it ends or somebody ends it.
    pub fn run(mut self) -> Result<Outcome, Error> {
        self.vcpus.release();
        let outcome = main_loop::run(MainLoop {
            signals: self.signals,
            console: self.console,
            serial: self.serial.clone(),
            lifecycle: self.lifecycle,
        });
        if let Err(stuck) = self.vcpus.stop() {
            tracing::error!("{stuck}");
        }
        if !self.serial.drain(LAST_WORDS) {
            tracing::warn!("the console takes no output; the guest's last words are lost");
        }
        Ok(outcome?)
    }
}
