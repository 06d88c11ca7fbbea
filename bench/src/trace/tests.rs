use std::path::{Path, PathBuf};

use iothread::PollSettings;
use iothread::trace::TraceEvent;
use iothread::trace::codec::{Entry, encode};
use iothread::trace::file::{Block, End, Header, Thread, Totals, put_events};

use super::csv::Table;
use super::files::find;
use super::read::{Outcome, read};
use super::summary::{Counter, Summary};

/// A part of a recording, written as the recorder writes it.
struct Part {
    bytes: Vec<u8>,
    entries: Vec<u8>,
    base_ns: i64,
    last_ns: i64,
}

impl Part {
    fn new(run: u64, sequence: u32, base_ns: i64) -> Self {
        let mut bytes = Header { run, sequence }.to_bytes().to_vec();
        let thread = Thread {
            ctx: 1,
            id: "io0".into(),
            name: "IO io0".into(),
            policy: "weighted".into(),
        };
        Block::Thread(0, thread).put(&mut bytes);
        let mut part = Part {
            bytes,
            entries: Vec::new(),
            base_ns,
            last_ns: base_ns,
        };
        let settings = PollSettings::default();
        let again = sequence != 0;
        part.put(0, &Entry::Settings { settings, again });
        for (node, name) in [(1, "completions"), (2, "disk0/0")] {
            part.put(0, &Entry::Handler { node, fd: 9, name });
        }
        part
    }

    fn put(&mut self, after_ns: i64, entry: &Entry<'_>) {
        let time_ns = self.last_ns + after_ns;
        encode(&mut self.entries, self.last_ns, time_ns, entry);
        self.last_ns = time_ns;
    }

    /// An iteration that polled; `by_polling` tells whether that found the handler's work.
    fn iteration(&mut self, node: u32, by_polling: bool, ns: i64, window: (i64, i64)) {
        let (ctx, active) = (1, [node]);
        let mut event = |after_ns, event| self.put(after_ns, &Entry::Event(event));
        event(
            1000,
            TraceEvent::RunPollHandlersBegin {
                ctx,
                max_ns: window.0,
                timeout: -1,
            },
        );
        event(
            500,
            TraceEvent::RunPollHandlersEnd {
                ctx,
                progress: by_polling,
                timeout: 0,
            },
        );
        event(
            10,
            TraceEvent::PollDispatch {
                ctx,
                node: node.into(),
                revents: u32::from(!by_polling),
            },
        );
        event(
            10,
            TraceEvent::PollObserve {
                ctx,
                block_ns: 500,
                dispatch_ns: 77,
                active: &active,
            },
        );
        event(
            10,
            TraceEvent::PollHandler {
                ctx,
                node: node.into(),
                ns,
            },
        );
        let (old, new) = window;
        if new > old {
            event(10, TraceEvent::PollGrow { ctx, old, new });
        }
    }

    fn block(&mut self) {
        put_events(&mut self.bytes, 0, self.base_ns, &self.entries);
        self.entries.clear();
        self.base_ns = self.last_ns;
    }

    fn finish(mut self, lost: u64, end: Option<End>, path: &Path) -> i64 {
        self.block();
        let written = 0;
        Block::Totals(0, Totals { written, lost }).put(&mut self.bytes);
        if let Some(end) = end {
            Block::End(end).put(&mut self.bytes);
        }
        std::fs::write(path, &self.bytes).unwrap();
        self.last_ns
    }
}

fn summarise(paths: &[PathBuf]) -> (Summary, Outcome, Vec<PathBuf>) {
    let parts = find(paths).unwrap();
    let mut counter = Counter::default();
    let outcome = read(&parts, &mut counter);
    let used = parts.iter().map(|part| part.path.clone()).collect();
    (counter.summary(&outcome), outcome, used)
}

/// A recording in two files: `trace.1`, then `trace`.
fn recording(dir: &Path) -> PathBuf {
    let path = dir.join("trace");
    let mut first = Part::new(5, 0, 1_000_000);
    for round in 0..10 {
        first.iteration(2, round % 2 == 0, 4000, (0, 8000));
    }
    let last_ns = first.finish(0, Some(End::Rotated), &dir.join("trace.1"));
    let mut second = Part::new(5, 1, last_ns);
    second.put(5, &Entry::Lost(7));
    for _ in 0..5 {
        second.iteration(1, true, 2000, (8000, 8000));
    }
    second.finish(9, Some(End::Closed), &path);
    path
}

#[test]
fn rotated_files_are_read_together_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let path = recording(dir.path());
    // A part of another recording, left over.
    Part::new(4, 3, 0).finish(0, Some(End::Rotated), &dir.path().join("trace.2"));
    let (summary, outcome, used) = summarise(std::slice::from_ref(&path));
    assert!(outcome.problem.is_none());
    assert_eq!(used, [dir.path().join("trace.1"), path.clone()]);
    let thread = &summary.threads[0];
    assert_eq!(summary.threads.len(), 1);
    assert_eq!(
        (thread.iterations, thread.polls, thread.hits, thread.misses),
        (15, 15, 10, 5)
    );
    assert_eq!((thread.grows, thread.shrinks, thread.lost), (10, 0, 9));
    assert_eq!(thread.duration_ns, 15 * 1530 + 10 * 10 - 1000 + 5);
    let window = thread.window.unwrap();
    assert_eq!((window.samples, window.mean_ns), (14, 8000));
    let handlers: Vec<_> = summary
        .handlers
        .iter()
        .map(|row| {
            (
                row.handler.as_str(),
                row.events,
                row.polls,
                row.hits,
                row.misses,
            )
        })
        .collect();
    // disk0/0 is on the list from its first dispatch on, the completions from theirs on.
    assert_eq!(
        handlers,
        [("completions", 5, 4, 5, 0), ("disk0/0", 10, 14, 5, 9)]
    );
    let windows: Vec<_> = summary
        .windows
        .iter()
        .map(|row| {
            (
                row.handler.as_str(),
                row.weight,
                row.window.samples,
                row.window.mean_ns,
            )
        })
        .collect();
    assert_eq!(
        windows,
        [
            ("completions", Some(3), 5, 2000),
            ("disk0/0", Some(3), 10, 4000)
        ]
    );
    assert!(
        summary
            .notes
            .iter()
            .any(|note| note.starts_with("9 of IO io0's entries were lost"))
    );
    let text = summary.text();
    for part in [
        "thread  handler      weight  samples  mean   p50   p90",
        "IO io0  disk0/0           3       10  4000  4001  4001",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // Named in any order, and twice.
    let all = [path.clone(), dir.path().join("trace.1"), path];
    let (again, _, used) = summarise(&all);
    assert_eq!(used.len(), 2);
    assert_eq!(again.text(), text);
}

#[test]
fn csv_has_a_line_an_entry() {
    let dir = tempfile::tempdir().unwrap();
    let path = recording(dir.path());
    let mut bytes = Vec::new();
    let mut table = Table::new(&mut bytes);
    read(&find(&[path]).unwrap(), &mut table);
    table.finish().unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("time_ns,thread,event,handler,"));
    // Settings and two names twice, a loss, and the iterations.
    assert_eq!(lines.len(), 1 + 3 + 10 * 6 + 3 + 1 + 5 * 5);
    assert!(text.contains("\n1001000,IO io0,run_poll_handlers_begin,,,,0,-1,,,,,,,,,,,,,,,,,\n"));
    assert!(text.contains(",IO io0,poll_observe,,,,,,,,,500,77,disk0/0,,,,,,,,,,,\n"));
    assert!(text.contains(",IO io0,poll_grow,,,,,,,0,8000,,,,,,,,,,,,,,\n"));
    assert!(text.contains(",IO io0,lost,,,,,,,,,,,,,,,,,,,,,,7\n"));
}

#[test]
fn damage_is_named_and_what_is_before_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let mut part = Part::new(5, 0, 0);
    part.iteration(2, true, 1, (0, 0));
    part.block();
    let good = part.bytes.len();
    part.iteration(2, true, 1, (0, 0));
    part.finish(0, None, &path);
    let whole = std::fs::read(&path).unwrap();

    let (summary, outcome, _) = summarise(std::slice::from_ref(&path));
    assert!(outcome.problem.is_none());
    assert_eq!(summary.threads[0].iterations, 2);
    assert!(summary.notes[0].contains("not closed"));

    std::fs::write(&path, &whole[..good + 30]).unwrap();
    let (summary, outcome, _) = summarise(std::slice::from_ref(&path));
    assert_eq!(summary.threads[0].iterations, 1);
    let problem = outcome.problem.unwrap().to_string();
    assert!(
        problem.contains(&format!("trace: offset {good}: the file ends")),
        "{problem}"
    );

    let mut damaged = whole;
    damaged[good + 25] ^= 0x10;
    std::fs::write(&path, &damaged).unwrap();
    let (summary, outcome, _) = summarise(std::slice::from_ref(&path));
    assert_eq!(summary.threads[0].iterations, 1);
    let problem = outcome.problem.unwrap().to_string();
    assert!(
        problem.contains(&format!("offset {good}: the file is damaged"))
            && problem.lines().count() == 1,
        "{problem}"
    );
}

#[test]
fn other_files_and_other_recordings_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    Part::new(1, 0, 0).finish(0, Some(End::Closed), &a);
    Part::new(2, 0, 0).finish(0, Some(End::Closed), &b);
    let text = |paths: &[&Path]| {
        let paths: Vec<PathBuf> = paths.iter().map(|path| path.to_path_buf()).collect();
        find(&paths).unwrap_err().to_string()
    };
    assert!(text(&[&a, &b]).contains("of different recordings"));
    std::fs::write(&b, "time,event\n").unwrap();
    assert!(text(&[&b]).contains("b: this is no trace"));
    assert!(text(&[&dir.path().join("c")]).contains("c: offset 0: No such file"));
}
