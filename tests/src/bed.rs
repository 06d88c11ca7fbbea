//! Where virtual machines run.

use std::env;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use crate::lab;

/// The environment variable that overrides the choice: `host` or `nested`.
pub const VARIABLE: &str = "POLLUX_BED";

/// A place where a Linux guest runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bed {
    /// This host's /dev/kvm.
    Host,
    /// The nested lab, see [`crate::lab`].
    Nested,
}

impl Bed {
    /// The bed to use.
    ///
    /// # Errors
    /// One line that says what is missing here; tests that need a bed are then skipped.
    ///
    /// # Panics
    /// `POLLUX_BED` is set to something that is no bed.
    pub fn choose() -> Result<Bed, String> {
        let wanted = env::var(VARIABLE).unwrap_or_default();
        match wanted.as_str() {
            "host" => host_kvm().map(|()| Bed::Host),
            "nested" => lab::available().map(|()| Bed::Nested),
            "" if has_virtualization() && host_kvm().is_ok() => Ok(Bed::Host),
            "" => lab::available()
                .map(|()| Bed::Nested)
                .map_err(|why| format!("no hardware KVM, and no nested lab: {why}")),
            other => panic!("{VARIABLE}={other}: no such bed; give host or nested"),
        }
    }
}

/// Whether this processor has VMX or SVM. A /dev/kvm without runs no unmodified kernel.
fn has_virtualization() -> bool {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    cpuinfo
        .lines()
        .filter(|line| line.starts_with("flags"))
        .any(|line| line.split_whitespace().any(|f| f == "vmx" || f == "svm"))
}

/// Whether /dev/kvm opens.
fn host_kvm() -> Result<(), String> {
    File::options()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .map(drop)
        .map_err(|error| format!("/dev/kvm: {error}"))
}

/// Whether a program is on the path or in the directories of the system's administrator.
pub(crate) fn has_program(name: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .any(|dir| dir.join(name).is_file())
}

/// Whether this process is root's.
pub(crate) fn is_root() -> bool {
    Command::new("id")
        .arg("-u")
        .output()
        .is_ok_and(|output| output.stdout == b"0\n")
}

/// A directory of the repository.
pub(crate) fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("/"))
}
