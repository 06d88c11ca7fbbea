//! The axes of a matrix: name, what it takes, and the field of a run that it sets.

use super::Tool;
use super::run::{Engine, Run, Rw, Vmm};

/// What an axis varies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// What the guest asks for. One VM can do several loads, one after the other.
    Load,
    /// How disks, queues and threads are laid out.
    Placement,
    /// What is under study: the VMM and its settings.
    Setting,
}

/// One axis.
pub struct Axis {
    /// As written in a matrix.
    pub name: &'static str,
    /// What it varies.
    pub kind: Kind,
    /// The loads that know it.
    pub tools: &'static [Tool],
    /// The values it takes, for messages and help.
    pub takes: &'static str,
    /// Sets the field; `None` if the value is not one of them.
    pub set: fn(&mut Run, &str) -> Option<()>,
    /// The field as it is written in a matrix; `None` if left to the default.
    pub get: fn(&Run) -> Option<String>,
    /// The value as it stands in a run's name.
    pub short: fn(&str) -> String,
}

impl std::fmt::Debug for Axis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// The axis of this name.
pub fn axis(name: &str) -> Option<&'static Axis> {
    AXES.iter().find(|axis| axis.name == name)
}

const ALL: &[Tool] = &[Tool::Fio, Tool::Guest, Tool::Vhost];

const RW: &[(&str, Rw)] = &[
    ("read", Rw::Read),
    ("write", Rw::Write),
    ("randread", Rw::RandRead),
    ("randwrite", Rw::RandWrite),
    ("rw", Rw::Rw),
    ("randrw", Rw::RandRw),
];
const VMMS: &[(&str, Vmm)] = &[("pollux", Vmm::Pollux), ("qemu", Vmm::Qemu)];
const ENGINES: &[(&str, Engine)] = &[
    ("io_uring", Engine::IoUring),
    ("native", Engine::Native),
    ("threads", Engine::Threads),
];
const SWITCH: &[(&str, bool)] = &[("on", true), ("off", false)];
const POLICIES: &[&str] = &[
    "weighted",
    "per-handler",
    "context",
    "off",
    "always",
    "auto",
];
const MONITORS: &[&str] = &["auto", "io_uring", "epoll", "ppoll"];
const IOENGINES: &[&str] = &["libaio", "io_uring", "psync", "sync"];
const COMPLETIONS: &[&str] = &["interrupt", "poll"];

fn pick<T: Copy>(table: &[(&str, T)], value: &str) -> Option<T> {
    table
        .iter()
        .find(|(name, _)| *name == value)
        .map(|(_, v)| *v)
}

fn name_of<T: PartialEq>(table: &[(&'static str, T)], value: &T) -> Option<String> {
    table
        .iter()
        .find(|(_, v)| v == value)
        .map(|(name, _)| (*name).into())
}

fn word(table: &[&str], value: &str) -> Option<String> {
    table.contains(&value).then(|| value.into())
}

fn whole<T: std::str::FromStr + PartialOrd>(value: &str, low: T, high: T) -> Option<T> {
    value.parse().ok().filter(|n| *n >= low && *n <= high)
}

/// A size with an optional K, M, G or T of 1024.
pub(crate) fn bytes(value: &str) -> Option<u64> {
    let digits = value.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match value[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The shortest way to write a size.
pub(crate) fn size_text(bytes: u64) -> String {
    for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "k")] {
        if bytes != 0 && bytes.is_multiple_of(1 << shift) {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

fn as_is(value: &str) -> String {
    value.into()
}

/// All axes, in the order of a table's columns.
pub static AXES: &[Axis] = &[
    Axis {
        name: "rw",
        kind: Kind::Load,
        tools: ALL,
        takes: "read, write, randread, randwrite, rw or randrw",
        set: |run, v| pick(RW, v).map(|x| run.rw = x),
        get: |run| name_of(RW, &run.rw),
        short: as_is,
    },
    Axis {
        name: "bs",
        kind: Kind::Load,
        tools: ALL,
        takes: "a multiple of 512 bytes up to 16M, such as 512, 4k or 1M",
        set: |run, v| {
            bytes(v)
                .filter(|b| (512..=16 << 20).contains(b) && b % 512 == 0)
                .map(|b| run.bs_bytes = b)
        },
        get: |run| Some(size_text(run.bs_bytes)),
        short: as_is,
    },
    Axis {
        name: "iodepth",
        kind: Kind::Load,
        tools: ALL,
        takes: "1 to 1024",
        set: |run, v| whole(v, 1, 1024).map(|n| run.iodepth = n),
        get: |run| Some(run.iodepth.to_string()),
        short: as_is,
    },
    Axis {
        name: "numjobs",
        kind: Kind::Load,
        tools: &[Tool::Fio],
        takes: "1 to 64 (jobs on each disk)",
        set: |run, v| whole(v, 1, 64).map(|n| run.numjobs = n),
        get: |run| Some(run.numjobs.to_string()),
        short: as_is,
    },
    Axis {
        name: "ioengine",
        kind: Kind::Load,
        tools: &[Tool::Fio],
        takes: "libaio, io_uring, psync or sync (fio's engine in the guest)",
        set: |run, v| word(IOENGINES, v).map(|s| run.ioengine = Some(s)),
        get: |run| run.ioengine.clone(),
        short: as_is,
    },
    Axis {
        name: "completion",
        kind: Kind::Load,
        tools: &[Tool::Guest, Tool::Vhost],
        takes: "interrupt or poll",
        set: |run, v| word(COMPLETIONS, v).map(|s| run.completion = Some(s)),
        get: |run| run.completion.clone(),
        short: as_is,
    },
    Axis {
        name: "think-ns",
        kind: Kind::Load,
        tools: &[Tool::Guest, Tool::Vhost],
        takes: "nanoseconds from 0 to 1000000000",
        set: |run, v| whole(v, 0, 1_000_000_000).map(|n| run.think_ns = Some(n)),
        get: |run| run.think_ns.map(|n| n.to_string()),
        short: |v| format!("think{v}"),
    },
    Axis {
        name: "think-ios",
        kind: Kind::Load,
        tools: &[Tool::Guest, Tool::Vhost],
        takes: "1 to 1000000 (requests between two pauses of think-ns)",
        set: |run, v| whole(v, 1, 1_000_000).map(|n| run.think_ios = Some(n)),
        get: |run| run.think_ios.map(|n| n.to_string()),
        short: |v| format!("after{v}"),
    },
    Axis {
        name: "mixed",
        kind: Kind::Load,
        tools: &[Tool::Guest, Tool::Vhost],
        takes: "on or off (every second disk is read through the page cache)",
        set: |run, v| pick(SWITCH, v).map(|x| run.mixed = x),
        get: |run| run.mixed.then(|| "on".into()),
        short: |v| format!("mixed-{v}"),
    },
    Axis {
        name: "disks",
        kind: Kind::Placement,
        tools: ALL,
        takes: "1 to 255",
        set: |run, v| whole(v, 1, 255).map(|n| run.disks = n),
        get: |run| Some(run.disks.to_string()),
        short: |v| format!("{v} disks"),
    },
    Axis {
        name: "idle-disks",
        kind: Kind::Placement,
        tools: &[Tool::Guest],
        takes: "0 to 255 beside one loaded disk (pollux)",
        set: |run, v| whole(v, 0, 255).map(|n| run.idle_disks = n),
        get: |run| (run.idle_disks != 0).then(|| run.idle_disks.to_string()),
        short: |v| format!("{v} idle"),
    },
    Axis {
        name: "iothreads",
        kind: Kind::Placement,
        tools: ALL,
        takes: "0 (the main loop) to 64",
        set: |run, v| whole(v, 0, 64).map(|n| run.iothreads = n),
        get: |run| Some(run.iothreads.to_string()),
        short: |v| match v {
            "0" => "main loop".into(),
            "1" => "1 iothread".into(),
            _ => format!("{v} iothreads"),
        },
    },
    Axis {
        name: "queues",
        kind: Kind::Placement,
        tools: ALL,
        takes: "1 to 64 (virtqueues of each disk)",
        set: |run, v| whole(v, 1, 64).map(|n| run.queues = n),
        get: |run| Some(run.queues.to_string()),
        short: |v| format!("{v} queues"),
    },
    Axis {
        name: "vcpus",
        kind: Kind::Placement,
        tools: ALL,
        takes: "1 to 64 (vhost: threads of the load)",
        set: |run, v| whole(v, 1, 64).map(|n| run.vcpus = n),
        get: |run| Some(run.vcpus.to_string()),
        short: |v| format!("{v} vcpus"),
    },
    Axis {
        name: "vmm",
        kind: Kind::Setting,
        tools: ALL,
        takes: "pollux or qemu (vhost: its storage daemon)",
        set: |run, v| pick(VMMS, v).map(|x| run.vmm = x),
        get: |run| name_of(VMMS, &run.vmm),
        short: as_is,
    },
    Axis {
        name: "engine",
        kind: Kind::Setting,
        tools: ALL,
        takes: "io_uring, native (Linux AIO) or threads",
        set: |run, v| pick(ENGINES, v).map(|x| run.engine = x),
        get: |run| name_of(ENGINES, &run.engine),
        short: as_is,
    },
    Axis {
        name: "direct",
        kind: Kind::Setting,
        tools: ALL,
        takes: "on or off (O_DIRECT on the host)",
        set: |run, v| pick(SWITCH, v).map(|x| run.direct = x),
        get: |run| name_of(SWITCH, &run.direct),
        short: |v| {
            if v == "on" {
                "direct".into()
            } else {
                "cached".into()
            }
        },
    },
    Axis {
        name: "fixedbufs",
        kind: Kind::Setting,
        tools: ALL,
        takes: "on or off (guest memory registered with the ring)",
        set: |run, v| pick(SWITCH, v).map(|x| run.fixedbufs = Some(x)),
        get: |run| run.fixedbufs.and_then(|x| name_of(SWITCH, &x)),
        short: |v| format!("fixedbufs-{v}"),
    },
    Axis {
        name: "poll-policy",
        kind: Kind::Setting,
        tools: ALL,
        takes: "weighted, per-handler, context, off, always or auto",
        set: |run, v| word(POLICIES, v).map(|s| run.poll_policy = Some(s)),
        get: |run| run.poll_policy.clone(),
        short: as_is,
    },
    Axis {
        name: "poll-weight",
        kind: Kind::Setting,
        tools: ALL,
        takes: "0 (the default weight) to 63",
        set: |run, v| whole(v, 0, 63).map(|n| run.poll_weight = Some(n)),
        get: |run| run.poll_weight.map(|n| n.to_string()),
        short: |v| format!("w{v}"),
    },
    Axis {
        name: "poll-alpha",
        kind: Kind::Setting,
        tools: ALL,
        takes: "0 to 10, such as 0.3",
        set: |run, v| {
            let milli = iothread::alpha_milli(v).ok()?;
            u32::try_from(milli)
                .ok()
                .map(|n| run.poll_alpha_milli = Some(n))
        },
        get: |run| run.poll_alpha_milli.map(|n| iothread::alpha_text(n.into())),
        short: |v| format!("a{v}"),
    },
    Axis {
        name: "poll-max-ns",
        kind: Kind::Setting,
        tools: ALL,
        takes: "nanoseconds from 0 (no polling) to 1000000000",
        set: |run, v| whole(v, 0, 1_000_000_000).map(|n| run.poll_max_ns = Some(n)),
        get: |run| run.poll_max_ns.map(|n| n.to_string()),
        short: |v| format!("max{v}"),
    },
    Axis {
        name: "poll-grow",
        kind: Kind::Setting,
        tools: ALL,
        takes: "0 (the default) to 1000000",
        set: |run, v| whole(v, 0, 1_000_000).map(|n| run.poll_grow = Some(n)),
        get: |run| run.poll_grow.map(|n| n.to_string()),
        short: |v| format!("grow{v}"),
    },
    Axis {
        name: "poll-shrink",
        kind: Kind::Setting,
        tools: ALL,
        takes: "0 (the default) to 1000000",
        set: |run, v| whole(v, 0, 1_000_000).map(|n| run.poll_shrink = Some(n)),
        get: |run| run.poll_shrink.map(|n| n.to_string()),
        short: |v| format!("shrink{v}"),
    },
    Axis {
        name: "poll-completions",
        kind: Kind::Setting,
        tools: ALL,
        takes: "on or off",
        set: |run, v| pick(SWITCH, v).map(|x| run.poll_completions = Some(x)),
        get: |run| run.poll_completions.and_then(|d| name_of(SWITCH, &d)),
        short: |v| format!("completions-{v}"),
    },
    Axis {
        name: "aio-max-batch",
        kind: Kind::Setting,
        tools: ALL,
        takes: "0 (the default) to 65536",
        set: |run, v| whole(v, 0, 65_536).map(|n| run.aio_max_batch = Some(n)),
        get: |run| run.aio_max_batch.map(|n| n.to_string()),
        short: |v| format!("batch{v}"),
    },
    Axis {
        name: "monitor",
        kind: Kind::Setting,
        tools: ALL,
        takes: "auto, io_uring, epoll or ppoll",
        set: |run, v| word(MONITORS, v).map(|s| run.monitor = Some(s)),
        get: |run| run.monitor.clone(),
        short: as_is,
    },
];
