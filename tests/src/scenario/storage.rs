//! What a guest writes is on its image, at its place, and a file system on it is sound, seen from
//! inside and from outside.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Environment, Outcome, six_disks, two_iothreads};
use crate::machine::{Disk, Finished, Machine};

/// Fills every disk with sectors that tell their own number and the disk's: the first half through
/// the page cache with a flush at the end, the second half around it.
const CONTENT: &str = r#"
number=1
for serial in data0 data1 data2 data3 pair plain; do
    device=$(disk "$serial")
    sectors=$(blockdev --getsz "$device")
    half=$((sectors / 2))
    seq -f "$number%0510.f" 0 $((half - 1)) |
        dd of="$device" bs=64k iflag=fullblock conv=fsync status=none || fail "dd $serial"
    seq -f "$number%0510.f" "$half" $((sectors - 1)) |
        dd of="$device" bs=4k seek="$((half * 512))" iflag=fullblock oflag=direct,seek_bytes \
            status=none ||
        fail "dd $serial, direct"
    number=$((number + 1))
done
"#;

pub fn content(environment: &Environment) -> Outcome {
    let mut machine = Machine::new(CONTENT);
    machine.iothreads = two_iothreads();
    machine.disks = six_disks(environment, 512 << 10);
    environment.start(&machine).finish().assert_success();
    for (number, disk) in (1..).zip(&machine.disks) {
        let image = fs::read(&disk.path).expect("it can be read");
        for (sector, found) in image.chunks_exact(512).enumerate() {
            let expected = format!("{number}{sector:0510}\n");
            assert!(
                found == expected.as_bytes(),
                "{}: sector {sector} has {:?} instead of its number",
                disk.serial,
                String::from_utf8_lossy(&found[480..])
            );
        }
    }
    Outcome::Held
}

/// Makes a file system, works with it and checks it; then the same once more after unmounting.
const FILESYSTEM: &str = r#"
device=$(disk data0)
mkfs.ext4 -q "$device" || fail mkfs.ext4
mkdir /tmp/mnt
mount "$device" /tmp/mnt || fail mount
cp -a /usr/bin/[a-d]* /tmp/mnt || fail cp
mkdir /tmp/mnt/many
for name in $(seq 300); do echo "$name" >/tmp/mnt/many/$name; done
for name in $(seq 1 3 300); do rm /tmp/mnt/many/$name; done
mv /tmp/mnt/many /tmp/mnt/some
sync
find /tmp/mnt -type f | sort | xargs cat | sha256sum >/tmp/before
cat /tmp/mnt/some/* | sha256sum >/tmp/some
umount /tmp/mnt || fail umount
fsck.ext4 -f -n "$device" >/tmp/fsck 2>&1 || fail "fsck.ext4: $(tail -n 1 /tmp/fsck)"
mount -o ro "$device" /tmp/mnt || fail "second mount"
find /tmp/mnt -type f | sort | xargs cat | sha256sum >/tmp/after
report files "$(find /tmp/mnt -type f | wc -l)"
umount /tmp/mnt
cmp /tmp/before /tmp/after || fail "the files changed by unmounting"
dd if=/usr/bin/bash of="$(disk plain)" bs=4k conv=fsync status=none || fail dd
report bash "$(sha256sum </usr/bin/bash)"
report size "$(stat -c %s /usr/bin/bash)"
"#;

pub fn filesystem(environment: &Environment) -> Outcome {
    let mut machine = Machine::new(FILESYSTEM);
    machine.iothreads = two_iothreads();
    machine.disks = vec![
        environment.disk("data0", 64 << 20).on("io1"),
        environment.disk("plain", 8 << 20),
    ];
    let ended = environment.start(&machine).finish();
    ended.assert_success();
    environment.note(&format!("{} files", ended.value("files")));

    // The same from outside, on the images.
    let image = &machine.disks[0].path;
    let checked = output(Command::new("e2fsck").args(["-f", "-n"]).arg(image));
    assert!(checked.contains("files"), "e2fsck says: {checked}");
    let copy = environment.path("copy");
    let dump = format!("dump /bash {}", copy.display());
    output(Command::new("debugfs").args(["-R", &dump]).arg(image));
    assert_eq!(
        sha256(&copy),
        ended.value("bash"),
        "bash, from the file system"
    );
    let size: usize = ended.value("size").parse().expect("a number");
    let raw = fs::read(&machine.disks[1].path).expect("it can be read");
    assert!(
        fs::read(&copy).expect("it can be read") == raw[..size],
        "bash, from the disk without a file system"
    );
    Outcome::Held
}

/// What a program says; it must end well.
pub fn output(command: &mut Command) -> String {
    // Not on every user's path.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let messages = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{text}{messages}",
        output.status
    );
    text
}

/// Every image holds what the guest read of it at the end, which it reports as `sum.SERIAL`.
pub fn check_sums(ended: &Finished, disks: &[Disk]) {
    for disk in disks {
        assert_eq!(
            sha256(&disk.path),
            ended.value(&format!("sum.{}", disk.serial)),
            "{}: the image and what the guest read",
            disk.serial
        );
    }
}

/// What `sha256sum` says of a file read from its standard input.
pub fn sha256(path: &Path) -> String {
    let file = fs::File::open(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    output(Command::new("sha256sum").stdin(file))
        .trim_end()
        .to_owned()
}
