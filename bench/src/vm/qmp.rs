//! Asks a running Pollux for its polling counters, over its QMP socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::record::Polling;
use crate::runner::Failure;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why there are no counters.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The socket.
    #[error("QMP: {0}")]
    Io(#[from] std::io::Error),
    /// The answer is an error, or another than expected.
    #[error("QMP: {0}")]
    Answer(String),
}

/// A session.
pub struct Qmp {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Run(error.to_string())
    }
}

/// The counters of all loops at one moment.
#[derive(Clone, Debug)]
pub struct Counters(Vec<Loop>);

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Loop {
    id: String,
    hits: u64,
    misses: u64,
    poll_ns: u64,
    vain_ns: u64,
    blocks: u64,
    wakeups: u64,
    enters: u64,
    window_histogram: Vec<Bucket>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Bucket {
    from_ns: u64,
    count: u64,
}

impl Qmp {
    /// Connects to the socket at `path`, which a VMM that just starts may not have made yet.
    pub fn connect(path: &Path) -> Result<Qmp, Error> {
        let deadline = Instant::now() + PATIENCE;
        let writer = loop {
            match UnixStream::connect(path) {
                Ok(stream) => break stream,
                Err(error) if Instant::now() > deadline => return Err(error.into()),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        writer.set_read_timeout(Some(PATIENCE))?;
        let mut qmp = Qmp {
            reader: BufReader::new(writer.try_clone()?),
            writer,
        };
        qmp.read(|message| message.get("QMP").is_some())?;
        qmp.call("qmp_capabilities")?;
        Ok(qmp)
    }

    /// The polling counters of all loops.
    pub fn counters(&mut self) -> Result<Counters, Error> {
        let value = self.call("x-query-polling")?;
        serde_json::from_value(value)
            .map(Counters)
            .map_err(|e| Error::Answer(e.to_string()))
    }

    fn call(&mut self, command: &str) -> Result<Value, Error> {
        writeln!(self.writer, "{}", json!({ "execute": command }))?;
        let is_answer = |m: &Value| m.get("return").is_some() || m.get("error").is_some();
        let mut answer = self.read(is_answer)?;
        if let Some(text) = answer.pointer("/error/desc") {
            return Err(Error::Answer(format!("{command}: {text}")));
        }
        Ok(answer["return"].take())
    }

    /// The next message that is wanted; events come in between.
    fn read(&mut self, wanted: impl Fn(&Value) -> bool) -> Result<Value, Error> {
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line)? == 0 {
                return Err(Error::Answer("the VMM closed the socket".into()));
            }
            let message: Value =
                serde_json::from_str(&line).map_err(|e| Error::Answer(e.to_string()))?;
            if wanted(&message) {
                return Ok(message);
            }
        }
    }
}

impl Counters {
    /// What was counted from `self` to `end`, by loop.
    pub fn until(&self, end: &Counters) -> Vec<Polling> {
        end.0
            .iter()
            .map(|now| between(self.0.iter().find(|l| l.id == now.id), now))
            .collect()
    }
}

fn between(before: Option<&Loop>, now: &Loop) -> Polling {
    let spent = |f: fn(&Loop) -> u64| f(now).saturating_sub(before.map_or(0, f));
    let old = |from_ns: u64| {
        let buckets = before.map_or(&[][..], |l| &l.window_histogram);
        buckets
            .iter()
            .find(|b| b.from_ns == from_ns)
            .map_or(0, |b| b.count)
    };
    let windows = now
        .window_histogram
        .iter()
        .map(|b| (b.from_ns, b.count.saturating_sub(old(b.from_ns))))
        .filter(|(_, count)| *count > 0)
        .collect();
    Polling {
        name: now.id.clone(),
        hits: spent(|l| l.hits),
        misses: spent(|l| l.misses),
        polled_ns: spent(|l| l.poll_ns),
        vain_ns: spent(|l| l.vain_ns),
        blocks: spent(|l| l.blocks),
        wakeups: spent(|l| l.wakeups),
        enters: spent(|l| l.enters),
        windows,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn one_loop(hits: u64, windows: Value) -> Value {
        json!([{ "id": "io0", "thread-id": 7, "hits": hits, "misses": 1, "poll-ns": 50,
                 "vain-ns": 10, "blocks": 2, "wakeups": 0, "enters": 3,
                 "window-histogram": windows }])
    }

    /// A server that answers each line with the next of `answers`.
    fn serve(answers: Vec<Value>) -> (tempfile::TempDir, std::path::PathBuf) {
        let place = tempfile::tempdir().expect("a directory");
        let path = place.path().join("qmp");
        let listener = UnixListener::bind(&path).expect("a socket");
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut reader = BufReader::new(stream.try_clone().expect("a copy"));
            writeln!(stream, "{}", json!({ "QMP": { "version": {} } })).expect("greeting");
            for answer in answers {
                let mut line = String::new();
                reader.read_line(&mut line).expect("a command");
                writeln!(stream, "{}", json!({ "event": "RESUME" })).expect("an event");
                writeln!(stream, "{answer}").expect("an answer");
            }
        });
        (place, path)
    }

    #[test]
    fn counters_of_an_interval_are_differences() {
        let (_place, path) = serve(vec![
            json!({ "return": {} }),
            json!({ "return": one_loop(10, json!([{ "from-ns": 4, "count": 5 }])) }),
            json!({ "return": one_loop(25, json!([
                { "from-ns": 4, "count": 5 }, { "from-ns": 8, "count": 2 }])) }),
        ]);
        let mut qmp = Qmp::connect(&path).expect("a session");
        let begin = qmp.counters().expect("begin");
        let used = begin.until(&qmp.counters().expect("end"));
        assert_eq!(
            (used[0].name.as_str(), used[0].hits, used[0].misses),
            ("io0", 15, 0)
        );
        assert_eq!(used[0].windows, [(8, 2)]);
        assert!(qmp.counters().is_err(), "the server is gone");
    }

    #[test]
    fn errors_are_told() {
        let (_place, path) = serve(vec![
            json!({ "return": {} }),
            json!({ "error": { "class": "CommandNotFound", "desc": "no such command" } }),
        ]);
        let mut qmp = Qmp::connect(&path).expect("a session");
        let error = qmp.counters().expect_err("an error").to_string();
        assert!(
            error.contains("x-query-polling") && error.contains("no such command"),
            "{error}"
        );
    }
}
