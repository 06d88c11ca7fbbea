//! What runs for each iteration, request and wake-up knows no lock: the modules that do are few, and
//! theirs are taken at starts, ends and calls from other threads.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

/// Modules that may name a lock, and what for.
const ALLOWED: [&str; 3] = [
    // The message of a panic.
    "thread.rs",
    // The function and the result of `Remote::call`.
    "remote.rs",
    "bottom_half.rs",
];

fn sources(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|e| e == "rs") {
            into.push(path);
        }
    }
}

#[test]
fn no_module_of_the_hot_path_knows_a_lock() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut found = Vec::new();
    for file in &files {
        let text = std::fs::read_to_string(file).unwrap();
        let code = text.lines().map(str::trim_start);
        let mut code = code.filter(|line| !line.starts_with("//"));
        let lock = code.find(|line| {
            ["Mutex", "RwLock", "Condvar", "Barrier", "mpsc"]
                .iter()
                .any(|word| line.contains(word))
        });
        if lock.is_some() {
            found.push(file.strip_prefix(&root).unwrap().display().to_string());
        }
    }
    assert!(files.len() > 25, "{} modules read", files.len());
    found.sort();
    let mut allowed = ALLOWED;
    allowed.sort_unstable();
    assert_eq!(found, allowed, "modules that know a lock");
}
