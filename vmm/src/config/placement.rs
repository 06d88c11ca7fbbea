//! Which iothread runs which queue of a disk.

use super::{Disk, IoThread};

/// For each queue of a disk the index of its iothread in the configuration; `None` is the main loop.
pub type Placement = Vec<Option<usize>>;

/// Why the queues of a disk cannot be placed.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No iothread has the name.
    #[error(
        "{key}={name}: no iothread of that name; add --iothread id={name} or name one of: {}",
        list(known)
    )]
    Unknown {
        /// The key that names it.
        key: &'static str,
        /// The name.
        name: String,
        /// The iothreads that exist.
        known: Vec<String>,
    },
    /// An iothread appears more than once.
    #[error("iothreads=: {0} is named twice; name each iothread once")]
    Twice(String),
    /// Both ways at once.
    #[error("iothread= and iothreads= are given together; keep one")]
    Both,
    /// `vqs` has nothing to refer to.
    #[error("vqs= needs iothreads=; add it, with one iothread for each list")]
    VqsAlone,
    /// The lists do not match the iothreads.
    #[error(
        "vqs= has {lists} lists for {iothreads} iothreads; give one list for each, separated by colons"
    )]
    VqsCount {
        /// Number of lists.
        lists: usize,
        /// Number of iothreads.
        iothreads: usize,
    },
    /// Some have queues assigned and some not.
    #[error("vqs=: {0} has no queues while others have; list queues for all iothreads or for none")]
    SomeWithout(String),
    /// There is no such queue.
    #[error("vqs=: queue {queue} of {iothread} does not exist; queues={queues} gives indices 0 to {}", queues - 1)]
    NoQueue {
        /// The queue.
        queue: u32,
        /// Its iothread.
        iothread: String,
        /// The number of queues.
        queues: u16,
    },
    /// A queue has two iothreads.
    #[error("vqs=: queue {queue} is given to {first} and to {second}; give it to one")]
    Assigned {
        /// The queue.
        queue: u32,
        /// The iothread that has it.
        first: String,
        /// The iothread that should get it too.
        second: String,
    },
    /// A queue has no iothread.
    #[error("vqs=: queue {0} is given to no iothread; add it to a list")]
    LeftOut(u16),
}

/// Places the `queues` queues of `disk`.
pub fn place(disk: &Disk, queues: u16, iothreads: &[IoThread]) -> Result<Placement, Error> {
    let find = |key, name: &String| {
        iothreads
            .iter()
            .position(|iothread| iothread.id == *name)
            .ok_or_else(|| Error::Unknown {
                key,
                name: name.clone(),
                known: iothreads
                    .iter()
                    .map(|iothread| iothread.id.clone())
                    .collect(),
            })
    };
    if disk.iothreads.is_empty() {
        if !disk.vqs.is_empty() {
            return Err(Error::VqsAlone);
        }
        let iothread = match &disk.iothread {
            Some(name) => Some(find("iothread", name)?),
            None => None,
        };
        return Ok(vec![iothread; usize::from(queues)]);
    }
    if disk.iothread.is_some() {
        return Err(Error::Both);
    }
    let mut indices = Vec::new();
    for name in &disk.iothreads {
        let index = find("iothreads", name)?;
        if indices.contains(&index) {
            return Err(Error::Twice(name.clone()));
        }
        indices.push(index);
    }
    if disk.vqs.is_empty() {
        return Ok((0..usize::from(queues))
            .map(|queue| Some(indices[queue % indices.len()]))
            .collect());
    }
    pin(disk, queues, &indices)
}

fn pin(disk: &Disk, queues: u16, indices: &[usize]) -> Result<Placement, Error> {
    if disk.vqs.len() != indices.len() {
        return Err(Error::VqsCount {
            lists: disk.vqs.len(),
            iothreads: indices.len(),
        });
    }
    let mut placement: Placement = vec![None; usize::from(queues)];
    for ((index, name), vqs) in indices.iter().zip(&disk.iothreads).zip(&disk.vqs) {
        if vqs.0.is_empty() {
            return Err(Error::SomeWithout(name.clone()));
        }
        for queue in &vqs.0 {
            let slot = placement
                .get_mut(*queue as usize)
                .ok_or_else(|| Error::NoQueue {
                    queue: *queue,
                    iothread: name.clone(),
                    queues,
                })?;
            if let Some(first) = slot {
                let first = indices.iter().position(|index| index == first);
                return Err(Error::Assigned {
                    queue: *queue,
                    first: first.map_or_else(String::new, |at| disk.iothreads[at].clone()),
                    second: name.clone(),
                });
            }
            *slot = Some(*index);
        }
    }
    match (0..queues).find(|queue| placement[usize::from(*queue)].is_none()) {
        Some(queue) => Err(Error::LeftOut(queue)),
        None => Ok(placement),
    }
}

fn list(names: &[String]) -> String {
    if names.is_empty() {
        "(there is none yet)".to_owned()
    } else {
        names.join(", ")
    }
}
