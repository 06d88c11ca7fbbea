//! The command line of `pollux-bench`.

mod fio;
mod footprint;
mod guest;
mod measure;
mod policy;
mod report;
#[cfg(test)]
mod tests;
mod trace;
mod vhost;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::matrix::AXES;
use crate::preset::Preset;
use crate::vm::Programs;

/// Measures how many I/Os a second a VMM's disks give, and what they cost in CPU.
#[derive(Debug, Parser)]
#[command(name = "pollux-bench", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run fio in a Linux guest over a matrix of loads and settings
    Fio(Box<fio::FioArgs>),
    /// Run the embedded guest over a matrix of loads and settings: results in seconds
    Guest(Box<guest::GuestArgs>),
    /// What a VM costs that does nothing: start, memory, CPU when idle, size of the program
    Footprint(footprint::FootprintArgs),
    /// Load back ends over vhost-user, ours and QEMU's storage daemon: no guest, no KVM
    Vhost(Box<vhost::VhostArgs>),
    /// Print the report of result files again
    Report(report::ReportArgs),
    /// Read what `pollux --trace` recorded: counts, poll windows, CSV
    Trace(trace::TraceArgs),
    /// Try polling rules without a VM
    #[command(subcommand)]
    Policy(policy::Command),
    /// Print two result files side by side
    Compare {
        /// The baseline, written by --json
        #[arg(value_name = "A.json")]
        a: PathBuf,
        /// What is compared with it
        #[arg(value_name = "B.json")]
        b: PathBuf,
    },
}

/// How it ended, for the exit status.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The command line asks for what cannot be. Status 2.
    #[error("{0}")]
    Usage(String),
    /// It did not succeed. Status 1.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// The exit status.
    pub fn status(&self) -> u8 {
        match self {
            Error::Usage(_) => 2,
            Error::Failed(_) => 1,
        }
    }
}

impl From<crate::record::Error> for Error {
    fn from(error: crate::record::Error) -> Error {
        match error {
            crate::record::Error::Write { .. } => Error::Failed(error.to_string()),
            other => Error::Usage(other.to_string()),
        }
    }
}

/// Does what the command line says.
pub fn run(cli: Cli) -> Result<(), Error> {
    match cli.command {
        Command::Fio(args) => fio::run(*args),
        Command::Guest(args) => guest::run(*args),
        Command::Footprint(args) => footprint::run(&args),
        Command::Vhost(args) => vhost::run(*args),
        Command::Report(args) => report::run(&args),
        Command::Trace(args) => trace::run(&args),
        Command::Policy(command) => policy::run(&command),
        Command::Compare { a, b } => {
            let (a, b) = (
                crate::record::Results::load(&a)?,
                crate::record::Results::load(&b)?,
            );
            print!("{}", crate::report::compare(&a, &b));
            Ok(())
        }
    }
}

/// What every load takes.
#[derive(Clone, Debug, Args)]
pub struct Common {
    /// axis=value[,value…] words; all axes are listed at the end of this help
    #[arg(value_name = "MATRIX")]
    matrix: Vec<String>,

    /// A published study as the matrix; words given besides replace its axes
    #[arg(long, value_name = "STUDY")]
    preset: Option<Preset>,

    /// Measure every run on this VMM too, turn by turn, and compare with it
    #[arg(long, value_name = "VMM")]
    peer: Option<Peer>,

    /// Warm-up rounds, which do not count
    #[arg(long, value_name = "N")]
    warm_up: Option<usize>,

    /// Counted rounds; from 5 on the spread holds the median with 90 % confidence
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeat: Option<u16>,

    /// Size of each file that is made for the measurement
    #[arg(long, value_name = "SIZE", default_value = "256M", value_parser = size)]
    size: u64,

    /// Where files are made [default: the temporary directory]
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,

    /// Load this file or block device instead of files made for it; once for each disk
    #[arg(long, value_name = "FILE")]
    file: Vec<PathBuf>,

    /// Allow writing loads on --file
    #[arg(long)]
    destroy_data: bool,

    #[command(flatten)]
    programs: ProgramArgs,

    /// Keep everything measured, for `report` and --resume
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Write every measurement as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// Write a page with charts
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Go on with a result that was interrupted: its matrix and rounds are used; repeat the
    /// other options
    #[arg(long, value_name = "RESULT.json", conflicts_with_all = ["matrix", "preset", "peer", "repeat"])]
    resume: Option<PathBuf>,
}

/// How long a turn takes, where the load is ours.
#[derive(Clone, Debug, Args)]
pub struct Timing {
    /// Measured interval, such as 2s or 500ms [default: 2s; 700ms with --preset policies]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    runtime: Option<std::time::Duration>,

    /// Load before it [default: 500ms; 800ms with --preset policies]
    #[arg(long, value_name = "TIME", value_parser = duration)]
    ramp: Option<std::time::Duration>,

    /// What any step may take beyond its duration
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    patience: std::time::Duration,
}

impl Timing {
    /// The load before the measured interval, and that. A preset of many runs has short ones; the
    /// load before it is as long as the rule `auto` takes to settle.
    fn of(&self, preset: Option<Preset>) -> (std::time::Duration, std::time::Duration) {
        let (ramp, runtime) = match preset {
            Some(Preset::Policies) => (800, 700),
            _ => (500, 2000),
        };
        let or = |given: Option<_>, ms| given.unwrap_or(std::time::Duration::from_millis(ms));
        (or(self.ramp, ramp), or(self.runtime, runtime))
    }
}

/// Rounds that count, and before, if nobody says how many.
fn rounds_of(preset: Option<Preset>) -> (u16, usize) {
    match preset {
        Some(Preset::Policies) => (2, 0),
        _ => (5, 1),
    }
}

/// Where the programs are that are measured.
#[derive(Clone, Debug, Args)]
pub struct ProgramArgs {
    /// The VMM under test [default: beside this program, else on PATH]
    #[arg(long, value_name = "FILE")]
    pollux: Option<PathBuf>,

    /// QEMU
    #[arg(long, value_name = "FILE", default_value = "qemu-system-x86_64")]
    qemu: PathBuf,

    /// QEMU's accelerator
    #[arg(long, value_name = "NAME", default_value = "kvm")]
    qemu_accel: String,

    /// QEMU's directory of firmware
    #[arg(long, value_name = "DIR")]
    qemu_firmware: Option<PathBuf>,
}

impl ProgramArgs {
    fn programs(&self) -> Programs {
        Programs {
            pollux: self.pollux.clone().unwrap_or_else(default_pollux),
            qemu: self.qemu.clone(),
            qemu_accel: self.qemu_accel.clone(),
            qemu_firmware: self.qemu_firmware.clone(),
            pollux_has_qmp: false,
        }
    }
}

/// `pollux` beside this program, else by PATH.
fn default_pollux() -> PathBuf {
    std::env::current_exe()
        .ok()
        .map(|own| own.with_file_name("pollux"))
        .filter(|path| path.exists())
        .unwrap_or_else(|| "pollux".into())
}

/// Whom to compare with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peer {
    /// QEMU's microvm machine; with vhost its storage daemon
    Qemu,
}

fn size(text: &str) -> Result<u64, String> {
    crate::matrix::bytes(text)
        .filter(|bytes| *bytes >= 1 << 20 && bytes % 4096 == 0)
        .ok_or_else(|| "give a multiple of 4k of at least 1M, such as 256M".into())
}

/// A time in seconds, or with the unit `ms` or `s`.
fn duration(text: &str) -> Result<std::time::Duration, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor_ms = match &text[digits.len()..] {
        "" | "s" => Some(1000),
        "ms" => Some(1),
        _ => None,
    };
    digits
        .parse::<u64>()
        .ok()
        .zip(factor_ms)
        .and_then(|(number, factor)| number.checked_mul(factor))
        .filter(|ms| (1..=86_400_000).contains(ms))
        .map(std::time::Duration::from_millis)
        .ok_or_else(|| "give a time up to a day, such as 2s or 500ms".into())
}

/// The axes of a load, for its help.
fn axes_help(tool: crate::matrix::Tool) -> String {
    let mut text = String::from("Axes of the matrix (1..5 is 1,2,3,4,5):\n");
    for axis in AXES.iter().filter(|a| a.tools.contains(&tool)) {
        text += &format!("  {:<17} {}\n", axis.name, axis.takes);
    }
    text
}
