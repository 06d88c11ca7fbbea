//! DISCARD and WRITE_ZEROES.

use std::os::unix::fs::MetadataExt;

use super::rig::*;
use crate::virtio::block::*;

fn allocated(file: &tempfile::NamedTempFile) -> u64 {
    file.as_file().sync_all().unwrap();
    file.as_file().metadata().unwrap().blocks() * 512
}

#[test]
fn case_3_discard_is_offered_with_real_limits_and_frees_space() {
    for engine in ENGINES {
        let file = image(4 << 20);
        let mut rig = Rig::new(Options::new(file.path()).engine(engine));
        let guest = rig.guest();
        let data = pattern(1, 1 << 20);
        guest.write(0, &data);
        assert_eq!(guest.ask(FLUSH, 0, &[], 0).status, OK);
        let full = allocated(&file);
        assert!(full >= 1 << 20);
        let range = Guest::range(256, 1024, 0);
        assert_eq!(guest.ask(DISCARD, 0, &range, 0).status, OK);
        assert!(allocated(&file) <= full - (512 << 10), "{engine}: a hole");
        assert_eq!(guest.read(0, 128 << 10), data[..128 << 10]);
        assert_eq!(guest.read(1280, 128 << 10), data[640 << 10..768 << 10]);
        assert_eq!(file.as_file().metadata().unwrap().len(), 4 << 20);
        let stats = rig.handle.stats();
        assert_eq!((stats.unmap_operations, stats.unmap_bytes), (1, 512 << 10));
    }
}

#[test]
fn case_4_write_zeroes_zeroes_the_medium() {
    for engine in ENGINES {
        for unmap in [0, 1] {
            let file = image(4 << 20);
            let mut rig = Rig::new(Options::new(file.path()).engine(engine));
            let guest = rig.guest();
            let data = pattern(2, 256 << 10);
            guest.write(0, &data);
            assert_eq!(guest.ask(FLUSH, 0, &[], 0).status, OK);
            let full = allocated(&file);
            // Not aligned to the filesystem's blocks.
            let range = Guest::range(3, 300, unmap);
            assert_eq!(guest.ask(WRITE_ZEROES, 0, &range, 0).status, OK);
            let mut expected = data;
            expected[3 * 512..303 * 512].fill(0);
            assert_eq!(guest.read(0, 256 << 10), expected, "{engine} unmap={unmap}");
            assert_eq!(file_bytes(&file, 0, 256 << 10), expected);
            if unmap == 1 {
                assert!(allocated(&file) < full, "{engine}: deallocated");
            }
        }
    }
}

#[test]
fn zeroes_are_written_where_the_filesystem_cannot_zero_ranges() {
    // tmpfs knows PUNCH_HOLE but not ZERO_RANGE.
    let Ok(file) = tempfile::NamedTempFile::new_in("/dev/shm") else {
        println!("skipped: no /dev/shm");
        return;
    };
    file.as_file().set_len(64 << 20).unwrap();
    for engine in ENGINES {
        let mut rig = Rig::new(Options::new(file.path()).engine(engine));
        let guest = rig.guest();
        guest.write(0, &pattern(1, 64 << 10));
        guest.write(65536, &pattern(2, 64 << 10));
        // More than one write's worth of zeroes.
        let range = Guest::range(1, 65536 + 7, 0);
        assert_eq!(guest.ask(WRITE_ZEROES, 0, &range, 0).status, OK);
        assert_eq!(guest.read(0, 512), pattern(1, 512));
        assert_eq!(guest.read(1, 64 << 10), vec![0; 64 << 10]);
        assert_eq!(guest.read(65536, 8 * 512), vec![0; 8 * 512], "{engine}");
        assert_eq!(
            guest.read(65544, 512),
            pattern(2, 64 << 10)[8 * 512..9 * 512],
            "{engine}"
        );
    }
}

#[test]
fn malformed_ranges_are_answered_as_the_specification_says() {
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()));
    let guest = rig.guest();
    for request in [DISCARD, WRITE_ZEROES] {
        let mut ask = |payload: &[u8]| guest.ask(request, 0, payload, 0).status;
        assert_eq!(ask(&[]), UNSUPP);
        assert_eq!(ask(&[0; 32]), UNSUPP);
        assert_eq!(ask(&Guest::range(0, 0, 0)), OK);
        assert_eq!(ask(&Guest::range(0, 8, 4)), UNSUPP);
        assert_eq!(ask(&Guest::range(2048, 8, 0)), IOERR);
        assert_eq!(ask(&Guest::range(2047, 2, 0)), IOERR);
        assert_eq!(ask(&Guest::range(u64::MAX, 2, 0)), IOERR);
        assert_eq!(ask(&Guest::range(0, u32::MAX, 0)), IOERR);
    }
    assert_eq!(
        guest.ask(DISCARD, 0, &Guest::range(0, 8, 1), 0).status,
        UNSUPP
    );
}

#[test]
fn discard_off_is_not_offered() {
    use crate::virtio::device::VirtioDevice;
    let file = image(1 << 20);
    let mut rig = Rig::new(Options::new(file.path()).with(|d| d.discard = false));
    assert_eq!(rig.block.features() & features::DISCARD, 0);
    let range = Guest::range(0, 8, 0);
    assert_eq!(rig.guest().ask(DISCARD, 0, &range, 0).status, UNSUPP);
    let mut limits = [0xff; 12];
    rig.block.read_config(36, &mut limits);
    assert_eq!(limits, [0; 12]);
    // Zeroing goes on, but frees nothing.
    rig.guest().write(0, &pattern(1, 64 << 10));
    let range = Guest::range(0, 128, 1);
    assert_eq!(rig.guest().ask(WRITE_ZEROES, 0, &range, 0).status, OK);
    assert_eq!(rig.guest().read(0, 64 << 10), vec![0; 64 << 10]);
}

#[test]
fn case_5_block_devices_discard_and_zero() {
    for engine in ENGINES {
        let file = image(4 << 20);
        let Some(device) = LoopDevice::new(&file, 512) else {
            return;
        };
        let mut rig = Rig::new(Options::new(&device.path).engine(engine));
        use crate::virtio::device::VirtioDevice;
        assert_ne!(rig.block.features() & features::DISCARD, 0, "it is offered");
        let guest = rig.guest();
        let data = pattern(3, 1 << 20);
        guest.write(0, &data);
        assert_eq!(guest.ask(FLUSH, 0, &[], 0).status, OK);
        let full = allocated(&file);
        let range = Guest::range(0, 1024, 0);
        assert_eq!(guest.ask(DISCARD, 0, &range, 0).status, OK, "{engine}");
        assert!(allocated(&file) <= full - (512 << 10), "{engine}: freed");
        for unmap in [0, 1] {
            let range = Guest::range(1030 + 10 * unmap, 5, unmap as u32);
            assert_eq!(guest.ask(WRITE_ZEROES, 0, &range, 0).status, OK);
        }
        let mut expected = data[512 << 10..].to_vec();
        expected[6 * 512..11 * 512].fill(0);
        expected[16 * 512..21 * 512].fill(0);
        assert_eq!(guest.read(1024, 512 << 10), expected, "{engine}");
    }
}
