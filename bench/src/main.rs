//! `pollux-bench`: IOPS against CPU.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match bench::cli::run(bench::cli::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pollux-bench: {error}");
            ExitCode::from(error.status())
        }
    }
}
