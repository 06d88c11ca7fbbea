//! What the monitor says about itself: version, commands, types.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::error::Error;
use super::super::message::VersionInfo;
use super::{Empty, Monitor};
use crate::metrics;

/// Arguments of `qmp_capabilities`, which the connection itself answers.
#[derive(Debug, Deserialize, JsonSchema)]
struct Negotiation {
    /// Capabilities to enable; there are none.
    #[serde(default, rename = "enable")]
    _enable: Vec<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct CommandInfo {
    name: &'static str,
}

pub(super) fn register(monitor: &mut Monitor) {
    monitor.offer("qmp_capabilities", negotiated);
    monitor.offer("query-version", query_version);
    monitor.offer("query-commands", query_commands);
    monitor.offer("query-qmp-schema", query_qmp_schema);
    monitor.offer("x-query-metrics", x_query_metrics);
}

fn negotiated(_: &Monitor, _: Negotiation) -> Result<Empty, Error> {
    Err(Error::AlreadyNegotiated)
}

fn query_version(_: &Monitor, _: Empty) -> Result<VersionInfo, Error> {
    Ok(VersionInfo::ours())
}

fn query_commands(monitor: &Monitor, _: Empty) -> Result<Vec<CommandInfo>, Error> {
    let names = monitor.commands.iter().map(|command| command.name);
    Ok(names.map(|name| CommandInfo { name }).collect())
}

fn query_qmp_schema(monitor: &Monitor, _: Empty) -> Result<Vec<Value>, Error> {
    let commands = monitor.commands.iter().map(|command| {
        json!({
            "name": command.name,
            "meta-type": "command",
            "arg-type": command.arguments,
            "ret-type": command.returns,
        })
    });
    let events = monitor
        .events
        .iter()
        .map(|(name, data)| json!({"name": name, "meta-type": "event", "arg-type": data}));
    Ok(commands
        .chain(events)
        .chain(monitor.types.describe())
        .collect())
}

/// All numbers in Prometheus' text format.
fn x_query_metrics(monitor: &Monitor, _: Empty) -> Result<String, Error> {
    Ok(metrics::render(&*monitor.machine))
}
