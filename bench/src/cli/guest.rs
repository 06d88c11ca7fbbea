//! `pollux-bench guest`.

use std::path::PathBuf;

use clap::Args;

use super::measure::{Defaults, Plan};
use super::{Common, Error, Timing, axes_help, rounds_of};
use crate::guest::GuestBed;
use crate::matrix::Tool;

#[derive(Debug, Args)]
#[command(after_help = axes_help(Tool::Guest))]
pub(super) struct GuestArgs {
    #[command(flatten)]
    common: Common,

    /// The guest [default: the one in this program]
    #[arg(long, value_name = "FILE")]
    image: Option<PathBuf>,

    #[command(flatten)]
    timing: Timing,
}

pub(super) fn run(args: GuestArgs) -> Result<(), Error> {
    let failed = |what: &str, e: std::io::Error| Error::Failed(format!("{what}: {e}"));
    let embedded = tempfile::Builder::new()
        .prefix("pollux-guest-")
        .tempfile()
        .map_err(|e| failed("no temporary file; set TMPDIR", e))?;
    let image = match args.image {
        Some(path) => {
            std::fs::File::open(&path).map_err(|e| {
                let path = path.display();
                Error::Usage(format!(
                    "--image {path}: {e}; name a guest, or leave it out"
                ))
            })?;
            path
        }
        None => {
            let elf = guest_image::elf().ok_or_else(|| {
                Error::Usage("the embedded guest is for x86_64; use pollux-bench fio".into())
            })?;
            std::fs::write(embedded.path(), elf).map_err(|e| failed("the guest's file", e))?;
            embedded.path().into()
        }
    };
    let (rounds, warm_up) = rounds_of(args.common.preset);
    let (ramp, runtime) = args.timing.of(args.common.preset);
    let defaults = Defaults {
        tool: Tool::Guest,
        rounds,
        warm_up,
    };
    let plan = Plan::new(args.common, &defaults, |_| false)?;
    let mut bed = GuestBed {
        programs: plan.programs.clone(),
        image,
        disks: plan.disks.paths.clone(),
        ramp,
        runtime,
        patience: args.timing.patience,
    };
    plan.execute(&mut bed)
}
