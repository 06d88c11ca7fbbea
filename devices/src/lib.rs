//! The devices of a Pollux VM: buses, serial console, power registers, virtio transports and the
//! virtio block device.
//!
//! This crate knows guest memory, file descriptors and [`iothread`] contexts. It knows neither KVM
//! nor the machine's layout: addresses, interrupts and ioeventfds are wired by the VMM.

pub mod bus;
pub mod reset;
pub mod serial;
pub mod virtio;

/// Guest RAM as every device sees it.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
