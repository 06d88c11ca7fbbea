//! The published studies as matrices of one word.

use clap::ValueEnum;

use crate::matrix::Tool;

/// A study. Words given besides replace its axes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// Weights 1 to 5 of the weighted rule against the older rules, random reads of 8k
    Weights,
    /// 16 disks on 1, 2, 4 and 8 iothreads, sequential and random, under each rule
    Iothreads,
    /// Linux AIO and io_uring, on an iothread and on the main loop, 4k at depth 1 and 64
    Engines,
}

impl Preset {
    /// Its words, the older rule first: that is the baseline.
    fn words(self, tool: Tool) -> Vec<&'static str> {
        let mut words = match self {
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
    fn words_given_replace_those_of_the_preset() {
        let given = ["poll-weight=2 iodepth=1,8", "rw=randwrite"];
        assert_eq!(names(Preset::Weights, Tool::Guest, &given).len(), 3 * 2);
    }
}
