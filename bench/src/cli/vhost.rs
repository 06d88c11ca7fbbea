//! `pollux-bench vhost`.

use std::path::PathBuf;

use clap::Args;

use super::measure::{Defaults, Plan};
use super::{Common, Error, Timing, axes_help, rounds_of};
use crate::matrix::Tool;
use crate::vhost::{self, VhostBed};

#[derive(Debug, Args)]
#[command(after_help = axes_help(Tool::Vhost))]
pub(super) struct VhostArgs {
    #[command(flatten)]
    common: Common,

    /// The peer
    #[arg(long, value_name = "FILE", default_value = "qemu-storage-daemon")]
    storage_daemon: PathBuf,

    #[command(flatten)]
    timing: Timing,
}

pub(super) fn run(args: VhostArgs) -> Result<(), Error> {
    let mut common = args.common;
    common.programs.qemu = args.storage_daemon;
    let mut skipped = None;
    if common.peer.is_some() {
        skipped = vhost::missing(&common.programs.programs());
        if let Some(why) = &skipped {
            eprintln!("pollux-bench: the peer is skipped: {why}");
            common.peer = None;
        }
    }
    let (rounds, warm_up) = rounds_of(common.preset);
    let (ramp, runtime) = args.timing.of(common.preset);
    let defaults = Defaults {
        tool: Tool::Vhost,
        rounds,
        warm_up,
    };
    let mut plan = Plan::new(common, &defaults, |_| false)?;
    if let Some(why) = skipped {
        let remark = format!("the peer was skipped: {why}");
        plan.results.conditions.remarks.push(remark);
    }
    let mut bed = VhostBed {
        programs: plan.programs.clone(),
        disks: plan.disks.paths.clone(),
        ramp,
        runtime,
        patience: args.timing.patience,
    };
    plan.execute(&mut bed)
}
