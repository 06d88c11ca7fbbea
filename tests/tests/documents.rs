//! What the documents say about the code is so: why each dependency is there, which test shows what
//! SECURITY.md claims, and what cargo-deny holds the dependencies to.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

fn main() {
    let trials = vec![
        trial("every_dependency_has_its_reason", dependencies),
        trial("security_md_names_tests_that_exist", security),
        Trial::ignorable_test("cargo_deny", cargo_deny),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn trial(name: &str, test: fn()) -> Trial {
    Trial::test(name, move || {
        test();
        Ok::<(), Failed>(())
    })
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The cells of each row of a document's tables, without the rows above the line.
fn rows(text: &str) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    let mut below = false;
    for line in text.lines() {
        let is_row = line.starts_with('|');
        let is_line = line.starts_with("|-") || line.starts_with("| -");
        if is_row && below && !is_line {
            let cells = line.trim_matches('|').split(" | ");
            rows.push(cells.map(|cell| cell.trim().to_owned()).collect());
        }
        below = is_row && (below || is_line);
    }
    rows
}

/// The names on the left of `name = …` and `name.workspace = …` in the tables of dependencies.
fn dependencies_of(manifest: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut inside = false;
    for line in manifest.lines() {
        if let Some(table) = line.strip_prefix('[') {
            inside = table.trim_end_matches(']').ends_with("dependencies");
        } else if inside
            && let Some((name, _)) = line.split_once(['.', ' '])
            && !name.is_empty()
            && !name.starts_with('#')
        {
            names.insert(name.to_owned());
        }
    }
    names
}

fn dependencies() {
    let workspace = read("Cargo.toml");
    let ours = ["iothread", "devices", "arch", "vmm", "guest-image"];
    let mut wanted: BTreeMap<String, BTreeSet<String>> = dependencies_of(&workspace)
        .into_iter()
        .filter(|name| !ours.contains(&name.as_str()))
        .map(|name| (name, BTreeSet::new()))
        .collect();
    let members = workspace
        .lines()
        .find_map(|line| line.strip_prefix("members = "));
    for member in members.unwrap().split('"').skip(1).step_by(2) {
        for name in dependencies_of(&read(format!("{member}/Cargo.toml"))) {
            if let Some(users) = wanted.get_mut(&name) {
                users.insert(member.to_owned());
            }
        }
    }
    let mut told = BTreeMap::new();
    for row in rows(&read("DEPENDENCIES.md")) {
        let [name, users, reason] = &row[..] else {
            panic!("a row with {} cells: {row:?}", row.len());
        };
        assert!(reason.len() > 10, "{name}: for what?");
        let users: BTreeSet<String> = users.split(", ").map(str::to_owned).collect();
        let before = told.insert(name.clone(), users);
        assert!(before.is_none(), "{name} is there twice");
    }
    assert_eq!(told, wanted, "DEPENDENCIES.md (left) and the manifests");
}

/// Everything in which a test may be named.
fn sources(folder: &Path, text: &mut String) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let path = entry.path();
        match path.is_dir() {
            true => sources(&path, text),
            false if path.extension().is_some_and(|end| end == "rs") => {
                text.push_str(&fs::read_to_string(&path).unwrap());
            }
            false => {}
        }
    }
}

fn security() {
    let mut code = String::new();
    for folder in [
        "arch/src",
        "devices/src",
        "iothread",
        "tests/fuzz/src",
        "tests/src",
        "vmm",
    ] {
        sources(&root().join(folder), &mut code);
    }
    let exists = |name: &str| {
        let is_path = name.contains('/') && root().join(name).exists();
        // A test, or a case or fuzz target that is a value of its name.
        is_path || code.contains(&format!("fn {name}(")) || code.contains(&format!("\"{name}\""))
    };
    let text = read("SECURITY.md");
    let rows = rows(&text);
    assert!(rows.len() >= 20, "{} rows", rows.len());
    for row in &rows {
        let [claim, _, shown_by] = &row[..] else {
            panic!("a row with {} cells: {row:?}", row.len());
        };
        let names: Vec<_> = shown_by.split('`').skip(1).step_by(2).collect();
        assert!(!names.is_empty(), "nothing shows: {claim}");
        for name in names {
            assert!(exists(name), "{claim}: there is no {name}");
        }
    }
    for attacker in [
        "## A hostile guest",
        "## A hostile disk image",
        "## A hostile client of the monitor",
        "## A hostile front end",
    ] {
        let section = text.split(attacker).nth(1).expect(attacker);
        let section = section.split("\n## ").next().unwrap();
        assert!(section.contains("\n| it cannot |"), "{attacker}: what not?");
        assert!(section.contains("\nIt can: "), "{attacker}: and what?");
    }
}

fn cargo_deny() -> Result<Completion, Failed> {
    let deny = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO"));
        command.current_dir(root()).arg("deny").args(arguments);
        command.output()
    };
    if !deny(&["--version"])?.status.success() {
        let remedy = "cargo-deny is not installed; cargo install --locked cargo-deny";
        return Ok(Completion::ignored_with(remedy));
    }
    // Advisories come by network and are no matter of a change: `cargo deny check` has them as well.
    let check = ["--offline", "check", "--hide-inclusion-graph"];
    let end = deny(&[&check[..], &["licenses", "bans", "sources"]].concat())?;
    let messages = String::from_utf8_lossy(&end.stderr).into_owned();
    match end.status.success() {
        true => Ok(Completion::Completed),
        false => Err(messages.into()),
    }
}
