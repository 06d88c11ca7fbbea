//! Which iothread runs which queue of a disk.

use devices::virtio::block::mapping::{self, MappingError, MappingItem};

use super::{Disk, IoThread};

/// For each queue of a disk the index of its iothread in the configuration; `None` is the main loop.
pub type Placement = Vec<Option<usize>>;

/// Why the queues of a disk cannot be placed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The mapping itself.
    #[error("{option}: {source}")]
    Mapping {
        /// The option that maps, with its value.
        option: String,
        /// What is wrong.
        source: MappingError,
    },
    /// `vqs` has nothing to refer to.
    #[error("vqs=: no iothreads= to refer to; add it, with one iothread for each list")]
    VqsAlone,
    /// The lists do not match the iothreads.
    #[error(
        "vqs=: {lists} lists for {iothreads} iothreads; give one list for each, separated by colons"
    )]
    VqsCount {
        /// Number of lists.
        lists: usize,
        /// Number of iothreads.
        iothreads: usize,
    },
}

/// Places the `queues` queues of `disk`.
pub fn place(disk: &Disk, queues: u16, iothreads: &[IoThread]) -> Result<Placement, Error> {
    let find = |name: &str| iothreads.iter().position(|iothread| iothread.id == name);
    let by_vqs = !disk.vqs.is_empty();
    if disk.iothreads.is_empty() {
        if by_vqs {
            return Err(Error::VqsAlone);
        }
        let Some(name) = &disk.iothread else {
            return Ok(vec![None; usize::from(queues)]);
        };
        let iothread = find(name).ok_or_else(|| Error::Mapping {
            option: format!("iothread={name}"),
            source: MappingError::Unknown {
                iothread: name.clone(),
            },
        })?;
        return Ok(vec![Some(iothread); usize::from(queues)]);
    }
    let failed = |source| Error::Mapping {
        option: format!("iothreads={}", disk.iothreads.join(":")),
        source,
    };
    if let Some(iothread) = &disk.iothread {
        let iothread = iothread.clone();
        return Err(failed(MappingError::Both { iothread }));
    }
    if by_vqs && disk.vqs.len() != disk.iothreads.len() {
        return Err(Error::VqsCount {
            lists: disk.vqs.len(),
            iothreads: disk.iothreads.len(),
        });
    }
    let names =
        mapping::assign(&items(disk), queues, |name| find(name).is_some()).map_err(failed)?;
    Ok(names.iter().map(|name| find(name)).collect())
}

/// The mapping in the device's terms; an empty list is none.
fn items(disk: &Disk) -> Vec<MappingItem> {
    let list = |at: usize| {
        let list = disk.vqs.get(at).filter(|list| !list.0.is_empty())?;
        // Indices are at most 65535 by their type's range.
        Some(
            list.0
                .iter()
                .filter_map(|queue| u16::try_from(*queue).ok())
                .collect(),
        )
    };
    let named = disk.iothreads.iter().enumerate();
    named
        .map(|(at, iothread)| MappingItem {
            iothread: iothread.clone(),
            vqs: list(at),
        })
        .collect()
}
