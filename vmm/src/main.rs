//! The `pollux` command.

use std::process::ExitCode;

use clap::Parser;
use vmm::config::Config;
use vmm::config::args::{Cli, Command};

/// Wrong usage, as clap has it.
const EXIT_USAGE: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let args = match cli.command {
        Some(Command::Run(args)) => *args,
        None => cli.run,
    };
    let config = match Config::from_args(&args) {
        Ok(config) => config,
        Err(error) => {
            eprintln!("pollux: {error}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    if args.print_config {
        println!("{}", config.print());
    }
    ExitCode::SUCCESS
}
