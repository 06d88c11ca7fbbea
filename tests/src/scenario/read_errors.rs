//! Reads that fail, as Linux sees them by the error policies: a device-mapper `error` target, there
//! from the start or for a while, and a truncated image.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use super::backends::{LoopDevice, clean_up, go_on, stopped};
use super::storage::output;
use super::{Environment, Outcome};
use crate::bed::is_root;
use crate::machine::{Disk, Machine, Vmm};

const MIB: u64 = 1 << 20;
/// Of each disk, in bytes.
const SIZE: u64 = 8 * MIB;

const SCRIPT: &str = r#"
reported=$(disk reported) ignored=$(disk ignored) cut=$(disk cut) image=$(disk image)
next() { read -r line; [ "$line" = "$1" ] || fail "expected $1, got $line"; }
error() { sed -n 's/.*: \([^:]*\)$/\1/p' /tmp/error | head -n 1; }
# Bytes of the first file that are not zero.
content() { tr -d '\000' <"$1" | wc -c; }

# The first half of both is good, the second is the error target.
for disk in $reported $ignored; do
    dd if=$disk bs=64k count=64 iflag=direct of=/tmp/read status=none || fail "the good half of $disk"
    [ "$(content /tmp/read)" = 4194304 ] || fail "what is in the good half of $disk"
done
dd if=$reported bs=4k skip=1024 count=1 iflag=direct of=/tmp/read 2>/tmp/error && fail "it was read"
report direct.error "$(error)"
dd if=$reported bs=4k skip=1100 count=1 of=/tmp/read 2>/tmp/error && fail "it was read by the page cache"
report cached.error "$(error)"
dd if=/dev/zero of=$reported bs=4k seek=1024 count=1 oflag=direct 2>/tmp/error && fail "it was written"
report write.error "$(error)"
dd if=$ignored bs=4k skip=1024 count=4 iflag=direct of=/tmp/read status=none || fail "errors are ignored"
[ "$(stat -c %s /tmp/read) $(content /tmp/read)" = "16384 0" ] || fail "an ignored error's content"
dd if=$reported bs=64k count=64 iflag=direct of=/dev/null status=none || fail "the good half afterwards"
report errors.done

next cut
# Behind the end of a file there are zeroes.
dd if=$image bs=64k iflag=direct of=/tmp/read status=none || fail "a truncated image"
[ "$(stat -c %s /tmp/read) $(content /tmp/read)" = "8388608 1048576" ] || fail "a truncated image's content"
dd if=$cut bs=64k count=64 iflag=direct of=/dev/null status=none || fail "what is left of the device"
dd if=$cut bs=64k skip=64 count=1 iflag=direct of=/tmp/read status=none || fail "reading after cont"
[ "$(content /tmp/read)" = 65536 ] || fail "what was read after cont"
report cut.read
"#;

pub fn read_errors(environment: &Environment) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("needs Pollux's monitor and options".to_owned());
    }
    if !is_root() {
        return Outcome::Skipped("needs root for loop devices and device-mapper".to_owned());
    }
    let full = |name: &str| {
        let path = environment.path(name);
        fs::write(&path, vec![b'Z'; SIZE as usize])
            .and_then(|()| File::open(&path)?.sync_all())
            .expect("there is room");
        path
    };
    let mapped = |name, good_bytes| {
        let lower = LoopDevice::new(&full(name), 512)?;
        Mapped::new(name, lower, good_bytes)
    };
    let made = (
        mapped("reported", SIZE / 2),
        mapped("ignored", SIZE / 2),
        mapped("cut", SIZE),
    );
    let (reported, ignored, cut) = match made {
        (Ok(reported), Ok(ignored), Ok(cut)) => (reported, ignored, cut),
        (Err(why), ..) | (_, Err(why), _) | (.., Err(why)) => return Outcome::Skipped(why),
    };
    let image = full("image");
    let mut machine = Machine::new(SCRIPT);
    machine.monitor = true;
    machine.disks = vec![
        Disk::of(reported.path(), "reported").with_options("rerror=report,werror=report"),
        Disk::of(ignored.path(), "ignored").with_options("rerror=ignore"),
        Disk::of(cut.path(), "cut").with_options("rerror=stop"),
        Disk::of(image.clone(), "image"),
    ];
    let mut running = environment.start(&machine);
    running.wait_for("errors.done");
    let mut monitor = running.monitor();

    assert!(monitor.disk_counter("reported", "failed_rd_operations") >= 2);
    assert!(monitor.disk_counter("reported", "failed_wr_operations") >= 1);

    let file = File::options().write(true).open(&image);
    file.and_then(|file| file.set_len(MIB))
        .expect("it can be truncated");
    cut.load(SIZE / 2);
    running.send("cut");
    stopped(&mut monitor, "cut", "read", false);
    cut.load(SIZE);
    go_on(&mut running, &mut monitor, "cut", "cut.read");

    let ended = running.finish();
    ended.assert_success();
    for key in ["direct.error", "cached.error", "write.error"] {
        assert_eq!(ended.value(key), "Input/output error", "{key}");
    }
    assert_eq!(
        image.metadata().expect("it is there").len(),
        MIB,
        "reading changes no size"
    );
    Outcome::Held
}

/// A device-mapper device of [`SIZE`] bytes: the beginning of a loop device, and for the rest the
/// `error` target.
struct Mapped {
    name: String,
    // Dropped after the device on it, by `drop`.
    lower: LoopDevice,
}

impl Mapped {
    fn new(name: &str, lower: LoopDevice, good_bytes: u64) -> Result<Mapped, String> {
        let name = format!("pollux-{}-{name}", std::process::id());
        let table = table(&lower, good_bytes);
        match dmsetup(&["create", &name, "--table", &table]).output() {
            Ok(made) if made.status.success() => Ok(Mapped { name, lower }),
            Ok(made) => Err(format!(
                "needs a kernel with device-mapper: {}",
                String::from_utf8_lossy(&made.stderr).trim()
            )),
            Err(error) => Err(format!("needs dmsetup: {error}")),
        }
    }

    fn path(&self) -> PathBuf {
        format!("/dev/mapper/{}", self.name).into()
    }

    /// From now on only the first `good_bytes` are good.
    fn load(&self, good_bytes: u64) {
        let table = table(&self.lower, good_bytes);
        output(&mut dmsetup(&["reload", &self.name, "--table", &table]));
        output(&mut dmsetup(&["resume", &self.name]));
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        clean_up(&mut dmsetup(&["remove", "--retry", &self.name]));
    }
}

fn table(lower: &LoopDevice, good_bytes: u64) -> String {
    let (size, good) = (SIZE / 512, good_bytes / 512);
    let linear = format!("0 {good} linear {} 0\n", lower.0.display());
    match size - good {
        0 => linear,
        bad => format!("{linear}{good} {bad} error\n"),
    }
}

fn dmsetup(arguments: &[&str]) -> Command {
    let mut command = Command::new("dmsetup");
    // Without udev nobody else makes the node.
    command.env("DM_DISABLE_UDEV", "1").args(arguments);
    command
}
