//! The CSV report: a line for each measurement, with everything.

use super::rows;
use crate::cpu::Group;
use crate::matrix::AXES;
use crate::record::{Measurement, Polling, Results};

/// The columns after the run's name, the axes and the round.
type Column = (&'static str, fn(&Measurement) -> Option<f64>);

const FIGURES: &[Column] = &[
    ("iops", |m| Some(m.iops)),
    ("bytes_per_second", |m| Some(m.bytes_per_second)),
    ("errors", |m| Some(m.errors as f64)),
    ("latency_mean_ns", |m| m.latency.map(|l| l.mean_ns)),
    ("latency_p50_ns", |m| m.latency.map(|l| l.p50_ns)),
    ("latency_p90_ns", |m| m.latency.map(|l| l.p90_ns)),
    ("latency_p99_ns", |m| m.latency.map(|l| l.p99_ns)),
    ("latency_p999_ns", |m| m.latency.map(|l| l.p999_ns)),
    ("latency_max_ns", |m| m.latency.map(|l| l.max_ns)),
    ("interval_ns", |m| Some(m.cpu.interval_ns as f64)),
    ("cpu_ns", |m| Some(m.cpu.total_ns() as f64)),
    ("cpu_main_ns", |m| {
        Some(m.cpu.of_ns(|g| *g == Group::Main) as f64)
    }),
    ("cpu_iothreads_ns", |m| {
        Some(m.cpu.of_ns(|g| matches!(g, Group::Iothread(_))) as f64)
    }),
    ("cpu_vcpus_ns", |m| {
        Some(m.cpu.of_ns(|g| matches!(g, Group::Vcpu(_))) as f64)
    }),
    ("cpu_vcpus_guest_ns", |m| {
        Some(m.cpu.groups.iter().map(|g| g.guest_ns).sum::<u64>() as f64)
    }),
    ("cpu_kernel_io_ns", |m| {
        Some(m.cpu.of_ns(|g| *g == Group::KernelIo) as f64)
    }),
    ("cpu_other_ns", |m| {
        Some(m.cpu.of_ns(|g| matches!(g, Group::Other | Group::Ended)) as f64)
    }),
    ("io_cpu_ns_per_io", Measurement::io_cpu_per_io),
    ("kicks_per_io", |m| m.kicks_per_io),
    ("interrupts_per_io", |m| m.interrupts_per_io),
    ("enters_per_io", Measurement::enters_per_io),
    ("syscalls_per_io", |m| m.syscalls_per_io),
    ("poll_hits", |m| polling(m, |p| p.hits)),
    ("poll_misses", |m| polling(m, |p| p.misses)),
    ("polled_ns", |m| polling(m, |p| p.polled_ns)),
    ("polled_in_vain_ns", |m| polling(m, |p| p.vain_ns)),
    ("blocks", |m| polling(m, |p| p.blocks)),
    ("guest_usr_percent", |m| m.guest_cpu.map(|c| c.usr)),
    ("guest_sys_percent", |m| m.guest_cpu.map(|c| c.sys)),
    ("guest_irq_percent", |m| m.guest_cpu.map(|c| c.irq)),
    ("guest_soft_percent", |m| m.guest_cpu.map(|c| c.soft)),
    ("guest_idle_percent", |m| m.guest_cpu.map(|c| c.idle)),
    ("host_user_percent", |m| Some(m.cpu.host.user_percent)),
    ("host_system_percent", |m| Some(m.cpu.host.system_percent)),
    ("host_irq_percent", |m| Some(m.cpu.host.irq_percent)),
    ("host_soft_percent", |m| Some(m.cpu.host.soft_percent)),
    ("host_steal_percent", |m| Some(m.cpu.host.steal_percent)),
    ("host_idle_percent", |m| Some(m.cpu.host.idle_percent)),
];

/// A counter of all loops together.
fn polling(m: &Measurement, counter: fn(&Polling) -> u64) -> Option<f64> {
    let sum: u64 = m.polling.iter().map(counter).sum();
    (!m.polling.is_empty()).then_some(sum as f64)
}

/// The report; `Err` only if the writer of CSV refuses, which memory does not.
pub fn csv(results: &Results) -> Result<Vec<u8>, ::csv::Error> {
    let mut writer = ::csv::Writer::from_writer(Vec::new());
    let mut header = vec!["run", "round"];
    header.extend(AXES.iter().map(|axis| axis.name));
    header.extend(FIGURES.iter().map(|(name, _)| *name));
    writer.write_record(&header)?;
    for row in rows(results) {
        for (round, measurement) in row.record.rounds.iter().enumerate() {
            let Some(measurement) = measurement else {
                continue;
            };
            let mut cells = vec![row.name.clone(), (round + 1).to_string()];
            cells.extend(
                AXES.iter()
                    .map(|axis| (axis.get)(row.run()).unwrap_or_default()),
            );
            cells.extend(
                FIGURES
                    .iter()
                    .map(|(_, figure)| figure(measurement).map_or(String::new(), short_number)),
            );
            writer.write_record(&cells)?;
        }
    }
    writer.into_inner().map_err(|e| e.into_error().into())
}

/// At most three decimals, none where they say nothing.
fn short_number(value: f64) -> String {
    let text = format!("{value:.3}");
    let text = text.trim_end_matches('0').trim_end_matches('.');
    if text.is_empty() {
        "0".into()
    } else {
        text.into()
    }
}
