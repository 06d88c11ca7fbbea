//! Which group a thread belongs to, by its name.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A group of threads; one for each iothread and each vCPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Group {
    /// The process's first thread: `main`.
    Main,
    /// An iothread: `IO <id>`, in Pollux and in QEMU.
    Iothread(String),
    /// A vCPU: `vcpu<N>` in Pollux, `CPU <N>/KVM` (or another accelerator) in QEMU.
    Vcpu(u32),
    /// Worker threads of io_uring: `iou-wrk-*` and `iou-sqp-*`.
    KernelIo,
    /// Threads of another name.
    Other,
    /// Threads that ended within the interval.
    Ended,
}

impl Group {
    /// The group of a thread named `name` (at most 15 bytes, as the kernel keeps it).
    pub fn of(name: &str, is_main: bool) -> Group {
        if is_main {
            return Group::Main;
        }
        if let Some(id) = name.strip_prefix("IO ") {
            return Group::Iothread(id.into());
        }
        if name.starts_with("iou-wrk") || name.starts_with("iou-sqp") {
            return Group::KernelIo;
        }
        let number = name.strip_prefix("vcpu").or_else(|| {
            name.strip_prefix("CPU ")
                .and_then(|rest| rest.split_once('/'))
                .map(|(number, _)| number)
        });
        match number.and_then(|n| n.parse().ok()) {
            Some(index) => Group::Vcpu(index),
            None => Group::Other,
        }
    }

    /// Whether its CPU time is spent for disks: all but vCPUs.
    pub fn is_io(&self) -> bool {
        !matches!(self, Group::Vcpu(_))
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Group::Main => f.write_str("main"),
            Group::Iothread(id) => write!(f, "IO {id}"),
            Group::Vcpu(index) => write!(f, "vcpu{index}"),
            Group::KernelIo => f.write_str("iou-wrk"),
            Group::Other => f.write_str("other"),
            Group::Ended => f.write_str("ended"),
        }
    }
}
