//! A process' memory without its guest's, from `/proc/PID/smaps`.

/// Memory that is the VMM's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Own {
    /// In memory now, program and libraries included.
    pub resident_bytes: u64,
    /// The part that no other process maps.
    pub private_bytes: u64,
}

/// Adds up the mappings that are smaller than the guest's memory.
pub(super) fn beyond_guest(smaps: &str, guest_bytes: u64) -> Own {
    let mut own = Own::default();
    let mut is_guest = false;
    for line in smaps.lines() {
        let Some((key, value)) = line.split_once(':') else {
            continue;
        };
        let bytes = || {
            let count = value.trim().trim_end_matches(" kB").parse::<u64>();
            count.unwrap_or(0) * 1024
        };
        match key {
            // The first field of every mapping.
            "Size" => is_guest = bytes() >= guest_bytes,
            "Rss" if !is_guest => own.resident_bytes += bytes(),
            "Private_Clean" | "Private_Dirty" if !is_guest => own.private_bytes += bytes(),
            _ => {}
        }
    }
    own
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guests_mapping_does_not_count() {
        let smaps = "\
55d0-55d1 r--p 00000000 fd:00 1  /usr/bin/x:y
Size:                 64 kB
Rss:                  60 kB
Private_Clean:         8 kB
Private_Dirty:         4 kB
7f00-7f10 rw-p 00000000 00:00 0
Size:             262144 kB
Rss:              100000 kB
Private_Dirty:    100000 kB
7f10-7f11 rw-p 00000000 00:00 0
Size:                 32 kB
Rss:                   4 kB
Private_Dirty:         4 kB
";
        let own = beyond_guest(smaps, 256 << 20);
        assert_eq!(own.resident_bytes, 64 << 10);
        assert_eq!(own.private_bytes, 16 << 10);
    }
}
