//! What `--sandbox`, `--user` and `--chroot` take away, and that a VM runs without it.
//!
//! What is given up cannot be had again, so the cases that look from inside run in a child of this program, which calls
//! itself.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::fs::Permissions;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Child, Command};

use common::guest::Program;
use common::{Image, finish, has_kvm, pollux, run, wait_for};
use libtest_mimic::{Arguments, Failed, Trial};
use rustix::process::{Pid, Signal, kill_process};
use vmm::config::Config;

/// Tells this program to enter the sandbox of the configuration in this file and to look around.
const CHILD: &str = "POLLUX_SANDBOX_CHILD";
/// A user without rights.
const NOBODY: u32 = 65534;

fn main() {
    if let Ok(config) = std::env::var(CHILD) {
        look_around(Path::new(&config));
        return;
    }
    let root = rustix::process::geteuid().is_root();
    let needs_root = |name: &str, test: fn()| {
        let reason = format!("{name}: skipped: only root can become another user");
        Trial::test(if root { name.to_owned() } else { reason }, move || {
            test();
            Ok::<(), Failed>(())
        })
        .with_ignored_flag(!root)
    };
    let plain = |name: &str, test: fn()| {
        Trial::test(name, move || {
            test();
            Ok::<(), Failed>(())
        })
    };
    let trials = vec![
        plain("only_named_files_and_no_network_are_left", only_named_files),
        plain("a_vm_with_everything_runs_in_it", everything_runs),
        plain("what_cannot_be_is_told_in_a_line", bad_input),
        needs_root("another_user_in_another_root", another_user),
        needs_root("an_unprivileged_user_of_the_kvm_group", kvm_group),
    ];
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

/// The child: everything that is wrong is said on standard error.
fn look_around(config: &Path) {
    let text = std::fs::read_to_string(config).unwrap();
    let config = Config::from_json(&text, "test").unwrap();
    let beside = config.disk[0].path.with_file_name("beside.img");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _ = vmm::sandbox::enter(&config, &[]).unwrap();

    let denied = |what: &str, result: std::io::Result<()>| match result {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
        other => eprintln!("{what}: {other:?}"),
    };
    let open = |path: &Path| std::fs::File::open(path).map(drop);
    denied("/etc/passwd", open(Path::new("/etc/passwd")));
    denied("/proc/self/environ", open(Path::new("/proc/self/environ")));
    denied("a file beside the disk", open(&beside));
    denied(
        "a new file",
        std::fs::write(beside.with_file_name("new"), "").map(drop),
    );
    denied(
        "a link",
        std::os::unix::fs::symlink("a", beside.with_file_name("link")),
    );
    let address = listener.local_addr().unwrap();
    denied("a connection", TcpStream::connect(address).map(drop));
    denied("a listener", TcpListener::bind("127.0.0.1:0").map(drop));
    denied("a program", Command::new("/bin/true").status().map(drop));

    let may = |what: &str, result: std::io::Result<()>| {
        if let Err(error) = result {
            eprintln!("{what}: {error}");
        }
    };
    let writable = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(&config.disk[0].path);
    may("the disk", writable.map(drop));
    may("the read-only disk", open(&config.disk[1].path));
    let readonly = std::fs::OpenOptions::new()
        .write(true)
        .open(&config.disk[1].path);
    denied("writing the read-only disk", readonly.map(drop));
    let metrics = config.metrics.unwrap().file;
    may("metrics", std::fs::write(metrics.with_extension("new"), ""));
    may(
        "metrics",
        std::fs::rename(metrics.with_extension("new"), metrics),
    );
}

fn only_named_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    for name in ["disk.img", "readonly.img", "beside.img"] {
        std::fs::write(path(name), [0; 4096]).unwrap();
    }
    std::fs::create_dir(path("metrics")).unwrap();
    let config = format!(
        r#"{{"sandbox": true, "disk": [{{"path": "{}"}}, {{"path": "{}", "readonly": true}}], "metrics": {{"file": "{}"}}}}"#,
        path("disk.img"),
        path("readonly.img"),
        path("metrics/file")
    );
    std::fs::write(path("config"), config).unwrap();
    let end = run(Command::new(std::env::current_exe().unwrap())
        .env(CHILD, path("config"))
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped()));
    assert_eq!((end.code(), end.stderr.as_str()), (Some(0), ""));
}

/// A VM with a console, monitor, metrics and a disk in `dir`, which waits.
fn start(image: &Image, prefix: &[&str], options: &[&str]) -> Child {
    let dir = image.dir.path();
    let disk = dir.join("disk.img");
    std::fs::write(&disk, [0; 4096]).unwrap();
    let out = dir.join("out");
    let program = pollux().get_program().to_owned();
    let mut command = match prefix.split_first() {
        Some((first, rest)) => {
            let mut command = Command::new(first);
            command.args(rest).arg(program);
            command
        }
        None => Command::new(program),
    };
    command
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .arg("--kernel")
        .arg(&image.path)
        .args(["--iothread", "io0"])
        .arg("--disk")
        .arg(format!("path={},iothread=io0", disk.display()))
        .arg("--serial")
        .arg(format!("file={}", out.join("console").display()))
        .arg("--qmp")
        .arg(format!("unix:{}", out.join("qmp").display()))
        .args(options)
        .spawn()
        .unwrap()
}

fn image() -> Image {
    let image = Image::new(&Program::new().print("up\n").hang());
    std::fs::create_dir(image.dir.path().join("out")).unwrap();
    image
}

/// The process that is at work once the guest is up: `child`, or what it became.
fn wait_until_up(image: &Image) {
    let console = image.dir.path().join("out/console");
    wait_for("the guest's word", || {
        std::fs::read_to_string(&console).is_ok_and(|text| text == "up\n")
    });
}

fn status(pid: u32, key: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(key));
    line.unwrap_or_default().trim().to_owned()
}

fn stop(child: Child) -> common::Finished {
    kill_process(
        Pid::from_raw(child.id().cast_signed()).unwrap(),
        Signal::TERM,
    )
    .unwrap();
    finish(child)
}

fn everything_runs() {
    if !has_kvm("a_vm_with_everything_runs_in_it") {
        return;
    }
    let image = image();
    let metrics = image.dir.path().join("out/metrics").display().to_string();
    let child = start(&image, &[], &["--sandbox", "on", "--metrics", &metrics]);
    wait_until_up(&image);
    let pid = child.id();
    for set in ["CapEff:", "CapPrm:", "CapBnd:", "CapInh:", "CapAmb:"] {
        let root = rustix::process::geteuid().is_root();
        assert!(
            u64::from_str_radix(&status(pid, set), 16) == Ok(0) || (set == "CapBnd:" && !root),
            "{set}"
        );
    }
    assert_eq!(status(pid, "NoNewPrivs:"), "1");
    let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let core = limits
        .lines()
        .find(|line| line.starts_with("Max core file size"));
    assert_eq!(
        core.unwrap().split_whitespace().nth(4),
        Some("0"),
        "{limits}"
    );
    let end = stop(child);
    assert_eq!(end.code(), Some(0), "{end:?}");
    let left: Vec<_> = std::fs::read_dir(image.dir.path().join("out"))
        .unwrap()
        .collect();
    assert_eq!(
        left.len(),
        2,
        "console and metrics, and no socket: {left:?}"
    );
}

fn another_user() {
    if !has_kvm("another_user_in_another_root") {
        return;
    }
    for sandbox in ["off", "on"] {
        let image = image();
        let out = image.dir.path().join("out");
        std::fs::set_permissions(&out, Permissions::from_mode(0o777)).unwrap();
        let root = tempfile::tempdir().unwrap();
        let chroot = root.path().display().to_string();
        let user = format!("{NOBODY}:{NOBODY}");
        let options = ["--user", &user, "--chroot", &chroot, "--sandbox", sandbox];
        let child = start(&image, &[], &options);
        wait_until_up(&image);
        let pid = child.id();
        let four = [
            NOBODY.to_string(),
            NOBODY.to_string(),
            NOBODY.to_string(),
            NOBODY.to_string(),
        ];
        for entry in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
            let task: u32 = entry
                .unwrap()
                .file_name()
                .to_str()
                .unwrap()
                .parse()
                .unwrap();
            assert_eq!(
                status(task, "Uid:").split_whitespace().collect::<Vec<_>>(),
                four
            );
            assert_eq!(
                status(task, "Gid:").split_whitespace().collect::<Vec<_>>(),
                four
            );
            assert_eq!(status(task, "Groups:"), "");
            assert_eq!(u64::from_str_radix(&status(task, "CapEff:"), 16), Ok(0));
        }
        assert_eq!(
            std::fs::read_link(format!("/proc/{pid}/root")).unwrap(),
            root.path()
        );
        assert_eq!(std::fs::metadata(out.join("qmp")).unwrap().uid(), NOBODY);
        let end = stop(child);
        assert_eq!(end.code(), Some(0), "{end:?}");
        assert!(!out.join("qmp").exists(), "the socket is left behind");
    }
}

/// In a mount namespace of its own /dev/kvm belongs to a group, as distributions have it.
fn kvm_group() {
    if !has_kvm("an_unprivileged_user_of_the_kvm_group") {
        return;
    }
    let image = image();
    std::fs::set_permissions(image.dir.path(), Permissions::from_mode(0o777)).unwrap();
    let out = image.dir.path().join("out");
    std::fs::set_permissions(out, Permissions::from_mode(0o777)).unwrap();
    let program = image.dir.path().join("pollux");
    std::fs::copy(pollux().get_program(), &program).unwrap();
    let disk = image.dir.path().join("disk.img");
    std::fs::write(&disk, [0; 4096]).unwrap();
    std::fs::set_permissions(&disk, Permissions::from_mode(0o666)).unwrap();
    let node = image.dir.path().join("kvm");
    let script = format!(
        "mknod -m 660 {node} c 10 232 && chgrp 4242 {node} && mount --bind {node} /dev/kvm && \
         exec setpriv --reuid {NOBODY} --regid {NOBODY} --groups 4242 -- {program} \
         --kernel {kernel} --sandbox on --iothread io0 --disk path={disk},iothread=io0 \
         --serial file={console} --qmp unix:{qmp}",
        node = node.display(),
        program = program.display(),
        kernel = image.path.display(),
        disk = disk.display(),
        console = image.dir.path().join("out/console").display(),
        qmp = image.dir.path().join("out/qmp").display(),
    );
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", &script])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let child = command.spawn().unwrap();
    let socket = image.dir.path().join("out/qmp");
    wait_until_up(&image);
    assert!(status(child.id(), "Uid:").starts_with(&NOBODY.to_string()));
    assert!(socket.exists());
    let end = stop(child);
    assert_eq!(end.code(), Some(0), "{end:?}");
    assert!(!socket.exists());
}

fn bad_input() {
    let cases: [(&[&str], &str); 4] = [
        (
            &["--chroot", "/tmp"],
            "--chroot /tmp: holds nobody who is root; add --user",
        ),
        (
            &["--user", "no-such-user"],
            "--user no-such-user: there is no such user or group",
        ),
        (
            &["--user", "0", "--chroot", "/no/such"],
            "--chroot /no/such: ",
        ),
        (&["--sandbox", "maybe"], "--sandbox maybe"),
    ];
    for (options, text) in cases {
        let end = run(pollux().args(["--kernel", "/no/such"]).args(options));
        assert_eq!((end.code(), end.stdout.as_str()), (Some(2), ""), "{end:?}");
        assert!(
            end.stderr.contains(text) && end.stderr.lines().count() == 1,
            "{}",
            end.stderr
        );
    }
}
