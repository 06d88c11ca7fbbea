//! The subcommands beside `run`: looking at the host, at a running VM, and at the program itself.

mod manual;
mod polling;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, Command, Subcommand, ValueEnum};
use clap_complete::Shell;
use serde_json::{Value, json};

use crate::check::Report;
use crate::config;
use crate::qmp::session::{self, Session};
use crate::top;

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Tool {
    /// Report what this host offers, and what would be slow or missing; exit status 0 if a VM can run
    Check,
    /// Ask a running VM
    Info(Info),
    /// Show a running VM's iothreads and disks, refreshed until Ctrl-C
    Top(Top),
    /// Print the JSON schema of the configuration file (--config)
    Schema,
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page, for man(1): pollux man > pollux.1
    Man {
        /// The page of a subcommand instead
        #[arg(value_parser = PossibleValuesParser::new(["run", "vhost-user-blk", "check", "info", "top", "schema", "completions"]))]
        subcommand: Option<String>,
    },
}

/// What to ask, and whom.
#[derive(Debug, Args)]
pub struct Info {
    /// What to ask
    what: Topic,
    /// The VM's monitor socket, as in --qmp unix:SOCKET
    socket: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What can be asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Topic {
    /// The iothreads and their settings
    Iothreads,
    /// What each loop's polling does and costs
    Polling,
    /// All numbers in Prometheus' text format
    Metrics,
    /// Whether the guest runs
    Status,
}

/// What to show, and how.
#[derive(Debug, Args)]
pub struct Top {
    /// The VM's monitor socket, as in --qmp unix:SOCKET
    socket: PathBuf,
    /// Seconds between two pictures
    #[arg(long, short, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    interval: f64,
    /// End after so many pictures
    #[arg(long, short, value_name = "N")]
    count: Option<u64>,
    /// Show every handler of every loop
    #[arg(long)]
    handlers: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds from 0.05 to 3600".to_owned()),
    }
}

/// Why a tool fails.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The VM does not answer, or refuses.
    #[error(transparent)]
    Session(#[from] session::Error),
    /// The live view ends.
    #[error(transparent)]
    Top(#[from] top::Error),
    /// Standard output does not take it.
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
}

/// Runs `tool`; `command` is the whole command line, for what describes it.
///
/// # Errors
/// See [`Error`]. A reader that has gone is none.
pub fn run(tool: &Tool, command: Command) -> Result<ExitCode, Error> {
    let mut status = ExitCode::SUCCESS;
    let output = match tool {
        Tool::Check => {
            let report = Report::of_this_host();
            if !report.can_run() {
                status = ExitCode::FAILURE;
            }
            report.to_string().into_bytes()
        }
        Tool::Info(info) => ask(info)?.into_bytes(),
        Tool::Top(top) => {
            let options = top::Options {
                interval: Duration::from_secs_f64(top.interval),
                count: top.count,
                handlers: top.handlers,
            };
            top::run(&top.socket, options)?;
            Vec::new()
        }
        Tool::Schema => pretty(&config::schema::schema()).into_bytes(),
        Tool::Completions { shell } => completions(*shell, command),
        Tool::Man { subcommand } => manual::page(subcommand.as_deref(), command)?,
    };
    match io::stdout().write_all(&output) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(status),
    }
}

fn completions(shell: Shell, mut command: Command) -> Vec<u8> {
    let mut script = Vec::new();
    let name = command.get_name().to_owned();
    clap_complete::generate(shell, &mut command, name, &mut script);
    script
}

fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

/// Asks a VM, and puts the answer in words.
fn ask(info: &Info) -> Result<String, session::Error> {
    let mut session = Session::connect(&info.socket)?;
    let mut execute = |command: &str| session.execute(command, json!({}));
    let command = match info.what {
        Topic::Iothreads => "query-iothreads",
        Topic::Polling => "x-query-polling",
        Topic::Metrics => "x-query-metrics",
        Topic::Status => "query-status",
    };
    if info.json {
        return Ok(pretty(&execute(command)?));
    }
    Ok(match info.what {
        Topic::Iothreads => human(&mut session, "info iothreads")?,
        Topic::Status => human(&mut session, "info status")?,
        Topic::Metrics => execute(command)?.as_str().unwrap_or_default().to_owned(),
        Topic::Polling => polling::describe(&execute(command)?),
    })
}

fn human(session: &mut Session, line: &str) -> Result<String, session::Error> {
    let arguments = json!({"command-line": line});
    let text = session.execute("human-monitor-command", arguments)?;
    Ok(text.as_str().unwrap_or_default().replace('\r', ""))
}

#[cfg(test)]
mod tests;
