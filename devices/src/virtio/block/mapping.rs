//! Which queue of a disk runs on which iothread: the rules of QEMU's `iothread-vq-mapping`.

/// One iothread of a mapping, and the queues that it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappingItem {
    /// The iothread's id.
    pub iothread: String,
    /// Its queues; None shares all queues out in turn.
    pub vqs: Option<Vec<u16>>,
}

/// Why a mapping cannot be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MappingError {
    /// No items at all.
    #[error("iothreads= names no iothread; give at least one or leave it out")]
    Empty,
    /// `iothread=` and a mapping together.
    #[error("iothread={iothread} and a mapping are given together; give one of them")]
    Both {
        /// The single iothread.
        iothread: String,
    },
    /// No such iothread.
    #[error("iothread {iothread} does not exist; define it with --iothread id={iothread}")]
    Unknown {
        /// Its id.
        iothread: String,
    },
    /// An iothread named twice.
    #[error("iothread {iothread} is named twice; name it once with all of its queues")]
    Duplicate {
        /// Its id.
        iothread: String,
    },
    /// Some items with `vqs=`, some without.
    #[error("iothread {iothread} has no vqs= but others do; give it to all or to none")]
    Mixed {
        /// The first one without.
        iothread: String,
    },
    /// A queue that the disk has not.
    #[error("vqs={queue} of iothread {iothread}: the disk has only {queues} queues, 0 to {}", queues - 1)]
    Index {
        /// The queue.
        queue: u16,
        /// Where it was named.
        iothread: String,
        /// Number of queues.
        queues: u16,
    },
    /// A queue assigned twice.
    #[error("queue {queue} is assigned to iothreads {first} and {second}; assign it once")]
    Twice {
        /// The queue.
        queue: u16,
        /// Its first iothread.
        first: String,
        /// Its second one.
        second: String,
    },
    /// A queue left out.
    #[error("queue {queue} is assigned to no iothread; add it to a vqs= list")]
    LeftOut {
        /// The queue.
        queue: u16,
    },
}

/// The iothread of each of a disk's `queues` queues.
///
/// # Errors
/// See [`MappingError`].
pub fn assign(
    items: &[MappingItem],
    queues: u16,
    exists: impl Fn(&str) -> bool,
) -> Result<Vec<String>, MappingError> {
    let Some(first) = items.first() else {
        return Err(MappingError::Empty);
    };
    for (i, item) in items.iter().enumerate() {
        let iothread = || item.iothread.clone();
        if !exists(&item.iothread) {
            return Err(MappingError::Unknown {
                iothread: iothread(),
            });
        }
        if items[..i]
            .iter()
            .any(|other| other.iothread == item.iothread)
        {
            return Err(MappingError::Duplicate {
                iothread: iothread(),
            });
        }
        if item.vqs.is_some() != first.vqs.is_some() {
            let without = if item.vqs.is_none() { item } else { first };
            return Err(MappingError::Mixed {
                iothread: without.iothread.clone(),
            });
        }
    }
    if first.vqs.is_none() {
        let in_turn = items.iter().cycle().take(queues.into());
        return Ok(in_turn.map(|item| item.iothread.clone()).collect());
    }
    let mut assigned: Vec<Option<String>> = vec![None; queues.into()];
    for item in items {
        for &queue in item.vqs.iter().flatten() {
            let Some(place) = assigned.get_mut(usize::from(queue)) else {
                return Err(MappingError::Index {
                    queue,
                    iothread: item.iothread.clone(),
                    queues,
                });
            };
            if let Some(first) = place.take() {
                return Err(MappingError::Twice {
                    queue,
                    first,
                    second: item.iothread.clone(),
                });
            }
            *place = Some(item.iothread.clone());
        }
    }
    (0..)
        .zip(assigned)
        .map(|(queue, iothread)| iothread.ok_or(MappingError::LeftOut { queue }))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(iothread: &str, vqs: Option<&[u16]>) -> MappingItem {
        MappingItem {
            iothread: iothread.into(),
            vqs: vqs.map(<[u16]>::to_vec),
        }
    }

    fn try_assign(items: &[MappingItem], queues: u16) -> Result<Vec<String>, MappingError> {
        assign(items, queues, |name| name.starts_with("io"))
    }

    #[test]
    fn queues_are_shared_out_in_turn() {
        let items = [item("io0", None), item("io1", None), item("io2", None)];
        let names = try_assign(&items, 5).unwrap();
        assert_eq!(names, ["io0", "io1", "io2", "io0", "io1"]);
        assert_eq!(try_assign(&items, 1).unwrap(), ["io0"]);
    }

    #[test]
    fn lists_pin_queues() {
        let items = [item("io0", Some(&[2, 0])), item("io1", Some(&[1, 3]))];
        let names = try_assign(&items, 4).unwrap();
        assert_eq!(names, ["io0", "io1", "io0", "io1"]);
    }

    #[test]
    fn each_breach_has_its_own_message() {
        let refused = |items: &[MappingItem]| try_assign(items, 2).unwrap_err().to_string();
        assert!(refused(&[]).contains("names no iothread"));
        assert!(refused(&[item("x", None)]).contains("iothread x does not exist"));
        assert!(refused(&[item("io0", None), item("io0", None)]).contains("named twice"));
        for items in [
            [item("io0", Some(&[0])), item("io1", None)],
            [item("io1", None), item("io0", Some(&[0]))],
        ] {
            assert!(refused(&items).contains("iothread io1 has no vqs="));
        }
        assert!(refused(&[item("io0", Some(&[0, 2]))]).contains("only 2 queues, 0 to 1"));
        assert!(
            refused(&[item("io0", Some(&[0, 1])), item("io1", Some(&[1]))])
                .contains("queue 1 is assigned to iothreads io0 and io1")
        );
        assert!(refused(&[item("io0", Some(&[1]))]).contains("queue 0 is assigned to no iothread"));
        let both = MappingError::Both {
            iothread: "io0".into(),
        };
        assert!(both.to_string().contains("give one of them"));
    }
}
