//! x86_64: boot protocols, ACPI, CPUID, registers and MSRs, memory layout.
//!
//! In the order of a start: [`layout`] says where memory goes, [`vm`] prepares the virtual machine,
//! [`acpi`] describes it, [`kernel`] loads what runs in it, [`cpuid`] and [`vcpu`] set up its
//! processors, and [`exit`] explains how one ended when it ended badly.

pub mod acpi;
mod bzimage;
pub mod cpuid;
pub mod detect;
mod elf;
pub mod error;
pub mod exit;
mod gdt;
mod initrd;
pub mod kernel;
mod lapic;
pub mod layout;
pub mod memory_map;
pub mod msr;
mod pvh;
pub mod regs;
pub mod routing;
pub mod vcpu;
pub mod vm;
mod zero_page;

#[cfg(test)]
mod testing;

pub use cpuid::{CpuModel, Cpuid};
pub use error::{Error, Result};
pub use kernel::{Boot, BootConfig, Protocol, load_kernel};
pub use layout::memory_regions;
pub use vcpu::configure_vcpu;
