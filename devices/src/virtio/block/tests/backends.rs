//! Error policies on backends that really fail: a block device whose end is gone or full, and a
//! device-mapper error target.

use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use super::policies::Full;
use super::rig::*;
use crate::virtio::block::*;

type Events = Arc<Mutex<Vec<BlockEvent>>>;

fn rig(
    path: &std::path::Path,
    engine: EngineKind,
    direct: bool,
    policy: ErrorPolicy,
) -> (Rig, Events) {
    let options = Options::new(path).engine(engine).with(|d| {
        d.direct = Some(direct);
        d.rerror = policy;
        d.werror = policy;
    });
    let rig = Rig::new(options);
    let events = Events::default();
    let sink = events.clone();
    rig.handle
        .set_event_callback(Arc::new(move |event| sink.lock().unwrap().push(event)));
    (rig, events)
}

/// The sectors from `bad` on cannot be read, those before can.
fn reads_fail_by_policy(path: &std::path::Path, bad: u64, engine: EngineKind, direct: bool) {
    for (policy, status) in [(ErrorPolicy::Report, IOERR), (ErrorPolicy::Ignore, OK)] {
        let (mut rig, events) = rig(path, engine, direct, policy);
        let reply = rig.guest().ask(IN, bad + 8, &[], 4096);
        assert_eq!(reply.status, status, "{engine} direct={direct} {policy}");
        if status == OK {
            // Not what was in the guest's memory before.
            assert_eq!(reply.data, vec![0; 4096]);
        }
        let event = events.lock().unwrap().remove(0);
        assert_eq!((event.is_read, event.action), (true, policy));
        assert!(!event.no_space && event.reason.contains("Input/output error"));
        // What can be read is read, and the disk lives on.
        rig.guest().read(0, 4096);
        assert_eq!(rig.guest().ask(IN, bad, &[], 512).status, status);
    }
}

#[test]
fn a_device_whose_end_is_gone_fails_reads_by_policy() {
    for engine in ENGINES {
        for direct in [false, true] {
            let file = image(4 << 20);
            let Some(device) = LoopDevice::new(&file, 512) else {
                return;
            };
            file.as_file().set_len(1 << 20).unwrap();
            reads_fail_by_policy(&device.path, 2048, engine, direct);
            // Kept until the end is there again.
            let (mut rig, events) = rig(&device.path, engine, direct, ErrorPolicy::Stop);
            let heads: Vec<u16> = (0..3)
                .map(|i| rig.guest().send(IN, 4096 + i * 8, &[], 4096))
                .collect();
            rig.guest().kick();
            eventually("three are kept", || events.lock().unwrap().len() == 3);
            rig.handle.drain();
            rig.guest().collect();
            assert!(!heads.iter().any(|&head| rig.guest().is_answered(head)));
            file.as_file().set_len(4 << 20).unwrap();
            rig.handle.resume();
            for head in heads {
                assert_eq!(rig.guest().wait(head).data, vec![0; 4096]);
            }
        }
    }
}

#[test]
fn a_device_on_a_full_filesystem_fails_writes_by_policy() {
    const LARGE: usize = 128 << 10;
    for engine in ENGINES {
        for policy in [
            ErrorPolicy::Report,
            ErrorPolicy::Ignore,
            ErrorPolicy::Stop,
            ErrorPolicy::Enospc,
        ] {
            let Some(full) = Full::new() else { return };
            let Some(device) = LoopDevice::at(&full.image(), 512) else {
                return;
            };
            // A loop device takes a write that fits in part for done.
            full.fill();
            // Buffered, the failure would come with the flush.
            let options = Options::new(&device.path).engine(engine).with(|d| {
                d.direct = Some(true);
                d.werror = policy;
            });
            let mut rig = Rig::new(options);
            let events = Events::default();
            let sink = events.clone();
            rig.handle
                .set_event_callback(Arc::new(move |event| sink.lock().unwrap().push(event)));
            let head = rig.guest().send(OUT, 0, &pattern(1, LARGE), 0);
            rig.guest().kick();
            let stops = match policy {
                // A loop device passes ENOSPC on; then it is a matter of space.
                ErrorPolicy::Enospc => {
                    eventually("told", || !events.lock().unwrap().is_empty());
                    events.lock().unwrap()[0].no_space
                }
                policy => policy == ErrorPolicy::Stop,
            };
            if stops {
                eventually("kept", || !events.lock().unwrap().is_empty());
                full.make_room();
                rig.handle.resume();
            }
            let status = rig.guest().wait(head).status;
            let fine = stops || policy == ErrorPolicy::Ignore;
            assert_eq!(status == OK, fine, "{engine} {policy}");
            assert!(!events.lock().unwrap()[0].is_read);
            if stops {
                assert_eq!(rig.guest().read(0, LARGE as u32), pattern(1, LARGE));
            }
        }
    }
}

/// A device-mapper device: the first half of `lower`, then an error target.
struct Mapped {
    name: String,
    _lower: LoopDevice,
}

impl Mapped {
    fn new(lower: LoopDevice, half_sectors: u64) -> Option<Mapped> {
        let name = format!("pollux-test-{}", std::process::id());
        let table = format!(
            "0 {half_sectors} linear {} 0\n{half_sectors} {half_sectors} error\n",
            lower.path.display()
        );
        let made = Command::new("dmsetup")
            .args(["create", &name, "--table", &table])
            .stderr(Stdio::null())
            .status();
        if !made.is_ok_and(|status| status.success()) {
            println!(
                "skipped: a_device_mapper_error_target_fails_by_policy needs dmsetup and a kernel with device-mapper"
            );
            return None;
        }
        Some(Mapped {
            name,
            _lower: lower,
        })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = Command::new("dmsetup")
            .args(["remove", "--retry", &self.name])
            .status();
    }
}

#[test]
fn a_device_mapper_error_target_fails_by_policy() {
    let file = image(4 << 20);
    let Some(lower) = LoopDevice::new(&file, 512) else {
        return;
    };
    let Some(mapped) = Mapped::new(lower, 4096) else {
        return;
    };
    let path = std::path::PathBuf::from(format!("/dev/mapper/{}", mapped.name));
    for engine in ENGINES {
        for direct in [false, true] {
            reads_fail_by_policy(&path, 4096, engine, direct);
        }
        // Written directly: buffered, the failure would come with the flush.
        let (mut rig, events) = rig(&path, engine, true, ErrorPolicy::Report);
        assert_eq!(rig.guest().ask(OUT, 6000, &[1; 512], 0).status, IOERR);
        assert!(!events.lock().unwrap()[0].is_read);
        rig.guest().write(0, &[1; 512]);
    }
}
