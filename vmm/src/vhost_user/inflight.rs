//! The shared memory that notes which requests are under way: made here on the front end's wish, kept
//! by the front end, handed to the next back end.

use std::fs::File;
use std::sync::Arc;

use devices::virtio::queue::MAX_SIZE;
use devices::virtio::queue::inflight::Inflight;
use rustix::fs::{MemfdFlags, SealFlags};

use super::memory::{self, Mapping};
use super::sigbus::Alarm;

/// Why the memory cannot be made or used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not this disk's queues.
    #[error(
        "inflight memory for {queues} queues of {size}; the disk has {have} of {MAX_SIZE} at most"
    )]
    Shape {
        /// Queues asked for.
        queues: u16,
        /// Descriptors of each.
        size: u16,
        /// The disk's queues.
        have: usize,
    },
    /// Smaller than that takes.
    #[error("inflight memory of {have} bytes; {needed} are needed")]
    Small {
        /// Given.
        have: u64,
        /// Needed.
        needed: u64,
    },
    /// Its file.
    #[error("inflight memory: {0}")]
    Memory(#[from] memory::Error),
    /// The system.
    #[error("inflight memory: {0}")]
    System(#[from] std::io::Error),
}

/// What the memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Queues.
    pub queues: u16,
    /// Descriptors of each.
    pub size: u16,
}

impl Shape {
    /// Bytes of the memory.
    pub fn bytes(&self) -> u64 {
        Inflight::bytes(self.size) as u64 * u64::from(self.queues)
    }

    fn check(&self, have: usize) -> Result<(), Error> {
        let Shape { queues, size } = *self;
        let good = (1..=have).contains(&usize::from(queues)) && (1..=MAX_SIZE).contains(&size);
        good.then_some(())
            .ok_or(Error::Shape { queues, size, have })
    }
}

/// Fresh memory for a disk with `have` queues. Nobody can cut it short.
///
/// # Errors
/// See [`Error`].
pub fn make(shape: Shape, have: usize) -> Result<File, Error> {
    shape.check(have)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("inflight", flags).map_err(std::io::Error::from)?;
    let file = File::from(fd);
    file.set_len(shape.bytes())?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals).map_err(std::io::Error::from)?;
    Ok(file)
}

/// The memory as the front end gave it.
pub struct Shared {
    shape: Shape,
    mapping: Arc<Mapping>,
}

impl Shared {
    /// Maps `size` bytes of `file` from `offset` on, for a disk with `have` queues.
    ///
    /// # Errors
    /// See [`Error`].
    pub fn map(
        shape: Shape,
        have: usize,
        file: File,
        offset: u64,
        size: u64,
        alarm: &Arc<Alarm>,
    ) -> Result<Shared, Error> {
        shape.check(have)?;
        let needed = shape.bytes();
        if size < needed {
            return Err(Error::Small { have: size, needed });
        }
        let mapping = Mapping::new(file, offset, needed, alarm)?;
        Ok(Shared {
            shape,
            mapping: Arc::new(mapping),
        })
    }

    /// The record of queue `index`, which has `size` descriptors; none if the memory is not for it.
    pub fn queue(&self, index: u16, size: u16) -> Option<Inflight> {
        if index >= self.shape.queues || size > self.shape.size {
            return None;
        }
        let at = Inflight::bytes(self.shape.size) * usize::from(index);
        let base = self.mapping.as_ptr().wrapping_add(at);
        // SAFETY: `map` made room for `queues` records of `size` descriptors at least, each at a
        // multiple of 64 bytes behind a page's beginning; the mapping is kept by the clone.
        Some(unsafe { Inflight::new(base, size, self.mapping.clone()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        queues: 2,
        size: 64,
    };

    #[test]
    fn memory_made_here_serves_and_cannot_be_cut() {
        let file = make(SHAPE, 4).unwrap();
        assert!(file.set_len(1).is_err());
        let alarm = Alarm::new().unwrap();
        let shared = Shared::map(SHAPE, 4, file, 0, SHAPE.bytes(), &alarm).unwrap();
        assert!(shared.queue(1, 64).is_some());
        assert!(shared.queue(1, 32).is_some());
        assert!(shared.queue(2, 64).is_none());
        assert!(shared.queue(0, 128).is_none());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for (queues, size) in [(0, 64), (5, 64), (2, 0), (2, 1025)] {
            assert!(make(Shape { queues, size }, 4).is_err());
        }
        let alarm = Alarm::new().unwrap();
        let map = |file, size| Shared::map(SHAPE, 4, file, 0, size, &alarm);
        let file = || make(SHAPE, 4).unwrap();
        assert!(matches!(map(file(), 64), Err(Error::Small { .. })));
        let short = tempfile::tempfile().unwrap();
        short.set_len(100).unwrap();
        assert!(matches!(
            map(short, SHAPE.bytes()),
            Err(Error::Memory(memory::Error::Short { .. }))
        ));
    }
}
