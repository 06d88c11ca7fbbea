//! The other end of the socket: what `pollux info` and `pollux top` talk to a running VM with.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

/// Longest wait for an answer: a command may be waiting for the guest's disks.
const PATIENCE: Duration = Duration::from_secs(30);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nobody listens.
    #[error("{path}: cannot connect: {error}; give the path that the VM has in --qmp unix:PATH")]
    Connect {
        /// The socket.
        path: String,
        /// The system's reason.
        error: io::Error,
    },
    /// The connection broke, or nothing came in time.
    #[error("{path}: {error}")]
    Connection {
        /// The socket.
        path: String,
        /// The system's reason.
        error: io::Error,
    },
    /// What came is not the protocol.
    #[error(
        "{path}: this is no QMP socket: {got:?}; give the path that the VM has in --qmp unix:PATH"
    )]
    Protocol {
        /// The socket.
        path: String,
        /// What came, cut short.
        got: String,
    },
    /// The VM refused.
    #[error("{command}: {reason}")]
    Refused {
        /// The command.
        command: String,
        /// The reason in its words.
        reason: String,
    },
}

/// A negotiated connection.
#[derive(Debug)]
pub struct Session {
    path: String,
    stream: UnixStream,
    input: BufReader<UnixStream>,
}

impl Session {
    /// Connects to a VM and negotiates.
    pub fn connect(path: &Path) -> Result<Self, Error> {
        let name = path.display().to_string();
        let stream = UnixStream::connect(path).map_err(|error| Error::Connect {
            path: name.clone(),
            error,
        })?;
        let prepare = || {
            stream.set_read_timeout(Some(PATIENCE))?;
            stream.set_write_timeout(Some(PATIENCE))?;
            stream.try_clone()
        };
        let input = prepare().map_err(|error| Error::Connection {
            path: name.clone(),
            error,
        })?;
        let mut session = Self {
            path: name,
            stream,
            input: BufReader::new(input),
        };
        let greeting = session.receive()?;
        if let Some(reason) = greeting.pointer("/error/desc").and_then(Value::as_str) {
            return Err(Error::Refused {
                command: session.path,
                reason: reason.to_owned(),
            });
        }
        if greeting.get("QMP").is_none() {
            return Err(session.protocol(&greeting.to_string()));
        }
        session.execute("qmp_capabilities", json!({}))?;
        Ok(session)
    }

    /// Runs a command and returns what it returned. Events that come meanwhile are passed over.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, Error> {
        let request = json!({"execute": command, "arguments": arguments});
        let sent = self.stream.write_all(format!("{request}\n").as_bytes());
        sent.map_err(|error| self.connection(error))?;
        loop {
            let mut message = self.receive()?;
            if let Some(value) = message.get_mut("return") {
                return Ok(value.take());
            }
            if let Some(error) = message.get("error") {
                let reason = error["desc"].as_str().unwrap_or("no reason given");
                return Err(Error::Refused {
                    command: command.to_owned(),
                    reason: reason.to_owned(),
                });
            }
            if message.get("event").is_none() {
                return Err(self.protocol(&message.to_string()));
            }
        }
    }

    fn receive(&mut self) -> Result<Value, Error> {
        let mut line = Vec::new();
        let read = self.input.read_until(b'\n', &mut line);
        match read {
            Ok(0) => {
                let error = io::Error::new(io::ErrorKind::UnexpectedEof, "the VM has ended");
                return Err(self.connection(error));
            }
            Ok(_) => {}
            Err(error) => return Err(self.connection(error)),
        }
        serde_json::from_slice(&line).map_err(|_| self.protocol(&String::from_utf8_lossy(&line)))
    }

    fn connection(&self, error: io::Error) -> Error {
        let error = match error.kind() {
            io::ErrorKind::WouldBlock => {
                io::Error::new(io::ErrorKind::TimedOut, "no answer within 30 seconds")
            }
            _ => error,
        };
        Error::Connection {
            path: self.path.clone(),
            error,
        }
    }

    fn protocol(&self, got: &str) -> Error {
        Error::Protocol {
            path: self.path.clone(),
            got: got.trim_end().chars().take(60).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::Arc;

    use super::super::testing::TestMachine;
    use super::super::{Event, Listener, Monitor, Server, event};
    use super::*;

    #[test]
    fn commands_are_answered_and_events_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let (sink, queue) = event::channel().unwrap();
        let machine = Arc::new(TestMachine::new(sink.clone()));
        let listener = Listener::bind(&path).unwrap();
        let server = Server::start(listener, Monitor::new(machine), queue).unwrap();
        let mut session = Session::connect(&path).unwrap();
        sink.emit(&Event::Resume);
        assert_eq!(session.execute("stop", json!({})).unwrap(), json!({}));
        let status = session.execute("query-status", json!({})).unwrap();
        assert_eq!(status["status"], "paused");
        let refused = session.execute("nope", json!({})).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "nope: The command nope has not been found"
        );
        drop(server);
        let ended = session.execute("stop", json!({})).unwrap_err().to_string();
        assert!(
            ended.ends_with("the VM has ended") || ended.contains("Broken pipe"),
            "{ended}"
        );
        let nobody = Session::connect(&path).unwrap_err().to_string();
        assert!(
            nobody.contains("cannot connect") && nobody.contains("--qmp"),
            "{nobody}"
        );
    }

    #[test]
    fn another_protocol_is_recognised() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("other");
        let listener = UnixListener::bind(&path).unwrap();
        let other = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(b"SSH-2.0-x\r\n").unwrap();
        });
        let error = Session::connect(&path).unwrap_err().to_string();
        assert!(error.contains("no QMP socket: \"SSH-2.0-x\""), "{error}");
        other.join().unwrap();
    }
}
