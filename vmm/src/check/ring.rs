//! Whether event loops and disks get io_uring, and with which features; Linux AIO.

use iothread::io_uring::{IoUring, Probe, opcode};
use iothread::{Context, ContextConfig, MonitorKind};

use super::host::Host;
use super::{Finding, Verdict};

/// Requests that loops and disks put on a ring.
const REQUESTS: [(&str, u8); 12] = [
    ("READ", opcode::Read::CODE),
    ("WRITE", opcode::Write::CODE),
    ("READV", opcode::Readv::CODE),
    ("WRITEV", opcode::Writev::CODE),
    ("READ_FIXED", opcode::ReadFixed::CODE),
    ("WRITE_FIXED", opcode::WriteFixed::CODE),
    ("FSYNC", opcode::Fsync::CODE),
    ("FALLOCATE", opcode::Fallocate::CODE),
    ("POLL_ADD", opcode::PollAdd::CODE),
    ("POLL_REMOVE", opcode::PollRemove::CODE),
    ("TIMEOUT", opcode::Timeout::CODE),
    ("ASYNC_CANCEL", opcode::AsyncCancel::CODE),
];

pub fn look(host: &Host) -> Vec<Finding> {
    let mut findings = vec![event_loop()];
    findings.extend(ring());
    findings.push(linux_aio(host));
    findings
}

/// Makes an event loop as iothreads have it by default.
fn event_loop() -> Finding {
    let with = |monitor| {
        let config = ContextConfig {
            monitor,
            ..ContextConfig::default()
        };
        Context::new(config).map(drop)
    };
    match (with(MonitorKind::IoUring), with(MonitorKind::Epoll)) {
        (Ok(()), _) => Finding::new(Verdict::Good, "event loops wait on io_uring"),
        (Err(error), Ok(())) => Finding::new(
            Verdict::Missing,
            format!("event loops fall back to epoll: {error}"),
        ),
        (Err(_), Err(error)) => Finding::new(
            Verdict::Fatal,
            format!("no event loop can be made: {error}"),
        ),
    }
}

/// What the ring can do, if there is one.
fn ring() -> Vec<Finding> {
    let Ok(ring) = IoUring::new(4) else {
        let text = "disks use Linux AIO or threads (engine=native, engine=threads)";
        return vec![Finding::new(Verdict::Missing, text)];
    };
    let mut probe = Probe::new();
    let mut findings = Vec::new();
    if ring.submitter().register_probe(&mut probe).is_ok() {
        let lacking = REQUESTS
            .iter()
            .filter(|(_, code)| !probe.is_supported(*code));
        let lacking: Vec<&str> = lacking.map(|(name, _)| *name).collect();
        findings.push(match lacking.as_slice() {
            [] => Finding::new(Verdict::Good, "io_uring has all requests that disks use"),
            names => Finding::new(
                Verdict::Missing,
                format!("io_uring lacks {}; use a newer kernel", names.join(", ")),
            ),
        });
    }
    let modes = [
        (
            "SINGLE_ISSUER",
            IoUring::builder().setup_single_issuer().build(4),
        ),
        (
            "COOP_TASKRUN",
            IoUring::builder().setup_coop_taskrun().build(4),
        ),
        (
            "DEFER_TASKRUN",
            IoUring::builder()
                .setup_single_issuer()
                .setup_defer_taskrun()
                .build(4),
        ),
    ];
    let (there, lacking): (Vec<_>, Vec<_>) = modes.into_iter().partition(|(_, made)| made.is_ok());
    let names = |modes: Vec<(&'static str, _)>| {
        let names: Vec<&str> = modes
            .into_iter()
            .map(|(name, _): (_, std::io::Result<IoUring>)| name)
            .collect();
        names.join(", ")
    };
    findings.push(match lacking.is_empty() {
        true => Finding::new(Verdict::Good, format!("io_uring has {}", names(there))),
        false => Finding::new(
            Verdict::Slow,
            format!("io_uring lacks {}, which spare interruptions of a busy loop; use Linux 6.1 or newer", names(lacking)),
        ),
    });
    findings
}

fn linux_aio(host: &Host) -> Finding {
    let (used, most) = (
        host.number("proc/sys/fs/aio-nr"),
        host.number("proc/sys/fs/aio-max-nr"),
    );
    match (used, most) {
        (Some(used), Some(most)) if used < most => Finding::new(
            Verdict::Good,
            format!(
                "Linux AIO (engine=native): {} of {most} requests free on this host",
                most - used
            ),
        ),
        (Some(_), Some(most)) => Finding::new(
            Verdict::Missing,
            format!(
                "Linux AIO (engine=native): all {most} requests are taken; raise fs.aio-max-nr"
            ),
        ),
        _ => Finding::new(
            Verdict::Missing,
            "Linux AIO (engine=native): the kernel does not have it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::host::Made;
    use super::*;

    #[test]
    fn linux_aio_is_there_full_or_not_there() {
        let look = |files: &[(&str, &str)]| linux_aio(&Made::of(files).host);
        let (used, most) = ("proc/sys/fs/aio-nr", "proc/sys/fs/aio-max-nr");
        let free = look(&[(used, "6"), (most, "65536")]);
        assert_eq!(free.verdict, Verdict::Good);
        assert!(free.text.contains("65530 of 65536"), "{}", free.text);
        let full = look(&[(used, "65536"), (most, "65536")]);
        assert_eq!(full.verdict, Verdict::Missing);
        assert!(full.text.contains("fs.aio-max-nr"), "{}", full.text);
        assert_eq!(look(&[]).verdict, Verdict::Missing);
    }
}
