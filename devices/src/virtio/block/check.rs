//! What a request asks for, and whether it may: no side effects, numbers in and a decision out.

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN,
    VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};

use super::config::SECTOR_BYTES;
use super::request::{Kind, Status};
use crate::virtio::queue;

/// Most sectors of one request: its bytes then fit what one system call transfers, and 32 bits.
pub(super) const MAX_SECTORS: u32 = 4_194_303;
/// Bytes of `struct virtio_blk_discard_write_zeroes`.
pub(super) const RANGE_BYTES: usize = 16;

/// What the disk is like at the moment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Sectors of the disk.
    pub(super) capacity: u64,
    /// Sectors of a logical block.
    pub(super) block: u64,
    /// The disk was offered as read-only, whatever the driver accepted.
    pub(super) readonly: bool,
    /// Negotiated: flush, discard, write zeroes.
    pub(super) flush: bool,
    pub(super) discard: bool,
    pub(super) write_zeroes: bool,
}

/// A request's shape, as parsed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) request_type: u32,
    pub(super) sector: u64,
    /// Bytes behind the header.
    pub(super) readable: u64,
    /// Bytes before the status.
    pub(super) writable: u64,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    /// It is answered at once.
    Answer(Status),
    /// The answer is the disk's serial.
    Id,
    /// It runs: `len` bytes at `offset`.
    Run { kind: Kind, offset: u64, len: u32 },
    /// No working driver sends this.
    Broken(queue::Error),
}

impl Limits {
    /// Whether `sectors` from `sector` on are whole blocks of the disk.
    fn holds(&self, sector: u64, sectors: u64) -> bool {
        let end = sector.checked_add(sectors);
        sector.is_multiple_of(self.block)
            && sectors.is_multiple_of(self.block)
            && sectors <= u64::from(MAX_SECTORS)
            && end.is_some_and(|end| end <= self.capacity)
    }

    fn transfer(&self, kind: Kind, sector: u64, bytes: u64) -> Decision {
        if !bytes.is_multiple_of(SECTOR_BYTES) || !self.holds(sector, bytes / SECTOR_BYTES) {
            return Decision::Answer(Status::IoErr);
        }
        if bytes == 0 {
            return Decision::Answer(Status::Ok);
        }
        Decision::Run {
            kind,
            offset: sector * SECTOR_BYTES,
            len: bytes as u32,
        }
    }

    fn range(&self, zeroes: bool, payload: [u8; RANGE_BYTES]) -> Decision {
        let sector: [u8; 8] = std::array::from_fn(|i| payload[i]);
        let sector = u64::from_le_bytes(sector);
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| payload[at + i]));
        let (sectors, flags) = (word(8), word(12));
        let unmap = flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0;
        let known = if zeroes {
            VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP
        } else {
            0
        };
        if flags & !known != 0 {
            return Decision::Answer(Status::Unsupp);
        }
        if !self.holds(sector, sectors.into()) {
            return Decision::Answer(Status::IoErr);
        }
        if sectors == 0 {
            return Decision::Answer(Status::Ok);
        }
        Decision::Run {
            kind: if zeroes {
                Kind::WriteZeroes { unmap }
            } else {
                Kind::Discard
            },
            offset: sector * SECTOR_BYTES,
            len: sectors * SECTOR_BYTES as u32,
        }
    }
}

/// Decides. `payload` gives the first bytes behind the header; it is asked for them only when the
/// request has a payload to be looked at.
#[inline]
pub(super) fn check(
    limits: &Limits,
    shape: Shape,
    payload: impl FnOnce() -> [u8; RANGE_BYTES],
) -> Decision {
    match shape.request_type {
        VIRTIO_BLK_T_IN => limits.transfer(Kind::In, shape.sector, shape.writable),
        VIRTIO_BLK_T_OUT if limits.readonly => Decision::Answer(Status::IoErr),
        VIRTIO_BLK_T_OUT => limits.transfer(Kind::Out, shape.sector, shape.readable),
        VIRTIO_BLK_T_FLUSH if limits.flush => Decision::Run {
            kind: Kind::Flush,
            offset: 0,
            len: 0,
        },
        VIRTIO_BLK_T_GET_ID => Decision::Id,
        VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES => {
            let zeroes = shape.request_type == VIRTIO_BLK_T_WRITE_ZEROES;
            let offered = if zeroes {
                limits.write_zeroes
            } else {
                limits.discard
            };
            if !offered {
                return Decision::Answer(Status::Unsupp);
            }
            if limits.readonly {
                return Decision::Answer(Status::IoErr);
            }
            const ONE: u64 = RANGE_BYTES as u64;
            match shape.readable {
                0 => Decision::Answer(Status::Unsupp),
                1..ONE => Decision::Broken(queue::Error::ShortPayload),
                ONE => limits.range(zeroes, payload()),
                _ => Decision::Answer(Status::Unsupp),
            }
        }
        _ => Decision::Answer(Status::Unsupp),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMITS: Limits = Limits {
        capacity: 1 << 40,
        block: 1,
        readonly: false,
        flush: true,
        discard: true,
        write_zeroes: true,
    };

    fn ask(limits: &Limits, request_type: u32, sector: u64, bytes: u64) -> Decision {
        let shape = Shape {
            request_type,
            sector,
            readable: bytes,
            writable: bytes,
        };
        check(limits, shape, || [0; RANGE_BYTES])
    }

    fn range(
        limits: &Limits,
        request_type: u32,
        sector: u64,
        sectors: u32,
        flags: u32,
    ) -> Decision {
        let shape = Shape {
            request_type,
            sector: 0,
            readable: 16,
            writable: 0,
        };
        let mut payload = [0; RANGE_BYTES];
        payload[..8].copy_from_slice(&sector.to_le_bytes());
        payload[8..12].copy_from_slice(&sectors.to_le_bytes());
        payload[12..].copy_from_slice(&flags.to_le_bytes());
        check(limits, shape, || payload)
    }

    const IO_ERROR: Decision = Decision::Answer(Status::IoErr);
    const UNSUPPORTED: Decision = Decision::Answer(Status::Unsupp);
    const OK: Decision = Decision::Answer(Status::Ok);

    #[test]
    fn transfers_stay_within_the_disk() {
        let limits = Limits {
            capacity: 100,
            ..LIMITS
        };
        for (request_type, kind) in [(VIRTIO_BLK_T_IN, Kind::In), (VIRTIO_BLK_T_OUT, Kind::Out)] {
            let run = |offset, len| Decision::Run { kind, offset, len };
            assert_eq!(ask(&limits, request_type, 0, 512), run(0, 512));
            assert_eq!(ask(&limits, request_type, 99, 512), run(99 * 512, 512));
            assert_eq!(ask(&limits, request_type, 0, 51200), run(0, 51200));
            for (sector, bytes) in [
                (99, 1024),
                (100, 512),
                (101, 0),
                (0, 51712),
                (0, 511),
                (0, 513),
                (u64::MAX, 512),
                (u64::MAX / 512 + 1, 512),
                (1 << 55, 512),
                (0, 1 << 32),
                (0, u64::MAX - 511),
            ] {
                assert_eq!(ask(&limits, request_type, sector, bytes), IO_ERROR);
            }
            assert_eq!(ask(&limits, request_type, 100, 0), OK);
        }
    }

    #[test]
    fn a_request_has_at_most_4194303_sectors() {
        let most = u64::from(MAX_SECTORS) * 512;
        assert!(matches!(
            ask(&LIMITS, VIRTIO_BLK_T_IN, 0, most),
            Decision::Run { .. }
        ));
        assert_eq!(ask(&LIMITS, VIRTIO_BLK_T_IN, 0, most + 512), IO_ERROR);
        for request_type in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            assert!(matches!(
                range(&LIMITS, request_type, 0, MAX_SECTORS, 0),
                Decision::Run { .. }
            ));
            assert_eq!(
                range(&LIMITS, request_type, 0, MAX_SECTORS + 1, 0),
                IO_ERROR
            );
            assert_eq!(range(&LIMITS, request_type, 0, u32::MAX, 0), IO_ERROR);
        }
    }

    #[test]
    fn larger_logical_blocks_bind() {
        let limits = Limits { block: 8, ..LIMITS };
        assert!(matches!(
            ask(&limits, VIRTIO_BLK_T_IN, 8, 4096),
            Decision::Run { .. }
        ));
        assert_eq!(ask(&limits, VIRTIO_BLK_T_IN, 1, 4096), IO_ERROR);
        assert_eq!(ask(&limits, VIRTIO_BLK_T_IN, 8, 512), IO_ERROR);
        assert_eq!(range(&limits, VIRTIO_BLK_T_DISCARD, 4, 8, 0), IO_ERROR);
    }

    #[test]
    fn case_1_and_2_writing_to_a_read_only_disk_is_an_error_and_no_more() {
        let limits = Limits {
            readonly: true,
            ..LIMITS
        };
        assert_eq!(ask(&limits, VIRTIO_BLK_T_OUT, 0, 512), IO_ERROR);
        assert_eq!(range(&limits, VIRTIO_BLK_T_DISCARD, 0, 8, 0), IO_ERROR);
        assert_eq!(range(&limits, VIRTIO_BLK_T_WRITE_ZEROES, 0, 8, 0), IO_ERROR);
        assert!(matches!(
            ask(&limits, VIRTIO_BLK_T_IN, 0, 512),
            Decision::Run { .. }
        ));
        assert!(matches!(
            ask(&limits, VIRTIO_BLK_T_FLUSH, 0, 0),
            Decision::Run { .. }
        ));
        assert_eq!(ask(&limits, VIRTIO_BLK_T_GET_ID, 0, 20), Decision::Id);
    }

    #[test]
    fn only_negotiated_features_are_acted_on() {
        let limits = Limits {
            flush: false,
            discard: false,
            write_zeroes: false,
            ..LIMITS
        };
        assert_eq!(ask(&limits, VIRTIO_BLK_T_FLUSH, 0, 0), UNSUPPORTED);
        assert_eq!(range(&limits, VIRTIO_BLK_T_DISCARD, 0, 8, 0), UNSUPPORTED);
        assert_eq!(
            range(&limits, VIRTIO_BLK_T_WRITE_ZEROES, 0, 8, 0),
            UNSUPPORTED
        );
    }

    #[test]
    fn discard_and_write_zeroes_payloads() {
        for request_type in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            assert_eq!(ask(&LIMITS, request_type, 0, 0), UNSUPPORTED);
            for bytes in [1, 8, 15] {
                assert_eq!(
                    ask(&LIMITS, request_type, 0, bytes),
                    Decision::Broken(queue::Error::ShortPayload)
                );
            }
            for bytes in [17, 32, 1 << 33] {
                assert_eq!(ask(&LIMITS, request_type, 0, bytes), UNSUPPORTED);
            }
            assert_eq!(range(&LIMITS, request_type, 7, 0, 0), OK);
            assert_eq!(range(&LIMITS, request_type, 0, 8, 2), UNSUPPORTED);
            assert_eq!(range(&LIMITS, request_type, 1 << 40, 8, 0), IO_ERROR);
            assert_eq!(range(&LIMITS, request_type, u64::MAX, 8, 0), IO_ERROR);
        }
        assert_eq!(range(&LIMITS, VIRTIO_BLK_T_DISCARD, 0, 8, 1), UNSUPPORTED);
        assert_eq!(
            range(&LIMITS, VIRTIO_BLK_T_WRITE_ZEROES, 3, 8, 1),
            Decision::Run {
                kind: Kind::WriteZeroes { unmap: true },
                offset: 1536,
                len: 4096
            }
        );
    }

    proptest! {
        /// Whatever is asked: what runs is within the disk.
        #[test]
        fn nothing_outside_the_disk_runs(
            request_type in 0u32..20,
            sector in any::<u64>(),
            bytes in any::<u64>(),
            sectors in any::<u32>(),
            flags in any::<u32>(),
            capacity in any::<u64>(),
            shift in 0u32..4,
        ) {
            let limits = Limits { capacity: capacity >> 9, block: 1 << shift, ..LIMITS };
            for decision in [
                ask(&limits, request_type, sector, bytes),
                ask(&limits, request_type, sector % 1000, bytes % 1_000_000),
                range(&limits, request_type, sector, sectors, flags),
                range(&limits, request_type, sector % 1000, sectors % 1000, flags % 4),
            ] {
                if let Decision::Run { offset, len, .. } = decision {
                    prop_assert!(offset + u64::from(len) <= limits.capacity * SECTOR_BYTES);
                }
            }
        }
    }
}
