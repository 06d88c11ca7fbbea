//! Storage that fails or is peculiar: a block device with sectors of 4 KiB, a full file system, a
//! device with bad sectors. The error policies as Linux and the monitor see them.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::storage::output;
use super::{Environment, Outcome};
use crate::bed::is_root;
use crate::machine::{Disk, Machine, Running, Vmm};
use crate::qmp::Qmp;

const MIB: u64 = 1 << 20;
/// First bad sector, and the last.
const BAD: (u64, u64) = (2048, 2055);

const SCRIPT: &str = r#"
loop=$(disk loop) bad=$(disk bad) full=$(disk full) small=$(disk small) careless=$(disk careless)
next() { read -r line; [ "$line" = "$1" ] || fail "expected $1, got $line"; }
error() { tail -n +1 /tmp/error | sed -n 's/.*: \([^:]*\)$/\1/p' | head -n 1; }

report limits $(cat /sys/block/${loop#/dev/}/queue/logical_block_size \
    /sys/block/${loop#/dev/}/queue/physical_block_size)
seq -f "%0511.f" 3 3 >/tmp/sector
dd if=/tmp/sector of=$loop bs=512 seek=3 oflag=direct status=none || fail "one sector"
dd if=$loop bs=512 skip=3 count=1 iflag=direct status=none | cmp - /tmp/sector || fail "read again"
blkdiscard -o 1M -l 2M $loop || fail blkdiscard
blkdiscard -z -o 4M -l 1M $loop || fail "blkdiscard -z"
fallocate -p -o 6M -l 1M $loop || fail "fallocate -p"
dd if=$loop bs=1M skip=1 count=2 iflag=direct status=none | tr -d '\000' | wc -c >/tmp/count
[ "$(cat /tmp/count)" = 0 ] || fail "what was discarded is not zero"
report loop.done

# Reads of bad sectors are reported.
dd if=$bad bs=4k skip=256 count=1 iflag=direct of=/tmp/read 2>/tmp/error && fail "a bad sector was read"
report read.error "$(error)"
dd if=$bad bs=4k count=255 iflag=direct of=/dev/null status=none || fail "good sectors"
seq -f "%0511.f" 1 16384 >/tmp/content

next bad
dd if=/tmp/content of=$bad bs=64k count=32 oflag=direct status=none || fail "writing after cont"
report bad.written

next full
dd if=/tmp/content of=$full bs=64k count=96 oflag=direct conv=fsync status=none || fail "writing after cont"
report full.written

dd if=/tmp/content of=$small bs=64k count=96 oflag=direct status=none 2>/tmp/error && fail "it was not full"
report small.error "$(error)"
dd if=/tmp/content of=$small bs=64k count=1 oflag=direct conv=notrunc status=none || fail "it is still there"
dd if=/tmp/content of=$careless bs=64k count=96 oflag=direct status=none || fail "errors are ignored"
"#;

pub fn backends(environment: &Environment) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("needs Pollux's monitor and options".to_owned());
    }
    if !is_root() {
        return Outcome::Skipped("needs root for loop devices, tmpfs and null_blk".to_owned());
    }
    let backing = environment.path("loop.backing");
    fs::write(&backing, vec![b'Z'; 8 << 20])
        .and_then(|()| File::open(&backing)?.sync_all())
        .expect("there is room");
    let (device, bad) = match (LoopDevice::new(&backing, 4096), BadDevice::new()) {
        (Ok(device), Ok(bad)) => (device, bad),
        (Err(why), _) | (_, Err(why)) => return Outcome::Skipped(why),
    };
    let (full, small) = (
        Tmpfs::new(environment.path("full"), 4 * MIB),
        Tmpfs::new(environment.path("small"), 2 * MIB),
    );
    let mut machine = Machine::new(SCRIPT);
    machine.monitor = true;
    machine.disks = vec![
        Disk::of(device.0.clone(), "loop"),
        Disk::of(bad.path.clone(), "bad").with_options("werror=stop,rerror=report"),
        Disk::create(full.0.join("image"), "full", 8 * MIB).with_options("werror=enospc"),
        Disk::create(small.0.join("image"), "small", 8 * MIB).with_options("werror=report"),
        Disk::create(small.0.join("other"), "careless", 8 * MIB).with_options("werror=ignore"),
    ];
    let mut running = environment.start(&machine);
    running.wait_for("loop.done");
    running.wait_for("read.error");
    let mut monitor = running.monitor();

    running.send("bad");
    stopped(&mut monitor, "bad", "write", false);
    bad.heal();
    go_on(&mut running, &mut monitor, "bad", "bad.written");

    running.send("full");
    stopped(&mut monitor, "full", "write", true);
    full.grow(16 * MIB);
    go_on(&mut running, &mut monitor, "full", "full.written");

    let ended = running.finish();
    ended.assert_success();
    assert_eq!(
        ended.value("limits"),
        "512 4096",
        "the loop device's blocks"
    );
    assert_eq!(ended.value("read.error"), "Input/output error");
    let error = ended.value("small.error");
    assert!(
        ["Input/output error", "No space left on device"].contains(&error),
        "a full medium: {error}"
    );
    drop(device);
    check_loop(environment, &backing);

    let written: Vec<u8> = (1..=12288)
        .flat_map(|n| format!("{n:0511}\n").into_bytes())
        .collect();
    let image = fs::read(&machine.disks[2].path).expect("it can be read");
    assert!(
        image[..written.len()] == *written,
        "what was kept and written after cont"
    );
    let device = fs::read(&bad.path).expect("it can be read");
    assert!(
        device[..2 << 20] == written[..2 << 20],
        "what was kept and written after cont"
    );
    Outcome::Held
}

/// The disk's request has stopped the VM, and the monitor says so in every way.
pub(super) fn stopped(monitor: &mut Qmp, disk: &str, operation: &str, no_space: bool) {
    // Errors before it that stopped nothing are passed over.
    let event = std::iter::repeat_with(|| monitor.wait_for_event("BLOCK_IO_ERROR"))
        .find(|event| !matches!(event["data"]["action"].as_str(), Some("report" | "ignore")))
        .expect("it repeats");
    let data = &event["data"];
    assert_eq!(data["device"], disk, "{event}");
    assert_eq!(data["operation"], operation, "{event}");
    assert_eq!(data["action"], "stop", "{event}");
    assert_eq!(data["nospace"], no_space, "{event}");
    monitor.wait_for_event("STOP");
    let status = monitor.execute("query-status", json!({}));
    assert_eq!(status, json!({"running": false, "status": "io-error"}));
    let status = monitor.disk(disk)["io-status"].take();
    assert_eq!(status, if no_space { "nospace" } else { "failed" });
}

/// The cause is gone: the kept request is done, and the guest never knew.
pub(super) fn go_on(running: &mut Running, monitor: &mut Qmp, disk: &str, done: &str) {
    monitor.execute("cont", json!({}));
    monitor.wait_for_event("RESUME");
    running.wait_for(done);
    assert_eq!(monitor.disk(disk)["io-status"], "ok");
    assert_eq!(monitor.disk_counter(disk, "failed_wr_operations"), 0);
}

/// One sector was changed within a block of the device, and holes are where they should be.
fn check_loop(environment: &Environment, backing: &Path) {
    File::open(backing)
        .and_then(|file| file.sync_all())
        .expect("it can be opened");
    let image = fs::read(backing).expect("it can be read");
    let mut expected = vec![b'Z'; 8 << 20];
    expected[3 * 512..4 * 512].copy_from_slice(format!("{:0511}\n", 3).as_bytes());
    for mib in [1, 2, 4, 6] {
        expected[mib << 20..(mib + 1) << 20].fill(0);
    }
    for (number, (found, expected)) in image.chunks(512).zip(expected.chunks(512)).enumerate() {
        assert!(
            found == expected,
            "sector {number} of the loop device's file"
        );
    }
    let allocated = backing.metadata().expect("it exists").blocks() * 512;
    environment.note(&format!(
        "the loop device's file: {} KiB allocated",
        allocated >> 10
    ));
    assert!(
        allocated.abs_diff(5 * MIB) <= MIB / 4,
        "{allocated} bytes allocated"
    );
}

/// A loop device; gone when dropped.
pub(super) struct LoopDevice(pub(super) PathBuf);

impl LoopDevice {
    pub(super) fn new(file: &Path, sector_bytes: u32) -> Result<LoopDevice, String> {
        if !Path::new("/dev/loop-control").exists() {
            return Err("needs loop devices: no /dev/loop-control".to_owned());
        }
        let device = output(
            Command::new("losetup")
                .args(["--sector-size", &sector_bytes.to_string(), "--show", "-f"])
                .arg(file),
        );
        Ok(LoopDevice(device.trim_end().into()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        clean_up(Command::new("losetup").arg("-d").arg(&self.0));
    }
}

/// A null_blk of 16 MiB in memory with [`BAD`] sectors; gone when dropped.
struct BadDevice {
    directory: PathBuf,
    path: PathBuf,
}

impl BadDevice {
    fn new() -> Result<BadDevice, String> {
        let all = Path::new("/sys/kernel/config/nullb");
        if !all.exists() {
            let mount = ["-t", "configfs", "configfs", "/sys/kernel/config"];
            let _ = Command::new("mount").args(mount).output();
        }
        if !all.exists() {
            return Err("needs the module null_blk: no /sys/kernel/config/nullb".to_owned());
        }
        let name = format!("pollux{}", std::process::id());
        let directory = all.join(&name);
        let made = fs::create_dir(&directory).and_then(|()| {
            for (name, value) in [("size", "16"), ("blocksize", "512"), ("memory_backed", "1")] {
                fs::write(directory.join(name), value)?;
            }
            fs::write(directory.join("badblocks"), format!("+{}-{}", BAD.0, BAD.1))?;
            fs::write(directory.join("power"), "1")?;
            fs::read_to_string(directory.join("index"))
        });
        let index =
            made.map_err(|error| format!("needs null_blk: {}: {error}", directory.display()))?;
        // Named by the directory, in older kernels by its number.
        let names = [name, format!("nullb{}", index.trim_end())];
        let mut paths = names.iter().map(|name| Path::new("/dev").join(name));
        match paths.find(|path| path.exists()) {
            Some(path) => Ok(BadDevice { directory, path }),
            None => Err(format!("needs null_blk: none of {names:?} in /dev")),
        }
    }

    /// No sector is bad any longer.
    fn heal(&self) {
        let range = format!("-{}-{}", BAD.0, BAD.1);
        fs::write(self.directory.join("badblocks"), range).expect("null_blk takes it");
    }
}

impl Drop for BadDevice {
    fn drop(&mut self) {
        let _ = fs::write(self.directory.join("power"), "0");
        let _ = fs::remove_dir(&self.directory);
    }
}

/// A file system in memory; gone when dropped.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn new(path: PathBuf, size_bytes: u64) -> Tmpfs {
        fs::create_dir(&path).expect("a directory can be made");
        let size = format!("size={size_bytes}");
        output(
            Command::new("mount")
                .args(["-t", "tmpfs", "-o", &size, "tmpfs"])
                .arg(&path),
        );
        Tmpfs(path)
    }

    fn grow(&self, size_bytes: u64) {
        let size = format!("remount,size={size_bytes}");
        output(Command::new("mount").args(["-o", &size]).arg(&self.0));
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        clean_up(Command::new("umount").arg(&self.0));
    }
}

/// Without a panic: there may be one under way.
pub(super) fn clean_up(command: &mut Command) {
    match command.status() {
        Ok(status) if status.success() => {}
        failed => eprintln!("{command:?}: {failed:?}"),
    }
}
