//! `pollux-bench footprint`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use super::{Error, Peer, ProgramArgs, duration};
use crate::footprint::{Plan, Sample, report, stripped_bytes};
use crate::matrix::Vmm;
use crate::runner::Stop;

/// Size of each disk.
const DISK_BYTES: u64 = 16 << 20;

#[derive(Debug, Args)]
pub(super) struct FootprintArgs {
    /// Disks of the VM
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    disks: u16,

    /// Iothreads of the VM, with polling as by default
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=64))]
    iothreads: u32,

    /// How long it idles in each round
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = duration)]
    idle: Duration,

    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeat: u16,

    /// Measure this VMM too, turn by turn
    #[arg(long, value_name = "VMM")]
    peer: Option<Peer>,

    #[command(flatten)]
    programs: ProgramArgs,
}

pub(super) fn run(args: &FootprintArgs) -> Result<(), Error> {
    let failed = |e: &dyn std::fmt::Display| Error::Failed(e.to_string());
    let elf = guest_image::elf()
        .ok_or_else(|| Error::Usage("the embedded guest is for x86_64 alone".into()))?;
    let scratch = tempfile::Builder::new()
        .prefix("pollux-footprint-")
        .tempdir()
        .map_err(|e| failed(&e))?;
    let guest = scratch.path().join("guest.elf");
    std::fs::write(&guest, elf).map_err(|e| failed(&e))?;
    let disks = (0..args.disks)
        .map(|index| make_disk(scratch.path(), index))
        .collect::<std::io::Result<Vec<_>>>()
        .map_err(|e| failed(&e))?;
    let plan = Plan {
        programs: args.programs.programs(),
        guest,
        disks,
        iothreads: args.iothreads,
        idle: args.idle,
        patience: Duration::from_secs(60),
    };
    let mut vmms: Vec<(&str, Vmm, Vec<Sample>)> = vec![("pollux", Vmm::Pollux, Vec::new())];
    if args.peer.is_some() {
        vmms.push(("qemu", Vmm::Qemu, Vec::new()));
    }
    let stop = Stop::on_signals().map_err(|e| failed(&e))?;
    for round in 1..=args.repeat {
        for (name, vmm, samples) in &mut vmms {
            let sample = plan.sample(*vmm, &stop).map_err(|e| failed(&e))?;
            eprintln!("round {round} of {}: {name}", args.repeat);
            samples.push(sample);
        }
    }
    let sizes: Vec<_> = vmms
        .iter()
        .map(|(_, vmm, _)| match vmm {
            Vmm::Pollux => stripped_bytes(&plan.programs.pollux).ok().flatten(),
            // Its firmware and libraries are files of their own.
            Vmm::Qemu => None,
        })
        .collect();
    let columns: Vec<_> = vmms.into_iter().map(|(name, _, s)| (name, s)).collect();
    println!(
        "{} disks on {} iothreads, 1 vCPU, {} rounds\n",
        args.disks, args.iothreads, args.repeat
    );
    print!("{}", report(&columns, &sizes));
    Ok(())
}

fn make_disk(folder: &Path, index: u16) -> std::io::Result<PathBuf> {
    let path = folder.join(format!("disk{index}.img"));
    std::fs::write(&path, vec![0; usize::try_from(DISK_BYTES).unwrap_or(0)])?;
    Ok(path)
}
