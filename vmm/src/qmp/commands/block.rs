//! The disks: what they are, what they have done, and changing them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::error::Error;
use super::super::machine::{Ability, DiskView, IoStatus};
use super::{Empty, Monitor};
use crate::config::Cache;

/// The queues of a disk that one iothread runs, as QEMU's virtio-blk says it. Without an iothread: the main loop.
#[derive(Debug, Serialize, JsonSchema)]
struct IoThreadVirtQueueMapping {
    #[serde(skip_serializing_if = "Option::is_none")]
    iothread: Option<String>,
    vqs: Vec<usize>,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct ImageInfo {
    filename: String,
    format: &'static str,
    virtual_size: u64,
    dirty_flag: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct CacheInfo {
    writeback: bool,
    direct: bool,
    no_flush: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
struct BlockDeviceInfo {
    file: String,
    #[serde(rename = "node-name")]
    node_name: String,
    ro: bool,
    drv: &'static str,
    backing_file_depth: u32,
    active: bool,
    encrypted: bool,
    detect_zeroes: &'static str,
    bps: u64,
    bps_rd: u64,
    bps_wr: u64,
    iops: u64,
    iops_rd: u64,
    iops_wr: u64,
    image: ImageInfo,
    cache: CacheInfo,
    write_threshold: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct BlockInfo {
    device: String,
    qdev: String,
    #[serde(rename = "type")]
    kind: &'static str,
    removable: bool,
    locked: bool,
    inserted: BlockDeviceInfo,
    io_status: IoStatus,
    iothread_vq_mapping: Vec<IoThreadVirtQueueMapping>,
}

/// Sizes are in bytes. As in QEMU, writes of zeroes count among the writes. Times are not measured: two clock readings a
/// request would cost more than what they tell.
#[derive(Debug, Serialize, JsonSchema)]
struct BlockDeviceStats {
    rd_bytes: u64,
    wr_bytes: u64,
    unmap_bytes: u64,
    rd_operations: u64,
    wr_operations: u64,
    flush_operations: u64,
    unmap_operations: u64,
    wr_highest_offset: u64,
    /// Requests are not merged: always 0.
    rd_merged: u64,
    wr_merged: u64,
    unmap_merged: u64,
    failed_rd_operations: u64,
    failed_wr_operations: u64,
    failed_flush_operations: u64,
    failed_unmap_operations: u64,
    /// Whether failed operations count among the operations: they do not.
    account_failed: bool,
    account_invalid: bool,
    /// Ours: refused before anything was done, of any kind.
    #[serde(rename = "x-invalid_operations")]
    invalid_operations: u64,
    /// Ours: fdatasync calls, kicks of the guest that woke a queue, interrupts raised.
    #[serde(rename = "x-syncs")]
    syncs: u64,
    #[serde(rename = "x-kicks")]
    kicks: u64,
    #[serde(rename = "x-interrupts")]
    interrupts: u64,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct BlockStats {
    device: String,
    qdev: String,
    node_name: String,
    stats: BlockDeviceStats,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct Resize {
    #[serde(default)]
    device: Option<String>,
    #[serde(default)]
    node_name: Option<String>,
    /// In bytes.
    size: i64,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ChangeIoThread {
    device: String,
    /// The iothread that runs all its queues from now on; none or null for the main loop.
    #[serde(default)]
    iothread: Option<String>,
}

pub(super) fn register(monitor: &mut Monitor) {
    monitor.offer("query-block", query_block);
    monitor.offer_if(Ability::DiskStats, "query-blockstats", query_blockstats);
    monitor.offer_if(Ability::ResizeDisk, "block_resize", block_resize);
    monitor.offer_if(
        Ability::MoveDisk,
        "blockdev-change-iothread",
        blockdev_change_iothread,
    );
}

fn qdev(disk: &DiskView) -> String {
    format!("/machine/peripheral/{}", disk.id)
}

fn query_block(monitor: &Monitor, _: Empty) -> Result<Vec<BlockInfo>, Error> {
    let disks = monitor.machine.disks();
    Ok(disks.iter().map(block_info).collect())
}

fn block_info(disk: &DiskView) -> BlockInfo {
    let file = disk.path.display().to_string();
    BlockInfo {
        device: disk.id.clone(),
        qdev: qdev(disk),
        kind: "unknown",
        removable: false,
        locked: false,
        inserted: BlockDeviceInfo {
            file: file.clone(),
            node_name: disk.id.clone(),
            ro: disk.readonly,
            drv: "raw",
            backing_file_depth: 0,
            active: true,
            encrypted: false,
            detect_zeroes: "off",
            // There are no limits.
            bps: 0,
            bps_rd: 0,
            bps_wr: 0,
            iops: 0,
            iops_rd: 0,
            iops_wr: 0,
            image: ImageInfo {
                filename: file,
                format: "raw",
                virtual_size: disk.size_bytes,
                dirty_flag: false,
            },
            cache: CacheInfo {
                writeback: disk.cache != Cache::Writethrough,
                direct: disk.direct,
                no_flush: disk.cache == Cache::Unsafe,
            },
            write_threshold: 0,
        },
        io_status: disk.io_status,
        iothread_vq_mapping: mapping(&disk.queues),
    }
}

/// The queues by iothread, in the order in which the iothreads first occur.
fn mapping(queues: &[Option<String>]) -> Vec<IoThreadVirtQueueMapping> {
    let mut mapping: Vec<IoThreadVirtQueueMapping> = Vec::new();
    for (queue, iothread) in queues.iter().enumerate() {
        match mapping.iter_mut().find(|item| &item.iothread == iothread) {
            Some(item) => item.vqs.push(queue),
            None => mapping.push(IoThreadVirtQueueMapping {
                iothread: iothread.clone(),
                vqs: vec![queue],
            }),
        }
    }
    mapping
}

fn query_blockstats(monitor: &Monitor, _: Empty) -> Result<Vec<BlockStats>, Error> {
    let disks = monitor.machine.disks();
    Ok(disks.iter().map(block_stats).collect())
}

fn block_stats(disk: &DiskView) -> BlockStats {
    let stats = &disk.stats;
    BlockStats {
        device: disk.id.clone(),
        qdev: qdev(disk),
        node_name: disk.id.clone(),
        stats: BlockDeviceStats {
            rd_bytes: stats.rd_bytes,
            wr_bytes: stats.wr_bytes + stats.zeroes_bytes,
            unmap_bytes: stats.unmap_bytes,
            rd_operations: stats.rd_operations,
            wr_operations: stats.wr_operations + stats.zeroes_operations,
            flush_operations: stats.flush_operations,
            unmap_operations: stats.unmap_operations,
            wr_highest_offset: stats.wr_highest_offset,
            rd_merged: 0,
            wr_merged: 0,
            unmap_merged: 0,
            failed_rd_operations: stats.failed_rd_operations,
            failed_wr_operations: stats.failed_wr_operations,
            failed_flush_operations: stats.failed_flush_operations,
            failed_unmap_operations: stats.failed_unmap_operations,
            account_failed: false,
            account_invalid: false,
            invalid_operations: stats.invalid_operations,
            syncs: stats.syncs,
            kicks: stats.kicks,
            interrupts: stats.interrupts,
        },
    }
}

fn block_resize(monitor: &Monitor, arguments: Resize) -> Result<Empty, Error> {
    let device = arguments.device.unwrap_or_default();
    let node = arguments.node_name.unwrap_or_default();
    let named = |disk: &DiskView| match (device.as_str(), node.as_str()) {
        ("", node) => disk.id == node,
        (device, "") => disk.id == device,
        // One is enough; of two, both must mean the same disk.
        (device, node) => disk.id == device && disk.id == node,
    };
    let disks = monitor.machine.disks();
    let disk = disks.iter().find(|disk| named(disk)).ok_or_else(|| {
        Error::failed(format!(
            "Cannot find device='{device}' nor node-name='{node}'"
        ))
    })?;
    let size_bytes = u64::try_from(arguments.size)
        .map_err(|_| Error::failed("Parameter 'size' expects a >0 size"))?;
    if disk.readonly {
        return Err(Error::failed("Image is read-only"));
    }
    let resized = monitor.machine.resize_disk(&disk.id, size_bytes);
    resized.map(|()| Empty {})
}

fn blockdev_change_iothread(monitor: &Monitor, arguments: ChangeIoThread) -> Result<Empty, Error> {
    let disks = monitor.machine.disks();
    if !disks.iter().any(|disk| disk.id == arguments.device) {
        return Err(Error::DeviceNotFound(arguments.device));
    }
    let iothread = arguments.iothread.as_deref();
    let known = monitor.machine.iothreads();
    if let Some(id) = iothread
        && !known.iter().any(|view| view.id == id)
    {
        return Err(Error::failed(format!(
            "there is no iothread '{id}'; add it with object-add first"
        )));
    }
    let moved = monitor.machine.move_disk(&arguments.device, iothread);
    moved.map(|()| Empty {})
}
