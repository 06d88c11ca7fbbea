//! The front end's memory: regions of files that it hands over, mapped here.

use std::fs::File;
use std::io;
use std::sync::Arc;

use devices::GuestMemory;
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap, MmapRegion};

use super::sigbus::{Alarm, Watch};

/// Regions of one front end at once.
pub const MAX_REGIONS: usize = 64;

/// Why a region is refused.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is empty, or one of its ends is beyond 64 bits.
    #[error("the region of {size:#x} bytes at {guest:#x} is empty or wraps round")]
    Range {
        /// Guest address.
        guest: u64,
        /// Bytes.
        size: u64,
    },
    /// It would be there twice.
    #[error("the region of {size:#x} bytes at {guest:#x} overlaps another")]
    Overlap {
        /// Guest address.
        guest: u64,
        /// Bytes.
        size: u64,
    },
    /// Its file ends before it does.
    #[error("the region's file has {len:#x} bytes, the region ends at {end:#x}")]
    Short {
        /// Bytes of the file.
        len: u64,
        /// The region's end in it.
        end: u64,
    },
    /// Too many.
    #[error("more than {MAX_REGIONS} regions")]
    TooMany,
    /// No such region is mapped.
    #[error("no region of {size:#x} bytes is mapped at {guest:#x}")]
    Unknown {
        /// Guest address.
        guest: u64,
        /// Bytes.
        size: u64,
    },
    /// The system refuses the mapping.
    #[error("cannot map the region: {0}")]
    Map(String),
    /// The file cannot be looked at, or the mapping not be watched.
    #[error("the region's file: {0}")]
    System(#[from] io::Error),
}

/// Where a region is, in each of the three views of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Guest physical address: what descriptors name.
    pub guest: u64,
    /// Bytes.
    pub size: u64,
    /// Address in the front end's process: what rings are named by.
    pub user: u64,
    /// Offset in the file.
    pub offset: u64,
}

impl Place {
    fn overlaps(&self, other: &Place) -> bool {
        let apart = |a: u64, b: u64| a + self.size <= b || b + other.size <= a;
        !apart(self.guest, other.guest) || !apart(self.user, other.user)
    }
}

/// A mapped piece of a file of the front end's.
pub struct Mapping {
    // Dropped before the mapping.
    _watch: Watch,
    region: Arc<MmapRegion>,
}

impl Mapping {
    /// Maps `size` bytes of `file` from `offset` on, shared.
    ///
    /// # Errors
    /// The file is too short, or cannot be mapped so.
    pub fn new(file: File, offset: u64, size: u64, alarm: &Arc<Alarm>) -> Result<Mapping, Error> {
        let len = file.metadata()?.len();
        let end = offset.checked_add(size);
        let end = end.ok_or(Error::Range {
            guest: offset,
            size,
        })?;
        if end > len {
            return Err(Error::Short { len, end });
        }
        let bytes = usize::try_from(size).map_err(|_| Error::Range {
            guest: offset,
            size,
        })?;
        let region = MmapRegion::from_file(FileOffset::new(file, offset), bytes)
            .map_err(|error| Error::Map(error.to_string()))?;
        let watch = Watch::new(region.as_ptr(), bytes, alarm)?;
        Ok(Mapping {
            _watch: watch,
            region: Arc::new(region),
        })
    }

    /// Its first byte, aligned to a page.
    pub fn as_ptr(&self) -> *mut u8 {
        self.region.as_ptr()
    }
}

struct Region {
    place: Place,
    mapping: Mapping,
}

/// All memory of a front end. To be changed only while no queue runs: the watches go with it.
#[derive(Default)]
pub struct Regions {
    list: Vec<Region>,
}

impl Regions {
    /// Maps one more region.
    ///
    /// # Errors
    /// See [`Error`]; nothing is changed then.
    pub fn add(&mut self, place: Place, file: File, alarm: &Arc<Alarm>) -> Result<(), Error> {
        let Place {
            guest, size, user, ..
        } = place;
        let range = || Error::Range { guest, size };
        if size == 0 {
            return Err(range());
        }
        guest.checked_add(size).ok_or_else(range)?;
        user.checked_add(size).ok_or_else(range)?;
        if self.list.len() >= MAX_REGIONS {
            return Err(Error::TooMany);
        }
        if self.list.iter().any(|other| place.overlaps(&other.place)) {
            return Err(Error::Overlap { guest, size });
        }
        let mapping = Mapping::new(file, place.offset, size, alarm)?;
        self.list.push(Region { place, mapping });
        self.list.sort_unstable_by_key(|region| region.place.guest);
        Ok(())
    }

    /// Unmaps a region.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn remove(&mut self, guest: u64, size: u64, user: u64) -> Result<(), Error> {
        let found = self.list.iter().position(|region| {
            let place = &region.place;
            (place.guest, place.size, place.user) == (guest, size, user)
        });
        let at = found.ok_or(Error::Unknown { guest, size })?;
        self.list.remove(at);
        Ok(())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// The regions as guest RAM.
    ///
    /// # Errors
    /// vm-memory refuses what was checked here already.
    pub fn memory(&self) -> Result<GuestMemory, Error> {
        let regions = self.list.iter().map(|region| {
            let guest = region.place.guest;
            let mapped =
                GuestRegionMmap::with_arc(region.mapping.region.clone(), GuestAddress(guest));
            mapped.map(Arc::new).ok_or(Error::Range {
                guest,
                size: region.place.size,
            })
        });
        let regions = regions.collect::<Result<Vec<_>, _>>()?;
        GuestMemory::from_arc_regions(regions).map_err(|error| Error::Map(error.to_string()))
    }

    /// The guest address of an address in the front end's process.
    pub fn guest_address(&self, user: u64) -> Option<u64> {
        let places = self.list.iter().map(|region| region.place);
        let mut hits = places.filter(|p| p.user <= user && user - p.user < p.size);
        hits.next().map(|place| place.guest + (user - place.user))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(guest: u64, size: u64, user: u64, offset: u64) -> Place {
        Place {
            guest,
            size,
            user,
            offset,
        }
    }

    fn file(len: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        file
    }

    #[test]
    fn addresses_of_the_front_end_lead_to_those_of_the_guest() {
        let alarm = Alarm::new().unwrap();
        let mut regions = Regions::default();
        let mut add = |at| regions.add(at, file(0x4000), &alarm).unwrap();
        add(place(0x10_0000, 0x2000, 0x7000_0000, 0x1000));
        add(place(0, 0x1000, 0x6000_0000, 0));
        assert_eq!(regions.guest_address(0x6000_0fff), Some(0xfff));
        assert_eq!(regions.guest_address(0x6000_1000), None);
        assert_eq!(regions.guest_address(0x7000_1fff), Some(0x10_1fff));
        assert_eq!(regions.guest_address(0), None);
        regions.memory().unwrap();
        regions.remove(0, 0x1000, 0x6000_0000).unwrap();
        assert!(matches!(
            regions.remove(0, 0x1000, 0x6000_0000),
            Err(Error::Unknown { .. })
        ));
        assert_eq!(regions.guest_address(0x6000_0000), None);
    }

    #[test]
    fn what_no_front_end_means_is_refused() {
        let alarm = Alarm::new().unwrap();
        let mut regions = Regions::default();
        let good = place(0x1000, 0x2000, 0x7000_0000, 0);
        regions.add(good, file(0x2000), &alarm).unwrap();
        let mut refused = |at| regions.add(at, file(0x2000), &alarm).unwrap_err();
        for at in [
            place(0x9000, 0, 0x9000, 0),
            place(u64::MAX - 0xfff, 0x2000, 0x9000, 0),
            place(0x9000, 0x2000, u64::MAX - 0xfff, 0),
            place(0x9000, 0x2000, 0x9000, u64::MAX - 0xfff),
        ] {
            assert!(matches!(refused(at), Error::Range { .. }), "{at:x?}");
        }
        for at in [
            good,
            place(0x2fff, 0x1000, 0x9000, 0),
            place(0, 0x1001, 0x9000, 0),
            place(0x9000, 0x1000, 0x7000_1fff, 0),
        ] {
            assert!(matches!(refused(at), Error::Overlap { .. }), "{at:x?}");
        }
        for at in [
            place(0x9000, 0x2001, 0x9000, 0),
            place(0x9000, 0x2000, 0x9000, 0x1000),
        ] {
            assert!(matches!(refused(at), Error::Short { .. }), "{at:x?}");
        }
        assert!(matches!(
            refused(place(0x9000, 0x1000, 0x9000, 0x10)),
            Error::Map(_)
        ));
        let (pipe, _other) = std::io::pipe().unwrap();
        let result = regions.add(
            place(0x9000, 0x1000, 0x9000, 0),
            File::from(std::os::fd::OwnedFd::from(pipe)),
            &alarm,
        );
        assert!(matches!(result, Err(Error::Short { .. })));
        for at in 1..MAX_REGIONS as u64 {
            let at = place(at << 20, 0x1000, at << 20, 0);
            regions.add(at, file(0x1000), &alarm).unwrap();
        }
        let last = place(1 << 40, 0x1000, 1 << 40, 0);
        assert!(matches!(
            regions.add(last, file(0x1000), &alarm),
            Err(Error::TooMany)
        ));
    }
}
