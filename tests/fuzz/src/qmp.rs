//! A client of the monitor that says anything.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use vmm::config::IoThread;
use vmm::qmp::machine::{Ability, DiskView, IoThreadView, RunState, Vcpu};
use vmm::qmp::{Error, Listener, Machine, Monitor, Server, event};
use vmm::trace::Tracer;

const PATIENCE: Duration = Duration::from_secs(60);

/// A machine with nothing in it, which agrees to everything.
struct Empty;

impl Machine for Empty {
    fn can(&self, _: Ability) -> bool {
        true
    }
    fn run_state(&self) -> RunState {
        RunState::Running
    }
    fn stop(&self) -> Result<(), Error> {
        Ok(())
    }
    fn cont(&self) -> Result<(), Error> {
        Ok(())
    }
    fn powerdown(&self) -> Result<(), Error> {
        Ok(())
    }
    fn quit(&self) {}
    fn vcpus(&self) -> Vec<Vcpu> {
        Vec::new()
    }
    fn iothreads(&self) -> Vec<IoThreadView> {
        Vec::new()
    }
    fn main_loop(&self) -> Option<IoThreadView> {
        None
    }
    fn tracer(&self) -> Option<&Tracer> {
        None
    }
    fn add_iothread(&self, _: &IoThread) -> Result<(), Error> {
        Ok(())
    }
    fn remove_iothread(&self, _: &str) -> Result<(), Error> {
        Ok(())
    }
    fn disks(&self) -> Vec<DiskView> {
        Vec::new()
    }
    fn resize_disk(&self, _: &str, _: u64) -> Result<(), Error> {
        Ok(())
    }
    fn move_disk(&self, _: &str, _: Option<&str>) -> Result<(), Error> {
        Ok(())
    }
}

/// A monitor on a socket, for as long as the thread lives.
struct Bed {
    socket: PathBuf,
    _server: Server,
    _folder: TempDir,
}

impl Bed {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let listener = Listener::bind(&socket).unwrap();
        let (_, queue) = event::channel().unwrap();
        let server = Server::start(listener, Monitor::new(Arc::new(Empty)), queue).unwrap();
        Self {
            socket,
            _server: server,
            _folder: folder,
        }
    }

    /// Everything that the monitor answers to `input`.
    fn ask(&self, input: &[u8]) -> Vec<u8> {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(input).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut output = Vec::new();
        stream.read_to_end(&mut output).unwrap();
        output
    }
}

/// The target. The first byte says whether the client negotiates first.
pub fn client(input: &[u8]) {
    thread_local! {
        static BED: Bed = Bed::new();
    }
    let Some((first, rest)) = input.split_first() else {
        return;
    };
    // What is not answered before more is sent must fit in the socket.
    let rest = &rest[..rest.len().min(32 << 10)];
    let mut bytes = Vec::new();
    if first % 2 == 0 {
        bytes.extend(b"{\"execute\": \"qmp_capabilities\"}\n");
    }
    bytes.extend(rest);
    BED.with(|bed| {
        let output = String::from_utf8(bed.ask(&bytes)).unwrap();
        for (index, line) in output.lines().enumerate() {
            let value: Value = serde_json::from_str(line).unwrap();
            let known = ["QMP", "return", "error", "event"];
            let kinds = known
                .iter()
                .filter(|key| value.get(**key).is_some())
                .count();
            assert!(
                kinds == 1 && (index == 0) == value.get("QMP").is_some(),
                "{line}"
            );
        }
        let next = bed.ask(b"{\"execute\": \"qmp_capabilities\"}");
        let next = String::from_utf8(next).unwrap();
        assert!(next.ends_with("{\"return\":{}}\r\n"), "{next}");
    });
}
