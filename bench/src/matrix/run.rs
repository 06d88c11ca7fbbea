//! One run of a matrix: a load, where it is placed, and the settings under study.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::axes::{AXES, Axis, Kind, axis};

/// Whose VMM serves the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Vmm {
    /// This project's.
    Pollux,
    /// QEMU's microvm machine.
    Qemu,
}

/// Direction and order of a load, in fio's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Rw {
    Read,
    Write,
    RandRead,
    RandWrite,
    /// Sequential, half reads and half writes.
    Rw,
    /// Random, half reads and half writes.
    RandRw,
}

/// Which kernel interface does the disk I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// io_uring.
    #[serde(rename = "io_uring")]
    IoUring,
    /// Linux AIO.
    Native,
    /// A pool of threads.
    Threads,
}

/// One run. What is `None` is left to the VMM's default.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Run {
    /// Direction and order.
    pub rw: Rw,
    /// Bytes of a request.
    pub bs_bytes: u64,
    /// Requests that a job keeps in flight.
    pub iodepth: u32,
    /// Jobs on each disk.
    pub numjobs: u32,
    /// fio's I/O engine in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ioengine: Option<String>,
    /// How the embedded guest learns of completions: `interrupt` or `poll`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion: Option<String>,
    /// Pause of the embedded guest between a completion and the next request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub think_ns: Option<u64>,
    /// Requests between two of these pauses; one if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub think_ios: Option<u32>,
    /// Every second disk goes through the page cache, whatever `direct` says: disks of different
    /// speed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mixed: bool,

    /// Disks under load.
    pub disks: u32,
    /// Disks beside them that the driver has and does not use.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub idle_disks: u32,
    /// Iothreads; 0 is the main loop.
    pub iothreads: u32,
    /// Virtqueues of each disk.
    pub queues: u32,
    /// Virtual CPUs.
    pub vcpus: u32,

    /// The VMM.
    pub vmm: Vmm,
    /// Disk engine. Never left to the VMM: the defaults of VMMs differ.
    pub engine: Engine,
    /// O_DIRECT. Never left to the VMM: the defaults of VMMs differ.
    pub direct: bool,
    /// Whether guest memory is registered with the ring.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fixedbufs: Option<bool>,
    /// The iothread's poll-policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_policy: Option<String>,
    /// The iothread's poll-weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_weight: Option<u32>,
    /// The iothread's poll-alpha in thousandths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_alpha_milli: Option<u32>,
    /// The iothread's poll-max-ns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_max_ns: Option<u64>,
    /// The iothread's poll-grow.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_grow: Option<u64>,
    /// The iothread's poll-shrink.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_shrink: Option<u64>,
    /// The iothread's poll-completions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_completions: Option<bool>,
    /// The iothread's aio-max-batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub aio_max_batch: Option<u64>,
    /// The iothread's event monitor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub monitor: Option<String>,
}

fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl Default for Run {
    fn default() -> Self {
        Run {
            rw: Rw::RandRead,
            bs_bytes: 4096,
            iodepth: 1,
            numjobs: 1,
            ioengine: None,
            completion: None,
            think_ns: None,
            think_ios: None,
            mixed: false,
            disks: 1,
            idle_disks: 0,
            iothreads: 1,
            queues: 1,
            vcpus: 1,
            vmm: Vmm::Pollux,
            engine: Engine::IoUring,
            direct: false,
            fixedbufs: None,
            poll_policy: None,
            poll_weight: None,
            poll_alpha_milli: None,
            poll_max_ns: None,
            poll_grow: None,
            poll_shrink: None,
            poll_completions: None,
            aio_max_batch: None,
            monitor: None,
        }
    }
}

impl Run {
    /// Clears what cannot have an effect, so that runs that would be the same are equal.
    pub(super) fn drop_meaningless(&mut self) {
        if self.vmm == Vmm::Qemu {
            // Through 10.x QEMU has one rule and no weight.
            self.poll_policy = None;
            self.poll_weight = None;
            self.poll_completions = None;
            self.monitor = None;
            self.fixedbufs = None;
        }
        if self.engine != Engine::IoUring {
            self.fixedbufs = None;
        }
        if self.poll_policy.as_deref() != Some("auto") || self.iothreads == 0 {
            self.poll_alpha_milli = None;
        }
        let policy = self.poll_policy.as_deref();
        if policy.is_some_and(|p| p != "weighted") {
            self.poll_weight = None;
        }
        let fixed = policy.is_some_and(|p| p == "off" || p == "always");
        if fixed || self.poll_max_ns == Some(0) {
            self.poll_grow = None;
            self.poll_shrink = None;
            self.poll_weight = None;
        }
        if policy == Some("off") {
            self.poll_max_ns = None;
            self.poll_completions = None;
        }
        if self.iothreads == 0 {
            self.poll_policy = None;
            self.poll_weight = None;
            self.poll_max_ns = None;
            self.poll_grow = None;
            self.poll_shrink = None;
            self.poll_completions = None;
            self.aio_max_batch = None;
            self.monitor = None;
        }
    }

    /// Whether the `index`-th disk is opened with O_DIRECT.
    pub fn is_direct(&self, index: u32) -> bool {
        self.direct && !(self.mixed && index % 2 == 1)
    }

    /// The same run on another VMM, for a comparison turn by turn.
    pub fn on(&self, vmm: Vmm) -> Run {
        let mut run = Run {
            vmm,
            ..self.clone()
        };
        run.drop_meaningless();
        run
    }

    /// Whether one VM can do both runs, one after the other.
    pub fn same_vm(&self, other: &Run) -> bool {
        AXES.iter()
            .filter(|axis| axis.kind != Kind::Load)
            .all(|axis| (axis.get)(self) == (axis.get)(other))
    }

    /// The run in the matrix language: [`super::parse`] reads it back.
    pub fn words(&self) -> String {
        AXES.iter()
            .filter_map(|axis| (axis.get)(self).map(|value| format!("{}={value}", axis.name)))
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// How a set of runs is laid out in a table: what names a run and which runs are compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Axes whose value names the run.
    named: Vec<&'static str>,
    /// Axes that must agree for two runs to be compared.
    fixed: Vec<&'static str>,
    /// Axes of load and placement that vary and have no column in every table.
    further: Vec<&'static str>,
    /// Whether the number of iothreads does: it has a column in the main table alone.
    iothreads: bool,
}

const DIRECT: &str = "direct";

/// Axes of load and placement that every table has a column for.
const COLUMNS: [&str; 5] = ["rw", "bs", "iodepth", "numjobs", "iothreads"];

impl Layout {
    /// Looks at what varies in `runs`.
    ///
    /// Runs are compared under one load and placement if a setting varies; where no setting
    /// does, the placement (iothreads, queues, …) is what is under study and names the run.
    pub fn of<'a>(runs: impl IntoIterator<Item = &'a Run>) -> Layout {
        let runs: Vec<&Run> = runs.into_iter().collect();
        let varying = |kind: Kind| -> Vec<&'static str> {
            AXES.iter()
                .filter(|axis| axis.kind == kind)
                .filter(|axis| {
                    let values: BTreeSet<_> = runs.iter().map(|run| (axis.get)(run)).collect();
                    values.len() > 1
                })
                .map(|axis| axis.name)
                .collect()
        };
        let names = |kinds: &[Kind]| -> Vec<&'static str> {
            AXES.iter()
                .filter(|a| kinds.contains(&a.kind))
                .map(|a| a.name)
                .collect()
        };
        let further = [varying(Kind::Load), varying(Kind::Placement)].concat();
        let further = further
            .into_iter()
            .filter(|name| !COLUMNS.contains(name))
            .collect();
        let iothreads = varying(Kind::Placement).contains(&"iothreads");
        let mut settings = varying(Kind::Setting);
        // Polling rules are compared under O_DIRECT and under the page cache, not across.
        let apart = settings.contains(&DIRECT) && settings.contains(&"poll-policy");
        let mut further: Vec<&'static str> = further;
        if apart {
            settings.retain(|name| *name != DIRECT);
            further.push(DIRECT);
        }
        if settings.is_empty() {
            Layout {
                named: varying(Kind::Placement),
                fixed: names(&[Kind::Load]),
                further,
                iothreads,
            }
        } else {
            Layout {
                named: settings,
                fixed: [
                    names(&[Kind::Load, Kind::Placement]),
                    apart.then_some(DIRECT).into_iter().collect(),
                ]
                .concat(),
                further,
                iothreads,
            }
        }
    }

    /// The run's name: the values of what varies, in the short form of the field (`w3`).
    pub fn name(&self, run: &Run) -> String {
        let parts: Vec<String> = AXES
            .iter()
            .filter(|axis| self.named.contains(&axis.name))
            .filter_map(|axis| (axis.get)(run).map(|value| (axis.short)(&value)))
            .collect();
        match (parts.is_empty(), self.named.is_empty()) {
            (false, _) => parts.join(" "),
            (true, true) => vmm_name(run.vmm).into(),
            (true, false) => "default".into(),
        }
    }

    /// Axes of load and placement that vary beyond those every table has a column for.
    pub fn further(&self) -> impl Iterator<Item = &'static Axis> + '_ {
        AXES.iter().filter(|axis| self.further.contains(&axis.name))
    }

    /// The run's load in a few words: `randread 4k d8 j4`.
    pub fn load(&self, run: &Run) -> String {
        let get = |name: &str| axis(name).and_then(|a| (a.get)(run)).unwrap_or_default();
        let mut text = format!("{} {} d{}", get("rw"), get("bs"), get("iodepth"));
        if run.numjobs > 1 {
            text += &format!(" j{}", run.numjobs);
        }
        for axis in self.further() {
            if let Some(value) = (axis.get)(run) {
                text += &format!(" {}={value}", axis.name);
            }
        }
        // Where it names the run, its name says so.
        if self.iothreads && !self.named.contains(&"iothreads") {
            text += &match run.iothreads {
                0 => ", main loop".to_string(),
                1 => ", 1 iothread".to_string(),
                n => format!(", {n} iothreads"),
            };
        }
        text
    }

    /// Whether `b` is to be read against `a`.
    pub fn comparable(&self, a: &Run, b: &Run) -> bool {
        AXES.iter()
            .filter(|axis| self.fixed.contains(&axis.name))
            .all(|axis| (axis.get)(a) == (axis.get)(b))
    }

    /// For each run the index of its baseline: the first run that it is comparable to.
    pub fn baselines(&self, runs: &[&Run]) -> Vec<usize> {
        runs.iter()
            .enumerate()
            .map(|(i, run)| {
                runs[..i]
                    .iter()
                    .position(|first| self.comparable(first, run))
                    .unwrap_or(i)
            })
            .collect()
    }
}

fn vmm_name(vmm: Vmm) -> &'static str {
    match vmm {
        Vmm::Pollux => "pollux",
        Vmm::Qemu => "qemu",
    }
}
