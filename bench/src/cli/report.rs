//! `pollux-bench report`.

use std::path::PathBuf;

use clap::Args;

use super::{Error, measure};
use crate::record::Results;
use crate::report;

#[derive(Debug, Args)]
pub(super) struct ReportArgs {
    /// Written by --json
    #[arg(value_name = "RESULT.json", required_unless_present = "reference")]
    results: Vec<PathBuf>,

    /// Print published figures of the same studies, and ours beside them
    #[arg(long)]
    reference: bool,

    /// Write every measurement as CSV; of one result file
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,

    /// Write a page with charts; of one result file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

pub(super) fn run(args: &ReportArgs) -> Result<(), Error> {
    let files: Vec<Results> = args
        .results
        .iter()
        .map(|path| Results::load(path))
        .collect::<Result<_, _>>()?;
    if (args.csv.is_some() || args.html.is_some()) && files.len() != 1 {
        let text = "--csv and --html write one result; give one result file";
        return Err(Error::Usage(text.into()));
    }
    for (path, results) in args.results.iter().zip(&files) {
        if files.len() > 1 {
            println!("{}", path.display());
        }
        println!("{}", report::text(results).trim_end());
        measure::write_files(results, args.csv.as_deref(), args.html.as_deref())?;
    }
    if args.reference {
        if !files.is_empty() {
            println!();
        }
        let records: Vec<_> = files.iter().flat_map(|r| &r.runs).collect();
        print!(
            "{}",
            report::reference(&records).map_err(|e| Error::Failed(e.to_string()))?
        );
    }
    Ok(())
}
