//! A process' memory without its guest's, from `/proc/PID/smaps`.

/// Memory that is the VMM's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Own {
    /// In memory now, program and libraries included.
    pub resident_bytes: u64,
    /// The part that no other process maps.
    pub private_bytes: u64,
}

/// A line of addresses, and what follows it.
#[derive(Clone, Copy, Default)]
struct Mapping {
    start: u64,
    end: u64,
    own: Own,
}

/// Adds up the mappings that are not the guest's memory: one that is as large, or several without a gap
/// that are together, since advice for a part of it (no huge pages) makes that a mapping of its own.
pub(super) fn beyond_guest(smaps: &str, guest_bytes: u64) -> Own {
    let mappings = parse(smaps);
    let mut own = Own::default();
    let mut next = 0;
    while let Some(mapping) = mappings.get(next) {
        let count = guest_at(&mappings[next..], guest_bytes);
        if count == 0 {
            own.resident_bytes += mapping.own.resident_bytes;
            own.private_bytes += mapping.own.private_bytes;
        }
        next += count.max(1);
    }
    own
}

/// How many mappings at the beginning of these are the guest's memory.
fn guest_at(mappings: &[Mapping], guest_bytes: u64) -> usize {
    let first = mappings[0];
    if first.end - first.start >= guest_bytes {
        return 1;
    }
    let mut end = first.end;
    for (index, mapping) in mappings.iter().enumerate().skip(1) {
        if mapping.start != end || end - first.start > guest_bytes {
            return 0;
        }
        end = mapping.end;
        if end - first.start == guest_bytes {
            return index + 1;
        }
    }
    0
}

fn parse(smaps: &str) -> Vec<Mapping> {
    let mut mappings: Vec<Mapping> = Vec::new();
    for line in smaps.lines() {
        let word = line.split_whitespace().next().unwrap_or_default();
        let address = |text| u64::from_str_radix(text, 16).ok();
        if let Some((start, end)) = word.split_once('-')
            && let (Some(start), Some(end)) = (address(start), address(end))
        {
            mappings.push(Mapping {
                start,
                end: end.max(start),
                ..Mapping::default()
            });
            continue;
        }
        let (Some((key, value)), Some(mapping)) = (line.split_once(':'), mappings.last_mut())
        else {
            continue;
        };
        let bytes = || {
            let count = value.trim().trim_end_matches(" kB").parse::<u64>();
            count.unwrap_or(0) * 1024
        };
        match key {
            "Rss" => mapping.own.resident_bytes += bytes(),
            "Private_Clean" | "Private_Dirty" => mapping.own.private_bytes += bytes(),
            _ => {}
        }
    }
    mappings
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest of 256 MiB between a program and a stack.
    fn own(guest: &str) -> Own {
        let smaps = format!(
            "\
550000000000-550000010000 r--p 00000000 fd:00 1  /usr/bin/x:y
Size:                 64 kB
Rss:                  60 kB
Private_Clean:         8 kB
Private_Dirty:         4 kB
{guest}7f0010000000-7f0010008000 rw-p 00000000 00:00 0
Size:                 32 kB
Rss:                   4 kB
Private_Dirty:         4 kB
"
        );
        beyond_guest(&smaps, 256 << 20)
    }

    #[test]
    fn the_guests_mapping_does_not_count() {
        let one = "7f0000000000-7f0010000000 rw-p 00000000 00:00 0\nRss: 100000 kB\n";
        let two = "\
7f0000000000-7f0000200000 rw-p 00000000 00:00 0
Rss: 1024 kB
Private_Dirty: 1024 kB
7f0000200000-7f0010000000 rw-p 00000000 00:00 0
Rss: 100000 kB
Private_Dirty: 100000 kB
";
        for guest in [one, two] {
            let own = own(guest);
            assert_eq!(
                (own.resident_bytes, own.private_bytes),
                (64 << 10, 16 << 10)
            );
        }
        let with_a_gap = two.replace("7f0000200000-", "7f0000300000-");
        assert_eq!(own(&with_a_gap).resident_bytes, (64 + 101_024) << 10);
    }
}
