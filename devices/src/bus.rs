//! Address ranges to devices: one [`Bus`] for port I/O and one for MMIO.
//!
//! A bus is filled while the VM is built and never changes afterwards, so that vCPU threads look
//! devices up without a lock. Whatever a device must guard, it guards itself.

use std::sync::Arc;

/// A device that answers accesses to a range of addresses. Called by vCPU threads, several at once.
pub trait BusDevice: Send + Sync {
    /// Fills `data` with what the guest reads at `offset` bytes from the start of the range.
    fn read(&self, offset: u64, data: &mut [u8]);

    /// Takes the bytes that the guest writes at `offset` bytes from the start of the range.
    fn write(&self, offset: u64, data: &[u8]);
}

/// Why a range could not be put on a bus.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// The range has no length, or wraps round the end of the address space.
    #[error("address range {base:#x} of {len:#x} bytes is empty or wraps round")]
    BadRange {
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
    },
    /// The range shares addresses with one that is there already.
    #[error("address range {base:#x} of {len:#x} bytes overlaps the one at {other:#x}")]
    Overlap {
        /// First address.
        base: u64,
        /// Length in bytes.
        len: u64,
        /// First address of the range in the way.
        other: u64,
    },
}

struct Range {
    base: u64,
    len: u64,
    device: Arc<dyn BusDevice>,
}

/// The devices of one address space.
#[derive(Default)]
pub struct Bus {
    // Sorted by base, without overlaps.
    ranges: Vec<Range>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Bus {
        Bus::default()
    }

    /// Puts `device` at `base..base + len`.
    ///
    /// # Errors
    /// The range is empty, wraps round or overlaps another.
    pub fn insert(&mut self, base: u64, len: u64, device: Arc<dyn BusDevice>) -> Result<(), Error> {
        let last = len
            .checked_sub(1)
            .and_then(|l| base.checked_add(l))
            .ok_or(Error::BadRange { base, len })?;
        let at = self.ranges.partition_point(|r| r.base < base);
        let before = at.checked_sub(1).map(|i| &self.ranges[i]);
        let clash = before
            .filter(|r| r.base + (r.len - 1) >= base)
            .or_else(|| self.ranges.get(at).filter(|r| r.base <= last));
        if let Some(other) = clash {
            return Err(Error::Overlap {
                base,
                len,
                other: other.base,
            });
        }
        self.ranges.insert(at, Range { base, len, device });
        Ok(())
    }

    /// The device whose range holds all of `addr..addr + len`, and the offset into the range.
    fn find(&self, addr: u64, len: usize) -> Option<(&dyn BusDevice, u64)> {
        let at = self.ranges.partition_point(|r| r.base <= addr);
        let range = &self.ranges[at.checked_sub(1)?];
        let offset = addr - range.base;
        let end = offset.checked_add(len as u64)?;
        (end <= range.len).then(|| (range.device.as_ref(), offset))
    }

    /// A guest's read. Where no device answers, the bytes are all ones, as on real hardware, and
    /// the result is false.
    pub fn read(&self, addr: u64, data: &mut [u8]) -> bool {
        match self.find(addr, data.len()) {
            Some((device, offset)) => {
                device.read(offset, data);
                true
            }
            None => {
                data.fill(0xff);
                false
            }
        }
    }

    /// A guest's write. False if no device takes it.
    pub fn write(&self, addr: u64, data: &[u8]) -> bool {
        match self.find(addr, data.len()) {
            Some((device, offset)) => {
                device.write(offset, data);
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

    impl BusDevice for Recorder {
        fn read(&self, offset: u64, data: &mut [u8]) {
            data.fill(offset as u8);
        }
        fn write(&self, offset: u64, data: &[u8]) {
            self.0.lock().unwrap().push((offset, data.to_vec()));
        }
    }

    fn bus(ranges: &[(u64, u64)]) -> (Bus, Arc<Recorder>) {
        let device = Arc::new(Recorder::default());
        let mut bus = Bus::new();
        for &(base, len) in ranges {
            bus.insert(base, len, device.clone()).unwrap();
        }
        (bus, device)
    }

    #[test]
    fn access_reaches_the_device_with_its_offset() {
        let (bus, device) = bus(&[(0x3f8, 8), (0x60, 5)]);
        let mut byte = [0];
        assert!(bus.read(0x3ff, &mut byte));
        assert_eq!(byte, [7]);
        assert!(bus.write(0x64, &[0xfe]));
        assert_eq!(*device.0.lock().unwrap(), [(4, vec![0xfe])]);
    }

    #[test]
    fn unclaimed_and_straddling_accesses_read_all_ones() {
        let (bus, device) = bus(&[(0x1000, 0x100)]);
        for addr in [0, 0xfff, 0x10fe, 0x1100, u64::MAX] {
            let mut data = [0; 4];
            assert!(!bus.read(addr, &mut data), "{addr:#x}");
            assert_eq!(data, [0xff; 4]);
            assert!(!bus.write(addr, &data));
        }
        assert!(device.0.lock().unwrap().is_empty());
    }

    #[test]
    fn overlaps_and_impossible_ranges_are_refused() {
        let (mut bus, device) = bus(&[(0x100, 0x10)]);
        for (base, len) in [(0xff, 2), (0x10f, 1), (0x100, 0x10), (0x0, 0x1000)] {
            let error = bus.insert(base, len, device.clone()).unwrap_err();
            assert!(matches!(error, Error::Overlap { other: 0x100, .. }));
        }
        for (base, len) in [(0, 0), (u64::MAX, 2)] {
            let error = bus.insert(base, len, device.clone()).unwrap_err();
            assert_eq!(error, Error::BadRange { base, len });
        }
        bus.insert(0x110, 1, device.clone()).unwrap();
        bus.insert(0xff, 1, device.clone()).unwrap();
        bus.insert(u64::MAX, 1, device).unwrap();
    }
}
