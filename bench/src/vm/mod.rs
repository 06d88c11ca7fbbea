//! A virtual machine for one turn: what it consists of, and how each VMM is told.

mod pollux;
mod process;
mod qemu;
mod qmp;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::matrix::{Run, Vmm};

pub use process::{Error as ProcessError, Vm};
pub use qmp::{Counters, Error as QmpError, Qmp};

/// Where the VMMs are.
#[derive(Clone, Debug)]
pub struct Programs {
    /// `pollux`.
    pub pollux: PathBuf,
    /// `qemu-system-x86_64`.
    pub qemu: PathBuf,
    /// QEMU's accelerator.
    pub qemu_accel: String,
    /// QEMU's directory of firmware (`-L`), if not its own.
    pub qemu_firmware: Option<PathBuf>,
    /// Whether `pollux` answers QMP, by which it tells its polling counters.
    pub pollux_has_qmp: bool,
}

/// A disk of the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Image or block device.
    pub path: PathBuf,
    /// What the guest finds it by; at most 20 bytes.
    pub serial: String,
    /// Never written.
    pub readonly: bool,
    /// Whether it bears the load: on an iothread, with the run's queues, engine and O_DIRECT.
    pub loaded: bool,
    /// Whether it is idle on the first iothread, and then on which transport.
    pub idle: Option<&'static str>,
}

/// The machine.
#[derive(Clone, Debug)]
pub struct Machine {
    /// Kernel, or the embedded guest.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Kernel command line.
    pub cmdline: String,
    /// Memory.
    pub memory_bytes: u64,
    /// Disks in the order in which the guest numbers them.
    pub disks: Vec<Disk>,
    /// Whether the guest is Linux, which wants ACPI where the embedded guest wants a bare machine.
    pub linux: bool,
}

impl Programs {
    /// The command that starts `machine` under the settings of `run`. The guest's console is on
    /// its standard output.
    pub fn command(&self, machine: &Machine, run: &Run) -> Command {
        let mut command = match run.vmm {
            Vmm::Pollux => Command::new(&self.pollux),
            Vmm::Qemu => Command::new(&self.qemu),
        };
        command.args(match run.vmm {
            Vmm::Pollux => pollux::arguments(machine, run),
            Vmm::Qemu => qemu::arguments(self, machine, run),
        });
        command
    }

    /// Asks `pollux` whether it answers QMP: versions without it refuse the option, before they look
    /// at the kernel, which is none here.
    pub fn find_qmp(&mut self) -> Result<(), ProcessError> {
        let output = Command::new(&self.pollux)
            .args(["--kernel", "/dev/null", "--qmp", "unix:/dev/null/qmp"])
            .output()
            .map_err(|error| ProcessError::start(&self.pollux, &error))?;
        let text = String::from_utf8_lossy(&output.stderr);
        let refused = text.contains("not available") || text.contains("unexpected argument");
        self.pollux_has_qmp = !refused;
        Ok(())
    }

    /// Has `command` of a run offer its polling counters on a socket in `directory`, if its VMM
    /// can; gives the socket's path.
    pub fn offer_counters(
        &self,
        command: &mut Command,
        run: &Run,
        directory: &Path,
    ) -> Option<PathBuf> {
        if run.vmm != Vmm::Pollux || !self.pollux_has_qmp {
            return None;
        }
        let path = directory.join("qmp");
        command.arg("--qmp").arg(format!("unix:{}", path.display()));
        Some(path)
    }

    /// The version that a VMM says it is, in one line.
    pub fn version(&self, vmm: Vmm) -> Result<String, ProcessError> {
        let program = match vmm {
            Vmm::Pollux => &self.pollux,
            Vmm::Qemu => &self.qemu,
        };
        let output = Command::new(program)
            .arg("--version")
            .output()
            .map_err(|error| ProcessError::start(program, &error))?;
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.lines().next().unwrap_or_default().trim().to_string())
    }
}

/// Which iothreads serve the `index`-th loaded disk: disks take turns; where there are more
/// iothreads than disks, a disk with several queues takes several.
pub(crate) fn iothreads_of_disk(run: &Run, index: u32) -> Vec<u32> {
    if run.iothreads == 0 {
        return Vec::new();
    }
    if run.disks >= run.iothreads {
        return vec![index % run.iothreads];
    }
    let step = usize::try_from(run.disks.max(1)).unwrap_or(1);
    let most = usize::try_from(run.queues).unwrap_or(1);
    (index..run.iothreads).step_by(step).take(most).collect()
}

/// The settings of every iothread, as `name=value` in the words of both VMMs; a name that a VMM
/// does not know was dropped from the run.
pub(crate) fn iothread_settings(run: &Run) -> Vec<(&'static str, String)> {
    let switch = |on: bool| if on { "on" } else { "off" }.to_string();
    [
        ("poll-policy", run.poll_policy.clone()),
        ("poll-weight", run.poll_weight.map(|v| v.to_string())),
        (
            "poll-alpha",
            run.poll_alpha_milli
                .map(|milli| iothread::alpha_text(milli.into())),
        ),
        ("poll-max-ns", run.poll_max_ns.map(|v| v.to_string())),
        ("poll-grow", run.poll_grow.map(|v| v.to_string())),
        ("poll-shrink", run.poll_shrink.map(|v| v.to_string())),
        ("poll-completions", run.poll_completions.map(switch)),
        ("aio-max-batch", run.aio_max_batch.map(|v| v.to_string())),
        ("monitor", run.monitor.clone()),
    ]
    .into_iter()
    .filter_map(|(name, value)| value.map(|value| (name, value)))
    .collect()
}

/// A value in a `key=value` list: its commas are doubled.
pub(crate) fn quoted(text: &str) -> String {
    text.replace(',', ",,")
}
