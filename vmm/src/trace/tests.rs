use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use iothread::trace::TraceEvent;
use iothread::trace::codec::{Decoder, Entry};
use iothread::trace::file::{Block, End, Reader};
use iothread::{IoThread, IoThreadConfig};

use super::*;
use crate::config::Size;

fn config(file: &Path, events: &str, max_size: u64, files: u32) -> Trace {
    Trace {
        file: file.to_owned(),
        events: vec![events.to_owned()],
        max_size: Size(max_size),
        files,
    }
}

fn iothread(id: &str) -> IoThread {
    IoThread::start(IoThreadConfig {
        id: id.to_owned(),
        ..IoThreadConfig::default()
    })
    .unwrap()
}

/// Makes the loop go through an iteration, which observes it.
fn iterate(iothread: &IoThread) {
    iothread.remote().call(|_| ()).unwrap();
}

fn wait_until(what: &str, done: impl Fn() -> bool) {
    let patience = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < patience, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[derive(Default, Debug)]
struct Contents {
    sequence: u32,
    events: Vec<(i64, &'static str)>,
    handlers: Vec<String>,
    settings: Vec<(i64, bool)>,
    threads: Vec<String>,
    lost: u64,
    end: Option<End>,
}

fn read(path: &Path) -> Contents {
    let mut reader = Reader::new(File::open(path).unwrap()).unwrap();
    let mut contents = Contents {
        sequence: reader.header().sequence,
        ..Contents::default()
    };
    let mut known = Vec::new();
    while let Some(block) = reader.next_block().unwrap() {
        assert!(contents.end.is_none(), "something follows the end");
        match block {
            Block::Thread(number, thread) => {
                known.push(number);
                contents.threads.push(thread.name);
            }
            Block::Totals(_, totals) => contents.lost = totals.lost,
            Block::End(end) => contents.end = Some(end),
            Block::Events {
                thread,
                base_ns,
                entries,
            } => {
                assert!(known.contains(&thread), "a thread is described first");
                let mut decoder = Decoder::new(&entries, 0, base_ns);
                while let Some((time_ns, entry)) = decoder.next().unwrap() {
                    match entry {
                        Entry::Event(event) => contents.events.push((time_ns, event.name())),
                        Entry::Handler { name, .. } => contents.handlers.push(name.to_owned()),
                        Entry::Settings { settings, again } => {
                            contents.settings.push((settings.poll_max_ns, again));
                        }
                        Entry::Lost(_) => {}
                    }
                }
            }
        }
    }
    contents
}

#[test]
fn a_loop_is_recorded_from_its_start_to_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let tracer = Tracer::start(&config(&path, "poll_observe", 4 << 20, 2)).unwrap();
    let io0 = iothread("io0");
    tracer.add(io0.remote(), "IO io0");
    for _ in 0..100 {
        iterate(&io0);
    }
    io0.remote().set("poll-max-ns", 12345).unwrap();
    iterate(&io0);
    io0.stop().unwrap();
    tracer.finish();
    let contents = read(&path);
    assert_eq!(contents.threads, ["IO io0"]);
    assert!(contents.handlers.contains(&"notifier".to_owned()));
    assert_eq!(contents.settings, [(32768, false), (12345, false)]);
    assert!(contents.events.len() >= 50, "{}", contents.events.len());
    assert!(
        contents
            .events
            .iter()
            .all(|(_, name)| *name == "poll_observe")
    );
    assert!(contents.events.is_sorted_by_key(|(time_ns, _)| *time_ns));
    assert_eq!((contents.end, contents.lost), (Some(End::Closed), 0));
}

#[test]
fn events_are_switched_while_loops_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let mut config = config(&path, "", 4 << 20, 2);
    config.events.clear();
    let tracer = Tracer::start(&config).unwrap();
    let io0 = iothread("io0");
    tracer.add(io0.remote(), "IO io0");
    iterate(&io0);
    assert_eq!(tracer.mask(), 0);
    assert!(tracer.set("poll_obsrve", true).is_err());
    for round in 0..3 {
        tracer.set("poll_*", true).unwrap();
        tracer.set("poll_observe", round != 1).unwrap();
        for _ in 0..10 {
            iterate(&io0);
        }
        tracer.set("*", false).unwrap();
        iterate(&io0);
    }
    assert_eq!(tracer.mask(), 0);
    io0.stop().unwrap();
    tracer.finish();
    let contents = read(&path);
    // A loop without a sink is nobody; each sink is a thread of its own.
    assert_eq!(contents.threads.len(), 3);
    assert_eq!(contents.settings.len(), 3);
    assert!(contents.events.len() >= 10, "{}", contents.events.len());
}

#[test]
fn full_files_are_followed_by_the_next_and_the_oldest_go() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let output = Output::create(&path, 4 << 20, 3).unwrap();
    let shared = Arc::new(Shared {
        mask: Arc::new(AtomicU32::new(u32::MAX)),
        loops: Mutex::default(),
    });
    let (sender, receiver) = mpsc::channel();
    let recorder = Recorder::new(output, Arc::clone(&shared));
    let thread = std::thread::spawn(move || recorder.run(&receiver));
    let (sink, source) = sink::pair(Arc::clone(&shared.mask), sink::RING_BYTES);
    let described = iothread::trace::file::Thread {
        ctx: 1,
        id: "a".into(),
        name: "IO a".into(),
        policy: "weighted".into(),
    };
    sender.send(Message::Source(described, source)).unwrap();
    let number = |path: &Path| {
        File::open(path).map_or(0, |f| Reader::new(f).map_or(0, |r| r.header().sequence))
    };
    {
        let sink = Sink::into_rc(sink);
        sink.settings(&iothread::PollSettings::default());
        sink.handler(7, 8, "disk0/0");
        let event = TraceEvent::PollShrink {
            ctx: 1,
            old: i64::MAX,
            new: i64::MIN,
        };
        let begun = Instant::now();
        while number(&path) < 5 {
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "it does not rotate"
            );
            for _ in 0..2000 {
                sink.event(&event);
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    sender.send(Message::Stop).unwrap();
    thread.join().unwrap();
    let mut names: Vec<_> = std::fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["trace", "trace.1", "trace.2"]);
    let mut before: Option<Contents> = None;
    for name in ["trace.2", "trace.1", "trace"] {
        let path = dir.path().join(name);
        assert!(std::fs::metadata(&path).unwrap().len() <= 4 << 20, "{name}");
        let contents = read(&path);
        assert_eq!(contents.threads, ["IO a"], "{name}");
        assert_eq!(contents.handlers, ["disk0/0"]);
        assert_eq!(contents.settings, [(32768, true)]);
        if let Some(before) = before {
            assert_eq!(contents.sequence, before.sequence + 1);
            assert_eq!(before.end, Some(End::Rotated));
            assert!(contents.events[0].0 >= before.events.last().unwrap().0);
        }
        before = Some(contents);
    }
    assert_eq!(before.unwrap().end, Some(End::Closed));
}

#[test]
fn a_file_that_cannot_be_written_ends_the_trace_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = config(&dir.path().join("no/such/file"), "*", 4 << 20, 2);
    let error = Tracer::start(&nowhere).unwrap_err().to_string();
    assert!(
        error.starts_with("--trace file=") && error.contains("No such file"),
        "{error}"
    );

    // The directory vanishes under it.
    let gone = dir.path().join("gone");
    std::fs::create_dir(&gone).unwrap();
    let path = gone.join("trace");
    let tracer = Tracer::start(&config(&path, "*", 4 << 20, 2)).unwrap();
    let io0 = iothread("io0");
    tracer.add(io0.remote(), "IO io0");
    iterate(&io0);
    std::fs::remove_dir_all(&gone).unwrap();
    wait_until("the trace goes on without a file", || {
        iterate(&io0);
        tracer.mask() == 0
    });
    iterate(&io0);
    let error = tracer.set("poll_observe", true).unwrap_err().to_string();
    assert!(error.contains("No such file"), "{error}");

    // And comes back.
    std::fs::create_dir(&gone).unwrap();
    tracer.set("poll_observe", true).unwrap();
    for _ in 0..10 {
        iterate(&io0);
    }
    io0.stop().unwrap();
    tracer.finish();
    let contents = read(&path);
    assert!(contents.events.len() >= 5 && contents.end == Some(End::Closed));
}

#[test]
fn a_device_is_no_file_for_a_trace() {
    let error = Output::create(Path::new("/dev/full"), 4 << 20, 1).unwrap_err();
    assert_eq!(error.to_string(), "it is no regular file");
    assert!(Path::new("/dev/full").exists());
}
