//! The devices of a Pollux VM: buses, channel subsystem, serial console, power registers, virtio transports and the
//! virtio block device.
//!
//! This crate knows guest memory, file descriptors and [`iothread`] contexts. It knows neither KVM
//! nor the machine's layout: addresses, interrupts and ioeventfds are wired by the VMM.
//!
//! # How a VMM puts a disk together
//!
//! ```no_run
//! # fn example(mem: devices::GuestMemory, main: &iothread::Context, io0: &iothread::IoThread)
//! #     -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use devices::bus::Bus;
//! use devices::virtio::block::{Block, DiskConfig, Placement};
//! use devices::virtio::mmio::MmioTransport;
//! use vmm_sys_util::eventfd::EventFd;
//!
//! // What the user asked for. Every field that is not set keeps its default.
//! let mut config = DiskConfig::new("disk0", "root.img");
//! config.queues = 2;
//! // Queue 0 on an iothread, queue 1 on the main loop.
//! let placement = Placement::new(&main.remote(), [Some(io0.remote().clone()), None]);
//! // In the main loop's thread: opens and locks the image, checks every option.
//! let block = Block::new(config, placement)?;
//! // Kept by the VMM: statistics, resize, moving, continuing after errors.
//! let handle = block.handle();
//! handle.set_event_callback(Arc::new(|event| eprintln!("{event:?}")));
//!
//! // The transport: an irqfd for an edge-triggered interrupt, an ioeventfd for every queue.
//! let irqfd = EventFd::new(0)?; // registered with KVM_IRQFD
//! let transport = Arc::new(MmioTransport::new(Box::new(block), mem, irqfd)?);
//! let base = 0xd000_0000;
//! for kick in transport.queue_eventfds() {
//!     // KVM_IOEVENTFD at `base + kick.offset`, 4 bytes, datamatch `kick.datamatch`.
//!     let _ = kick.eventfd;
//! }
//! let mut mmio = Bus::new();
//! mmio.insert(base, MmioTransport::LEN, transport)?;
//! # Ok(())
//! # }
//! ```
//!
//! Stop the vCPUs before the transport is dropped, and drop the transport before the iothreads are
//! stopped: it waits for the disk's I/O. Disks on the main loop need that loop to run whenever the
//! guest may reset them, so the main thread must never wait for a vCPU without running it.
//! The thread pool behind `engine=threads` and behind discards on block devices makes threads while
//! the guest runs, from the iothread that needs them.

pub mod bus;
pub mod channel;
pub mod reset;
pub mod serial;
mod sync;
pub mod virtio;

/// Guest RAM as every device sees it.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;
