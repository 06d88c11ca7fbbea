//! The `pollux` command.

use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use vmm::config::Config;
use vmm::config::args::{Cli, Command, RunArgs};
use vmm::tools;
use vmm::vm::{Error, builder};

/// Wrong usage, as clap has it.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let args = match cli.command {
        Some(Command::Run(args)) => *args,
        Some(Command::Guest(command)) => return done(vmm::guest::run(&command)),
        Some(Command::Demo(options)) => return done(vmm::demo::run(&options)),
        Some(Command::VhostUserBlk(args)) => return status(vmm::vhost_user::run(&args)),
        Some(Command::Tool(tool)) => {
            return tools::run(&tool, Cli::command()).unwrap_or_else(|error| {
                say(&error.to_string());
                ExitCode::FAILURE
            });
        }
        None => cli.run,
    };
    status(run(&args))
}

fn status(result: Result<ExitCode, Error>) -> ExitCode {
    match result {
        Ok(status) => status,
        Err(error) => {
            say(&error.to_string());
            match error.is_usage() {
                true => ExitCode::from(EXIT_USAGE),
                false => ExitCode::FAILURE,
            }
        }
    }
}

fn done(result: Result<(), impl std::fmt::Display>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn run(args: &RunArgs) -> Result<ExitCode, Error> {
    let config = Config::from_args(args)?;
    if args.print_config {
        println!("{}", config.print());
        return Ok(ExitCode::SUCCESS);
    }
    vmm::logging::start(&config.log)?;
    let outcome = builder::build(&config)?.run()?;
    match outcome {
        vmm::vm::lifecycle::Outcome::PowerOff => tracing::info!("{outcome}"),
        _ => say(&outcome.to_string()),
    }
    match outcome.is_good() {
        true => Ok(ExitCode::SUCCESS),
        false => Ok(ExitCode::FAILURE),
    }
}

/// A message for the user. Standard output is the guest's.
fn say(message: &str) {
    eprintln!("pollux: {message}");
}
