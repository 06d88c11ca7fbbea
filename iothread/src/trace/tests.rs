use proptest::prelude::*;

use super::codec::{Decoder, Entry, encode};
use super::file::{Block, End, HEADER_BYTES, Header, ReadError, Reader, Thread, Totals};
use super::*;

/// An entry that owns its parts.
#[derive(Debug, Clone)]
enum Owned {
    Event(TraceEvent<'static>),
    Observe(i64, i64, Vec<u32>),
    Handler(u64, i32, String),
    Settings(PollSettings, bool),
    Lost(u64),
}

const CTX: u64 = 7;

impl Owned {
    fn entry(&self) -> Entry<'_> {
        match self {
            Owned::Event(event) => Entry::Event(*event),
            Owned::Observe(block_ns, dispatch_ns, active) => {
                Entry::Event(TraceEvent::PollObserve {
                    ctx: CTX,
                    block_ns: *block_ns,
                    dispatch_ns: *dispatch_ns,
                    active,
                })
            }
            Owned::Handler(node, fd, name) => Entry::Handler {
                node: *node,
                fd: *fd,
                name,
            },
            Owned::Settings(settings, again) => Entry::Settings {
                settings: *settings,
                again: *again,
            },
            Owned::Lost(count) => Entry::Lost(*count),
        }
    }
}

fn number() -> impl Strategy<Value = i64> {
    prop_oneof![any::<i64>(), 0i64..100_000, Just(-1), Just(i64::MIN)]
}

fn any_entry() -> impl Strategy<Value = Owned> {
    let (ctx, node) = (CTX, any::<u64>());
    prop_oneof![
        (number(), number()).prop_map(move |(max_ns, timeout)| Owned::Event(
            TraceEvent::RunPollHandlersBegin {
                ctx,
                max_ns,
                timeout
            }
        )),
        (any::<bool>(), number()).prop_map(move |(progress, timeout)| Owned::Event(
            TraceEvent::RunPollHandlersEnd {
                ctx,
                progress,
                timeout
            }
        )),
        (number(), number()).prop_map(move |(old, new)| Owned::Event(TraceEvent::PollGrow {
            ctx,
            old,
            new
        })),
        (number(), number()).prop_map(move |(old, new)| Owned::Event(TraceEvent::PollShrink {
            ctx,
            old,
            new
        })),
        (node, any::<i32>(), any::<u32>()).prop_map(move |(node, fd, revents)| {
            Owned::Event(TraceEvent::PollAdd {
                ctx,
                node,
                fd,
                revents,
            })
        }),
        (node, any::<i32>()).prop_map(move |(node, fd)| Owned::Event(TraceEvent::PollRemove {
            ctx,
            node,
            fd
        })),
        (node, any::<u32>()).prop_map(move |(node, revents)| Owned::Event(
            TraceEvent::PollDispatch { ctx, node, revents }
        )),
        (node, number()).prop_map(move |(node, ns)| Owned::Event(TraceEvent::PollHandler {
            ctx,
            node,
            ns
        })),
        ([number(), number()], any::<[u64; 4]>()).prop_map(move |(times, counts)| {
            let [now_ns, cpu_ns] = times;
            let [completions, events, kicks, blocks] = counts;
            let reading = Reading {
                now_ns,
                cpu_ns,
                completions,
                events,
                kicks,
                blocks,
            };
            Owned::Event(TraceEvent::PollReading { ctx, reading })
        }),
        (any::<[i64; 4]>(), any::<bool>(), any::<u64>()).prop_map(
            move |(numbers, scanning, switches)| {
                let [incumbent_ns, window_ns, score_micro, advantage_micro] = numbers;
                Owned::Event(TraceEvent::PollTrial {
                    ctx,
                    incumbent_ns,
                    window_ns,
                    scanning,
                    score_micro,
                    advantage_micro,
                    switches,
                })
            }
        ),
        (
            number(),
            number(),
            prop::collection::vec(any::<u32>(), 0..40)
        )
            .prop_map(|(block_ns, dispatch_ns, active)| Owned::Observe(
                block_ns,
                dispatch_ns,
                active
            )),
        (node, any::<i32>(), ".{0,60}").prop_map(|(node, fd, name)| Owned::Handler(node, fd, name)),
        (any::<[i64; 6]>(), any::<bool>()).prop_map(|(numbers, again)| {
            let [
                poll_max_ns,
                poll_grow,
                poll_shrink,
                poll_weight,
                poll_alpha_milli,
                aio_max_batch,
            ] = numbers;
            let settings = PollSettings {
                poll_max_ns,
                poll_grow,
                poll_shrink,
                poll_weight,
                poll_alpha_milli,
                aio_max_batch,
            };
            Owned::Settings(settings, again)
        }),
        any::<u64>().prop_map(Owned::Lost),
    ]
}

fn any_block() -> impl Strategy<Value = (Block, Vec<(i64, Owned)>)> {
    let text = ".{0,40}";
    let events = (
        any::<u16>(),
        number(),
        prop::collection::vec((number(), any_entry()), 0..30),
    )
        .prop_map(|(thread, base_ns, list)| {
            let mut entries = Vec::new();
            let mut since_ns = base_ns;
            for (time_ns, entry) in &list {
                encode(&mut entries, since_ns, *time_ns, &entry.entry());
                since_ns = *time_ns;
            }
            let block = Block::Events {
                thread,
                base_ns,
                entries,
            };
            (block, list)
        });
    prop_oneof![
        4 => events,
        1 => (any::<u16>(), any::<u64>(), text, text, text).prop_map(|(number, ctx, id, name, policy)| {
            (Block::Thread(number, Thread { ctx, id, name, policy }), Vec::new())
        }),
        1 => (any::<u16>(), any::<u64>(), any::<u64>()).prop_map(|(thread, written, lost)| {
            (Block::Totals(thread, Totals { written, lost }), Vec::new())
        }),
        1 => any::<bool>().prop_map(|closed| {
            let end = if closed { End::Closed } else { End::Rotated };
            (Block::End(end), Vec::new())
        }),
    ]
}

fn written(header: Header, blocks: &[Block]) -> (Vec<u8>, Vec<usize>) {
    let mut bytes = header.to_bytes().to_vec();
    let mut ends = vec![bytes.len()];
    for block in blocks {
        block.put(&mut bytes);
        ends.push(bytes.len());
    }
    (bytes, ends)
}

/// All blocks that can be read, and why no more.
fn read(bytes: &[u8]) -> Result<(Header, Vec<Block>, Option<ReadError>), ReadError> {
    let mut reader = Reader::new(bytes)?;
    let mut blocks = Vec::new();
    loop {
        match reader.next_block() {
            Ok(Some(block)) => blocks.push(block),
            Ok(None) => return Ok((reader.header(), blocks, None)),
            Err(error) => return Ok((reader.header(), blocks, Some(error))),
        }
    }
}

proptest! {
    #[test]
    fn what_is_written_is_what_is_read(
        run: u64, sequence: u32, list in prop::collection::vec(any_block(), 0..12),
    ) {
        let header = Header { run, sequence };
        let blocks: Vec<Block> = list.iter().map(|(block, _)| block.clone()).collect();
        let (bytes, _) = written(header, &blocks);
        let (got, read, error) = read(&bytes).unwrap();
        prop_assert!(error.is_none());
        prop_assert_eq!(got, header);
        prop_assert_eq!(&read, &blocks);
        for (block, (_, wanted)) in read.iter().zip(&list) {
            let Block::Events { base_ns, entries, .. } = block else { continue };
            let mut decoder = Decoder::new(entries, CTX, *base_ns);
            for (time_ns, entry) in wanted {
                prop_assert_eq!(decoder.next(), Ok(Some((*time_ns, entry.entry()))));
            }
            prop_assert_eq!(decoder.next(), Ok(None));
        }
    }

    /// Cut anywhere: what is before is read, and the error names the block.
    #[test]
    fn a_cut_file_gives_what_is_before(
        list in prop::collection::vec(any_block(), 1..6), cut: prop::sample::Index,
    ) {
        let blocks: Vec<Block> = list.into_iter().map(|(block, _)| block).collect();
        let (bytes, ends) = written(Header { run: 1, sequence: 0 }, &blocks);
        let cut = HEADER_BYTES + cut.index(bytes.len() - HEADER_BYTES);
        let (_, read, error) = read(&bytes[..cut]).unwrap();
        let whole = ends.iter().filter(|end| **end <= cut).count() - 1;
        prop_assert_eq!(&read, &blocks[..whole]);
        match error {
            None => prop_assert_eq!(cut, ends[whole]),
            Some(ReadError::Truncated { offset }) => {
                prop_assert_eq!(offset, ends[whole] as u64);
                prop_assert!(cut > ends[whole]);
            }
            Some(other) => prop_assert!(false, "{other}"),
        }
    }

    /// A changed byte is noticed; nothing before it is lost, nothing wrong is shown.
    #[test]
    fn a_damaged_file_gives_what_is_before(
        list in prop::collection::vec(any_block(), 1..6), at: prop::sample::Index, bit in 0u8..8,
    ) {
        let blocks: Vec<Block> = list.into_iter().map(|(block, _)| block).collect();
        let (mut bytes, ends) = written(Header { run: 1, sequence: 0 }, &blocks);
        let at = HEADER_BYTES + at.index(bytes.len() - HEADER_BYTES);
        bytes[at] ^= 1 << bit;
        let (_, read, error) = read(&bytes).unwrap();
        let before = ends.iter().filter(|end| **end <= at).count() - 1;
        // The byte behind the kind means nothing, but is under the checksum all the same.
        prop_assert_eq!(&read, &blocks[..before]);
        let text = error.expect("noticed").to_string();
        let place = format!("offset {}: ", ends[before]);
        prop_assert!(text.starts_with(&place), "{text}");
    }

    #[test]
    fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut decoder = Decoder::new(&bytes, 0, 0);
        while let Ok(Some(_)) = decoder.next() {}
        let mut framed = Header { run: 0, sequence: 0 }.to_bytes().to_vec();
        framed.extend_from_slice(&bytes);
        let _ = read(&framed);
        let _ = read(&bytes);
    }
}

#[test]
fn other_files_are_told_apart() {
    let text = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
    assert!(text(b"").contains("no trace"));
    assert!(text(b"{\"a\": 1}").contains("no trace"));
    let header = Header {
        run: 5,
        sequence: 1,
    };
    let mut bytes = header.to_bytes();
    assert!(text(&bytes[..10]).contains("offset 0: the file ends"));
    bytes[8] = 9;
    assert!(text(&bytes).contains("version 9"));
    let mut bytes = header.to_bytes();
    bytes[13] ^= 1;
    assert!(text(&bytes).contains("offset 0: the file is damaged"));
}

#[test]
fn an_entry_is_some_ten_bytes() {
    let mut bytes = Vec::new();
    let event = TraceEvent::PollObserve {
        ctx: CTX,
        block_ns: 12_345,
        dispatch_ns: 1_000_000_012_345,
        active: &[1],
    };
    encode(
        &mut bytes,
        1_000_000_000_000,
        1_000_000_012_345,
        &Entry::Event(event),
    );
    assert!(bytes.len() <= 16, "{}", bytes.len());
}

#[test]
fn events_have_the_names_that_select_them() {
    let (ctx, node) = (0, 0);
    let events = [
        (
            TraceEvent::RunPollHandlersBegin {
                ctx,
                max_ns: 0,
                timeout: 0,
            },
            "run_poll_handlers_begin",
        ),
        (
            TraceEvent::RunPollHandlersEnd {
                ctx,
                progress: false,
                timeout: 0,
            },
            "run_poll_handlers_end",
        ),
        (
            TraceEvent::PollGrow {
                ctx,
                old: 0,
                new: 0,
            },
            "poll_grow",
        ),
        (
            TraceEvent::PollShrink {
                ctx,
                old: 0,
                new: 0,
            },
            "poll_shrink",
        ),
        (
            TraceEvent::PollAdd {
                ctx,
                node,
                fd: 0,
                revents: 0,
            },
            "poll_add",
        ),
        (TraceEvent::PollRemove { ctx, node, fd: 0 }, "poll_remove"),
        (
            TraceEvent::PollDispatch {
                ctx,
                node,
                revents: 0,
            },
            "poll_dispatch",
        ),
        (
            TraceEvent::PollObserve {
                ctx,
                block_ns: 0,
                dispatch_ns: 0,
                active: &[],
            },
            "poll_observe",
        ),
        (TraceEvent::PollHandler { ctx, node, ns: 0 }, "poll_handler"),
    ];
    for (event, name) in events {
        assert_eq!(event.name(), name);
    }
}
