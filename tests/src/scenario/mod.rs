//! What must hold, each a scenario with a name. Several share one start of the lab; on a host with
//! hardware KVM the same run directly.
//!
//! A scenario fails by a panic, so that `assert!` and friends can be used.

use std::env;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

pub(crate) use fio::run_fio;
pub(crate) use storage::sha256;

use crate::guest::{Guest, Kernel};
use crate::lab;
use crate::machine::{Disk, IoThread, Machine, Running, Vmm};

mod backends;
mod boot;
mod ending;
mod ending_now;
mod features;
mod fio;
mod idle;
mod kernels;
mod live;
mod many;
mod mapping;
mod powerdown;
mod read_errors;
mod storage;

/// A scenario.
pub struct Scenario {
    /// Its name, as cargo's filters see it.
    pub name: &'static str,
    /// What it does.
    pub run: fn(&Environment) -> Outcome,
}

/// How a scenario ended that did not fail.
pub enum Outcome {
    /// All held.
    Held,
    /// It does not apply, for this reason.
    Skipped(String),
}

/// Every scenario.
pub const ALL: &[Scenario] = &[
    Scenario {
        name: "boot_bzimage",
        run: boot::bzimage,
    },
    Scenario {
        name: "boot_vmlinux",
        run: boot::vmlinux,
    },
    Scenario {
        name: "kernel_generic",
        run: kernels::generic,
    },
    Scenario {
        name: "kernel_backports",
        run: kernels::backports,
    },
    Scenario {
        name: "disks_many",
        run: many::many,
    },
    Scenario {
        name: "disks_on_iothreads",
        run: mapping::mapping,
    },
    Scenario {
        name: "disk_features",
        run: features::features,
    },
    Scenario {
        name: "disk_backends",
        run: backends::backends,
    },
    Scenario {
        name: "disk_read_errors",
        run: read_errors::read_errors,
    },
    Scenario {
        name: "live_changes",
        run: live::live,
    },
    Scenario {
        name: "storage_content",
        run: storage::content,
    },
    Scenario {
        name: "storage_filesystem",
        run: storage::filesystem,
    },
    Scenario {
        name: "fio_verify",
        run: fio::verify,
    },
    Scenario {
        name: "fio_beside_qemu",
        run: fio::beside_qemu,
    },
    Scenario {
        name: "idle",
        run: idle::idle,
    },
    Scenario {
        name: "ending_reboot",
        run: ending::reboot,
    },
    Scenario {
        name: "ending_reboot_by_fault",
        run: ending::reboot_by_fault,
    },
    Scenario {
        name: "ending_panic",
        run: ending::panic,
    },
    Scenario {
        name: "ending_init_dies",
        run: ending::init_dies,
    },
    Scenario {
        name: "ending_triple_fault",
        run: ending::triple_fault,
    },
    Scenario {
        name: "ending_powerdown",
        run: powerdown::powerdown,
    },
    Scenario {
        name: "ending_quit",
        run: ending_now::quit,
    },
    Scenario {
        name: "ending_sigterm",
        run: ending_now::sigterm,
    },
    Scenario {
        name: "ending_sigint",
        run: ending_now::sigint,
    },
];

/// What a scenario works with.
pub struct Environment {
    vmm: Vmm,
    pollux: PathBuf,
    guest: Guest,
    dir: TempDir,
}

impl Environment {
    /// An environment with an empty directory. `pollux` is the program to test, by default the one
    /// on the path.
    ///
    /// # Panics
    /// The directory cannot be made.
    pub fn new(vmm: Vmm, pollux: Option<&Path>) -> Environment {
        // In the lab the working directory is the scratch disk; elsewhere beside the images rather
        // than in /tmp, which may be a tmpfs without O_DIRECT.
        let parent = if env::var_os("POLLUX_LAB").is_some() {
            ".".into()
        } else {
            lab::dir()
        };
        Environment {
            vmm,
            pollux: pollux.unwrap_or(Path::new("pollux")).to_owned(),
            guest: Guest::find(),
            dir: tempfile::tempdir_in(parent).expect("there is room for a directory"),
        }
    }

    /// The program that runs machines.
    pub fn vmm(&self) -> Vmm {
        self.vmm
    }

    /// The path of a file in the scenario's directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Whether there is that kernel.
    pub fn has_kernel(&self, kernel: Kernel) -> bool {
        self.guest.kernel(kernel).is_file()
    }

    /// A new disk image of `bytes` zeroes, named by its serial number.
    pub fn disk(&self, serial: &str, bytes: u64) -> Disk {
        Disk::create(self.path(&format!("{serial}.img")), serial, bytes)
    }

    /// Starts a machine.
    pub fn start(&self, machine: &Machine) -> Running {
        self.start_with(self.vmm, machine)
    }

    /// Starts a machine in that VMM.
    pub fn start_with(&self, vmm: Vmm, machine: &Machine) -> Running {
        let program = match vmm {
            Vmm::Pollux => &self.pollux,
            Vmm::Qemu => Path::new("qemu-system-x86_64"),
        };
        machine.start(vmm, program, &self.guest, self.dir.path())
    }

    /// Says something that the reader of a test's result wants to see, such as a figure.
    pub fn note(&self, line: &str) {
        eprintln!("{line}");
    }
}

/// Two iothreads that poll.
fn two_iothreads() -> Vec<IoThread> {
    ["io0", "io1"]
        .map(|id| IoThread {
            id,
            poll_max_ns: 32_768,
        })
        .into()
}

/// The disks that most scenarios use: four on two iothreads, one with two queues, and one without an
/// iothread. Their sizes are `unit` bytes and some sectors more, each another number.
fn six_disks(environment: &Environment, unit: u64) -> Vec<Disk> {
    let disk = |serial, sectors: u64| {
        // QEMU takes no image with O_DIRECT that ends within a page.
        let sectors = match environment.vmm() {
            Vmm::Pollux => sectors,
            Vmm::Qemu => sectors.next_multiple_of(8),
        };
        environment.disk(serial, unit + sectors * 512)
    };
    vec![
        disk("data0", 0).on("io0"),
        disk("data1", 1).on("io0"),
        disk("data2", 8).on("io1"),
        disk("data3", 13).on("io1"),
        disk("pair", 16).on("io0").with_queues(2),
        disk("plain", 24),
    ]
}
