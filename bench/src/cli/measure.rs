//! What all loads share between the command line and the report.

use std::path::{Path, PathBuf};

use super::{Common, Error, Peer};
use crate::disks::{LoadDisks, Wanted};
use crate::matrix::{self, Layout, Run, Rw, Tool, Vmm};
use crate::progress;
use crate::record::{Conditions, Results};
use crate::report;
use crate::runner::{self, Bed, Outcome, Stop};
use crate::vm::Programs;

/// A measurement that is about to begin.
pub struct Plan {
    /// What is kept.
    pub results: Results,
    /// The VMMs.
    pub programs: Programs,
    /// The files under load.
    pub disks: LoadDisks,
    stop: Stop,
    warm_up: usize,
    json: Option<PathBuf>,
    csv: Option<PathBuf>,
    html: Option<PathBuf>,
}

/// What a load does when it is not told.
pub struct Defaults {
    /// The load.
    pub tool: Tool,
    /// Counted rounds.
    pub rounds: u16,
    /// Rounds before.
    pub warm_up: usize,
}

impl Plan {
    /// Checks everything that can be checked before the first VM, and makes the disks.
    ///
    /// `adapt` may change the runs that the matrix gives, and tells whether one writes in a way
    /// that they do not show.
    pub fn new(
        common: Common,
        defaults: &Defaults,
        adapt: impl FnOnce(&mut Vec<Run>) -> bool,
    ) -> Result<Plan, Error> {
        let usage = |e: &dyn std::fmt::Display| Error::Usage(e.to_string());
        let writes;
        let mut results = match &common.resume {
            Some(path) => {
                let results = Results::load(path)?;
                if results.tool != defaults.tool {
                    let text = format!(
                        "--resume {}: measured with `{}`; go on with that subcommand",
                        path.display(),
                        results.tool.name()
                    );
                    return Err(Error::Usage(text));
                }
                // They are as adapted then; only what else it finds out is of interest.
                writes = adapt(&mut results.runs.iter().map(|r| r.run.clone()).collect());
                results
            }
            None => {
                let runs = match common.preset {
                    Some(preset) => preset.runs(defaults.tool, &common.matrix),
                    None => matrix::parse(&common.matrix, defaults.tool),
                };
                let mut runs = runs.map_err(|e| usage(&e))?;
                writes = adapt(&mut runs);
                if common.peer == Some(Peer::Qemu) {
                    runs = beside(&runs, Vmm::Qemu);
                }
                let rounds = usize::from(common.repeat.unwrap_or(defaults.rounds));
                Results::new(defaults.tool, Conditions::of_this_host(), rounds, runs)
            }
        };
        let mut programs = common.programs.programs();
        let mut versions = Vec::new();
        for vmm in [Vmm::Pollux, Vmm::Qemu] {
            if results.runs.iter().any(|r| r.run.vmm == vmm) {
                versions.push(programs.version(vmm).map_err(|e| usage(&e))?);
            }
        }
        if results.runs.iter().any(|r| r.run.vmm == Vmm::Pollux) {
            programs.find_qmp().map_err(|e| usage(&e))?;
        }
        // Before the disks, which Ctrl-C must not leave behind.
        let stop = Stop::on_signals().map_err(|e| Error::Failed(format!("signals: {e}")))?;
        let runs = || results.runs.iter().map(|r| &r.run);
        let disks = LoadDisks::prepare(&Wanted {
            files: common.file.clone(),
            destroy_data: common.destroy_data,
            directory: common.directory.clone().unwrap_or_else(std::env::temp_dir),
            size_bytes: common.size,
            count: runs().map(|r| r.disks as usize).max().unwrap_or(1),
            writes: writes || runs().any(|r| !matches!(r.rw, Rw::Read | Rw::RandRead)),
            cached: runs().any(|r| !r.direct),
        })
        .map_err(|e| usage(&e))?;
        results.conditions.versions = versions;
        results
            .conditions
            .remarks
            .extend(disks.remarks.iter().cloned());
        results.conditions.remarks.dedup();
        Ok(Plan {
            results,
            programs,
            disks,
            stop,
            warm_up: common.warm_up.unwrap_or(defaults.warm_up),
            json: common.json.or(common.resume),
            csv: common.csv,
            html: common.html,
        })
    }

    /// Measures on `bed`, prints the report and writes the files asked for.
    pub fn execute(mut self, bed: &mut dyn Bed) -> Result<(), Error> {
        let mut progress = progress::choose(Layout::of(self.results.runs.iter().map(|r| &r.run)));
        let json = self.json.clone();
        let mut unsaved = None;
        let outcome = runner::execute(
            bed,
            &mut self.results,
            self.warm_up,
            &self.stop,
            progress.as_mut(),
            &mut |results| {
                if let Some(path) = &json {
                    unsaved = results.save(path).err();
                }
            },
        );
        let measured = self
            .results
            .runs
            .iter()
            .any(|r| r.measurements().next().is_some());
        if measured {
            print!("{}", report::text(&self.results));
            write_files(&self.results, self.csv.as_deref(), self.html.as_deref())?;
        }
        if let Some(error) = unsaved {
            return Err(error.into());
        }
        match outcome {
            Outcome::Fatal(message) => Err(Error::Failed(message)),
            Outcome::Interrupted => Err(Error::Failed(match &self.json {
                Some(path) if measured => {
                    format!("interrupted; go on with --resume {}", path.display())
                }
                _ => "interrupted".into(),
            })),
            Outcome::Complete => {
                let failed = self
                    .results
                    .runs
                    .iter()
                    .filter(|r| !r.failures.is_empty())
                    .count();
                if failed == 0 {
                    return Ok(());
                }
                // Without any measurement there was no report to say why.
                let first = self.results.runs.iter().find_map(|r| r.failures.first());
                let why = first
                    .filter(|_| !measured)
                    .map_or(String::new(), |w| format!(": {w}"));
                let all = self.results.runs.len();
                Err(Error::Failed(format!("{failed} of {all} runs failed{why}")))
            }
        }
    }
}

/// Every run with its like on `peer` before it, which makes that the baseline.
pub fn beside(runs: &[Run], peer: Vmm) -> Vec<Run> {
    let mut all: Vec<Run> = Vec::new();
    for run in runs {
        for candidate in [run.on(peer), run.clone()] {
            if !all.contains(&candidate) {
                all.push(candidate);
            }
        }
    }
    all
}

/// Writes the reports that are asked for.
pub fn write_files(
    results: &Results,
    csv: Option<&Path>,
    html: Option<&Path>,
) -> Result<(), Error> {
    if let Some(path) = csv {
        let bytes = report::csv(results).map_err(|e| Error::Failed(format!("CSV: {e}")))?;
        crate::record::write_whole(path, &bytes)?;
    }
    if let Some(path) = html {
        crate::record::write_whole(path, report::html(results).as_bytes())?;
    }
    Ok(())
}
