//! The user's terminal: raw while the guest has it, restored however the run ends.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use common::guest::Program;
use common::{Image, PATIENCE, finish, has_kvm, wait_for};
use rustix::process::{Pid, Signal, WaitOptions, kill_process};
use rustix::pty::OpenptFlags;
use rustix::termios::{LocalModes, tcgetattr};

/// A terminal, and a program that has it.
struct Session {
    screen: File,
    tty: OwnedFd,
    child: Child,
}

impl Session {
    /// Starts `command` in a session of its own with a new terminal.
    fn start(command: &mut Command) -> Self {
        let screen =
            rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
                .unwrap();
        rustix::pty::grantpt(&screen).unwrap();
        rustix::pty::unlockpt(&screen).unwrap();
        let name = rustix::pty::ptsname(&screen, Vec::new()).unwrap();
        let flags =
            rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY | rustix::fs::OFlags::CLOEXEC;
        let tty = rustix::fs::open(&name, flags, rustix::fs::Mode::empty()).unwrap();
        let end = || Stdio::from(tty.try_clone().unwrap());
        command.stdin(end()).stdout(end()).stderr(Stdio::piped());
        // SAFETY: between fork and exec only two system calls are made, which allocate nothing.
        unsafe {
            command.pre_exec(|| {
                rustix::process::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        Self {
            screen: File::from(screen),
            tty,
            child,
        }
    }

    fn is_raw(&self) -> bool {
        let modes = tcgetattr(&self.tty).unwrap().local_modes;
        let raw = !modes.intersects(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG);
        let cooked = modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG);
        assert!(
            raw || cooked,
            "half of the settings were changed: {modes:?}"
        );
        raw
    }

    fn expect(&mut self, text: &str) {
        let mut seen = Vec::new();
        let deadline = std::time::Instant::now() + PATIENCE;
        while !String::from_utf8_lossy(&seen).contains(text) {
            let mut poll = [rustix::event::PollFd::new(
                &self.screen,
                rustix::event::PollFlags::IN,
            )];
            let second = rustix::event::Timespec {
                tv_sec: 1,
                tv_nsec: 0,
            };
            if rustix::event::poll(&mut poll, Some(&second)).unwrap() > 0 {
                let mut buffer = [0; 256];
                let count = self.screen.read(&mut buffer).unwrap();
                seen.extend_from_slice(&buffer[..count]);
            }
            let late = std::time::Instant::now() > deadline;
            assert!(
                !late,
                "no {text:?} on the screen, but {:?}",
                String::from_utf8_lossy(&seen)
            );
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

/// Boots `program` on a terminal and waits for its "up".
fn boot(program: &[u8]) -> (Session, Image) {
    let image = Image::new(program);
    let mut session = Session::start(&mut image.command());
    session.expect("up");
    assert!(session.is_raw());
    (session, image)
}

#[test]
fn keys_go_to_the_guest_and_its_end_restores_the_terminal() {
    if !has_kvm("keys_go_to_the_guest_and_its_end_restores_the_terminal") {
        return;
    }
    let (mut session, _image) = boot(&Program::new().print("up").echo());
    // Ctrl-C, Ctrl-Z, Ctrl-D and Ctrl-A are the guest's; a lone carriage return stays one.
    session
        .screen
        .write_all(b"a\x03b\x1ac\x04d\x01\x01e\rf")
        .unwrap();
    session.expect("a\x03b\x1ac\x04d\x01e\rf");
    session.screen.write_all(b"q").unwrap();
    let Session { tty, child, screen } = session;
    let end = finish(child);
    assert_eq!(end.code(), Some(0), "{end:?}");
    assert!(
        tcgetattr(&tty)
            .unwrap()
            .local_modes
            .contains(LocalModes::ICANON | LocalModes::ECHO)
    );
    drop(screen);
}

#[test]
fn the_terminal_is_restored_however_the_run_ends() {
    if !has_kvm("the_terminal_is_restored_however_the_run_ends") {
        return;
    }
    let listening = || Program::new().print("up").hang();
    type End = (&'static str, Vec<u8>, fn(&mut Session), Option<i32>);
    let ends: [End; 8] = [
        ("SIGTERM", listening(), |s| s.signal(Signal::TERM), Some(0)),
        ("SIGINT", listening(), |s| s.signal(Signal::INT), Some(0)),
        ("SIGHUP", listening(), |s| s.signal(Signal::HUP), Some(0)),
        ("SIGSEGV", listening(), |s| s.signal(Signal::SEGV), None),
        ("SIGABRT", listening(), |s| s.signal(Signal::ABORT), None),
        ("SIGQUIT", listening(), |s| s.signal(Signal::QUIT), None),
        // Also a guest that does not listen can be left.
        (
            "Ctrl-A x",
            listening(),
            |s| s.screen.write_all(b"typed in vain\x01x").unwrap(),
            Some(0),
        ),
        // Its end waits for a key, so that the terminal can be seen raw before.
        (
            "guest's end",
            Program::new().print("up").echo(),
            |s| s.screen.write_all(b"q").unwrap(),
            Some(0),
        ),
    ];
    for (name, program, finish_it, code) in ends {
        let (mut session, _image) = boot(&program);
        finish_it(&mut session);
        let Session { tty, child, screen } = session;
        let end = finish(child);
        assert_eq!(end.code(), code, "{name}: {end:?}");
        let modes = tcgetattr(&tty).unwrap().local_modes;
        let cooked = LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG;
        assert!(modes.contains(cooked), "{name}: {modes:?}");
        drop(screen);
    }
}

#[test]
fn a_stopped_process_gives_the_terminal_back_and_takes_it_again() {
    if !has_kvm("a_stopped_process_gives_the_terminal_back_and_takes_it_again") {
        return;
    }
    let (mut session, _image) = boot(&Program::new().print("up").echo());
    session.signal(Signal::TSTP);
    let pid = Pid::from_child(&session.child);
    wait_for("the process to stop", || {
        let status =
            rustix::process::waitpid(Some(pid), WaitOptions::UNTRACED | WaitOptions::NOHANG);
        status.unwrap().is_some_and(|(_, status)| status.stopped())
    });
    assert!(!session.is_raw());
    session.signal(Signal::CONT);
    wait_for("raw mode after the continuation", || session.is_raw());
    session.screen.write_all(b"again").unwrap();
    session.expect("again");
    session.screen.write_all(b"q").unwrap();
    assert_eq!(finish(session.child).code(), Some(0));
}

#[test]
fn a_job_in_the_background_leaves_the_terminal_alone_until_it_is_brought_forward() {
    if !has_kvm("a_job_in_the_background_leaves_the_terminal_alone_until_it_is_brought_forward") {
        return;
    }
    let image = Image::new(&Program::new().print("the guest is awake").echo());
    let mut shell = Command::new("bash");
    shell
        .args(["--norc", "--noprofile", "--noediting", "-i"])
        .env("PS1", "prompt ");
    let mut session = Session::start(&mut shell);
    let line = format!(
        "{} --kernel {} --memory 64M &\n",
        env!("CARGO_BIN_EXE_pollux"),
        image.path.display()
    );
    session.screen.write_all(line.as_bytes()).unwrap();
    session.expect("the guest is awake");
    for round in 1..=2 {
        // The shell has the terminal and its keys.
        assert!(!session.is_raw());
        let line = format!("echo still $((40 + {round})) here\n");
        session.screen.write_all(line.as_bytes()).unwrap();
        session.expect(&format!("still {} here", 40 + round));
        assert!(!session.is_raw());
        // Nothing is typed after this until the guest has the terminal.
        session.screen.write_all(b"fg\n").unwrap();
        wait_for("raw mode in the foreground", || session.is_raw());
        let text = format!("round {round} in the guest");
        session.screen.write_all(text.as_bytes()).unwrap();
        session.expect(&text);
        if round == 1 {
            // Back again, stopped and continued by the shell.
            let pollux = rustix::termios::tcgetpgrp(&session.screen).unwrap();
            rustix::process::kill_process_group(pollux, Signal::TSTP).unwrap();
            wait_for("the shell's settings", || !session.is_raw());
            session.screen.write_all(b"bg\n").unwrap();
        }
    }
    session.screen.write_all(b"q").unwrap();
    wait_for("the shell's settings", || !session.is_raw());
    session.screen.write_all(b"exit\n").unwrap();
    assert_eq!(finish(session.child).code(), Some(0));
}

#[test]
fn a_panic_restores_the_terminal() {
    // The test binary runs itself as the program that panics.
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "helper_that_panics_in_raw_mode", "--nocapture"])
        .env(HELPER, "1");
    let mut session = Session::start(&mut command);
    session.expect("ready");
    assert!(session.is_raw());
    session.screen.write_all(b"g").unwrap();
    let Session { tty, child, screen } = session;
    assert_eq!(finish(child).code(), Some(0));
    assert!(
        tcgetattr(&tty)
            .unwrap()
            .local_modes
            .contains(LocalModes::ICANON)
    );
    drop(screen);
}

const HELPER: &str = "POLLUX_TEST_TERMINAL_HELPER";

/// Does nothing unless it is the helper of the test above.
#[test]
fn helper_that_panics_in_raw_mode() {
    if std::env::var_os(HELPER).is_none() {
        return;
    }
    let raw = vmm::vm::terminal::RawMode::enter().unwrap().unwrap();
    println!("ready");
    let mut go = [0];
    std::io::stdin().read_exact(&mut go).unwrap();
    std::thread::spawn(|| panic!("for the test"))
        .join()
        .unwrap_err();
    // Not by leaving the scope: the panic hook alone has restored the terminal by now.
    assert!(
        tcgetattr(rustix::stdio::stdin())
            .unwrap()
            .local_modes
            .contains(LocalModes::ICANON)
    );
    std::mem::forget(raw);
}

#[test]
fn a_pty_console_is_told_and_works() {
    if !has_kvm("a_pty_console_is_told_and_works") {
        return;
    }
    let image = Image::new(&Program::new().echo());
    let mut child = image.command().args(["--serial", "pty"]).spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let mut told = String::new();
    while !told.ends_with('\n') {
        let mut byte = [0];
        stderr.read_exact(&mut byte).unwrap();
        told.push(char::from(byte[0]));
    }
    let path = told
        .trim()
        .strip_prefix("pollux: the serial console is ")
        .unwrap();
    let mut console = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    console.write_all(b"through the pty").unwrap();
    let mut back = [0; 15];
    console.read_exact(&mut back).unwrap();
    assert_eq!(&back, b"through the pty");
    // The user may leave and come back.
    drop(console);
    let mut console = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    console.write_all(b"q").unwrap();
    assert_eq!(finish(child).code(), Some(0));
}
