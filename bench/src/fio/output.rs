//! Reads what the guest brings back: fio's JSON, mpstat's JSON, /proc/interrupts.

use serde::Deserialize;
use std::collections::BTreeMap;

use crate::record::{GuestCpu, Latency};

/// Why it could not be read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No JSON, or not fio's.
    #[error("fio's output is not the JSON of fio 3: {0}")]
    Fio(String),
    /// fio itself reports an error.
    #[error("fio's job `{job}` failed: {why}")]
    Job {
        /// The job's name.
        job: String,
        /// The error's text.
        why: String,
    },
    /// mpstat's JSON has another form.
    #[error("mpstat's output is not the JSON of sysstat 12: {0}")]
    Mpstat(String),
}

/// What fio says of all jobs together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FioResult {
    /// Reads, writes and trims a second.
    pub iops: f64,
    /// Bytes a second.
    pub bytes_per_second: f64,
    /// Number of I/Os.
    pub ios: u64,
    /// From submission to completion. Of several jobs or directions each percentile is the
    /// worst: fio's percentiles cannot be merged.
    pub latency: Option<Latency>,
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<Job>,
}

#[derive(Deserialize)]
struct Job {
    jobname: String,
    #[serde(default)]
    error: i32,
    read: Direction,
    write: Direction,
    #[serde(default)]
    trim: Direction,
}

#[derive(Default, Deserialize)]
struct Direction {
    #[serde(default)]
    iops: f64,
    /// fio 3 gives bytes; its `bw` is in KiB.
    #[serde(default)]
    bw_bytes: u64,
    #[serde(default)]
    total_ios: u64,
    #[serde(default)]
    clat_ns: Times,
}

#[derive(Default, Deserialize)]
struct Times {
    #[serde(default)]
    max: f64,
    #[serde(default)]
    mean: f64,
    #[serde(default)]
    percentile: BTreeMap<String, f64>,
}

/// Reads the output of `fio --output-format=json`, which may begin with warnings.
pub fn fio(text: &str) -> Result<FioResult, Error> {
    let start = text.find('{').ok_or_else(|| Error::Fio(first_line(text)))?;
    // Warnings may also follow.
    let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Output>();
    let output = values
        .next()
        .ok_or_else(|| Error::Fio(first_line(text)))?
        .map_err(|e| Error::Fio(e.to_string()))?;
    if output.jobs.is_empty() {
        return Err(Error::Fio("it has no jobs".into()));
    }
    let mut result = FioResult::default();
    let mut mean_sum = 0.0;
    for job in &output.jobs {
        if job.error != 0 {
            let why = std::io::Error::from_raw_os_error(job.error).to_string();
            return Err(Error::Job {
                job: job.jobname.clone(),
                why,
            });
        }
        for direction in [&job.read, &job.write, &job.trim] {
            if direction.total_ios == 0 {
                continue;
            }
            result.iops += direction.iops;
            result.bytes_per_second += direction.bw_bytes as f64;
            result.ios += direction.total_ios;
            let times = &direction.clat_ns;
            mean_sum += times.mean * direction.total_ios as f64;
            let latency = result.latency.get_or_insert_default();
            let worst = |old: &mut f64, key: &str| {
                *old = old.max(times.percentile.get(key).copied().unwrap_or(0.0));
            };
            worst(&mut latency.p50_ns, "50.000000");
            worst(&mut latency.p90_ns, "90.000000");
            worst(&mut latency.p99_ns, "99.000000");
            worst(&mut latency.p999_ns, "99.900000");
            latency.max_ns = latency.max_ns.max(times.max);
        }
    }
    if let Some(latency) = &mut result.latency {
        latency.mean_ns = mean_sum / result.ios as f64;
    }
    Ok(result)
}

fn first_line(text: &str) -> String {
    let line = text
        .lines()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("it is empty");
    line.chars().take(200).collect()
}

/// Reads the output of `mpstat -o JSON`, the mean of its samples.
pub fn mpstat(text: &str) -> Result<GuestCpu, Error> {
    let form = |what: &str| Error::Mpstat(what.into());
    let value: serde_json::Value =
        serde_json::from_str(text).map_err(|e| Error::Mpstat(e.to_string()))?;
    let samples = value
        .pointer("/sysstat/hosts/0/statistics")
        .and_then(|s| s.as_array())
        .ok_or_else(|| form("no statistics"))?;
    let mut sum = GuestCpu::default();
    let mut count = 0.0;
    for sample in samples {
        let all = sample.get("cpu-load").and_then(|c| c.as_array());
        let Some(cpu) = all.and_then(|c| c.iter().find(|c| c["cpu"] == "all")) else {
            continue;
        };
        let field = |name: &str| {
            cpu.get(name)
                .and_then(serde_json::Value::as_f64)
                .unwrap_or(0.0)
        };
        sum.usr += field("usr") + field("nice");
        sum.sys += field("sys");
        sum.iowait += field("iowait");
        sum.irq += field("irq");
        sum.soft += field("soft");
        sum.steal += field("steal");
        sum.idle += field("idle");
        count += 1.0;
    }
    if count == 0.0 {
        return Err(form("no sample of all CPUs"));
    }
    Ok(GuestCpu {
        usr: sum.usr / count,
        sys: sum.sys / count,
        iowait: sum.iowait / count,
        irq: sum.irq / count,
        soft: sum.soft / count,
        steal: sum.steal / count,
        idle: sum.idle / count,
    })
}

/// Interrupts of virtio devices until now, from /proc/interrupts.
pub fn virtio_interrupts(text: &str) -> u64 {
    text.lines()
        .filter(|line| line.contains("virtio"))
        .flat_map(|line| {
            line.split_ascii_whitespace()
                .skip(1)
                .map_while(|word| word.parse::<u64>().ok())
        })
        .sum()
}
