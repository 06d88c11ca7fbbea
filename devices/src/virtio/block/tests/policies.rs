//! What happens when the host fails a request.

use std::sync::{Arc, Mutex};

use super::rig::*;
use crate::virtio::block::*;

/// A disk whose writes fail for lack of space: an image on a full tmpfs.
pub(super) struct Full {
    dir: tempfile::TempDir,
}

impl Full {
    /// None where mounting is not allowed.
    pub(super) fn new() -> Option<Full> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"])
            .arg(dir.path())
            .status();
        if !mounted.is_ok_and(|status| status.success()) {
            println!("skipped: a tmpfs cannot be mounted here");
            return None;
        }
        let image = std::fs::File::create(dir.path().join("disk.img")).unwrap();
        image.set_len(4 << 20).unwrap();
        std::fs::write(dir.path().join("filler"), vec![1; 192 << 10]).unwrap();
        Some(Full { dir })
    }

    pub(super) fn image(&self) -> std::path::PathBuf {
        self.dir.path().join("disk.img")
    }

    /// Leaves no room at all.
    pub(super) fn fill(&self) {
        use std::io::Write;
        let filler = std::fs::File::options()
            .append(true)
            .open(self.dir.path().join("filler"));
        let mut filler = filler.unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
    }

    pub(super) fn make_room(&self) {
        std::fs::remove_file(self.dir.path().join("filler")).unwrap();
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(self.dir.path())
            .status();
    }
}

type Events = Arc<Mutex<Vec<BlockEvent>>>;

fn rig(full: &Full, engine: EngineKind, werror: ErrorPolicy) -> (Rig, Events) {
    let options = Options::new(&full.image())
        .engine(engine)
        .with(|d| d.werror = werror);
    let rig = Rig::new(options);
    let events = Events::default();
    let sink = events.clone();
    rig.handle
        .set_event_callback(Arc::new(move |event| sink.lock().unwrap().push(event)));
    (rig, events)
}

const LARGE: usize = 128 << 10;

#[test]
fn report_gives_the_guest_an_error() {
    for engine in ENGINES {
        let Some(full) = Full::new() else { return };
        let (mut rig, events) = rig(&full, engine, ErrorPolicy::Report);
        assert_eq!(rig.guest().ask(OUT, 0, &vec![1; LARGE], 0).status, IOERR);
        let event = events.lock().unwrap().pop().unwrap();
        assert_eq!(event.id, "d0");
        assert_eq!(event.action, ErrorPolicy::Report);
        assert!(event.no_space && !event.is_read, "{engine}: {event:?}");
        assert_eq!(rig.handle.stats().failed_wr_operations, 1);
        rig.guest().read(0, 512);
    }
}

#[test]
fn ignore_gives_the_guest_success() {
    let Some(full) = Full::new() else { return };
    let (mut rig, events) = rig(&full, EngineKind::IoUring, ErrorPolicy::Ignore);
    assert_eq!(rig.guest().ask(OUT, 0, &vec![1; LARGE], 0).status, OK);
    assert_eq!(events.lock().unwrap()[0].action, ErrorPolicy::Ignore);
}

#[test]
fn stop_keeps_requests_in_order_and_resumes_them() {
    for engine in ENGINES {
        for policy in [ErrorPolicy::Stop, ErrorPolicy::Enospc] {
            let Some(full) = Full::new() else { return };
            let (mut rig, events) = rig(&full, engine, policy);
            let first = rig.guest().send(OUT, 0, &pattern(1, LARGE), 0);
            rig.guest().kick();
            eventually("stopped", || !events.lock().unwrap().is_empty());
            assert_eq!(events.lock().unwrap()[0].action, ErrorPolicy::Stop);
            rig.guest().collect();
            assert!(!rig.guest().is_answered(first));
            // Continuing without remedy stops again.
            rig.handle.resume();
            eventually("stopped again", || events.lock().unwrap().len() == 2);
            // With a drain in between, and after a move to another thread.
            rig.handle.drain();
            let other = iothread("other", 0);
            let placement = Placement::single(other.remote(), 1);
            rig.handle.change_placement(placement).unwrap();
            full.make_room();
            rig.handle.resume();
            assert_eq!(rig.guest().wait(first).status, OK, "{engine} {policy}");
            assert_eq!(rig.guest().read(0, LARGE as u32), pattern(1, LARGE));
            rig.reset();
        }
    }
}

#[test]
fn a_reset_drops_what_was_kept() {
    let Some(full) = Full::new() else { return };
    let (mut rig, events) = rig(&full, EngineKind::IoUring, ErrorPolicy::Stop);
    rig.guest().send(OUT, 0, &pattern(1, LARGE), 0);
    rig.guest().kick();
    eventually("stopped", || !events.lock().unwrap().is_empty());
    rig.reset();
    full.make_room();
    rig.handle.resume();
    rig.activate();
    rig.handle.resume();
    let seen = rig.guest().read(64, 32 << 10);
    assert!(seen.iter().all(|&b| b == 0) || seen == pattern(1, LARGE)[64 * 512..][..32 << 10]);
    rig.guest().write(0, &[5; 512]);
    assert_eq!(rig.handle.stats().wr_operations, 1);
}

#[test]
fn case_33_reads_past_the_end_of_a_truncated_image_give_zeroes() {
    for engine in ENGINES {
        for direct in [Some(false), None] {
            let file = image(1 << 20);
            let options = Options::new(file.path())
                .engine(engine)
                .with(|d| d.direct = direct);
            let mut rig = Rig::new(options);
            rig.guest().write(0, &pattern(1, 64 << 10));
            // The image loses its end behind our back, in the middle of a block.
            file.as_file().set_len(10_000).unwrap();
            let mut expected = pattern(1, 64 << 10);
            expected[10_000..].fill(0);
            assert_eq!(rig.guest().read(0, 64 << 10), expected, "{engine}");
            assert_eq!(rig.guest().read(1024, 4096), vec![0; 4096]);
            // Cut over several segments.
            let guest = rig.guest();
            guest.recycle();
            let header = guest.put(&Guest::header(IN, 16), 0);
            let mut buffers = vec![(header, 16, false)];
            for len in [512, 1024, 2048, 512] {
                buffers.push((guest.alloc(len.into(), 0), len, true));
            }
            buffers.push((guest.alloc(1, 0), 1, true));
            let head = guest.offer(&buffers);
            guest.kick();
            let reply = guest.wait(head);
            assert_eq!(
                (reply.status, &reply.data[..]),
                (OK, &expected[8192..12288])
            );
        }
    }
}
