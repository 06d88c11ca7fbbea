//! `pollux-bench fio`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::measure::{Defaults, Plan};
use super::{Common, Error, axes_help};
use crate::fio::job_file::JobFile;
use crate::fio::{FioBed, Times};
use crate::matrix::Tool;

/// Where `tests/lab/prepare` puts what a guest boots.
const LAB: &str = "target/lab/current/guest";

#[derive(Debug, Args)]
#[command(after_help = axes_help(Tool::Fio))]
pub(super) struct FioArgs {
    #[command(flatten)]
    common: Common,

    /// Kernel of the guest [default: what tests/lab/prepare made]
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,

    /// Initial RAM disk, which runs /lab/script in the userland [default: as for --kernel]
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,

    /// Root disk with fio and mpstat, never written [default: as for --kernel]
    #[arg(long, value_name = "FILE")]
    root: Option<PathBuf>,

    /// More for the kernel's command line
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "",
        allow_hyphen_values = true
    )]
    cmdline: String,

    /// Guest memory
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = super::size)]
    memory: u64,

    /// Seconds of the measured interval
    #[arg(long, value_name = "S", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    runtime: u64,

    /// Seconds of load before it
    #[arg(long, value_name = "S", default_value_t = 2,
          value_parser = clap::value_parser!(u64).range(0..=3600))]
    ramp: u64,

    /// Seconds that booting, or any step beyond its duration, may take
    #[arg(long, value_name = "S", default_value_t = 120,
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    patience: u64,

    /// Boot a new guest for every run, so that runs are interleaved most finely
    #[arg(long)]
    fresh_guest: bool,

    /// A fio job file in place of the matrix's loads; it finds its disks as ${DISK0}, ${DISK1}, …
    #[arg(long, value_name = "FILE")]
    job_file: Option<PathBuf>,
}

/// Axes that a job file replaces.
const LOAD_AXES: [&str; 5] = ["rw", "bs", "iodepth", "numjobs", "ioengine"];

pub(super) fn run(args: FioArgs) -> Result<(), Error> {
    let mut job_file = None;
    if let Some(path) = &args.job_file {
        for axis in LOAD_AXES {
            if args
                .common
                .matrix
                .iter()
                .any(|word| word.trim().starts_with(&format!("{axis}=")))
            {
                let text = format!(
                    "--job-file {}: the matrix gives {axis} too; leave that axis to the file",
                    path.display()
                );
                return Err(Error::Usage(text));
            }
        }
        let text = std::fs::read_to_string(path).map_err(|e| {
            Error::Usage(format!(
                "--job-file {}: cannot be read: {e}; give a job file of fio",
                path.display()
            ))
        })?;
        job_file = Some(text);
    }
    let kernel = image(args.kernel, "--kernel", "bzImage")?;
    let initrd = image(args.initrd, "--initrd", "initramfs")?;
    let root = image(args.root, "--root", "root.img")?;
    let mut parsed = None;
    let defaults = Defaults {
        tool: Tool::Fio,
        rounds: 3,
        warm_up: 0,
    };
    let mut plan = Plan::new(args.common, &defaults, |runs| {
        let Some(text) = &job_file else { return false };
        let most = runs.iter().map(|r| r.disks).max().unwrap_or(1);
        let file = JobFile::read(text, most);
        runs.iter_mut().for_each(|run| file.describe(run));
        let writes = file.writes;
        parsed = Some(file);
        writes
    })?;
    if parsed.as_ref().is_some_and(|file| file.differs) {
        let text = "the jobs of the file differ; the table's columns show its first one";
        plan.results.conditions.remarks.push(text.into());
    }
    let mut bed = FioBed {
        programs: plan.programs.clone(),
        kernel,
        initrd,
        root,
        cmdline: args.cmdline,
        memory_bytes: args.memory,
        disks: plan.disks.paths.clone(),
        times: Times {
            ramp_s: args.ramp,
            runtime_s: args.runtime,
        },
        patience: Duration::from_secs(args.patience),
        runs_a_turn: if args.fresh_guest { 1 } else { 64 },
        job_file: parsed,
    };
    if let Some(file) = &bed.job_file {
        bed.times.ramp_s = file.ramp_s;
    }
    plan.execute(&mut bed)
}

/// A file that the guest boots: the one given, or the lab's.
fn image(given: Option<PathBuf>, option: &str, name: &str) -> Result<PathBuf, Error> {
    let is_default = given.is_none();
    let path = given.unwrap_or_else(|| PathBuf::from(LAB).join(name));
    match std::fs::File::open(&path) {
        Ok(_) => Ok(path),
        Err(error) => {
            let remedy = if is_default {
                "make it with tests/lab/prepare, or name another"
            } else {
                "name a file that can be read"
            };
            Err(Error::Usage(format!(
                "{option} {}: {error}; {remedy}",
                path.display()
            )))
        }
    }
}
