//! One connection: its input cut into requests, its output bounded, and whether it has negotiated.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

use rustix::net::{SendFlags, send};
use serde_json::{Value, json};

use super::error::Error;
use super::framing::Framer;
use super::message::{self, Call, Request};

/// Bytes read in one go.
const PACKET_BYTES: usize = 64 << 10;
/// With this much unread output, no further request of the client is looked at.
const HIGH_WATER_BYTES: usize = 64 << 10;
/// With this much, the client is dropped: it does not read its events.
const MAX_OUTPUT_BYTES: usize = 1 << 20;

/// Why a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// It was closed at the other end.
    Closed,
    /// It does not read.
    Deaf,
}

/// Executes commands on behalf of clients.
pub trait Execute {
    /// Runs a command. Returns what is to be sent before its reply, the events that it caused, and its outcome.
    fn execute(&self, call: Call) -> (Vec<Value>, Result<Value, Error>);
}

/// A connected client.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    framer: Framer,
    output: Vec<u8>,
    /// How much of `output` was sent.
    sent: usize,
    negotiated: bool,
    /// The client has sent its last byte.
    input_ended: bool,
    /// Requests may be left in the framer.
    backlog: bool,
    gone: Option<Gone>,
}

impl Client {
    /// Greets on a fresh, nonblocking connection.
    pub fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            framer: Framer::default(),
            output: message::line(&message::greeting()),
            sent: 0,
            negotiated: false,
            input_ended: false,
            backlog: false,
            gone: None,
        }
    }

    /// The connection, to wait on.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Why the connection is to be dropped, if it is.
    pub fn gone(&self) -> Option<Gone> {
        self.gone
    }

    /// Whether input is wanted: not while earlier requests or their replies are unfinished.
    pub fn wants_input(&self) -> bool {
        !self.input_ended && !self.backlog && self.unsent() < HIGH_WATER_BYTES
    }

    /// Whether there is something to send.
    pub fn wants_output(&self) -> bool {
        self.unsent() > 0
    }

    fn unsent(&self) -> usize {
        self.output.len() - self.sent
    }

    /// Does all that can be done without waiting: sends, reads once, and answers. Returns the events that the commands
    /// caused: they are for the other clients, this one has them.
    pub fn turn(&mut self, monitor: &impl Execute) -> Vec<Value> {
        self.flush();
        if self.wants_input() {
            self.read();
        }
        let mut caused = Vec::new();
        while self.backlog && self.gone.is_none() && self.unsent() < HIGH_WATER_BYTES {
            let request = match self.framer.next_text() {
                Some(Ok(text)) => Request::parse(text),
                Some(Err(error)) => Request::broken(error),
                None => {
                    self.backlog = false;
                    break;
                }
            };
            caused.extend(self.answer(request, monitor));
            if self.unsent() >= HIGH_WATER_BYTES {
                self.flush();
            }
        }
        self.flush();
        if self.input_ended && !self.backlog && !self.wants_output() {
            self.gone = Some(Gone::Closed);
        }
        caused
    }

    fn answer(&mut self, request: Request, monitor: &impl Execute) -> Vec<Value> {
        let (events, outcome) = match request.call {
            Ok(call) if call.command == "qmp_capabilities" => (Vec::new(), self.negotiate(&call)),
            Ok(_) if !self.negotiated => (Vec::new(), Err(Error::NotNegotiated)),
            Ok(call) => monitor.execute(call),
            Err(error) => (Vec::new(), Err(error)),
        };
        for event in &events {
            self.output.extend(message::line(event));
        }
        let reply = message::reply(request.id, outcome);
        self.output.extend(message::line(&reply));
        events
    }

    fn negotiate(&mut self, call: &Call) -> Result<Value, Error> {
        if self.negotiated {
            return Err(Error::AlreadyNegotiated);
        }
        for (name, value) in &call.arguments {
            match (name.as_str(), value.as_array()) {
                ("enable", Some(wanted)) => {
                    // There is no capability that could be enabled.
                    if let Some(first) = wanted.first() {
                        let value = first
                            .as_str()
                            .map_or_else(|| first.to_string(), str::to_owned);
                        let name = name.clone();
                        return Err(Error::ArgumentValue { name, value });
                    }
                }
                ("enable", None) => {
                    return Err(Error::ArgumentType {
                        name: name.clone(),
                        expected: "array",
                    });
                }
                _ => return Err(Error::UnexpectedArgument(name.clone())),
            }
        }
        self.negotiated = true;
        Ok(json!({}))
    }

    /// Tells an event, as a line, if the client has negotiated.
    pub fn tell(&mut self, event: &[u8]) {
        if self.negotiated {
            self.output.extend_from_slice(event);
            if self.unsent() > MAX_OUTPUT_BYTES {
                self.gone = Some(Gone::Deaf);
            }
        }
    }

    fn read(&mut self) {
        let mut packet = [0; PACKET_BYTES];
        match self.stream.read(&mut packet) {
            Ok(0) => self.input_ended = true,
            Ok(length) => {
                self.framer.feed(&packet[..length]);
                self.backlog = true;
            }
            // An interrupted read is repeated in the next turn: the connection is still readable.
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {}
                _ => self.gone = Some(Gone::Closed),
            },
        }
    }

    /// Sends what the connection takes now.
    pub fn flush(&mut self) {
        while self.wants_output() {
            match send(&self.stream, &self.output[self.sent..], SendFlags::NOSIGNAL) {
                Ok(length) => self.sent += length,
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => break,
                Err(_) => {
                    self.gone = Some(Gone::Closed);
                    break;
                }
            }
        }
        if !self.wants_output() || self.sent >= HIGH_WATER_BYTES {
            self.output.drain(..self.sent);
            self.sent = 0;
        }
    }
}
