use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver, Sender};

use serde_json::json;

use super::super::event::{self, Event, ShutdownCause, Sink};
use super::*;

/// Answers with the name of the command, however long; `emit` emits, `big` answers with much.
/// `wait` waits for the test.
struct Echo(Sink, Mutex<Hold>);

/// The command's end of the test's hold on it.
struct Hold {
    begun: Sender<()>,
    released: Receiver<()>,
}

impl Commands for Echo {
    fn execute(&self, call: Call) -> Result<Value, Error> {
        match call.command.as_str() {
            "emit" => {
                self.0.emit(&Event::Stop);
                Ok(json!({}))
            }
            "big" => Ok(json!("x".repeat(50_000))),
            "wait" => {
                let hold = self.1.lock().unwrap();
                hold.begun.send(()).unwrap();
                hold.released.recv().unwrap();
                Ok(json!("waited"))
            }
            "fail" => Err(Error::failed("it failed")),
            name => Ok(json!(name)),
        }
    }
}

struct Bed {
    /// Before the directory, so that the socket is removed first.
    server: Option<Server>,
    sink: Sink,
    begun: Receiver<()>,
    release: Sender<()>,
    path: PathBuf,
    dir: tempfile::TempDir,
}

fn bed() -> Bed {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let (sink, queue) = event::channel().unwrap();
    let (begin, begun) = mpsc::channel();
    let (release, released) = mpsc::channel();
    let hold = Hold {
        begun: begin,
        released,
    };
    let listener = Listener::bind(&path).unwrap();
    let server =
        Some(Server::start(listener, Echo(sink.clone(), Mutex::new(hold)), queue).unwrap());
    Bed {
        server,
        sink,
        begun,
        release,
        path,
        dir,
    }
}

struct Peer {
    stream: UnixStream,
    input: BufReader<UnixStream>,
}

impl Bed {
    fn connect(&self) -> Peer {
        let stream = UnixStream::connect(&self.path).unwrap();
        // So that a server that does not answer fails the test and does not hang it.
        let patience = Some(Duration::from_secs(20));
        stream.set_read_timeout(patience).unwrap();
        stream.set_write_timeout(patience).unwrap();
        let input = BufReader::new(stream.try_clone().unwrap());
        Peer { stream, input }
    }

    /// A client that has negotiated.
    fn client(&self) -> Peer {
        let mut peer = self.connect();
        assert!(peer.receive()["QMP"]["version"]["package"].is_string());
        assert_eq!(
            peer.ask(json!({"execute": "qmp_capabilities"})),
            json!({"return": {}})
        );
        peer
    }
}

impl Peer {
    fn send(&mut self, text: impl AsRef<[u8]>) {
        self.stream.write_all(text.as_ref()).unwrap();
    }

    fn line(&mut self) -> Option<String> {
        let mut line = String::new();
        match self.input.read_line(&mut line) {
            Ok(0) => None,
            Ok(_) => Some(line),
            Err(error) => panic!("no line: {error}"),
        }
    }

    fn receive(&mut self) -> Value {
        let line = self.line().expect("not at the end");
        assert!(line.ends_with("\r\n"));
        serde_json::from_str(&line).unwrap()
    }

    fn ask(&mut self, request: Value) -> Value {
        self.send(request.to_string());
        self.receive()
    }
}

#[test]
fn commands_wait_for_negotiation_which_happens_once() {
    let bed = bed();
    let mut peer = bed.connect();
    assert_eq!(peer.receive()["QMP"]["capabilities"], json!([]));
    for _ in 0..2 {
        let reply = peer.ask(json!({"execute": "x", "id": 1}));
        assert_eq!(reply["error"]["class"], "CommandNotFound");
        assert_eq!(
            reply["error"]["desc"],
            "Expecting capabilities negotiation with 'qmp_capabilities'"
        );
        assert_eq!(reply["id"], 1);
    }
    for (arguments, problem) in [
        (
            json!({"enable": ["oob"]}),
            "Parameter 'enable' does not accept value 'oob'",
        ),
        (
            json!({"enable": "oob"}),
            "Invalid parameter type for 'enable', expected: array",
        ),
        (json!({"x": 1}), "Parameter 'x' is unexpected"),
    ] {
        let reply = peer.ask(json!({"execute": "qmp_capabilities", "arguments": arguments}));
        assert_eq!(reply["error"]["desc"], problem);
    }
    let negotiate = json!({"execute": "qmp_capabilities", "arguments": {"enable": []}});
    assert_eq!(peer.ask(negotiate.clone()), json!({"return": {}}));
    assert_eq!(
        peer.ask(json!({"execute": "x", "id": "a"})),
        json!({"return": "x", "id": "a"})
    );
    assert_eq!(peer.ask(negotiate)["error"]["class"], "CommandNotFound");
}

#[test]
fn half_lines_and_many_commands_a_packet_are_answered_in_order() {
    let bed = bed();
    let mut peer = bed.client();
    peer.send("{\"execute\": \"a\", ");
    std::thread::sleep(Duration::from_millis(20));
    peer.send("\"id\": 1}{\"execute\":\n\"b\"} {\"execute\":\"fail\"}{]\n{\"execute\":\"c\"}");
    assert_eq!(peer.receive(), json!({"return": "a", "id": 1}));
    assert_eq!(peer.receive(), json!({"return": "b"}));
    assert_eq!(peer.receive()["error"]["desc"], "it failed");
    let syntax = peer.receive();
    assert_eq!(syntax["error"]["class"], "GenericError");
    assert!(
        syntax["error"]["desc"]
            .as_str()
            .unwrap()
            .starts_with("JSON parse error")
    );
    assert_eq!(peer.receive(), json!({"return": "c"}));
}

#[test]
fn a_huge_line_is_refused_and_the_client_lives_on() {
    let bed = bed();
    let mut peer = bed.client();
    peer.send(format!(
        "{{\"execute\": \"{}\"}}\n{{\"execute\": \"next\"}}",
        "x".repeat(3 << 20)
    ));
    assert_eq!(
        peer.receive()["error"]["desc"],
        "JSON parse error, message is longer than 1 MiB"
    );
    assert_eq!(peer.receive(), json!({"return": "next"}));
}

#[test]
fn a_client_that_has_said_all_still_gets_its_answers() {
    let bed = bed();
    let mut peer = bed.client();
    for _ in 0..100 {
        peer.send(json!({"execute": "big"}).to_string());
    }
    peer.stream.shutdown(Shutdown::Write).unwrap();
    for _ in 0..100 {
        assert_eq!(
            peer.receive()["return"].as_str().map(str::len),
            Some(50_000)
        );
    }
    assert_eq!(peer.line(), None);
}

#[test]
fn all_clients_are_told_events_and_the_causer_before_its_reply() {
    let bed = bed();
    let mut silent = bed.connect();
    silent.receive();
    let (mut one, mut other) = (bed.client(), bed.client());
    one.send(json!({"execute": "emit"}).to_string());
    assert_eq!(one.receive()["event"], "STOP");
    assert_eq!(one.receive(), json!({"return": {}}));
    assert_eq!(other.receive()["event"], "STOP");
    bed.sink.emit(&Event::Resume);
    assert_eq!(one.receive()["event"], "RESUME");
    assert_eq!(other.receive()["event"], "RESUME");
    // Who has not negotiated hears nothing.
    silent.send(json!({"execute": "qmp_capabilities"}).to_string());
    assert_eq!(silent.receive(), json!({"return": {}}));
}

#[test]
fn sixty_four_clients_are_served_and_one_more_is_told_so() {
    let bed = bed();
    let mut clients: Vec<Peer> = (0..MAX_CLIENTS).map(|_| bed.client()).collect();
    let mut extra = bed.connect();
    assert!(
        extra.receive()["error"]["desc"]
            .as_str()
            .unwrap()
            .contains("64")
    );
    assert_eq!(extra.line(), None);
    for (id, client) in clients.iter_mut().enumerate() {
        let reply = client.ask(json!({"execute": "x", "id": id}));
        assert_eq!(reply, json!({"return": "x", "id": id}));
    }
    // One leaves, and there is room again. The server may see the newcomer first.
    clients.pop();
    let mut newcomer = loop {
        let mut peer = bed.connect();
        if peer.receive().get("QMP").is_some() {
            break peer;
        }
    };
    newcomer.ask(json!({"execute": "qmp_capabilities"}));
}

#[test]
fn clients_that_vanish_at_any_point_disturb_nobody() {
    let bed = bed();
    let mut witness = bed.client();
    for n in 0..200 {
        let mut peer = bed.client();
        match n % 4 {
            0 => {}
            1 => peer.send("{\"execute\": \"bi"),
            2 => peer.send(json!({"execute": "big"}).to_string().repeat(20)),
            _ => peer.send(json!({"execute": "emit"}).to_string()),
        }
        drop(peer);
        assert_eq!(witness.ask_past_events("x"), json!({"return": "x"}));
    }
}

impl Peer {
    /// The reply to a command, events left out.
    fn ask_past_events(&mut self, command: &str) -> Value {
        self.send(json!({"execute": command}).to_string());
        loop {
            let message = self.receive();
            if message.get("event").is_none() {
                return message;
            }
        }
    }
}

#[test]
fn a_client_that_never_reads_is_held_back_and_dropped_when_events_pile_up() {
    let bed = bed();
    let mut deaf = bed.client();
    let patience = Some(Duration::from_millis(300));
    deaf.stream.set_write_timeout(patience).unwrap();
    // The server stops reading its requests: they fill the socket's buffers and the sending blocks.
    let flood = json!({"execute": "big"}).to_string().repeat(1000);
    let blocked = (0..1000).find_map(|_| deaf.stream.write_all(flood.as_bytes()).err());
    assert_eq!(blocked.unwrap().kind(), std::io::ErrorKind::WouldBlock);
    // The others do not notice.
    let mut witness = bed.client();
    assert_eq!(witness.ask_past_events("x"), json!({"return": "x"}));
    // Some 60 bytes an event: a mebibyte of output is passed well within these.
    let mut told = 0;
    for _ in 0..40_000 {
        witness.send(json!({"execute": "emit"}).to_string());
        assert_eq!(witness.receive()["event"], "STOP");
        witness.receive();
        told += 1;
        let hung_up = {
            let mut fds = [PollFd::new(&deaf.stream, PollFlags::empty())];
            poll(&mut fds, Some(&Timespec::default())).unwrap();
            fds[0].revents().contains(PollFlags::HUP)
        };
        if hung_up {
            break;
        }
    }
    assert!(told < 40_000, "still connected after {told} events");
}

#[test]
fn a_stopping_server_tells_the_last_event_and_leaves_no_socket() {
    let mut bed = bed();
    let mut peer = bed.client();
    bed.sink.emit(&Event::Shutdown(ShutdownCause::HostSignal));
    drop(bed.server.take());
    let last = peer.receive();
    assert_eq!(last["event"], "SHUTDOWN");
    assert_eq!(
        last["data"],
        json!({"guest": false, "reason": "host-signal"})
    );
    assert_eq!(peer.line(), None);
    assert_eq!(std::fs::read_dir(bed.dir.path()).unwrap().count(), 0);
}

#[test]
fn a_client_that_does_not_read_does_not_keep_the_server_from_stopping() {
    let mut bed = bed();
    let mut deaf = bed.client();
    deaf.send(json!({"execute": "big"}).to_string().repeat(100));
    let mut witness = bed.client();
    witness.ask(json!({"execute": "x"}));
    drop(bed.server.take());
    assert!(!bed.path.exists());
    drop(deaf);
}

/// The server's loop in the test's own hands, with clients connected to it.
#[test]
fn clients_that_wait_do_not_keep_the_server_awake() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("qmp");
    let (sink, queue) = event::channel().unwrap();
    let (begun, _begun) = mpsc::channel();
    let (_release, released) = mpsc::channel();
    let hold = Hold { begun, released };
    let mut service = Service {
        listener: Listener::bind(&path).unwrap(),
        commands: WithEvents {
            commands: Echo(sink, Mutex::new(hold)),
            queue: Arc::new(queue),
        },
        stopping: Arc::default(),
        clients: Vec::new(),
        accept_after: None,
    };
    let negotiation = json!({"execute": "qmp_capabilities"}).to_string();
    let big = json!({"execute": "big"}).to_string();
    let inputs = [
        // Idle, in the middle of a message, held back, and held back after its last byte.
        negotiation.clone(),
        format!("{negotiation}{{\"execute\""),
        format!("{negotiation}{}", big.repeat(100)),
        format!("{negotiation}{}", big.repeat(100)),
    ];
    let mut peers: Vec<UnixStream> = inputs
        .iter()
        .map(|input| {
            let mut peer = UnixStream::connect(&path).unwrap();
            peer.write_all(input.as_bytes()).unwrap();
            peer
        })
        .collect();
    peers[3].shutdown(Shutdown::Write).unwrap();
    service.accept();
    let soon = || Some(Instant::now() + Duration::from_millis(50));
    for _ in 0..10 {
        let (_, ready) = service.wait(soon());
        service.serve(&ready);
    }
    assert_eq!(service.wait(soon()), (false, vec![false; 4]));
    // Each that goes away is noticed, in whatever state.
    for left in (0..4).rev() {
        peers.pop();
        let mut turns = 0;
        while service.clients.len() > left {
            let (_, ready) = service.wait(soon());
            service.serve(&ready);
            turns += 1;
            assert!(turns < 10, "client {left} lingers");
        }
    }
}

#[test]
fn a_command_under_way_is_served_to_its_end_while_the_server_stops() {
    let mut bed = bed();
    let mut peer = bed.client();
    peer.send(json!({"execute": "wait"}).to_string());
    bed.begun.recv().unwrap();
    let server = bed.server.take().unwrap();
    let mut served = 0;
    server.stop(|| {
        served += 1;
        // The thread that stops is the one that the command waits for.
        if served == 3 {
            bed.release.send(()).unwrap();
        }
    });
    assert!(served >= 3);
    assert_eq!(peer.receive(), json!({"return": "waited"}));
    assert_eq!(peer.line(), None);
}
