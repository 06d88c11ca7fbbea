//! Switching trace events, with QEMU's names and shapes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::error::Error;
use super::{Empty, Monitor};
use crate::trace::{EVENTS, matches, select};

/// Whether an event is recorded.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum TraceEventState {
    /// It cannot be: the VM was started without a trace file.
    Unavailable,
    /// No.
    Disabled,
    /// Yes.
    Enabled,
}

#[derive(Debug, Serialize, JsonSchema)]
struct TraceEventInfo {
    name: &'static str,
    state: TraceEventState,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct TraceEventName {
    name: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct TraceEventSwitch {
    name: String,
    enable: bool,
    #[serde(default)]
    ignore_unavailable: bool,
}

pub(super) fn register(monitor: &mut Monitor) {
    monitor.offer("trace-event-get-state", trace_event_get_state);
    monitor.offer("trace-event-set-state", trace_event_set_state);
}

fn failed(error: crate::trace::Error) -> Error {
    Error::failed(error.to_string())
}

fn trace_event_get_state(
    monitor: &Monitor,
    event: TraceEventName,
) -> Result<Vec<TraceEventInfo>, Error> {
    select(&event.name).map_err(failed)?;
    let mask = monitor.machine.tracer().map(|tracer| tracer.mask());
    let events = EVENTS.into_iter().enumerate();
    let named = events.filter(|(_, name)| matches(&event.name, name));
    let state = |place: usize| match mask {
        None => TraceEventState::Unavailable,
        Some(mask) if mask & 1 << place != 0 => TraceEventState::Enabled,
        Some(_) => TraceEventState::Disabled,
    };
    Ok(named
        .map(|(place, name)| TraceEventInfo {
            name,
            state: state(place),
        })
        .collect())
}

fn trace_event_set_state(monitor: &Monitor, switch: TraceEventSwitch) -> Result<Empty, Error> {
    let events = select(&switch.name).map_err(failed)?;
    match monitor.machine.tracer() {
        Some(tracer) => tracer.set(&switch.name, switch.enable).map_err(failed)?,
        None if events == 0 || switch.ignore_unavailable => {}
        None => {
            return Err(Error::failed(format!(
                "event \"{}\" cannot be recorded: the VM was started without a trace file; start it with --trace file=FILE",
                switch.name
            )));
        }
    }
    Ok(Empty {})
}
