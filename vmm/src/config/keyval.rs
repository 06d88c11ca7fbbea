//! Lists of `key=value` as they are written on the command line.
//!
//! Items are separated by commas. A value keeps a comma that is doubled (`,,`), or every comma if it is quoted: a value
//! that begins with `"` runs to the next `"`, and `""` inside stands for one quote. The first item may leave out its
//! key where the option has a main one (`--memory 1G` is `size=1G`).

use serde_json::{Map, Value};

use super::error::{Error, Problem};

/// Reads `text` into an object of texts; `main_key` names the key of a first item without `=`.
pub fn parse(text: &str, main_key: Option<&str>) -> Result<Map<String, Value>, Error> {
    let mut list = Map::new();
    let mut rest = text;
    let mut first = true;
    loop {
        let (key, after) = split_key(rest);
        let (key, value_text) = match (key, main_key) {
            (Some(key), _) => (key, after),
            (None, Some(main)) if first && !rest.is_empty() => (main, rest),
            (None, _) => return Err(no_value(rest, text)),
        };
        if key.is_empty() {
            return Err(syntax(
                "a value has no key before its \"=\"; write key=value",
            ));
        }
        let (value, end) = take_value(value_text)?;
        if list.insert(key.to_owned(), Value::String(value)).is_some() {
            return Err(Error::of(Problem::DuplicateKey(key.to_owned())));
        }
        match end {
            Some(next) => rest = next,
            None => return Ok(list),
        }
        first = false;
    }
}

/// Writes an object so that [`parse`] reads the same back. Absent values and empty lists are left out; lists are
/// joined by `:`, lists in lists by `+`.
pub fn print(list: &Map<String, Value>) -> String {
    let mut text = String::new();
    for (key, value) in list {
        let Some(value) = scalar(value, ":") else {
            continue;
        };
        if !text.is_empty() {
            text.push(',');
        }
        text.push_str(key);
        text.push('=');
        if value.starts_with('"') {
            text.push('"');
            text.push_str(&value.replace('"', "\"\""));
            text.push('"');
        } else {
            text.push_str(&value.replace(',', ",,"));
        }
    }
    text
}

fn scalar(value: &Value, separator: &str) -> Option<String> {
    match value {
        Value::Null | Value::Object(_) => None,
        Value::Bool(on) => Some(if *on { "on" } else { "off" }.to_owned()),
        Value::Number(number) => Some(number.to_string()),
        Value::String(text) => Some(text.clone()),
        Value::Array(items) if items.is_empty() => None,
        Value::Array(items) => {
            let items: Vec<_> = items.iter().filter_map(|item| scalar(item, "+")).collect();
            Some(items.join(separator))
        }
    }
}

/// The key before the first `=` of the item that `text` starts with, and what follows the `=`.
fn split_key(text: &str) -> (Option<&str>, &str) {
    match text.find(['=', ',']) {
        Some(at) if text.as_bytes()[at] == b'=' => (Some(&text[..at]), &text[at + 1..]),
        _ => (None, text),
    }
}

/// The value that `text` starts with, and what follows the comma after it.
fn take_value(text: &str) -> Result<(String, Option<&str>), Error> {
    let (quote, mut rest) = match text.strip_prefix('"') {
        Some(rest) => ('"', rest),
        None => (',', text),
    };
    let mut value = String::new();
    loop {
        let Some(at) = rest.find(quote) else {
            if quote == '"' {
                return Err(syntax("a quoted value has no closing quote; add one"));
            }
            value.push_str(rest);
            return Ok((value, None));
        };
        value.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        match rest.strip_prefix(quote) {
            Some(after) => {
                value.push(quote);
                rest = after;
            }
            None if quote == ',' => return Ok((value, Some(rest))),
            None if rest.is_empty() => return Ok((value, None)),
            None => {
                let next = rest.strip_prefix(',').ok_or_else(|| {
                    syntax("text follows a closing quote; put a comma there, or double the quote")
                })?;
                return Ok((value, Some(next)));
            }
        }
    }
}

fn no_value(item: &str, text: &str) -> Error {
    let item = item.split(',').next().unwrap_or_default();
    syntax(&if text.is_empty() {
        "the value is empty; give key=value".to_owned()
    } else if item.is_empty() {
        "a comma has nothing after it; remove it, or double it (,,) if it belongs to a value"
            .to_owned()
    } else {
        format!("{item:?} has no value; write {item}=VALUE (on or off for a switch)")
    })
}

fn syntax(message: &str) -> Error {
    Error::of(Problem::Syntax(message.to_owned()))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> Result<Vec<(String, String)>, String> {
        match parse(text, Some("main")) {
            Ok(map) => Ok(map
                .into_iter()
                .map(|(k, v)| (k, v.as_str().unwrap().to_owned()))
                .collect()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn pairs(expected: &[(&str, &str)]) -> Result<Vec<(String, String)>, String> {
        Ok(expected
            .iter()
            .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
            .collect())
    }

    #[test]
    fn plain_lists() {
        assert_eq!(parsed("a=1,b=2"), pairs(&[("a", "1"), ("b", "2")]));
        assert_eq!(parsed("a="), pairs(&[("a", "")]));
        assert_eq!(parsed("a=b=c"), pairs(&[("a", "b=c")]));
        assert_eq!(parsed("1G"), pairs(&[("main", "1G")]));
        assert_eq!(parsed("1G,a=2"), pairs(&[("main", "1G"), ("a", "2")]));
    }

    #[test]
    fn commas_doubled_or_quoted() {
        assert_eq!(parsed("a=1,,2,b=3"), pairs(&[("a", "1,2"), ("b", "3")]));
        assert_eq!(parsed("a=,,,b=3"), pairs(&[("a", ","), ("b", "3")]));
        assert_eq!(parsed("a=\"1,2\",b=3"), pairs(&[("a", "1,2"), ("b", "3")]));
        assert_eq!(
            parsed("a=\"say \"\"hi\"\"\""),
            pairs(&[("a", "say \"hi\"")])
        );
        assert_eq!(parsed("a=x\"y"), pairs(&[("a", "x\"y")]));
        assert_eq!(parsed("x,,y,a=1"), pairs(&[("main", "x,y"), ("a", "1")]));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("", "empty"),
            ("a=1,", "nothing after it"),
            ("a=1,b", "write b=VALUE"),
            ("a=1,a=2", "given twice"),
            ("main=1,main=2", "given twice"),
            ("=1", "no key"),
            ("a=\"1", "closing quote"),
            ("a=\"1\"2", "follows a closing quote"),
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
        assert!(parse("1G", None).is_err());
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(list in prop::collection::btree_map("[a-z][a-z-]{0,8}", ".{0,12}", 1..6)) {
            let map: Map<String, Value> =
                list.iter().map(|(k, v)| (k.clone(), Value::String(v.clone()))).collect();
            prop_assert_eq!(parse(&print(&map), None).unwrap(), map);
        }

        #[test]
        fn no_text_panics(text in "[a-c=,\": ]{0,24}") {
            let _ = parse(&text, Some("main"));
            let _ = parse(&text, None);
        }
    }
}
