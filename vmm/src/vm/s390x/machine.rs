//! Not yet a machine that runs by KVM.

use crate::config::Config;
use crate::vm::error::Error;
use crate::vm::hypervisor::{BootFiles, Hardware, Hypervisor, Parts};
use crate::vm::kvm;
use crate::vm::memory::{self, GuestMemory};

/// What may be wrong with a disk's place; here nothing is.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {}

impl AttachError {
    /// Whether the user asked for a disk that cannot be.
    pub fn is_usage(&self) -> bool {
        match *self {}
    }
}

/// The machine while it is put together.
pub struct Machine(());

impl Hypervisor for Machine {
    fn open(_config: &Config) -> Result<Self, Error> {
        kvm::open()?;
        Err(Error::NoMachine)
    }

    fn map_memory(&self, config: &Config) -> Result<GuestMemory, Error> {
        Ok(memory::map(
            &config.memory,
            &arch::memory_regions(config.memory.size.0),
        )?)
    }

    fn load(&mut self, _: &Config, _: &BootFiles, _: &GuestMemory) -> Result<String, Error> {
        Err(Error::NoMachine)
    }

    fn assemble(self, _: Parts<'_>) -> Result<Hardware, Error> {
        Err(Error::NoMachine)
    }
}

/// What this host's KVM can do, for `pollux check`.
pub mod probe {
    /// Looks at /dev/kvm: one line for each thing that is good, or an error for one that makes a VM impossible.
    ///
    /// # Errors
    /// There is no KVM.
    pub fn probe() -> Result<Vec<Result<String, String>>, crate::vm::kvm::Error> {
        crate::vm::kvm::open()?;
        Ok(vec![Err(crate::vm::Error::NoMachine.to_string())])
    }
}
