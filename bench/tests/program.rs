//! The program as its users run it: status, files, Ctrl-C, going on.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_pollux-bench");

fn bench(words: &[&str]) -> Output {
    Command::new(PROGRAM)
        .args(words)
        .output()
        .expect("pollux-bench")
}

/// Whether the machine has what a run on QEMU needs; says so if not.
fn has_qemu(test: &str) -> bool {
    let qemu = Command::new("qemu-system-x86_64")
        .arg("--version")
        .output()
        .is_ok();
    let able = qemu && Path::new("/dev/kvm").exists();
    if !able {
        println!("skipped: {test} needs qemu-system-x86_64 and /dev/kvm");
    }
    able
}

#[test]
fn wrong_usage_is_status_2_and_one_line() {
    let output = bench(&["guest", "bs=1", "vmm=qemu"]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.starts_with("pollux-bench: matrix: bs=1"), "{text}");
    assert_eq!(text.lines().count(), 1);
    assert!(output.stdout.is_empty());
}

#[test]
fn published_figures_are_printed_without_a_result() {
    let output = bench(&["report", "--reference"]);
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("163718") && text.contains("qemu-9.1"),
        "{text}"
    );
}

/// Ctrl-C in the middle: the report of what was measured is printed, the file is kept, nothing is
/// left behind; going on completes it; and the other subcommands read it.
#[test]
fn an_interrupted_run_is_kept_and_completed() {
    if !has_qemu("an_interrupted_run_is_kept_and_completed") {
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let at = |name: &str| {
        place
            .path()
            .join(name)
            .to_str()
            .expect("a path")
            .to_string()
    };
    let disks = place.path().join("disks");
    std::fs::create_dir(&disks).expect("mkdir");
    let (json, html, csv) = (at("a.json"), at("a.html"), at("a.csv"));
    let common = [
        "--size",
        "4M",
        "--ramp",
        "50ms",
        "--runtime",
        "300ms",
        "--warm-up",
        "0",
        "--directory",
        disks.to_str().expect("a path"),
        "--html",
        &html,
        "--csv",
        &csv,
    ];
    let mut child = Command::new(PROGRAM)
        .args([
            "guest",
            "vmm=qemu",
            "iodepth=1,4",
            "--repeat",
            "1000",
            "--json",
            &json,
        ])
        .args(common)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("pollux-bench");
    let mut lines = BufReader::new(child.stderr.take().expect("its messages")).lines();
    // Both runs measured once, the third turn under way.
    for _ in 0..2 {
        let line = lines.next().expect("a line").expect("text");
        assert!(line.contains("IOPS"), "{line}");
    }
    let pid = i32::try_from(child.id()).expect("a pid");
    // SAFETY: the signal goes to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
    let mut report = String::new();
    child
        .stdout
        .take()
        .expect("its report")
        .read_to_string(&mut report)
        .expect("text");
    let last = lines.map_while(Result::ok).last().expect("a last line");
    assert_eq!(child.wait().expect("its end").code(), Some(1));
    assert!(last.contains("interrupted; go on with --resume"), "{last}");
    assert!(report.contains("note: interrupted"), "{report}");
    assert_eq!(
        std::fs::read_dir(&disks).expect("list").count(),
        0,
        "disks are removed"
    );
    let page = std::fs::read_to_string(&html).expect("the page");
    assert!(page.contains("</html>"));

    // Few rounds more: fewer than were asked for at first, or this would take its time.
    let text = std::fs::read_to_string(&json).expect("the result");
    assert!(text.contains("\"complete\": false"));
    std::fs::write(&json, text.replace("\"rounds\": 1000", "\"rounds\": 2")).expect("written");
    let output = Command::new(PROGRAM)
        .args(["guest", "--resume", &json])
        .args(common)
        .output()
        .expect("pollux-bench");
    let messages = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{messages}");
    let text = std::fs::read_to_string(&json).expect("the result");
    assert!(text.contains("\"complete\": true"));
    let lines = std::fs::read_to_string(&csv).expect("CSV").lines().count();
    assert_eq!(lines, 1 + 4, "two runs, two rounds");

    let again = bench(&["report", &json]);
    assert_eq!(again.stdout, output.stdout);
    let compared = bench(&["compare", &json, &json]);
    assert!(compared.status.success());
    let text = String::from_utf8_lossy(&compared.stdout);
    assert!(text.contains("+0.0% noise"), "{text}");
}

#[test]
fn a_vmm_that_fails_is_status_1_with_its_message() {
    let place = tempfile::tempdir().expect("a directory");
    let script = place.path().join("pollux");
    std::fs::write(
        &script,
        "#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho no luck >&2\nexit 1\n",
    )
    .expect("a script");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).expect("executable");
    let output = bench(&[
        "guest",
        "iodepth=1,2",
        "--size",
        "1M",
        "--repeat",
        "3",
        "--pollux",
        script.to_str().expect("a path"),
    ]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("no luck") && text.contains("2 of 2 runs failed"),
        "{text}"
    );
}
