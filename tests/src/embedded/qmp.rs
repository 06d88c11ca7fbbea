//! A client of the monitor: just enough to change settings.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// A connection after its greeting.
pub struct Qmp {
    reader: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects, as soon as there is somebody to connect to.
    ///
    /// # Panics
    /// There is nobody, or no greeting.
    pub fn connect(socket: &Path) -> Qmp {
        let deadline = Instant::now() + Duration::from_secs(30);
        let stream = loop {
            match UnixStream::connect(socket) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => panic!("{}: {error}", socket.display()),
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        stream
            .set_read_timeout(Some(Duration::from_secs(30)))
            .expect("a time-out");
        let mut qmp = Qmp {
            reader: BufReader::new(stream),
        };
        assert!(qmp.read()["QMP"].is_object(), "a greeting");
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
            let mut answer = self.read();
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = answer.get_mut("error") {
                return Err(error.take());
            }
            // An event.
        }
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        self.reader
            .read_line(&mut line)
            .expect("a line of the monitor");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
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
}
