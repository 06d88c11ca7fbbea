//! The block device behind a transport or without one, and its interrupts.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::rig::PATIENCE;
use crate::GuestMemory;
use crate::bus::BusDevice;
use crate::virtio::block::Block;
use crate::virtio::device::{ActivateError, Activation, ActiveQueue, Interrupt, VirtioDevice};
use crate::virtio::mmio::MmioTransport;
use crate::virtio::pci::{MsiMessage, PciFunction, PciHost, VirtioPci};
use crate::virtio::queue::Queue;
use crate::virtio::testing::DriverQueue;

/// What lies between driver and device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Wire {
    /// Nothing: the test calls the device.
    #[default]
    Bare,
    Mmio,
    Pci,
}

impl Wire {
    pub(super) const ALL: [Wire; 3] = [Wire::Bare, Wire::Mmio, Wire::Pci];
}

/// Counts interrupts; the driver waits for them.
#[derive(Default)]
pub(super) struct Line {
    raised: Mutex<u64>,
    changed: Condvar,
    pub(super) config: AtomicU64,
    pub(super) needs_reset: AtomicBool,
    // A transport's irqfds; without one the device calls.
    wires: Arc<Vec<EventFd>>,
}

impl Line {
    /// Takes what the irqfds have, after waiting for it if there is nothing.
    fn listen(&self, timeout_ms: i32) {
        let mut fds: Vec<libc::pollfd> = self
            .wires
            .iter()
            .map(|wire| libc::pollfd {
                fd: wire.as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        if fds.is_empty() {
            return;
        }
        // SAFETY: so many pollfds.
        unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) };
        let news: u64 = self.wires.iter().filter_map(|wire| wire.read().ok()).sum();
        *self.raised.lock().unwrap() += news;
    }

    pub(super) fn count(&self) -> u64 {
        self.listen(0);
        *self.raised.lock().unwrap()
    }

    /// False if none comes.
    pub(super) fn wait_beyond(&self, seen: u64) -> bool {
        if self.wires.is_empty() {
            let raised = self.raised.lock().unwrap();
            let (_raised, timeout) = self
                .changed
                .wait_timeout_while(raised, PATIENCE, |r| *r <= seen)
                .unwrap();
            return !timeout.timed_out();
        }
        let begin = Instant::now();
        while self.count() <= seen {
            if begin.elapsed() > PATIENCE {
                return false;
            }
            self.listen(100);
        }
        true
    }
}

impl Interrupt for Line {
    fn queue(&self, _index: u16) {
        *self.raised.lock().unwrap() += 1;
        self.changed.notify_all();
    }
    fn config(&self) {
        self.config.fetch_add(1, Ordering::SeqCst);
    }
    fn needs_reset(&self) {
        self.needs_reset.store(true, Ordering::SeqCst);
        self.config.fetch_add(1, Ordering::SeqCst);
    }
}

/// Routes messages nowhere, as the irqfds themselves are looked at; keeps the way to kick.
#[derive(Default)]
struct Host(Mutex<Vec<(u64, EventFd)>>);

impl PciHost for Host {
    fn route(&self, _: u16, _: MsiMessage) -> std::io::Result<()> {
        Ok(())
    }
    fn add_kick(&self, address: u64, eventfd: &EventFd) -> std::io::Result<()> {
        let mut kicks = self.0.lock().unwrap();
        kicks.push((address, eventfd.try_clone()?));
        kicks.sort_by_key(|(address, _)| *address);
        Ok(())
    }
    fn remove_kick(&self, _: u64, _: &EventFd) -> std::io::Result<()> {
        self.0.lock().unwrap().clear();
        Ok(())
    }
}

// A test's disk is one of few: its size does not matter.
#[allow(clippy::large_enum_variant)]
enum Kind {
    Bare(Block),
    Mmio(MmioTransport),
    Pci(VirtioPci, Arc<Host>),
}

/// A disk as its driver sees it.
pub(super) struct Board {
    kind: Kind,
    sizes: Vec<u16>,
    wires: Arc<Vec<EventFd>>,
}

// Registers of virtio-mmio (section 4.2.2).
const MMIO_CONFIG: u64 = 0x100;
// The BAR of virtio-pci, as its capabilities say; `pci::transport` has tests of these.
const PCI_DEVICE: u64 = 0x2000;
const PCI_MSIX_TABLE: u64 = 0x4000;

const STATUS: [u32; 3] = [3, 0xb, 0xf];

impl Board {
    pub(super) fn new(wire: Wire, block: Block, mem: &GuestMemory) -> Board {
        let sizes = block.queue_max_sizes();
        let vectors = match wire {
            Wire::Bare => 0,
            Wire::Mmio => 1,
            Wire::Pci => VirtioPci::vectors_of(&block),
        };
        let wires: Vec<EventFd> = (0..vectors)
            .map(|_| EventFd::new(EFD_NONBLOCK).unwrap())
            .collect();
        let mut ends: Vec<EventFd> = wires.iter().map(|w| w.try_clone().unwrap()).collect();
        let block = Box::new(block);
        let kind = match wire {
            Wire::Bare => Kind::Bare(*block),
            Wire::Mmio => {
                Kind::Mmio(MmioTransport::new(block, mem.clone(), ends.remove(0)).unwrap())
            }
            Wire::Pci => {
                let host = Arc::new(Host::default());
                let pci = VirtioPci::new(block, mem.clone(), ends, host.clone()).unwrap();
                pci.set_bar(0xc000_0000);
                // Memory and bus master.
                pci.write_config(0x04, &[6, 0]);
                Kind::Pci(pci, host)
            }
        };
        Board {
            kind,
            sizes,
            wires: Arc::new(wires),
        }
    }

    /// A new listener to its interrupts.
    pub(super) fn line(&self) -> Arc<Line> {
        Arc::new(Line {
            wires: self.wires.clone(),
            ..Line::default()
        })
    }

    /// A register of 32 bits.
    fn read(&self, register: u64) -> u32 {
        let mut data = [0; 4];
        match &self.kind {
            Kind::Bare(_) => {}
            Kind::Mmio(mmio) => mmio.read(register, &mut data),
            Kind::Pci(pci, _) => pci.read_bar(register, &mut data),
        }
        u32::from_le_bytes(data)
    }

    fn write(&self, register: u64, bytes: usize, value: u64) {
        let data = &value.to_le_bytes()[..bytes];
        match &self.kind {
            Kind::Bare(_) => {}
            Kind::Mmio(mmio) => mmio.write(register, data),
            Kind::Pci(pci, _) => pci.write_bar(register, data),
        }
    }

    /// What a driver does at its start; each queue's kick.
    pub(super) fn start(
        &mut self,
        mem: &GuestMemory,
        features: u64,
        rings: &[DriverQueue],
        line: &Arc<Line>,
    ) -> Vec<Arc<EventFd>> {
        match &mut self.kind {
            Kind::Bare(block) => {
                let kicks: Vec<Arc<EventFd>> = rings
                    .iter()
                    .map(|_| Arc::new(EventFd::new(0).unwrap()))
                    .collect();
                let queue = |(index, ring): (u16, &DriverQueue)| ActiveQueue {
                    index,
                    queue: Queue::new(mem, ring.layout, ring.layout.size, features, 0).unwrap(),
                    notify: kicks[usize::from(index)].clone(),
                };
                block.features_accepted(features);
                block
                    .activate(Activation {
                        features,
                        mem: mem.clone(),
                        queues: (0..).zip(rings).map(queue).collect(),
                        interrupt: line.clone(),
                    })
                    .unwrap();
                kicks
            }
            Kind::Mmio(_) => self.start_mmio(features, rings),
            Kind::Pci(..) => self.start_pci(features, rings),
        }
    }

    fn start_mmio(&mut self, features: u64, rings: &[DriverQueue]) -> Vec<Arc<EventFd>> {
        self.write(0x70, 4, STATUS[0].into());
        for half in 0..2 {
            self.write(0x24, 4, half);
            self.write(0x20, 4, features >> (32 * half) & 0xffff_ffff);
        }
        self.write(0x70, 4, STATUS[1].into());
        for (index, ring) in (0..).zip(rings) {
            let layout = ring.layout;
            self.write(0x30, 4, index);
            self.write(0x38, 4, layout.size.into());
            let areas = [
                (0x80, layout.desc),
                (0x90, layout.avail),
                (0xa0, layout.used),
            ];
            for (register, address) in areas {
                self.write(register, 4, address & 0xffff_ffff);
                self.write(register + 4, 4, address >> 32);
            }
            self.write(0x44, 4, 1);
        }
        self.write(0x70, 4, STATUS[2].into());
        assert_eq!(self.read(0x70), STATUS[2]);
        let Kind::Mmio(mmio) = &self.kind else {
            return Vec::new();
        };
        let kicks = mmio.queue_eventfds().into_iter();
        kicks.map(|kick| kick.eventfd).collect()
    }

    fn start_pci(&mut self, features: u64, rings: &[DriverQueue]) -> Vec<Arc<EventFd>> {
        let Kind::Pci(pci, host) = &self.kind else {
            return Vec::new();
        };
        let byte = |at: usize| {
            let mut data = [0];
            pci.read_config(at, &mut data);
            data[0]
        };
        let mut msix = usize::from(byte(0x34));
        while byte(msix) != 0x11 {
            msix = byte(msix + 1).into();
        }
        pci.write_config(msix + 2, &0x8000u16.to_le_bytes());
        for vector in 0..self.wires.len() as u64 {
            self.write(PCI_MSIX_TABLE + 16 * vector, 4, 0xfee0_0000);
            self.write(PCI_MSIX_TABLE + 16 * vector + 8, 4, 0x20 + vector);
            self.write(PCI_MSIX_TABLE + 16 * vector + 12, 4, 0);
        }
        self.write(0x14, 1, STATUS[0].into());
        for half in 0..2 {
            self.write(0x08, 4, half);
            self.write(0x0c, 4, features >> (32 * half) & 0xffff_ffff);
        }
        self.write(0x14, 1, STATUS[1].into());
        for (index, ring) in (0..).zip(rings) {
            self.write(0x16, 2, index);
            self.write(0x18, 2, ring.layout.size.into());
            self.write(0x1a, 2, index + 1);
            self.write(0x20, 8, ring.layout.desc);
            self.write(0x28, 8, ring.layout.avail);
            self.write(0x30, 8, ring.layout.used);
            self.write(0x1c, 2, 1);
        }
        self.write(0x14, 1, STATUS[2].into());
        assert_eq!(self.read(0x14) & 0xff, STATUS[2]);
        let kicks = host.0.lock().unwrap();
        let kicks = kicks.iter().map(|(_, kick)| kick.try_clone().unwrap());
        kicks.map(Arc::new).collect()
    }
}

impl VirtioDevice for Board {
    fn device_type(&self) -> u32 {
        2
    }

    fn name(&self) -> String {
        "a test's disk".into()
    }

    fn features(&self) -> u64 {
        let (select, value) = match &self.kind {
            Kind::Bare(block) => return block.features(),
            Kind::Mmio(_) => (0x14, 0x10),
            Kind::Pci(..) => (0x00, 0x04),
        };
        let halves = (0..2).map(|half| {
            self.write(select, 4, half);
            u64::from(self.read(value)) << (32 * half)
        });
        halves.sum()
    }

    fn queue_max_sizes(&self) -> Vec<u16> {
        self.sizes.clone()
    }

    fn config_generation(&self) -> u32 {
        match &self.kind {
            Kind::Bare(block) => block.config_generation(),
            Kind::Mmio(_) => self.read(0xfc),
            Kind::Pci(..) => self.read(0x15) & 0xff,
        }
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        match &self.kind {
            Kind::Bare(block) => block.read_config(offset, data),
            Kind::Mmio(mmio) => mmio.read(MMIO_CONFIG + offset, data),
            Kind::Pci(pci, _) => pci.read_bar(PCI_DEVICE + offset, data),
        }
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        match &mut self.kind {
            Kind::Bare(block) => block.write_config(offset, data),
            Kind::Mmio(mmio) => mmio.write(MMIO_CONFIG + offset, data),
            Kind::Pci(pci, _) => pci.write_bar(PCI_DEVICE + offset, data),
        }
    }

    fn activate(&mut self, _: Activation) -> Result<(), ActivateError> {
        Err(ActivateError("boards are started with `start`".into()))
    }

    fn reset(&mut self) {
        match &mut self.kind {
            Kind::Bare(block) => block.reset(),
            Kind::Mmio(_) => self.write(0x70, 4, 0),
            Kind::Pci(..) => self.write(0x14, 1, 0),
        }
    }
}
