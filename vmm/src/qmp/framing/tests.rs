use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

/// What comes out of one stream of input: texts, and errors as their words.
type Output = Vec<Result<Vec<u8>, String>>;

fn run<'a>(packets: impl IntoIterator<Item = &'a [u8]>) -> (Framer, Output) {
    let mut framer = Framer::default();
    let mut output = Vec::new();
    for packet in packets {
        framer.feed(packet);
        while let Some(next) = framer.next_text() {
            output.push(next.map(<[u8]>::to_vec).map_err(|error| error.to_string()));
        }
        assert!(framer.held() <= MAX_MESSAGE_BYTES + packet.len());
    }
    (framer, output)
}

fn texts(input: &[u8]) -> Vec<String> {
    let (_, output) = run([input]);
    output
        .into_iter()
        .map(|item| match item {
            Ok(text) => String::from_utf8(text).unwrap(),
            Err(error) => format!("! {error}"),
        })
        .collect()
}

#[test]
fn texts_end_where_brackets_balance() {
    assert_eq!(
        texts(b"{\"a\": [1, {}]}[]\r\n  {}"),
        ["{\"a\": [1, {}]}", "[]", "{}"]
    );
    assert_eq!(texts(b"{\"a\":\n\n{\n}\n"), [] as [&str; 0]);
    assert_eq!(texts(b"{\"a\":\n\n{\n}\n}"), ["{\"a\":\n\n{\n}\n}"]);
    // Brackets and quotes within strings do not count.
    assert_eq!(texts(br#"{"}": "\"}\\"}1 "#), [r#"{"}": "\"}\\"}"#, "1"]);
    assert_eq!(
        texts(b"5 true\n\"a b\"-1{}"),
        ["5", "true", "\"a b\"", "-1", "{}"]
    );
}

#[test]
fn what_cannot_become_json_is_reported_and_left_behind() {
    assert_eq!(
        texts(b"{}}\n{}"),
        ["{}", "! JSON parse error, stray '}'", "{}"]
    );
    assert_eq!(
        texts(b"{\"a\": \"b\n{}"),
        ["! JSON parse error, control character in a string", "{}"]
    );
    assert_eq!(
        texts(b"{\"a\": [\"b\xff{}"),
        ["! JSON parse error, invalid byte 0xff", "{}"]
    );
    assert_eq!(texts(b"\xff\xff{}").len(), 3);
}

#[test]
fn a_text_of_the_greatest_length_passes_and_one_byte_more_does_not() {
    let text = |length: usize| format!("\"{}\"", "x".repeat(length - 2)).into_bytes();
    let longest = text(MAX_MESSAGE_BYTES);
    let (_, output) = run(longest.chunks(4096));
    assert!(output == [Ok(longest)]);

    let mut longer = text(MAX_MESSAGE_BYTES + 1);
    longer.extend_from_slice(b" the rest of the line {} \"\n{}");
    let (framer, output) = run(longer.chunks(4096));
    let problem = "JSON parse error, message is longer than 1 MiB".to_owned();
    assert!(output == [Err(problem), Ok(b"{}".to_vec())]);
    assert_eq!(framer.held(), 0);
}

#[test]
fn a_line_without_end_takes_no_memory() {
    let mut framer = Framer::default();
    let mut errors = 0;
    for _ in 0..64 {
        framer.feed(&[b'['; 65536]);
        while let Some(next) = framer.next_text() {
            assert!(next.is_err());
            errors += 1;
        }
        assert!(framer.held() <= MAX_MESSAGE_BYTES + 65536);
    }
    assert_eq!(errors, 1);
    framer.feed(b"]]\n{}");
    assert_eq!(framer.next_text(), Some(Ok(b"{}".as_slice())));
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        "[\\[\\]{}\"\\\\:, ]{0,12}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((".{0,6}", inner), 0..4)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// Cuts `input` at the given places (taken modulo its length).
fn cut<'a>(input: &'a [u8], places: &[prop::sample::Index]) -> Vec<&'a [u8]> {
    let mut places: Vec<usize> = places
        .iter()
        .map(|place| place.index(input.len() + 1))
        .collect();
    places.sort_unstable();
    let mut packets = Vec::new();
    let mut from = 0;
    for place in places {
        packets.push(&input[from..place]);
        from = place;
    }
    packets.push(&input[from..]);
    packets
}

proptest! {
    #[test]
    fn any_values_come_out_whole_however_they_are_cut(
        values in prop::collection::vec((value(), any::<bool>()), 0..6),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let mut input = Vec::new();
        for (value, pretty) in &values {
            let text = if *pretty { format!("{value:#}") } else { value.to_string() };
            input.extend_from_slice(text.as_bytes());
            input.push(b'\n');
        }
        let (_, output) = run(cut(&input, &places));
        let read: Vec<Value> = output.into_iter()
            .map(|text| serde_json::from_slice(&text.unwrap()).unwrap()).collect();
        let sent: Vec<Value> = values.into_iter().map(|(value, _)| value).collect();
        prop_assert_eq!(read, sent);
    }

    #[test]
    fn any_bytes_are_cut_alike_in_any_packets(
        input in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(b"{}[]\"\\\n a1\xff".to_vec())], 0..200),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let (_, whole) = run([input.as_slice()]);
        let (_, pieces) = run(cut(&input, &places));
        prop_assert_eq!(whole, pieces);
    }

    #[test]
    fn the_reset_byte_always_brings_back_the_next_request(
        garbage in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let request = json!({"execute": "query-status"}).to_string();
        let input = [&garbage, b"\xff".as_slice(), request.as_bytes()].concat();
        let (framer, output) = run([input.as_slice()]);
        prop_assert_eq!(output.last(), Some(&Ok(request.into_bytes())));
        prop_assert_eq!(framer.held(), 0);
    }
}
