//! A client of the monitor: just enough to give orders and to see what happens.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long the monitor may keep its client waiting: longer than anything here takes, also in an
/// emulation on a busy host.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection after its greeting.
pub struct Qmp {
    reader: BufReader<UnixStream>,
    /// Events that nobody has asked for yet, in their order.
    events: Vec<Value>,
}

impl Qmp {
    /// Connects, as soon as there is somebody to connect to.
    ///
    /// # Panics
    /// There is nobody, or no greeting.
    pub fn connect(socket: &Path) -> Qmp {
        let deadline = Instant::now() + PATIENCE;
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => panic!("{}: {error}", socket.display()),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
        let mut qmp = Qmp {
            reader: BufReader::new(stream),
            events: Vec::new(),
        };
        let greeting = qmp.read().expect("a greeting");
        assert!(greeting["QMP"].is_object(), "no greeting: {greeting}");
        qmp.execute("qmp_capabilities", json!({}));
        qmp
    }

    /// What a command returns.
    ///
    /// # Panics
    /// It is refused.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Value {
        let answer = self.try_execute(command, arguments);
        answer.unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// What a command returns, or its error.
    ///
    /// # Panics
    /// The connection is lost.
    pub fn try_execute(&mut self, command: &str, arguments: Value) -> Result<Value, Value> {
        let mut line = json!({"execute": command, "arguments": arguments}).to_string();
        line.push('\n');
        self.reader
            .get_mut()
            .write_all(line.as_bytes())
            .expect("the monitor's socket");
        loop {
            let mut answer = self.read().expect("an answer before the connection ends");
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get_mut("error") {
                return Err(error.take());
            }
            self.events.push(answer);
        }
    }

    /// Waits for the next event of that name and returns it; those before it are dropped.
    ///
    /// # Panics
    /// It does not come.
    pub fn wait_for_event(&mut self, name: &str) -> Value {
        let mut others = Vec::new();
        loop {
            let event = match self.events.is_empty() {
                false => self.events.remove(0),
                true => self.read().unwrap_or_else(|| {
                    panic!("the connection ended without {name}; before: {others:?}")
                }),
            };
            if event["event"] == name {
                return event;
            }
            others.push(event["event"].to_string());
        }
    }

    /// All events from here to the end of the VM.
    ///
    /// # Panics
    /// The connection does not end.
    pub fn last_events(mut self) -> Vec<Value> {
        while let Some(event) = self.read() {
            self.events.push(event);
        }
        self.events
    }

    /// The next line; none at the end of the connection.
    fn read(&mut self) -> Option<Value> {
        let mut line = String::new();
        match self.reader.read_line(&mut line) {
            Ok(0) => None,
            // The other side's process has ended.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => None,
            Err(error) => panic!("the monitor says nothing: {error}"),
            Ok(_) => Some(
                serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}")),
            ),
        }
    }

    /// Sets a property of an iothread.
    ///
    /// # Panics
    /// It is refused.
    pub fn set(&mut self, iothread: &str, property: &str, value: i64) {
        let path = format!("/objects/{iothread}");
        self.execute(
            "qom-set",
            json!({"path": path, "property": property, "value": value}),
        );
    }

    /// A property of an iothread.
    ///
    /// # Panics
    /// There is none of the name.
    pub fn get(&mut self, iothread: &str, property: &str) -> Value {
        let path = format!("/objects/{iothread}");
        self.execute("qom-get", json!({"path": path, "property": property}))
    }

    /// A counter of a disk, as `query-blockstats` names it.
    ///
    /// # Panics
    /// There is no such disk or counter.
    pub fn disk_counter(&mut self, disk: &str, name: &str) -> u64 {
        let all = self.execute("query-blockstats", json!({}));
        let of_disk = |entry: &&Value| entry["device"] == disk;
        let entry = all.as_array().and_then(|all| all.iter().find(of_disk));
        let counter = entry.and_then(|entry| entry["stats"][name].as_u64());
        counter.unwrap_or_else(|| panic!("no {name} of disk {disk}: {all}"))
    }

    /// What `query-block` says of a disk.
    ///
    /// # Panics
    /// There is no such disk.
    pub fn disk(&mut self, disk: &str) -> Value {
        let all = self.execute("query-block", json!({}));
        let mut entries = all.as_array().into_iter().flatten();
        let entry = entries.find(|entry| entry["device"] == disk);
        entry
            .unwrap_or_else(|| panic!("no disk {disk}: {all}"))
            .clone()
    }
}
