//! The published studies as matrices of one word.

use clap::ValueEnum;

use crate::matrix::{self, Run, Tool};

/// A study. Words given besides replace its axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// Weights 1 to 5 of the weighted rule against the older rules, random reads of 8k
    Weights,
    /// 16 disks on 1, 2, 4 and 8 iothreads, sequential and random, under each rule
    Iothreads,
    /// Linux AIO and io_uring, on an iothread and on the main loop, 4k at depth 1 and 64
    Engines,
    /// Every polling rule under 15 loads: depth 1, 4, 16 and 32 with O_DIRECT reads and writes and a
    /// warm file, think time, two disks of different speed, bursts
    Policies,
}

/// The loads of [`Preset::Policies`].
const LOADS: [&str; 5] = [
    "direct=on rw=randread,randwrite iodepth=1,4,16,32",
    "direct=off rw=randread iodepth=1,4,16,32",
    "direct=on rw=randread iodepth=1 think-ns=50000",
    "direct=on rw=randread iodepth=4 disks=2 mixed=on",
    "direct=on rw=randread iodepth=4 think-ns=40000000 think-ios=400",
];
/// Its rules: what the others are read against comes first.
const RULES: [&str; 4] = [
    "poll-policy=per-handler,off,context",
    "poll-policy=weighted poll-weight=2,3,4",
    "poll-policy=always",
    "poll-policy=auto poll-alpha=0.1,0.3,1",
];

impl Preset {
    /// Its words, the older rule first: that is the baseline.
    fn words(self, tool: Tool) -> Vec<&'static str> {
        let mut words = match self {
            // Its loads are no product: see `runs`.
            Preset::Policies => vec!["bs=8k"],
            Preset::Weights => vec![
                "rw=randread",
                "bs=8k",
                "iodepth=8",
                "poll-policy=per-handler,context,weighted",
                "poll-weight=1..5",
            ],
            Preset::Iothreads => vec![
                "rw=read,write,randread,randwrite",
                "bs=8k",
                "iodepth=8",
                "numjobs=1,4,8",
                "disks=16",
                "iothreads=1,2,4,8",
                "poll-policy=per-handler,weighted",
                "poll-weight=2,3",
            ],
            Preset::Engines => vec![
                "rw=randread,randwrite",
                "bs=4k",
                "iodepth=1,64",
                "iothreads=0,1",
                "engine=native,io_uring",
            ],
        };
        // The others have no jobs beside each other.
        if tool != Tool::Fio {
            words.retain(|word| !word.starts_with("numjobs="));
        }
        words
    }

    /// The runs of the preset, with what `given` sets in place of its own words.
    ///
    /// # Errors
    /// `given` is no matrix.
    pub fn runs(self, tool: Tool, given: &[String]) -> Result<Vec<Run>, matrix::Error> {
        if self != Preset::Policies {
            return matrix::parse(&self.matrix(tool, given), tool);
        }
        let mut runs = Vec::new();
        for load in LOADS {
            for rule in RULES {
                let words = [load, rule].join(" ");
                let own = given.iter().flat_map(|text| text.split_whitespace());
                let own: Vec<&str> = own.filter_map(|word| word.split('=').next()).collect();
                let kept = words.split_whitespace().filter(|word| {
                    let name = word.split('=').next().unwrap_or_default();
                    // fio's guest has no pauses and no mixture of disks.
                    let known =
                        tool != Tool::Fio || !["think-ns", "think-ios", "mixed"].contains(&name);
                    known && !own.contains(&name)
                });
                let mut words = self.matrix(tool, given);
                words.extend(kept.map(String::from));
                for run in matrix::parse(&words, tool)? {
                    if !runs.contains(&run) {
                        runs.push(run);
                    }
                }
            }
        }
        // All rules of a load one after the other: what else the machine does changes in between.
        let loads: Vec<Run> = runs.iter().map(load_of).collect();
        let place = |run: &Run| loads.iter().position(|load| *load == load_of(run));
        runs.sort_by_key(place);
        Ok(runs)
    }

    /// The matrix: the preset's words without the axes that `given` sets, then `given`.
    pub fn matrix(self, tool: Tool, given: &[String]) -> Vec<String> {
        let axis = |word: &str| word.split('=').next().unwrap_or_default().to_string();
        let own: Vec<String> = given
            .iter()
            .flat_map(|text| text.split_whitespace())
            .map(axis)
            .collect();
        self.words(tool)
            .into_iter()
            .filter(|word| !own.contains(&axis(word)))
            .map(String::from)
            .chain(given.iter().cloned())
            .collect()
    }
}

/// The run without its rule.
fn load_of(run: &Run) -> Run {
    Run {
        poll_policy: None,
        poll_weight: None,
        poll_alpha_milli: None,
        poll_completions: None,
        poll_max_ns: None,
        ..run.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::{Layout, parse};

    fn names(preset: Preset, tool: Tool, given: &[&str]) -> Vec<String> {
        let given: Vec<String> = given.iter().map(|w| (*w).to_string()).collect();
        let runs = parse(&preset.matrix(tool, &given), tool).expect("a matrix");
        let layout = Layout::of(&runs);
        runs.iter().map(|run| layout.name(run)).collect()
    }

    #[test]
    fn weights_are_set_against_the_older_rules() {
        for tool in [Tool::Fio, Tool::Guest] {
            let weighted = (1..=5).map(|w| format!("weighted w{w}"));
            let expected: Vec<String> = ["per-handler".into(), "context".into()]
                .into_iter()
                .chain(weighted)
                .collect();
            assert_eq!(names(Preset::Weights, tool, &[]), expected);
        }
    }

    #[test]
    fn the_other_studies_have_their_size() {
        assert_eq!(
            names(Preset::Iothreads, Tool::Fio, &[]).len(),
            4 * 3 * 4 * 3
        );
        assert_eq!(names(Preset::Iothreads, Tool::Guest, &[]).len(), 4 * 4 * 3);
        assert_eq!(names(Preset::Engines, Tool::Fio, &[]).len(), 2 * 2 * 2 * 2);
    }

    #[test]
    fn every_rule_is_set_against_per_handler_under_every_load() {
        for tool in [Tool::Guest, Tool::Vhost] {
            let runs = Preset::Policies.runs(tool, &[]).expect("runs");
            assert_eq!(runs.len(), 15 * 10);
            let layout = Layout::of(&runs);
            let all: Vec<&Run> = runs.iter().collect();
            let baselines = layout.baselines(&all);
            for (index, baseline) in baselines.into_iter().enumerate() {
                assert_eq!(baseline, index / 10 * 10);
                assert_eq!(layout.name(&runs[baseline]), "per-handler");
            }
            assert_eq!(layout.name(&runs[9]), "auto a1");
        }
        let given = ["poll-policy=auto poll-alpha=0.2 iodepth=1".to_string()];
        let runs = Preset::Policies.runs(Tool::Guest, &given).expect("runs");
        assert!(
            runs.iter()
                .all(|run| run.poll_alpha_milli == Some(200) && run.iodepth == 1)
        );
    }

    #[test]
    fn words_given_replace_those_of_the_preset() {
        let given = ["poll-weight=2 iodepth=1,8", "rw=randwrite"];
        assert_eq!(names(Preset::Weights, Tool::Guest, &given).len(), 3 * 2);
    }
}
