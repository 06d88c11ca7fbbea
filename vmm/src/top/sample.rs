//! What a VM tells of itself at one moment.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::json;

use super::Error;
use crate::qmp::session::{self, Session};

/// A VM's counters and state.
#[derive(Debug, Clone, Default)]
pub struct Sample {
    /// Its state in QEMU's words.
    pub status: String,
    /// Its vCPUs.
    pub vcpus: Vec<Vcpu>,
    /// Its loops, the main one last.
    pub loops: Vec<Loop>,
    /// Its disks.
    pub disks: Vec<Disk>,
}

#[derive(Debug, Clone, Deserialize)]
struct Status {
    status: String,
}

/// A vCPU.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Vcpu {
    pub cpu_index: u32,
    #[serde(default)]
    pub cpu_ns: Option<u64>,
}

/// A loop's counters, as `x-query-polling` has them.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Loop {
    pub id: String,
    pub time_ns: i64,
    #[serde(default)]
    pub cpu_ns: Option<u64>,
    pub window_ns: u64,
    pub hits: u64,
    pub misses: u64,
    pub poll_ns: u64,
    pub vain_ns: u64,
    pub blocks: u64,
    pub wakeups: u64,
    pub completions: u64,
    #[serde(default)]
    pub experiment: Option<Experiment>,
    pub handlers: Vec<Handler>,
}

/// What the rule `auto` is about.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Experiment {
    pub incumbent_ns: u64,
    #[serde(default)]
    pub trial_ns: Option<u64>,
    pub scanning: bool,
    pub score: f64,
    pub trials: u64,
    pub switches: u64,
}

/// One of a loop's handlers.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Handler {
    pub name: String,
    pub events: u64,
    pub hits: u64,
    pub ns: u64,
    pub polled: bool,
}

/// A disk: its counters, and the loops that run its queues.
#[derive(Debug, Clone, Default)]
pub struct Disk {
    pub id: String,
    /// Ids of loops, each once.
    pub loops: Vec<String>,
    pub stats: DiskStats,
}

/// Counters of a disk, as `query-blockstats` has them.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub struct DiskStats {
    pub rd_bytes: u64,
    pub wr_bytes: u64,
    pub rd_operations: u64,
    pub wr_operations: u64,
    pub flush_operations: u64,
    pub unmap_operations: u64,
    pub failed_rd_operations: u64,
    pub failed_wr_operations: u64,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Block {
    device: String,
    iothread_vq_mapping: Vec<Mapping>,
}

#[derive(Debug, Deserialize)]
struct Mapping {
    #[serde(default)]
    iothread: Option<String>,
}

#[derive(Debug, Deserialize)]
struct BlockStats {
    device: String,
    stats: DiskStats,
}

fn ask<T: DeserializeOwned>(session: &mut Session, command: &'static str) -> Result<T, Error> {
    let answer = session.execute(command, json!({}))?;
    serde_json::from_value(answer).map_err(|error| Error::Answer { command, error })
}

/// Asks for all of it.
pub fn take(session: &mut Session) -> Result<Sample, Error> {
    let status: Status = ask(session, "query-status")?;
    let blocks: Vec<Block> = ask(session, "query-block")?;
    let stats: Vec<BlockStats> = match ask(session, "query-blockstats") {
        // A VM that does not count has no numbers to show; its loops are still worth a look.
        Err(Error::Session(session::Error::Refused { .. })) => Vec::new(),
        stats => stats?,
    };
    let disks = blocks.into_iter().map(|block| {
        let mut loops = Vec::new();
        for mapping in block.iothread_vq_mapping {
            let id = mapping.iothread.unwrap_or_else(|| "main".to_owned());
            if !loops.contains(&id) {
                loops.push(id);
            }
        }
        let counted = stats.iter().find(|stats| stats.device == block.device);
        Disk {
            id: block.device,
            loops,
            stats: counted.map(|counted| counted.stats).unwrap_or_default(),
        }
    });
    Ok(Sample {
        status: status.status,
        disks: disks.collect(),
        vcpus: ask(session, "query-cpus-fast")?,
        loops: ask(session, "x-query-polling")?,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::qmp::testing::TestMachine;
    use crate::qmp::{Listener, Monitor, Server, event};

    #[test]
    fn a_sample_has_loops_disks_and_which_runs_which() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let (sink, queue) = event::channel().unwrap();
        let monitor = Monitor::new(Arc::new(TestMachine::new(sink)));
        let _server = Server::start(Listener::bind(&path).unwrap(), monitor, queue).unwrap();
        let sample = take(&mut Session::connect(&path).unwrap()).unwrap();
        assert_eq!(sample.status, "running");
        let loops: Vec<&str> = sample.loops.iter().map(|one| one.id.as_str()).collect();
        assert_eq!(loops, ["io0", "io1", "main"]);
        assert_eq!(sample.disks[0].loops, ["io0", "io1"]);
        assert_eq!(sample.disks[1].loops, ["main"]);
        assert_eq!(sample.disks[1].stats.rd_operations, 3);
        assert_eq!(sample.vcpus.len(), 2);
    }
}
