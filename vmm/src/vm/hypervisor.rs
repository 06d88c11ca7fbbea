//! What differs by processor when a VM is put together and run. The rest of this module knows no processor.
//!
//! [`platform`](super::platform) is the module of the processor that this program is built for; its `Machine` implements
//! [`Hypervisor`].

use std::any::Any;
use std::fs::File;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;
use std::time::Duration;

use devices::virtio::block::Block;
use vmm_sys_util::eventfd::EventFd;

use super::console::Console;
use super::error::Error;
use super::lifecycle::{Lifecycle, Outcome};
use super::memory::GuestMemory;
use crate::config::Config;

/// A machine while it is put together. The methods are called in this order, each once.
pub trait Hypervisor: Sized {
    /// Opens KVM and checks what the user asked for against what it has.
    ///
    /// # Errors
    /// No KVM, or one that lacks something.
    fn open(config: &Config) -> Result<Self, Error>;

    /// Maps guest memory where this processor's guests have it.
    ///
    /// # Errors
    /// It does not fit, or the host does not give it.
    fn map_memory(&self, config: &Config) -> Result<GuestMemory, Error>;

    /// Puts into memory what the guest finds there. Returns a line about it.
    ///
    /// # Errors
    /// The files, or the devices that are to be announced, do not fit.
    fn load(
        &mut self,
        config: &Config,
        files: &BootFiles,
        memory: &GuestMemory,
    ) -> Result<String, Error>;

    /// Makes the VM with its vCPUs and devices. No vCPU runs yet.
    ///
    /// # Errors
    /// KVM refuses something.
    fn assemble(self, parts: Parts<'_>) -> Result<Hardware, Error>;
}

/// The kernel, and the initrd if there is one.
pub struct BootFiles {
    /// The kernel's image.
    pub kernel: File,
    /// The initial RAM disk.
    pub initrd: Option<File>,
}

/// What a machine is made of.
pub struct Parts<'a> {
    /// What the user asked for.
    pub config: &'a Config,
    /// The disks, in the order of the configuration.
    pub blocks: Vec<Block>,
    /// Guest memory with the kernel in it.
    pub memory: &'a GuestMemory,
    /// Where the guest's power events go.
    pub lifecycle: &'a Arc<Lifecycle>,
}

/// A machine that is ready to run.
pub struct Hardware {
    /// The vCPUs, in order.
    pub vcpus: Vec<Box<dyn Vcpu>>,
    /// The guest's side of the console.
    pub guest_console: Arc<dyn GuestConsole>,
    /// The user's side of the console.
    pub console: Console,
    /// Asks the guest to power off.
    pub power_button: PowerButton,
    /// Kept until the vCPUs are gone and the disks are quiet: the VM and its devices. A vCPU's thread must not be the one
    /// that drops a device, which waits for the device's I/O.
    pub keep: Box<dyn Any>,
}

/// Asks the guest to power off; called by any thread.
pub type PowerButton = Box<dyn Fn() -> std::io::Result<()> + Send + Sync>;

/// The guest's side of the console.
pub trait GuestConsole: Send + Sync {
    /// Offers typed bytes; the number taken. When it is less than all, [`GuestConsole::input_room`] becomes readable as
    /// soon as more can be taken.
    fn input(&self, bytes: &[u8]) -> usize;

    /// Readable when input that was refused can be offered again. The reader resets it by reading.
    fn input_room(&self) -> &EventFd;

    /// Waits until the guest's output is written, at most `timeout`. Whether it was.
    fn drain(&self, timeout: Duration) -> bool;
}

/// What a vCPU's thread does after a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Run on.
    Continue,
    /// Somebody kicked the vCPU: take the kick back and look why.
    Kicked,
    /// The vCPU cannot go on.
    End(Outcome),
}

/// One vCPU, used by its own thread.
pub trait Vcpu: Send {
    /// `kvm_run.immediate_exit`: it is valid as long as the vCPU, and nothing but KVM and whoever has this pointer touches
    /// it.
    fn immediate_exit(&mut self) -> NonNull<AtomicU8>;

    /// The vCPU stood still and goes on now.
    fn after_hold(&mut self) {}

    /// Runs the guest until it needs something, and does that.
    fn step(&mut self) -> Step;
}
