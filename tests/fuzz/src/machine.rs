//! What the device targets share: memory, a disk on an iothread behind virtio-mmio, and its driver.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use devices::GuestMemory;
use devices::bus::BusDevice;
use devices::virtio::block::{Block, DiskConfig, Placement};
use devices::virtio::mmio::MmioTransport;
use iothread::{IoThread, IoThreadConfig};
use tempfile::NamedTempFile;
use virtio_bindings::virtio_mmio as reg;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Longer than any answer takes: what is not there by then will not come.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two stretches with a hole between, so that buffers may run over an end.
pub const RAM: [(u64, usize); 2] = [(0, 4 << 20), (8 << 20, 1 << 20)];
/// Bytes of the disk.
pub const DISK_BYTES: usize = 64 << 10;
/// Descriptors of its queue.
pub const QUEUE_SIZE: u16 = 64;
pub const DESC: u64 = 0x1000;
pub const AVAIL: u64 = 0x3000;
pub const USED: u64 = 0x4000;

const ACKNOWLEDGE: u32 = 1;
const DRIVER: u32 = 2;
const DRIVER_OK: u32 = 4;
const FEATURES_OK: u32 = 8;
const NEEDS_RESET: u32 = 0x40;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// There is a new used element.
    Used,
    /// The device wants a reset.
    NeedsReset,
}

/// Guest memory of [`RAM`].
pub fn ram() -> GuestMemory {
    GuestMemory::from_ranges(&RAM.map(|(base, len)| (GuestAddress(base), len))).unwrap()
}

/// A disk in a temporary file, on an iothread.
pub fn disk() -> (NamedTempFile, IoThread, Block) {
    let image = NamedTempFile::new().unwrap();
    image.as_file().set_len(DISK_BYTES as u64).unwrap();
    let iothread = IoThread::start(IoThreadConfig {
        id: "fuzz".to_owned(),
        ..IoThreadConfig::default()
    })
    .unwrap();
    let mut config = DiskConfig::new("fuzz", image.path());
    config.direct = Some(false);
    config.serial = "fuzz".to_owned();
    config.queue_size = QUEUE_SIZE;
    // A file has no second user here, and a reset by a target must not be taken for one.
    config.locking = false;
    let placement = Placement::single(iothread.remote(), 1);
    let block = Block::new(config, placement).unwrap();
    (image, iothread, block)
}

/// The machine that inputs are tried on, one after the other.
pub struct Machine {
    pub mem: GuestMemory,
    pub transport: MmioTransport,
    image: NamedTempFile,
    interrupt: EventFd,
    /// The driver's count of what it made available, and of what it has seen used.
    avail: u16,
    used: u16,
    _iothread: IoThread,
}

impl Default for Machine {
    fn default() -> Self {
        let mem = ram();
        let (image, iothread, block) = disk();
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let irqfd = interrupt.try_clone().unwrap();
        let transport = MmioTransport::new(Box::new(block), mem.clone(), irqfd).unwrap();
        Self {
            mem,
            transport,
            image,
            interrupt,
            avail: 0,
            used: 0,
            _iothread: iothread,
        }
    }
}

impl Machine {
    pub fn set(&self, register: u32, value: u32) {
        self.transport.write(register.into(), &value.to_le_bytes());
    }

    pub fn get(&self, register: u32) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(register.into(), &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Resets the device and everything the driver knows.
    pub fn reset(&mut self) {
        self.set(reg::VIRTIO_MMIO_STATUS, 0);
        assert_eq!(
            self.get(reg::VIRTIO_MMIO_STATUS),
            0,
            "the reset is done at once"
        );
        let zeros = vec![0u8; 0x10000];
        self.mem.write_slice(&zeros, GuestAddress(0)).unwrap();
        (self.avail, self.used) = (0, 0);
    }

    /// Negotiates the features and sets the queue up.
    pub fn start(&mut self, event_idx: bool) {
        self.reset();
        self.set(reg::VIRTIO_MMIO_STATUS, ACKNOWLEDGE | DRIVER);
        let mut features = 0u64;
        for half in [0, 1] {
            self.set(reg::VIRTIO_MMIO_DEVICE_FEATURES_SEL, half);
            features |= u64::from(self.get(reg::VIRTIO_MMIO_DEVICE_FEATURES)) << (32 * half);
        }
        if !event_idx {
            features &= !devices::virtio::features::EVENT_IDX;
        }
        for half in [0, 1] {
            self.set(reg::VIRTIO_MMIO_DRIVER_FEATURES_SEL, half);
            self.set(
                reg::VIRTIO_MMIO_DRIVER_FEATURES,
                (features >> (32 * half)) as u32,
            );
        }
        let status = ACKNOWLEDGE | DRIVER | FEATURES_OK;
        self.set(reg::VIRTIO_MMIO_STATUS, status);
        self.set(reg::VIRTIO_MMIO_QUEUE_SEL, 0);
        self.set(reg::VIRTIO_MMIO_QUEUE_NUM, QUEUE_SIZE.into());
        for (register, address) in [
            (reg::VIRTIO_MMIO_QUEUE_DESC_LOW, DESC),
            (reg::VIRTIO_MMIO_QUEUE_AVAIL_LOW, AVAIL),
            (reg::VIRTIO_MMIO_QUEUE_USED_LOW, USED),
        ] {
            self.set(register, address as u32);
            self.set(register + 4, 0);
        }
        self.set(reg::VIRTIO_MMIO_QUEUE_READY, 1);
        self.set(reg::VIRTIO_MMIO_STATUS, status | DRIVER_OK);
        let status = self.get(reg::VIRTIO_MMIO_STATUS);
        assert_eq!(status & NEEDS_RESET, 0, "a good driver is served");
    }

    /// Writes a descriptor at `index` of the table at `table`.
    pub fn describe(&self, table: u64, index: u16, descriptor: Descriptor) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&descriptor.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&descriptor.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&descriptor.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&descriptor.next.to_le_bytes());
        let at = GuestAddress(table + 16 * u64::from(index));
        self.mem.write_slice(&bytes, at).unwrap();
    }

    /// Makes `head` available, `ahead` places further than it should be, and kicks.
    pub fn offer(&mut self, head: u16, ahead: u16) {
        let slot = AVAIL + 4 + 2 * u64::from(self.avail % QUEUE_SIZE);
        self.mem.write_obj(head, GuestAddress(slot)).unwrap();
        self.avail = self.avail.wrapping_add(1).wrapping_add(ahead);
        // The element before the index, and the index before the kick.
        fence(Ordering::SeqCst);
        self.mem
            .write_obj(self.avail, GuestAddress(AVAIL + 2))
            .unwrap();
        fence(Ordering::SeqCst);
        self.kick();
    }

    pub fn kick(&self) {
        self.set(reg::VIRTIO_MMIO_QUEUE_NOTIFY, 0);
    }

    /// Waits for an answer.
    pub fn wait(&mut self) -> End {
        let begin = Instant::now();
        loop {
            let used: u16 = self.mem.read_obj(GuestAddress(USED + 2)).unwrap();
            fence(Ordering::SeqCst);
            if used != self.used {
                self.used = self.used.wrapping_add(1);
                // The next interrupt is wanted, too.
                let event = AVAIL + 4 + 2 * u64::from(QUEUE_SIZE);
                self.mem.write_obj(self.used, GuestAddress(event)).unwrap();
                return End::Used;
            }
            if self.get(reg::VIRTIO_MMIO_STATUS) & NEEDS_RESET != 0 {
                return End::NeedsReset;
            }
            assert!(
                begin.elapsed() < PATIENCE,
                "neither an answer nor NEEDS_RESET"
            );
            self.sleep();
        }
    }

    /// Until the next interrupt, or a moment.
    fn sleep(&self) {
        let mut fd = libc::pollfd {
            fd: self.interrupt.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one pollfd, which outlives the call.
        unsafe { libc::poll(&raw mut fd, 1, 20) };
        let _ = self.interrupt.read();
    }

    /// What is in the image now.
    pub fn image(&self) -> Vec<u8> {
        let mut bytes = vec![0; DISK_BYTES];
        self.file().read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn file(&self) -> &File {
        self.image.as_file()
    }
}

/// A descriptor as the driver writes it.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    pub address: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}
