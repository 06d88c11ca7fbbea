//! `pollux vhost-user-blk` behind QEMU: an unmodified Debian guest, emulated (TCG), on this host. Needs
//! neither KVM nor the lab's machine, only its files. [`s390x`] has a guest with the other byte order.

mod s390x;

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::guest::{Guest, Kernel};
use crate::machine::{PATIENCE, Running};
use crate::scenario::run_fio;
use crate::{bed, lab, session};

/// Size of the disk under load.
const DISK_BYTES: u64 = 24 << 20;

/// The test program `vhost_user`.
pub fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let name = "debian_on_qemu_verifies_while_its_back_end_is_killed";
    let here = Trial::ignorable_test(name, || {
        if let Err(why) = available() {
            return Ok(Completion::ignored_with(why));
        }
        lab::prepare()?;
        let pollux = session::build_pollux()?;
        killed_under_load(&pollux).map_err(Failed::from)?;
        Ok(Completion::Completed)
    });
    let name = "big_endian_debian_on_qemu_finds_its_disks_as_they_are";
    let big_endian = Trial::ignorable_test(name, || {
        if let Err(why) = s390x::prepare()? {
            return Ok(Completion::ignored_with(why));
        }
        let pollux = session::build_pollux()?;
        s390x::disks(&pollux).map_err(Failed::from)?;
        Ok(Completion::Completed)
    });
    libtest_mimic::run(&arguments, vec![here, big_endian]).exit_code()
}

fn available() -> Result<(), String> {
    match bed::has_program("qemu-system-x86_64") || bed::is_root() {
        true => lab::available(),
        false => Err("no qemu-system-x86_64; as root: tests/lab/packages".to_owned()),
    }
}

/// A back end. Dropping it kills it, at once.
struct BackEnd(Child);

impl BackEnd {
    fn start(pollux: &Path, disk: &str, socket: &Path) -> BackEnd {
        BackEnd::start_with(pollux, disk, socket, &[])
    }

    /// With further options.
    fn start_with(pollux: &Path, disk: &str, socket: &Path, more: &[&str]) -> BackEnd {
        let mut command = Command::new(pollux);
        command.args(["vhost-user-blk", "--iothread", "id=io0", "--disk", disk]);
        command.arg("--socket").arg(socket).stdin(Stdio::null());
        command.args(more);
        let child = command.spawn().expect("the program was just built");
        let deadline = Instant::now() + PATIENCE;
        // A stale name of its predecessor's is there from the start: what counts is that it answers.
        while std::os::unix::net::UnixStream::connect(socket).is_err() {
            assert!(
                Instant::now() < deadline,
                "{} is not served",
                socket.display()
            );
            thread::sleep(Duration::from_millis(5));
        }
        BackEnd(child)
    }
}

impl Drop for BackEnd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// fio writes and verifies on two queues at once; meanwhile the disk's back end is killed twice and
/// started again. Nothing is lost, nothing done twice that matters, and the image is what the guest saw.
fn killed_under_load(pollux: &Path) -> Result<(), String> {
    let guest = Guest::find();
    // Beside the images: O_DIRECT works there, and it is no tmpfs.
    let dir = tempfile::tempdir_in(lab::dir()).map_err(|error| error.to_string())?;
    let image = dir.path().join("data.img");
    let made = File::create(&image).and_then(|file| file.set_len(DISK_BYTES));
    made.map_err(|error| error.to_string())?;
    let [root_socket, socket] = ["root", "data"].map(|name| dir.path().join(name));
    let root = format!("path={},readonly=on", guest.root_image().display());
    let _root = BackEnd::start(pollux, &root, &root_socket);
    let disk = format!("path={},iothread=io0,queues=2,direct=on", image.display());
    let mut back_end = BackEnd::start(pollux, &disk, &socket);

    let initramfs = dir.path().join("initramfs");
    let written = guest.write_initramfs(&initramfs, Kernel::BzImage, &script());
    written.map_err(|error| error.to_string())?;
    let mut machine = Running::start(
        qemu(&guest, &initramfs, &root_socket, &socket),
        dir.path().join("qmp"),
    );
    machine.wait_for("fio-begins");
    // The image begins empty: its blocks tell how far the writing is.
    for share in [4, 2] {
        let deadline = Instant::now() + PATIENCE;
        while allocated(&image) < DISK_BYTES / share {
            if Instant::now() > deadline {
                return Err("fio does not get on".to_owned());
            }
            thread::sleep(Duration::from_millis(2));
        }
        drop(back_end);
        back_end = BackEnd::start(pollux, &disk, &socket);
    }
    let ended = machine.finish();
    ended.assert_success();
    for job in 0..2 {
        let results = ended.all("fio");
        let fields: Vec<&str> = results.get(job).unwrap_or(&"").split(';').collect();
        if fields.get(4) != Some(&"0") {
            ended.fail("fio reported no result without error for each of its two jobs");
        }
    }
    let inside = ended.value("sum");
    let outside = crate::scenario::sha256(&image);
    if inside != outside {
        ended.fail("the image is not what the guest read");
    }
    Ok(())
}

/// Bytes of a sparse file that are there.
fn allocated(path: &Path) -> u64 {
    path.metadata().map_or(0, |data| data.blocks() * 512)
}

fn script() -> String {
    let half = DISK_BYTES / 2;
    let file = format!(
        "[global]\nfilename=/dev/vdb\ndirect=1\nioengine=libaio\niodepth=16\nbs=4k\nrw=randwrite\n\
         size={half}\nverify=crc32c\nverify_fatal=1\nverify_async=0\nthread=1\n\
         [low]\ncpus_allowed=0\n[high]\noffset={half}\ncpus_allowed=1\n"
    );
    format!(
        "[ -d /sys/block/vdb/mq/1 ] || fail \"vdb has no second queue\"\n\
         report fio-begins\n{}\
         report sum \"$(dd if=/dev/vdb bs=512k iflag=direct status=none | sha256sum)\"\n",
        run_fio("fio", &file)
    )
}

fn qemu(guest: &Guest, initramfs: &Path, root: &PathBuf, data: &PathBuf) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command.args(["-M", "q35,memory-backend=ram", "-accel", "tcg,thread=multi"]);
    command.args(["-object", "memory-backend-memfd,id=ram,size=256M,share=on"]);
    command.args(["-m", "256", "-smp", "2", "-nodefaults", "-no-user-config"]);
    command.args(["-no-reboot", "-display", "none", "-serial", "stdio"]);
    for (name, socket, queues) in [("root", root, 1), ("data", data, 2)] {
        let path = socket.display();
        command.arg("-chardev");
        command.arg(format!("socket,id={name},path={path},reconnect-ms=50"));
        command.arg("-device");
        command.arg(format!(
            "vhost-user-blk-pci,chardev={name},num-queues={queues}"
        ));
    }
    command.arg("-kernel").arg(guest.kernel(Kernel::BzImage));
    command.arg("-initrd").arg(initramfs);
    command.args(["-append", "console=ttyS0 root=/dev/vda ro quiet panic=-1"]);
    command
}
