//! Running and stopping the guest.

use schemars::JsonSchema;
use serde::Serialize;

use super::super::error::Error;
use super::super::machine::{Ability, RunState};
use super::{Empty, Monitor};
use crate::threads::thread_cpu_ns;

#[derive(Debug, Serialize, JsonSchema)]
struct StatusInfo {
    running: bool,
    status: RunState,
}

/// A vCPU's place in the topology that the guest sees.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct CpuProperties {
    socket_id: u32,
    core_id: u32,
    thread_id: u32,
}

#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct CpuInfoFast {
    cpu_index: u32,
    qom_path: String,
    thread_id: i32,
    props: CpuProperties,
    /// CPU time of its thread: ours, QEMU does not tell it.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_ns: Option<u64>,
    target: &'static str,
}

pub(super) fn register(monitor: &mut Monitor) {
    monitor.offer("query-status", query_status);
    monitor.offer("query-cpus-fast", query_cpus_fast);
    monitor.offer_if(Ability::Pause, "stop", stop);
    monitor.offer_if(Ability::Pause, "cont", cont);
    monitor.offer_if(Ability::Powerdown, "system_powerdown", system_powerdown);
    monitor.offer("quit", quit);
}

fn query_status(monitor: &Monitor, _: Empty) -> Result<StatusInfo, Error> {
    let status = monitor.machine.run_state();
    Ok(StatusInfo {
        running: status == RunState::Running,
        status,
    })
}

fn query_cpus_fast(monitor: &Monitor, _: Empty) -> Result<Vec<CpuInfoFast>, Error> {
    let vcpus = monitor.machine.vcpus().into_iter();
    Ok(vcpus
        .map(|vcpu| CpuInfoFast {
            cpu_index: vcpu.index,
            qom_path: format!("/machine/vcpu[{}]", vcpu.index),
            thread_id: vcpu.thread_id,
            // One socket of single-threaded cores.
            props: CpuProperties {
                socket_id: 0,
                core_id: vcpu.index,
                thread_id: 0,
            },
            cpu_ns: thread_cpu_ns(vcpu.thread_id),
            target: std::env::consts::ARCH,
        })
        .collect())
}

fn stop(monitor: &Monitor, _: Empty) -> Result<Empty, Error> {
    monitor.machine.stop().map(|()| Empty {})
}

fn cont(monitor: &Monitor, _: Empty) -> Result<Empty, Error> {
    monitor.machine.cont().map(|()| Empty {})
}

fn system_powerdown(monitor: &Monitor, _: Empty) -> Result<Empty, Error> {
    monitor.machine.powerdown().map(|()| Empty {})
}

fn quit(monitor: &Monitor, _: Empty) -> Result<Empty, Error> {
    monitor.machine.quit();
    Ok(Empty {})
}
