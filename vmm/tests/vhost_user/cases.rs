//! Messages that no front end should send, and when.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use vm_memory::MmapRegion;

use crate::front::*;

/// How far a front end has come when it sends its bad message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stage {
    Connected,
    Negotiated,
    Shared,
    Running,
}

/// A name, when it is sent, the request, its payload and descriptors.
pub type Case = (&'static str, Stage, u32, Vec<u8>, Vec<RawFd>);

/// Descriptors of all kinds.
pub struct Files {
    ram: Arc<MmapRegion>,
    page: File,
    readonly: File,
    pipe: (std::io::PipeReader, std::io::PipeWriter),
    event: OwnedFd,
}

impl Files {
    pub fn new() -> Files {
        let page = tempfile::tempfile().unwrap();
        page.set_len(0x1000).unwrap();
        Files {
            ram: crate::driver::shared_memory(RAM_BYTES as usize),
            page,
            readonly: File::open("/proc/self/exe").unwrap(),
            pipe: std::io::pipe().unwrap(),
            event: eventfd(),
        }
    }
}

/// All of them.
pub fn cases(files: &Files) -> Vec<Case> {
    use Stage::*;
    let fd = files.ram.file_offset().unwrap().file().as_raw_fd();
    let file = files.page.as_raw_fd();
    let readonly = files.readonly.as_raw_fd();
    let pipe = files.pipe.0.as_raw_fd();
    let event = files.event.as_raw_fd();
    let page = [0, 0x1000, USER, 0];
    let region = |region: [u64; 4]| words(&[&[0], &region[..]].concat());
    let misaligned = |at: usize| {
        let mut payload = Front::addresses(0);
        payload[8 + at * 8] += 1;
        payload
    };
    let inflight = |size: u64, offset: u64, queues: u16, queue_size: u16| {
        let mut payload = words(&[size, offset]);
        payload.extend(queues.to_ne_bytes());
        payload.extend(queue_size.to_ne_bytes());
        payload.extend([0; 4]);
        payload
    };
    let config = |offset: u32, size: u32| [offset, size, 0].map(u32::to_ne_bytes).concat();
    vec![
        ("no such request", Connected, 99, vec![], vec![]),
        ("request 0", Connected, 0, vec![], vec![]),
        (
            "features that were not offered",
            Connected,
            SET_FEATURES,
            words(&[1 << 34]),
            vec![],
        ),
        (
            "protocol features not offered",
            Connected,
            SET_PROTOCOL_FEATURES,
            words(&[1 << 1]),
            vec![],
        ),
        (
            "a short payload",
            Connected,
            SET_FEATURES,
            vec![1, 2],
            vec![],
        ),
        (
            "a long payload",
            Connected,
            SET_FEATURES,
            words(&[0, 0]),
            vec![],
        ),
        (
            "a descriptor that nobody asked for",
            Connected,
            SET_FEATURES,
            words(&[0]),
            vec![fd],
        ),
        (
            "an order before its feature",
            Connected,
            SET_VRING_ENABLE,
            state(0, 1),
            vec![],
        ),
        (
            "inflight before its feature",
            Connected,
            GET_INFLIGHT_FD,
            inflight(0, 0, 1, 128),
            vec![],
        ),
        ("no regions", Negotiated, SET_MEM_TABLE, table(&[]), vec![]),
        (
            "a region without its file",
            Negotiated,
            SET_MEM_TABLE,
            table(&[page]),
            vec![],
        ),
        (
            "two regions, one file",
            Negotiated,
            SET_MEM_TABLE,
            table(&[page, [0x1000, 0x1000, 0, 0]]),
            vec![fd],
        ),
        (
            "one region, two files",
            Negotiated,
            SET_MEM_TABLE,
            table(&[page]),
            vec![fd, fd],
        ),
        (
            "33 regions",
            Negotiated,
            SET_MEM_TABLE,
            table(&vec![page; 33]),
            vec![fd],
        ),
        (
            "regions that overlap",
            Negotiated,
            SET_MEM_TABLE,
            table(&[page, [0x800, 0x1000, 0, 0]]),
            vec![fd, fd],
        ),
        (
            "an empty region",
            Negotiated,
            SET_MEM_TABLE,
            table(&[[0, 0, USER, 0]]),
            vec![fd],
        ),
        (
            "a region that wraps",
            Negotiated,
            SET_MEM_TABLE,
            table(&[[u64::MAX - 0xfff, 0x2000, USER, 0]]),
            vec![fd],
        ),
        (
            "a file that is too short",
            Negotiated,
            SET_MEM_TABLE,
            table(&[[0, 0x2000, USER, 0]]),
            vec![file],
        ),
        (
            "an offset beyond the file",
            Negotiated,
            SET_MEM_TABLE,
            table(&[[0, 0x1000, USER, 0x1000]]),
            vec![file],
        ),
        (
            "an offset within a page",
            Negotiated,
            SET_MEM_TABLE,
            table(&[[0, 0x800, USER, 0x10]]),
            vec![file],
        ),
        (
            "a pipe as memory",
            Negotiated,
            SET_MEM_TABLE,
            table(&[page]),
            vec![pipe],
        ),
        (
            "an eventfd as memory",
            Negotiated,
            SET_MEM_TABLE,
            table(&[page]),
            vec![event],
        ),
        (
            "a file that cannot be written",
            Negotiated,
            SET_MEM_TABLE,
            table(&[page]),
            vec![readonly],
        ),
        (
            "the whole address space",
            Negotiated,
            SET_MEM_TABLE,
            table(&[[0, u64::MAX, 0, 0]]),
            vec![fd],
        ),
        (
            "added: overlaps",
            Shared,
            ADD_MEM_REG,
            region([0x1000, 0x1000, 0, 0]),
            vec![fd],
        ),
        (
            "added: wraps",
            Shared,
            ADD_MEM_REG,
            region([u64::MAX - 0xfff, 0x2000, 0, 0]),
            vec![fd],
        ),
        (
            "added: empty",
            Shared,
            ADD_MEM_REG,
            region([1 << 40, 0, 0, 0]),
            vec![fd],
        ),
        (
            "added: short file",
            Shared,
            ADD_MEM_REG,
            region([1 << 40, 0x2000, 0, 0]),
            vec![file],
        ),
        (
            "added: no file",
            Shared,
            ADD_MEM_REG,
            region([1 << 40, 0x1000, 0, 0]),
            vec![],
        ),
        (
            "removed: unknown",
            Shared,
            REM_MEM_REG,
            region([1 << 40, 0x1000, 0, 0]),
            vec![],
        ),
        (
            "added under a queue: overlaps",
            Running,
            ADD_MEM_REG,
            region([0x1000, 0x1000, 0, 0]),
            vec![fd],
        ),
        (
            "all memory removed under a queue, then wrong",
            Running,
            SET_MEM_TABLE,
            table(&[[1 << 40, 0x1000, 0, 0]]),
            vec![fd],
        ),
        ("queue size 0", Shared, SET_VRING_NUM, state(0, 0), vec![]),
        ("queue size 3", Shared, SET_VRING_NUM, state(0, 3), vec![]),
        (
            "queue size 2048",
            Shared,
            SET_VRING_NUM,
            state(0, 2048),
            vec![],
        ),
        (
            "queue size 65536",
            Shared,
            SET_VRING_NUM,
            state(0, 65536),
            vec![],
        ),
        (
            "queue size 65664, 128 in 16 bits",
            Shared,
            SET_VRING_NUM,
            state(0, 65664),
            vec![],
        ),
        ("queue 2 of 2", Shared, SET_VRING_NUM, state(2, 128), vec![]),
        (
            "queue -1",
            Shared,
            SET_VRING_ADDR,
            Front::addresses(u32::MAX),
            vec![],
        ),
        (
            "base of queue 7",
            Shared,
            SET_VRING_BASE,
            state(7, 0),
            vec![],
        ),
        (
            "base of 17 bits",
            Shared,
            SET_VRING_BASE,
            state(0, 65536),
            vec![],
        ),
        (
            "index of queue 9",
            Shared,
            GET_VRING_BASE,
            state(9, 0),
            vec![],
        ),
        (
            "table misaligned",
            Shared,
            SET_VRING_ADDR,
            misaligned(0),
            vec![],
        ),
        (
            "used ring misaligned",
            Shared,
            SET_VRING_ADDR,
            misaligned(1),
            vec![],
        ),
        (
            "available ring misaligned",
            Shared,
            SET_VRING_ADDR,
            misaligned(2),
            vec![],
        ),
        (
            "kick of queue 200",
            Shared,
            SET_VRING_KICK,
            words(&[200]),
            vec![event],
        ),
        (
            "a kick without its eventfd",
            Shared,
            SET_VRING_KICK,
            words(&[0]),
            vec![],
        ),
        (
            "no kick at all",
            Shared,
            SET_VRING_KICK,
            words(&[0x100]),
            vec![],
        ),
        (
            "a kick that is a file",
            Shared,
            SET_VRING_KICK,
            words(&[0]),
            vec![file],
        ),
        (
            "a kick that is a pipe",
            Shared,
            SET_VRING_KICK,
            words(&[0]),
            vec![pipe],
        ),
        (
            "a call that is a file",
            Shared,
            SET_VRING_CALL,
            words(&[0]),
            vec![file],
        ),
        (
            "two calls",
            Shared,
            SET_VRING_CALL,
            words(&[0]),
            vec![event, event],
        ),
        (
            "an error that is a pipe",
            Shared,
            SET_VRING_ERR,
            words(&[0]),
            vec![pipe],
        ),
        (
            "enabled twice over",
            Shared,
            SET_VRING_ENABLE,
            state(0, 2),
            vec![],
        ),
        (
            "enabled: queue 5",
            Shared,
            SET_VRING_ENABLE,
            state(5, 1),
            vec![],
        ),
        (
            "config: nothing",
            Negotiated,
            SET_CONFIG,
            config(0, 0),
            vec![],
        ),
        (
            "config: beyond 4096",
            Negotiated,
            SET_CONFIG,
            [config(4090, 8), vec![0; 8]].concat(),
            vec![],
        ),
        (
            "config: wraps",
            Negotiated,
            SET_CONFIG,
            config(u32::MAX, 8),
            vec![],
        ),
        (
            "config: size is a lie",
            Negotiated,
            SET_CONFIG,
            [config(0, 60), vec![0; 4]].concat(),
            vec![],
        ),
        (
            "inflight of three queues",
            Negotiated,
            GET_INFLIGHT_FD,
            inflight(0, 0, 3, 128),
            vec![],
        ),
        (
            "inflight of queues of 4096",
            Negotiated,
            GET_INFLIGHT_FD,
            inflight(0, 0, 1, 4096),
            vec![],
        ),
        (
            "inflight of none",
            Negotiated,
            GET_INFLIGHT_FD,
            inflight(0, 0, 0, 0),
            vec![],
        ),
        (
            "inflight without its file",
            Negotiated,
            SET_INFLIGHT_FD,
            inflight(8192, 0, 1, 128),
            vec![],
        ),
        (
            "inflight too small",
            Negotiated,
            SET_INFLIGHT_FD,
            inflight(64, 0, 1, 128),
            vec![fd],
        ),
        (
            "inflight: short file",
            Negotiated,
            SET_INFLIGHT_FD,
            inflight(1 << 20, 0, 2, 1024),
            vec![file],
        ),
        (
            "inflight: offset wraps",
            Negotiated,
            SET_INFLIGHT_FD,
            inflight(8192, u64::MAX, 1, 128),
            vec![fd],
        ),
        (
            "inflight: while a queue runs",
            Running,
            SET_INFLIGHT_FD,
            inflight(8192, 0, 1, 128),
            vec![fd],
        ),
        (
            "the size of a running queue",
            Running,
            SET_VRING_NUM,
            state(0, 64),
            vec![],
        ),
        (
            "the addresses of a running queue",
            Running,
            SET_VRING_ADDR,
            Front::addresses(0),
            vec![],
        ),
        (
            "the index of a running queue",
            Running,
            SET_VRING_BASE,
            state(0, 1),
            vec![],
        ),
        (
            "features of a running queue",
            Running,
            SET_FEATURES,
            words(&[0]),
            vec![],
        ),
    ]
}
