//! What the loops and the disks did, as a text at the end of a run.

use std::fmt::Write as _;

use devices::virtio::block::{BlockHandle, BlockStats};
use iothread::{Context, Stats};

use crate::qmp::machine::IoThreadView;

/// A paragraph for each loop. To be asked for while the disks are attached: a handler's numbers go with it.
pub fn loops(main: &Context, iothreads: &[IoThreadView]) -> String {
    let mut text = String::new();
    for iothread in iothreads {
        let title = format!("iothread {}", iothread.id);
        text.push_str(&loop_report(&title, &iothread.remote.stats()));
    }
    text.push_str(&loop_report("main loop", &main.remote().stats()));
    text
}

/// A line for each disk.
pub fn disks(disks: &[BlockHandle]) -> String {
    let disks = disks.iter();
    disks
        .map(|disk| disk_report(disk.id(), &disk.stats()))
        .collect()
}

fn disk_report(id: &str, stats: &BlockStats) -> String {
    let failed = stats.failed_rd_operations
        + stats.failed_wr_operations
        + stats.failed_flush_operations
        + stats.failed_unmap_operations;
    format!(
        "disk {id}: {} reads of {} bytes, {} writes of {} bytes, {} flushes, {failed} failed, {} refused; {} kicks, {} interrupts\n",
        stats.rd_operations,
        stats.rd_bytes,
        stats.wr_operations,
        stats.wr_bytes,
        stats.flush_operations,
        stats.invalid_operations,
        stats.kicks,
        stats.interrupts
    )
}

fn loop_report(title: &str, stats: &Stats) -> String {
    let mut text = format!(
        "{title}: {} iterations, {} blocks, {} wake-ups, {} requests, {} completions, {} io_uring_enter\n",
        stats.iterations,
        stats.blocks,
        stats.wakeups,
        stats.submissions,
        stats.completions,
        stats.enters
    );
    if stats.poll_hits + stats.poll_misses > 0 {
        let windows = &stats.window_histogram;
        let _ = writeln!(
            text,
            "  polling: {} hits, {} misses, {} us polled, {} us in vain; window {} ns (p50 {}, p90 {}, p99 {})",
            stats.poll_hits,
            stats.poll_misses,
            stats.poll_ns / 1000,
            stats.poll_vain_ns / 1000,
            stats.window_ns,
            windows.percentile(50.0),
            windows.percentile(90.0),
            windows.percentile(99.0)
        );
    }
    if let Some(auto) = &stats.experiment {
        let _ = writeln!(
            text,
            "  auto: holds {} ns; score {:.3}; {} epochs, {} scans, {} trials, {} switches",
            auto.incumbent_ns, auto.score, auto.epochs, auto.scans, auto.trials, auto.switches
        );
    }
    let busy = stats.handlers.iter().filter(|handler| handler.events > 0);
    for handler in busy {
        let _ = writeln!(
            text,
            "  {:<24} {:>10} events {:>10} by polling {:>8} ns{}",
            handler.name,
            handler.events,
            handler.poll_hits,
            handler.ns,
            if handler.polled { ", polled" } else { "" }
        );
    }
    text
}
