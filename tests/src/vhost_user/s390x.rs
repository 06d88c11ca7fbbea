//! A big-endian guest: Debian's s390x kernel, emulated, with two disks of `pollux vhost-user-blk`. What
//! it sees of the configuration, the rings and the requests is little-endian (VIRTIO 1.2, section 1.4).

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use libtest_mimic::Failed;
use serde_json::json;

use super::{BackEnd, allocated};
use crate::guest::append_script;
use crate::machine::Running;
use crate::qmp::Qmp;
use crate::scenario::sha256;
use crate::{bed, lab};

const MIB: u64 = 1 << 20;
/// Sizes in bytes; that of the second changes while the guest runs.
const FIRST: u64 = 16 * MIB;
const SECOND: u64 = 24 * MIB;
const GROWN: u64 = 40 * MIB;
/// What the guest discards of the second disk.
const DISCARDED: Range<u64> = 4 * MIB..7 * MIB;

/// Fetches kernel and emulator; the inner error is what this host lacks.
pub fn prepare() -> Result<Result<(), String>, Failed> {
    if !bed::has_program("apt-get") {
        return Ok(Err(
            "no apt-get on this host; the emulator and the kernel are Debian packages".to_owned(),
        ));
    }
    let script = script_path("toolchain");
    let ended = Command::new(&script).stdin(Stdio::null()).status()?;
    match ended.success() {
        true => Ok(Ok(())),
        false => Err(format!("{}: {ended}", script.display()).into()),
    }
}

fn script_path(name: &str) -> PathBuf {
    bed::repository().join("tests/s390x").join(name)
}

/// The guest reads what the host wrote, the host what the guest wrote: contents, sizes, serial numbers,
/// limits, discards, a file system, and a disk that comes back larger.
pub fn disks(pollux: &Path) -> Result<(), String> {
    let current = lab::dir().join("current");
    // Beside the images: O_DIRECT works there, and it is no tmpfs.
    let dir = tempfile::tempdir_in(lab::dir()).map_err(|error| error.to_string())?;
    let path = |name: &str| dir.path().join(name);
    let [first, second] = ["first.img", "second.img"].map(path);
    for (path, bytes) in [(&first, FIRST), (&second, SECOND)] {
        fs::write(path, noise(bytes)).map_err(|error| error.to_string())?;
    }
    let read = sha256(&first);

    let [first_socket, second_socket, again_socket] = ["first", "second", "again"].map(path);
    let options = "iothread=io0,direct=on,discard=on";
    let first_disk = format!("path={},{options},serial=first,queues=2", first.display());
    let second_disk = format!("path={},{options},serial=second", second.display());
    let _first = BackEnd::start(pollux, &first_disk, &first_socket);
    let monitor = path("back-end");
    let monitor_option = format!("unix:{}", monitor.display());
    let back_end = BackEnd::start_with(
        pollux,
        &second_disk,
        &second_socket,
        &["--qmp", &monitor_option],
    );

    let initramfs = path("initramfs");
    append_script(&current.join("s390x-initramfs"), &initramfs, &script())
        .map_err(|error| error.to_string())?;
    let qmp = path("qmp");
    let mut command = qemu(&current.join("s390x/guest/vmlinuz"), &initramfs, &qmp);
    for (name, socket, queues) in [("first", &first_socket, 2), ("second", &second_socket, 1)] {
        let path = socket.display();
        command.arg("-chardev");
        command.arg(format!("socket,id={name},path={path}"));
        command.arg("-device");
        command.arg(format!(
            "vhost-user-blk-pci,id={name},chardev={name},num-queues={queues}"
        ));
    }
    let mut machine = Running::start(command, qmp);
    if machine.wait_for("first") != read {
        return Err("the guest does not read what is on the disk".to_owned());
    }

    // Everything but the last step is done, and flushed.
    let written = machine.wait_for("written");
    if written != sha256(&second) {
        return Err("the image is not what the guest reads".to_owned());
    }
    check_second(&second)?;
    check_counts(&mut Qmp::connect(&monitor))?;

    // The protocol crate has no message for a new size, so the disk goes and comes again.
    let mut qemu = machine.monitor();
    qemu.execute("device_del", json!({"id": "second"}));
    qemu.wait_for_event("DEVICE_DELETED");
    drop(back_end);
    let grown = File::options().write(true).open(&second);
    let grown = grown.and_then(|file| file.set_len(GROWN));
    grown.map_err(|error| error.to_string())?;
    let _back_end = BackEnd::start(pollux, &second_disk, &again_socket);
    let address = json!({"type": "unix", "data": {"path": again_socket}});
    let socket = json!({"type": "socket", "data": {"addr": address, "server": false}});
    qemu.execute("chardev-add", json!({"id": "again", "backend": socket}));
    qemu.execute(
        "device_add",
        json!({"driver": "vhost-user-blk-pci", "id": "again", "chardev": "again", "num-queues": 1}),
    );
    machine.send("go on");

    let ended = machine.finish();
    ended.assert_success();
    if ended.value("grown") != sha256(&second) {
        ended.fail("the image that grew is not what the guest reads");
    }
    if ended.value("written") != written {
        ended.fail("reports are mixed up");
    }
    check_file_system(&first)
}

/// The second disk begins with what was on the first, but for what was discarded.
fn check_second(second: &Path) -> Result<(), String> {
    let mut wanted = noise(FIRST);
    wanted[DISCARDED.start as usize..DISCARDED.end as usize].fill(0);
    wanted.extend_from_slice(&noise(SECOND)[FIRST as usize..]);
    let found = fs::read(second).map_err(|error| error.to_string())?;
    if wanted != found {
        return Err("what the guest copied from disk to disk is not there".to_owned());
    }
    let most = SECOND - (DISCARDED.end - DISCARDED.start);
    match allocated(second) <= most {
        true => Ok(()),
        false => Err("what the guest discarded still takes room".to_owned()),
    }
}

fn check_counts(monitor: &mut Qmp) -> Result<(), String> {
    let all = monitor.execute("query-blockstats", json!({}));
    let stats = &all[0]["stats"];
    for name in [
        "rd_operations",
        "wr_operations",
        "flush_operations",
        "unmap_operations",
    ] {
        if stats[name].as_u64().is_none_or(|count| count == 0) {
            return Err(format!("no {name}: {all}"));
        }
    }
    match stats["failed_wr_operations"].as_u64() {
        Some(0) => Ok(()),
        _ => Err(format!("writes failed: {all}")),
    }
}

/// The guest's file system is whole, by this host's tools.
fn check_file_system(first: &Path) -> Result<(), String> {
    let path = ["/usr/sbin", "/sbin"]
        .map(|dir| Path::new(dir).join("e2fsck"))
        .into_iter()
        .find(|path| path.exists())
        .ok_or("no e2fsck (package e2fsprogs)")?;
    let mut check = Command::new(path);
    check.args(["-f", "-n"]).arg(first);
    let output = check.output().map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "the guest's file system: {}",
            String::from_utf8_lossy(&output.stdout)
        )),
    }
}

/// Bytes that repeat nowhere, so that what is at a wrong place is seen: others for other sizes.
fn noise(bytes: u64) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ bytes;
    let mut noise = Vec::with_capacity(bytes as usize);
    while noise.len() < bytes as usize {
        // xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        noise.extend_from_slice(&state.to_le_bytes());
    }
    noise
}

fn script() -> String {
    let Range { start, end } = DISCARDED;
    format!(
        r#"
first=$(disk first) second=$(disk second)
of() {{ cat "/sys/block/${{1##*/}}/$2"; }}
check() {{ [ "$2" = "$3" ] || fail "$1: $2, not $3"; }}
check "size of the first" "$(blockdev --getsize64 "$first")" {FIRST}
check "size of the second" "$(blockdev --getsize64 "$second")" {SECOND}
check "queues of the first" "$(ls "/sys/block/${{first##*/}}/mq" | wc -l)" 2
check "queues of the second" "$(ls "/sys/block/${{second##*/}}/mq" | wc -l)" 1
check "cache of the second" "$(of "$second" cache_type)" "write back"
check "block size" "$(of "$second" queue/logical_block_size)" 512
[ "$(of "$second" queue/discard_max_bytes)" -gt 0 ] || fail "no discard"
sum() {{ dd if="$1" bs=64k iflag=direct 2>/dev/null | sha256sum; }}
report first "$(sum "$first")"

# Two at a time, through both queues of the first.
copy() {{
    taskset "$1" dd if="$first" of="$second" bs=4k skip="$2" seek="$2" count={half} \
        iflag=direct oflag=direct conv=notrunc,fsync 2>/copied.$1 || fail "$(cat /copied.$1)"
}}
copy 1 0 & copy 2 {half} & wait
cat /copied.1 /copied.2
mke2fs "$first" >/dev/null && mount -t ext4 "$first" /mnt || fail "no file system"
cp /bin/busybox /mnt/ && mkdir -p /mnt/a/b && seq 20000 >/mnt/a/b/numbers && umount /mnt || fail "no files"
mount -t ext4 -o ro "$first" /mnt && cmp /bin/busybox /mnt/busybox || fail "the file has changed"
check lines "$(wc -l </mnt/a/b/numbers)" 20000
umount /mnt || fail "the file system is in use"

blkdiscard -o {start} -l {length} "$second" || fail "the disk does not discard"
dd if="$second" bs=1M skip={skip} count={count} iflag=direct 2>/dev/null | tr -d '\0' | wc -c >/left
check "bytes left of what was discarded" "$(cat /left)" 0
report written "$(sum "$second")"

read -r _
tries=0
until second=$(disk second) && [ "$(blockdev --getsize64 "$second")" = {GROWN} ]; do
    tries=$((tries + 1))
    [ $tries -lt 600 ] || fail "the disk has not come back larger"
    sleep 0.1
done
dd if="$first" of="$second" bs=64k seek={at_end} count=16 iflag=direct oflag=direct conv=notrunc,fsync 2>/dev/null ||
    fail "the new part takes no data"
report grown "$(sum "$second")"
"#,
        half = FIRST / 2 / 4096,
        length = end - start,
        skip = start / MIB,
        count = (end - start) / MIB,
        at_end = (GROWN - MIB) / (64 << 10),
    )
}

fn qemu(kernel: &Path, initramfs: &Path, qmp: &Path) -> Command {
    let mut command = Command::new(script_path("qemu"));
    command.args(["-M", "s390-ccw-virtio,memory-backend=ram"]);
    command.args(["-accel", "tcg,thread=multi"]);
    command.args(["-object", "memory-backend-memfd,id=ram,size=256M,share=on"]);
    command.args(["-m", "256", "-smp", "2", "-nodefaults", "-no-user-config"]);
    command.args(["-no-reboot", "-display", "none"]);
    command.args(["-chardev", "stdio,id=console,signal=off"]);
    command.args(["-serial", "chardev:console"]);
    command.arg("-qmp");
    command.arg(format!("unix:{},server=on,wait=off", qmp.display()));
    command.arg("-kernel").arg(kernel);
    command.arg("-initrd").arg(initramfs);
    command.args(["-append", "quiet nokaslr panic=-1"]);
    command
}
