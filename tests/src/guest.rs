//! What a guest boots, and the script that it runs.
//!
//! The guest is a Debian userland on a read-only root disk. Its first program (`lab/init/guest`) runs
//! the scenario's script, which is appended to the initramfs as an archive of its own, and powers
//! off. Nothing else tells the guest what to do, so its disks are the scenario's alone.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::lab;

/// Functions that every script can use, and the marks by which the test knows its lines: a line
/// `@KEY VALUE` on the console reports a value.
const PRELUDE: &str = r#"
report() { printf '@%s\n' "$*"; }
fail() { report fail "$*"; exit 1; }
# disk SERIAL: the device of the disk with that serial number.
disk() {
    for entry in /sys/block/vd*; do
        # The file ends without a line's end, of which read complains.
        read -r found <"$entry/serial"
        [ "$found" = "$1" ] && echo "/dev/${entry##*/}" && return
    done
    fail "no disk with the serial number $1"
}
"#;

/// A kernel image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// Of the distribution's cloud flavour, as it is shipped.
    BzImage,
    /// The ELF file inside that.
    Vmlinux,
    /// Of the generic flavour, as it is shipped.
    Generic,
    /// Of the newer kernel in the distribution's backports, cloud flavour, as it is shipped.
    Backports,
}

/// The files that a guest boots.
#[derive(Debug, Clone)]
pub struct Guest {
    root_image: PathBuf,
    dir: PathBuf,
}

impl Guest {
    /// The files of this bed: in the lab those that are shared with it, on a host those that
    /// `lab/prepare` made.
    ///
    /// # Panics
    /// In the lab, there is no room for a copy of the root file system's image.
    pub fn find() -> Guest {
        let Some(share) = env::var_os("POLLUX_LAB") else {
            let dir = lab::dir().join("current/guest");
            return Guest {
                root_image: dir.join("root.img"),
                dir,
            };
        };
        let dir = Path::new(&share).join("guest");
        // On the scratch disk it is faster than on the share, and has O_DIRECT.
        let root_image = PathBuf::from("/scratch/root.img");
        if !root_image.exists() {
            fs::copy(dir.join("root.img"), &root_image).expect("the scratch disk has room");
        }
        Guest { root_image, dir }
    }

    /// The kernel image; only [`Kernel::Backports`] may not exist.
    pub fn kernel(&self, kernel: Kernel) -> PathBuf {
        self.dir.join(match kernel {
            Kernel::BzImage => "bzImage",
            Kernel::Vmlinux => "vmlinux",
            Kernel::Generic => "generic/bzImage",
            Kernel::Backports => "backports/bzImage",
        })
    }

    /// The initramfs with that kernel's modules.
    fn initramfs(&self, kernel: Kernel) -> PathBuf {
        self.dir.join(match kernel {
            Kernel::BzImage | Kernel::Vmlinux => "initramfs",
            Kernel::Generic => "generic/initramfs",
            Kernel::Backports => "backports/initramfs",
        })
    }

    /// The root file system's image; to be used read-only.
    pub fn root_image(&self) -> &Path {
        &self.root_image
    }

    /// Writes an initramfs for `kernel` to `path` that runs `script` (of a POSIX shell, after the
    /// functions `report`, `fail` and `disk`) as soon as the guest is up.
    ///
    /// # Errors
    /// A file cannot be read or written.
    pub fn write_initramfs(&self, path: &Path, kernel: Kernel, script: &str) -> io::Result<()> {
        append_script(&self.initramfs(kernel), path, script)
    }
}

/// Writes the initramfs `from` to `path` with `script` in it, as [`Guest::write_initramfs`] does.
///
/// # Errors
/// A file cannot be read or written.
pub(crate) fn append_script(from: &Path, path: &Path, script: &str) -> io::Result<()> {
    let mut archive = fs::read(from)?;
    let script = format!("{PRELUDE}\n{script}");
    append_archive(
        &mut archive,
        &[("lab", None), ("lab/script", Some(&script))],
    );
    fs::write(path, archive)
}

/// Appends a cpio archive of the "newc" form (Documentation/driver-api/early-userspace/
/// buffer-format.rst in Linux) with directories (no contents) and files.
fn append_archive(out: &mut Vec<u8>, entries: &[(&str, Option<&str>)]) {
    // Archives may follow each other at multiples of four bytes.
    pad(out);
    let trailer = ("TRAILER!!!", Some(""));
    for (inode, (name, contents)) in entries.iter().chain([&trailer]).enumerate() {
        let mode = if contents.is_some() {
            0o100_755
        } else {
            0o040_755
        };
        let contents = contents.unwrap_or_default();
        let mut header = String::from("070701");
        let fields = [
            inode + 1,
            mode,
            0,
            0,
            1,
            0,
            contents.len(),
            0,
            0,
            0,
            0,
            name.len() + 1,
            0,
        ];
        for field in fields {
            write!(header, "{field:08x}").expect("a string takes it");
        }
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(name.as_bytes());
        out.push(0);
        pad(out);
        out.extend_from_slice(contents.as_bytes());
        pad(out);
    }
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn cpio_reads_what_is_appended() {
        let mut archive = vec![0; 3];
        append_archive(
            &mut archive,
            &[("d", None), ("d/file", Some("hello\n")), ("e", Some(""))],
        );
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("archive"), &archive[4..]).unwrap();
        let read = Command::new("cpio")
            .args(["--quiet", "-id", "-F", "archive"])
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .output();
        let read = match read {
            Ok(read) => read,
            Err(error) => {
                eprintln!("skipped: cpio: {error}");
                return;
            }
        };
        assert!(read.status.success(), "{read:?}");
        assert_eq!(
            fs::read_to_string(dir.path().join("d/file")).unwrap(),
            "hello\n"
        );
        assert_eq!(fs::read(dir.path().join("e")).unwrap(), b"");
    }
}
