//! `human-monitor-command`: the few commands of QEMU's human monitor that people and scripts use for iothreads.

use std::fmt::Write;

use schemars::JsonSchema;
use serde::Deserialize;

use super::super::error::Error;
use super::super::machine::RunState;
use super::iothread::query_iothreads;
use super::{Empty, Monitor};

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct CommandLine {
    command_line: String,
    /// Which vCPU the command concerns; none of ours concerns one.
    #[serde(default, rename = "cpu-index")]
    _cpu_index: Option<i64>,
}

pub(super) fn register(monitor: &mut Monitor) {
    monitor.offer("human-monitor-command", human_monitor_command);
}

fn human_monitor_command(monitor: &Monitor, arguments: CommandLine) -> Result<String, Error> {
    let words: Vec<&str> = arguments.command_line.split_whitespace().collect();
    match words.as_slice() {
        [] => Ok(String::new()),
        ["info", "iothreads"] => info_iothreads(monitor),
        ["info", "status"] => Ok(info_status(monitor.machine.run_state())),
        ["info", "version"] => Ok(format!("{}\r\n", env!("CARGO_PKG_VERSION"))),
        ["help" | "?"] | ["help" | "?", "info"] | ["info"] => Ok(HELP.to_owned()),
        _ => Ok(format!("unknown command: '{}'\r\n", arguments.command_line)),
    }
}

const HELP: &str = "info iothreads  -- show iothreads\r\n\
                    info status  -- show the current VM status (running|paused)\r\n\
                    info version  -- show the version of pollux\r\n";

/// In QEMU's layout, line ends included.
fn info_iothreads(monitor: &Monitor) -> Result<String, Error> {
    let mut text = String::new();
    for info in query_iothreads(monitor, Empty {})? {
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "{}:\r\n  thread_id={}\r\n  poll-max-ns={}\r\n  poll-grow={}\r\n  poll-shrink={}\r\n  \
             poll-weight={}\r\n  aio-max-batch={}\r\n",
            info.id,
            info.thread_id,
            info.poll_max_ns,
            info.poll_grow,
            info.poll_shrink,
            info.poll_weight,
            info.aio_max_batch
        );
    }
    Ok(text)
}

fn info_status(state: RunState) -> String {
    let (state, reason) = match state {
        RunState::Running => ("running", ""),
        RunState::Paused => ("paused", ""),
        RunState::Prelaunch => ("paused", " (prelaunch)"),
        RunState::IoError => ("paused", " (io-error)"),
        RunState::GuestPanicked => ("paused", " (guest-panicked)"),
        RunState::Shutdown => ("paused", " (shutdown)"),
    };
    format!("VM status: {state}{reason}\r\n")
}
