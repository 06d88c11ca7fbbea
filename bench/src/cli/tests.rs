use clap::{CommandFactory, Parser};

use super::*;
use crate::matrix::{self, Tool, Vmm};

/// The message and the exit status of a command line.
fn outcome(words: &[&str]) -> (String, u8) {
    let all = std::iter::once("pollux-bench").chain(words.iter().copied());
    match Cli::try_parse_from(all) {
        Err(error) => (
            error.to_string(),
            u8::try_from(error.exit_code()).expect("a status"),
        ),
        Ok(cli) => match run(cli) {
            Ok(()) => (String::new(), 0),
            Err(error) => (error.to_string(), error.status()),
        },
    }
}

#[test]
fn the_options_are_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn wrong_usage_is_one_line_with_the_remedy_and_status_2() {
    let place = tempfile::tempdir().expect("a directory");
    let file = place.path().join("some");
    std::fs::write(&file, "x").expect("written");
    let some = file.to_str().expect("a path");
    let boot = ["--kernel", some, "--initrd", some, "--root", some];
    let fio = |words: &[&'static str]| -> Vec<String> {
        let all = ["fio"].iter().chain(&boot).chain(words);
        all.map(|w| (*w).to_string()).collect()
    };
    let cases: [(Vec<String>, &[&str]); 6] = [
        (fio(&["bs=1"]), &["bs=1 is not possible", "multiple of 512"]),
        (
            fio(&["bs=4k", "--pollux", "/nowhere/pollux"]),
            &["/nowhere/pollux", "--pollux"],
        ),
        (
            fio(&["vmm=qemu", "--qemu", "/nowhere/qemu"]),
            &["/nowhere/qemu", "--qemu"],
        ),
        (
            fio(&["--resume", "/nowhere/a.json"]),
            &["/nowhere/a.json", "--json"],
        ),
        (
            fio(&["bs=4k", "--job-file", "x.fio"]),
            &["--job-file x.fio", "bs too"],
        ),
        (
            ["fio", "--kernel", "/nowhere/k"].map(String::from).to_vec(),
            &["--kernel /nowhere/k", "can be read"],
        ),
    ];
    for (words, parts) in cases {
        let (message, status) = outcome(&words.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(
            (status, message.lines().count()),
            (2, 1),
            "{words:?}: {message}"
        );
        for part in parts {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
    for words in [
        &["fio", "--size", "1000"][..],
        &["fio", "--repeat", "0"],
        &["nothing"],
        &[],
    ] {
        assert_eq!(outcome(words).1, 2, "{words:?}");
    }
}

#[test]
fn a_peer_stands_before_what_is_compared_with_it() {
    let runs = matrix::parse(&["poll-weight=2,3 bs=4k,8k"], Tool::Guest).expect("a matrix");
    let all = measure::beside(&runs, Vmm::Qemu);
    let order: Vec<_> = all
        .iter()
        .map(|r| (r.vmm == Vmm::Qemu, r.poll_weight, r.bs_bytes >> 10))
        .collect();
    assert_eq!(
        order,
        [
            (true, None, 4),
            (false, Some(2), 4),
            (true, None, 8),
            (false, Some(2), 8),
            (false, Some(3), 4),
            (false, Some(3), 8),
        ]
    );
    let layout = matrix::Layout::of(&all);
    let baselines = layout.baselines(&all.iter().collect::<Vec<_>>());
    assert_eq!(baselines, [0, 0, 2, 2, 0, 2]);
}

#[test]
fn the_help_lists_the_axes_of_its_load() {
    let help = axes_help(Tool::Fio);
    assert!(help.contains("poll-weight") && help.contains("numjobs"));
    assert!(!help.contains("think-ns"));
}
