//! Every target on its corpus, and on inputs made from it and from nothing with a fixed seed.

use std::path::Path;

use fuzz::{TARGETS, Target};
use libtest_mimic::{Arguments, Trial};

/// Longest input that is made.
const MAX_BYTES: u64 = 2048;

fn main() {
    let trials = TARGETS.iter().map(|target| {
        Trial::test(target.name, move || {
            short(target);
            Ok(())
        })
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit();
}

fn short(target: &Target) {
    let corpus = corpus(target.name);
    assert!(!corpus.is_empty(), "no corpus of {}", target.name);
    for input in &corpus {
        (target.run)(input);
    }
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for number in 0..target.short_inputs {
        let input = random.input(&corpus);
        let run = std::panic::AssertUnwindSafe(|| (target.run)(&input));
        if std::panic::catch_unwind(run).is_err() {
            panic!(
                "{}: input {number} of the short run: {input:02x?}",
                target.name
            );
        }
    }
}

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("corpus")
        .join(name);
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.path()).collect();
    files.sort();
    files
        .iter()
        .filter_map(|path| std::fs::read(path).ok())
        .collect()
}

/// SplitMix64: the same inputs everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// Noise, or a piece of the corpus with some bytes changed, cut out or doubled.
    fn input(&mut self, corpus: &[Vec<u8>]) -> Vec<u8> {
        if self.below(3) == 0 {
            let len = self.below(MAX_BYTES as usize);
            return (0..len).map(|_| self.next() as u8).collect();
        }
        let mut input = corpus[self.below(corpus.len())].clone();
        for _ in 0..=self.below(8) {
            if input.is_empty() {
                break;
            }
            let at = self.below(input.len());
            match self.below(4) {
                0 => input[at] = self.next() as u8,
                1 => input[at] ^= 1 << self.below(8),
                2 => {
                    let end = (at + self.below(16)).min(input.len());
                    input.drain(at..end);
                }
                _ => {
                    let end = (at + self.below(16)).min(input.len());
                    let piece = input[at..end].to_vec();
                    input.splice(at..at, piece);
                }
            }
        }
        input
    }
}
