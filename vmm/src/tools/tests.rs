use std::sync::Arc;

use clap::{CommandFactory, Parser};

use super::*;
use crate::config::args::{self, Cli};
use crate::qmp::testing::TestMachine;
use crate::qmp::{Listener, Monitor, Server, event};

fn tool(line: &[&str]) -> Tool {
    let words = std::iter::once("pollux").chain(line.iter().copied());
    match Cli::try_parse_from(words).unwrap().command {
        Some(args::Command::Tool(tool)) => tool,
        other => panic!("{line:?}: {other:?}"),
    }
}

#[test]
fn the_command_line_has_the_tools() {
    assert!(matches!(tool(&["check"]), Tool::Check));
    let Tool::Info(info) = tool(&["info", "iothreads", "/run/vm.sock"]) else {
        panic!("no info")
    };
    assert_eq!(info.socket, PathBuf::from("/run/vm.sock"));
    let Tool::Top(top) = tool(&["top", "/run/vm.sock", "-i", "0.5", "-c", "3"]) else {
        panic!("no top")
    };
    assert_eq!((top.interval, top.count), (0.5, Some(3)));
    for line in [
        ["top", "s", "-i0"].as_slice(),
        &["top", "s", "-ix"],
        &["top"],
        &["info", "nothing", "s"],
        &["man", "nothing"],
    ] {
        let words = std::iter::once("pollux").chain(line.iter().copied());
        assert!(Cli::try_parse_from(words).is_err(), "{line:?}");
    }
}

#[test]
fn a_running_vm_is_asked_and_answers_in_words_or_json() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("qmp");
    let (sink, queue) = event::channel().unwrap();
    let monitor = Monitor::new(Arc::new(TestMachine::new(sink)));
    let _server = Server::start(Listener::bind(&socket).unwrap(), monitor, queue).unwrap();
    let answer = |what, json| {
        let socket = socket.clone();
        ask(&Info { what, socket, json }).unwrap()
    };
    let text = answer(Topic::Iothreads, false);
    assert!(
        text.starts_with("io0:\n  thread_id=") && !text.contains('\r'),
        "{text}"
    );
    let value: Value = serde_json::from_str(&answer(Topic::Iothreads, true)).unwrap();
    assert_eq!(value[1]["id"], "io1");
    assert_eq!(answer(Topic::Status, false), "VM status: running\n");
    assert!(answer(Topic::Metrics, false).contains("# TYPE pollux_running gauge\n"));
    assert!(answer(Topic::Polling, false).contains("main (thread "));
    let nobody = Info {
        what: Topic::Status,
        socket: dir.path().join("none"),
        json: false,
    };
    assert!(
        ask(&nobody)
            .unwrap_err()
            .to_string()
            .contains("cannot connect")
    );
}

#[test]
fn every_shell_gets_completions_that_know_the_options() {
    for shell in Shell::value_variants() {
        let script = String::from_utf8(completions(*shell, Cli::command())).unwrap();
        assert!(
            script.contains("iothread") && script.contains("completions"),
            "{shell}"
        );
    }
}
