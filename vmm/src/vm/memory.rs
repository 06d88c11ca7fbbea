//! Guest RAM: how much, of which pages, and where it lies for KVM.

use std::fs::File;
use std::os::fd::AsFd;

use rustix::fs::MemfdFlags;
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{FileOffset, GuestAddress, GuestRegionMmap};

use crate::config::{HugePages, Memory, Size};

/// Guest RAM as the devices see it.
pub type GuestMemory = vm_memory::GuestMemoryMmap<()>;

/// Why there is no guest memory.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// More than the host has.
    #[error("--memory {0}: more than the {1} MiB that this host has; give less")]
    BeyondHost(Size, u64),
    /// More than the processor can address.
    #[error("--memory {0}: more than {1} bits of guest physical address reach; give less")]
    BeyondAddressing(Size, u32),
    /// The size is no multiple of the huge pages'.
    #[error("--memory size={0},hugepages={1}: the size is no multiple of the page size; round it")]
    Unaligned(Size, HugePages),
    /// The host has no huge pages of this size.
    #[error("--memory hugepages={0}: this host has no pages of that size; it has: {1}")]
    NoSuchPage(HugePages, String),
    /// The pool of huge pages is too small.
    #[error(
        "--memory size={size},hugepages={page}: the host's pool has no room ({source}); write {pages} to {path}"
    )]
    HugePool {
        /// Guest memory.
        size: Size,
        /// The page size.
        page: HugePages,
        /// The system's reason.
        source: std::io::Error,
        /// Pages needed.
        pages: u64,
        /// The file that sizes the pool.
        path: String,
    },
    /// The memory cannot be mapped.
    #[error("--memory {0}: the host does not give it: {1}; give less")]
    Map(Size, std::io::Error),
    /// The memory cannot be populated.
    #[error(
        "--memory {0},prefault=on: the host cannot populate it: {1}; give less, or prefault=off"
    )]
    Prefault(Size, std::io::Error),
    /// vm-memory finds fault with the regions.
    #[error("guest memory regions: {0}")]
    Regions(#[from] vm_memory::GuestRegionCollectionError),
    /// KVM refuses a region.
    #[error("KVM_SET_USER_MEMORY_REGION of {1} bytes at {0:#x}: {2}")]
    Slot(u64, u64, vmm_sys_util::errno::Error),
}

/// Maps `regions` (address and length in bytes) as guest memory.
pub fn map(memory: &Memory, regions: &[(GuestAddress, usize)]) -> Result<GuestMemory, Error> {
    let host = host_memory_bytes();
    if memory.size.0 > host {
        return Err(Error::BeyondHost(memory.size, host >> 20));
    }
    let pages = Pages::find(memory)?;
    if let Some(bytes) = pages.huge_bytes
        && regions
            .iter()
            .any(|(_, len)| !(*len as u64).is_multiple_of(bytes))
    {
        return Err(Error::Unaligned(memory.size, memory.hugepages));
    }
    let shared = match memory.shared {
        true => Some(pages.memfd(memory)?),
        false => None,
    };
    let mut offset = 0;
    let mut mapped = Vec::new();
    for (address, len) in regions {
        let file = match &shared {
            Some(file) => Some(FileOffset::new(
                file.try_clone()
                    .map_err(|error| Error::Map(memory.size, error))?,
                offset,
            )),
            None => None,
        };
        mapped.push(map_region(memory, &pages, *address, *len, file)?);
        offset += *len as u64;
    }
    Ok(GuestMemory::from_regions(mapped)?)
}

fn map_region(
    memory: &Memory,
    pages: &Pages,
    address: GuestAddress,
    len: usize,
    file: Option<FileOffset>,
) -> Result<GuestRegionMmap<()>, Error> {
    let mut flags = match file {
        Some(_) => libc::MAP_SHARED,
        None => libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | pages.mmap_flags(),
    };
    if pages.huge_bytes.is_none() {
        // Ordinary pages are taken as the guest touches them; huge ones are reserved now, or the mapping is refused.
        flags |= libc::MAP_NORESERVE;
    }
    let mut builder = MmapRegionBuilder::new(len)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(flags);
    if let Some(file) = file {
        builder = builder.with_file_offset(file);
    }
    let region = builder.build().map_err(|error| {
        let source = match error {
            MmapRegionError::Mmap(source) => source,
            other => std::io::Error::other(other.to_string()),
        };
        pages.map_error(memory, source)
    })?;
    if pages.huge_bytes.is_none() {
        // Boot needs a few small pages at the very bottom. A huge one there would have to be found and zeroed before
        // the guest starts, which takes milliseconds where memory is fragmented.
        let small = if address.0 == 0 {
            LOW_BYTES.min(len)
        } else {
            0
        };
        advise(
            region.as_ptr().wrapping_add(small),
            len - small,
            libc::MADV_HUGEPAGE,
        );
    }
    // The guest's memory would make a core dump as large as the guest.
    advise(region.as_ptr(), len, libc::MADV_DONTDUMP);
    if memory.prefault {
        populate(region.as_ptr(), len).map_err(|error| Error::Prefault(memory.size, error))?;
    }
    GuestRegionMmap::new(region, address).ok_or(Error::BeyondAddressing(memory.size, u64::BITS))
}

/// What lies below every kernel's bulk: tables, command line, the first steps of booting.
const LOW_BYTES: usize = 2 << 20;

/// A hint: a kernel that does not take it loses nothing but speed.
fn advise(start: *mut u8, len: usize, advice: i32) {
    // SAFETY: the range is the mapping just made; neither advice changes its contents.
    if unsafe { libc::madvise(start.cast(), len, advice) } != 0 {
        tracing::debug!(advice, error = %std::io::Error::last_os_error(), "madvise");
    }
}

/// Populates the range for writing, which unlike MAP_POPULATE reports failure.
fn populate(start: *mut u8, len: usize) -> std::io::Result<()> {
    // SAFETY: the range is the mapping just made; populating does not change its contents.
    if unsafe { libc::madvise(start.cast(), len, libc::MADV_POPULATE_WRITE) } == 0 {
        return Ok(());
    }
    Err(std::io::Error::last_os_error())
}

/// What the memory is made of.
struct Pages {
    /// Size of the huge pages; `None` for ordinary ones.
    huge_bytes: Option<u64>,
}

impl Pages {
    fn find(memory: &Memory) -> Result<Self, Error> {
        let huge_bytes = match memory.hugepages {
            HugePages::Off => return Ok(Self { huge_bytes: None }),
            HugePages::On => default_huge_bytes(),
            HugePages::Size(size) => Some(size.0),
        };
        let known = huge_page_sizes();
        match huge_bytes.filter(|bytes| known.contains(bytes)) {
            Some(bytes) => Ok(Self {
                huge_bytes: Some(bytes),
            }),
            None => {
                let known: Vec<_> = known.iter().map(|bytes| Size(*bytes).to_string()).collect();
                let known = match known.is_empty() {
                    true => "none".to_owned(),
                    false => known.join(", "),
                };
                Err(Error::NoSuchPage(memory.hugepages, known))
            }
        }
    }

    /// The page size as mmap(2) and memfd_create(2) take it: its logarithm in the upper bits.
    fn mmap_flags(&self) -> i32 {
        self.huge_bytes.map_or(0, |bytes| {
            libc::MAP_HUGETLB | ((bytes.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT)
        })
    }

    fn memfd(&self, memory: &Memory) -> Result<File, Error> {
        let mut flags = MemfdFlags::CLOEXEC;
        if let Some(bytes) = self.huge_bytes {
            flags |= MemfdFlags::HUGETLB
                | MemfdFlags::from_bits_retain(bytes.trailing_zeros() << libc::MAP_HUGE_SHIFT);
        }
        let failed = |error: rustix::io::Errno| self.map_error(memory, error.into());
        let fd = rustix::fs::memfd_create("guest-memory", flags).map_err(failed)?;
        rustix::fs::ftruncate(fd.as_fd(), memory.size.0).map_err(failed)?;
        Ok(File::from(fd))
    }

    fn map_error(&self, memory: &Memory, source: std::io::Error) -> Error {
        match self.huge_bytes {
            Some(bytes) => Error::HugePool {
                size: memory.size,
                page: memory.hugepages,
                source,
                pages: memory.size.0.div_ceil(bytes),
                path: format!("{HUGE_PAGES}/hugepages-{}kB/nr_hugepages", bytes >> 10),
            },
            None => Error::Map(memory.size, source),
        }
    }
}

const HUGE_PAGES: &str = "/sys/kernel/mm/hugepages";

/// Sizes in bytes of the huge pages that the host knows.
fn huge_page_sizes() -> Vec<u64> {
    let Ok(entries) = std::fs::read_dir(HUGE_PAGES) else {
        return Vec::new();
    };
    let mut sizes: Vec<u64> = entries
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
            Some(kib.parse::<u64>().ok()? << 10)
        })
        .collect();
    sizes.sort_unstable();
    sizes
}

fn default_huge_bytes() -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("Hugepagesize:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// All RAM of the host.
fn host_memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    // `totalram` is the C long that the kernel fills, in units of `mem_unit`.
    (info.totalram as u64).saturating_mul(u64::from(info.mem_unit))
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use vm_memory::GuestMemoryBackend as _;

    use super::*;

    fn memory(bytes: u64) -> Memory {
        Memory {
            size: Size(bytes),
            ..Memory::default()
        }
    }

    const MIB: usize = 1 << 20;

    #[test]
    fn private_and_shared_memory_is_mapped_where_asked() {
        for shared in [false, true] {
            let memory = Memory {
                shared,
                prefault: true,
                ..memory(3 << 20)
            };
            let regions = [(GuestAddress(0), MIB), (GuestAddress(1 << 32), 2 * MIB)];
            let mapped = map(&memory, &regions).unwrap();
            mapped.write_obj(7u8, GuestAddress(MIB as u64 - 1)).unwrap();
            mapped
                .write_obj(8u8, GuestAddress((1 << 32) + 2 * MIB as u64 - 1))
                .unwrap();
            assert_eq!(mapped.read_obj::<u8>(GuestAddress(1 << 32)).unwrap(), 0);
            assert!(mapped.write_obj(1u8, GuestAddress(MIB as u64)).is_err());
            let has_file = mapped.iter().all(|region| region.file_offset().is_some());
            assert_eq!(has_file, shared);
        }
    }

    #[test]
    fn more_than_the_host_has_is_refused_with_its_size() {
        let size = 1 << 50;
        let error = map(&memory(size), &[(GuestAddress(0), size as usize)]).unwrap_err();
        assert!(matches!(error, Error::BeyondHost(..)));
        assert!(
            error
                .to_string()
                .starts_with("--memory 1024T: more than the "),
            "{error}"
        );
    }

    #[test]
    fn page_sizes_that_the_host_lacks_are_refused() {
        let memory = Memory {
            hugepages: HugePages::Size(Size(64 << 20)),
            ..memory(64 << 20)
        };
        let error = map(&memory, &[(GuestAddress(0), 64 * MIB)]).unwrap_err();
        assert!(error.to_string().contains("hugepages=64M"), "{error}");
    }

    #[test]
    fn a_pool_without_room_names_the_file_that_sizes_it() {
        let Some(bytes) = default_huge_bytes().filter(|bytes| huge_page_sizes().contains(bytes))
        else {
            eprintln!("skipped: this host has no huge pages");
            return;
        };
        // Half of the host's memory as huge pages: no test machine's pool holds that.
        let size = host_memory_bytes() / 2 / bytes * bytes;
        for shared in [false, true] {
            let memory = Memory {
                hugepages: HugePages::On,
                shared,
                ..memory(size)
            };
            let error = map(&memory, &[(GuestAddress(0), size as usize)]).unwrap_err();
            assert!(error.to_string().contains("nr_hugepages"), "{error}");
        }
        let memory = Memory {
            hugepages: HugePages::On,
            ..memory(bytes + 4096)
        };
        let regions = [(GuestAddress(0), bytes as usize + 4096)];
        assert!(matches!(map(&memory, &regions), Err(Error::Unaligned(..))));
    }
}
