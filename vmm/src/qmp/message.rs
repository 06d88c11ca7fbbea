//! Requests and replies.

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::error::Error;
use crate::config::de::parse_json;

/// What a client asks.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The client's mark, returned with the reply.
    pub id: Option<Value>,
    /// The command and its arguments, or why there is none.
    pub call: Result<Call, Error>,
}

/// A command with its arguments.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// The command's name.
    pub command: String,
    /// Its arguments, not yet checked.
    pub arguments: Map<String, Value>,
}

impl Request {
    /// Reads a request out of one JSON text.
    pub fn parse(text: &[u8]) -> Self {
        match parse(text) {
            Ok(mut members) => Self {
                id: members.shift_remove("id"),
                call: call(members),
            },
            Err(error) => Self {
                id: None,
                call: Err(error),
            },
        }
    }

    /// A request that could not even be read.
    pub fn broken(error: Error) -> Self {
        Self {
            id: None,
            call: Err(error),
        }
    }
}

fn parse(text: &[u8]) -> Result<Map<String, Value>, Error> {
    let text = std::str::from_utf8(text).map_err(|_| Error::Syntax("invalid UTF-8".to_owned()))?;
    match parse_json(text).map_err(|error| Error::Syntax(error.to_string()))? {
        Value::Object(members) => Ok(members),
        _ => Err(Error::Input("must be a JSON object".to_owned())),
    }
}

fn call(members: Map<String, Value>) -> Result<Call, Error> {
    let mut command = None;
    let mut arguments = Map::new();
    for (key, value) in members {
        match (key.as_str(), value) {
            ("execute", Value::String(name)) => command = Some(name),
            ("execute", _) => {
                return Err(Error::Input("member 'execute' must be a string".to_owned()));
            }
            ("arguments", Value::Object(members)) => arguments = members,
            ("arguments", _) => {
                return Err(Error::Input(
                    "member 'arguments' must be an object".to_owned(),
                ));
            }
            _ => return Err(Error::Input(format!("member '{key}' is unexpected"))),
        }
    }
    let command = command.ok_or_else(|| Error::Input("lacks member 'execute'".to_owned()))?;
    Ok(Call { command, arguments })
}

/// The answer to the request marked `id`.
pub fn reply(id: Option<Value>, outcome: Result<Value, Error>) -> Value {
    let mut reply = match outcome {
        Ok(value) => json!({"return": value}),
        Err(error) => json!({"error": error.to_json()}),
    };
    if let Some(id) = id {
        reply["id"] = id;
    }
    reply
}

/// Three numbers.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VersionTriple {
    major: u64,
    minor: u64,
    micro: u64,
}

/// The version that clients are told, in the layout they know; the numbers are Pollux's own.
#[derive(Debug, Serialize, JsonSchema)]
pub struct VersionInfo {
    qemu: VersionTriple,
    package: String,
}

impl VersionInfo {
    /// This program's version.
    pub fn ours() -> Self {
        let number = |text: &str| text.parse().unwrap_or(0);
        Self {
            qemu: VersionTriple {
                major: number(env!("CARGO_PKG_VERSION_MAJOR")),
                minor: number(env!("CARGO_PKG_VERSION_MINOR")),
                micro: number(env!("CARGO_PKG_VERSION_PATCH")),
            },
            package: concat!("pollux-", env!("CARGO_PKG_VERSION")).to_owned(),
        }
    }
}

/// What a client is sent when it has connected.
pub fn greeting() -> Value {
    json!({"QMP": {"version": VersionInfo::ours(), "capabilities": []}})
}

/// A message as it goes over the wire: one line.
pub fn line(message: &Value) -> Vec<u8> {
    let mut bytes = message.to_string().into_bytes();
    bytes.extend_from_slice(b"\r\n");
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> (Option<Value>, String) {
        let request = Request::parse(text.as_bytes());
        (request.id, request.call.expect_err(text).to_string())
    }

    #[test]
    fn a_request_has_a_command_and_may_have_arguments_and_an_id() {
        let request = Request::parse(br#"{"execute": "a", "arguments": {"b": 1}, "id": [null]}"#);
        assert_eq!(request.id, Some(json!([null])));
        let call = request.call.unwrap();
        assert_eq!(call.command, "a");
        assert_eq!(Value::Object(call.arguments), json!({"b": 1}));
        let request = Request::parse(br#"{"execute": "a"}"#);
        assert_eq!(request.id, None);
        assert!(request.call.unwrap().arguments.is_empty());
    }

    #[test]
    fn what_is_no_request_is_told_why_with_its_id() {
        for (text, id, problem) in [
            ("[1]", None, "QMP input must be a JSON object"),
            ("5", None, "QMP input must be a JSON object"),
            (
                r#"{"id": 3}"#,
                Some(json!(3)),
                "QMP input lacks member 'execute'",
            ),
            (
                r#"{"execute": 1, "id": null}"#,
                Some(Value::Null),
                "QMP input member 'execute' must be a string",
            ),
            (
                r#"{"execute": "a", "arguments": null, "id": "x"}"#,
                Some(json!("x")),
                "QMP input member 'arguments' must be an object",
            ),
            (
                r#"{"execute": "a", "foo": 1}"#,
                None,
                "QMP input member 'foo' is unexpected",
            ),
            (
                r#"{"exec-oob": "a"}"#,
                None,
                "QMP input member 'exec-oob' is unexpected",
            ),
        ] {
            assert_eq!(error_of(text), (id, problem.to_owned()), "{text}");
        }
        for text in [
            "{]",
            "{\"a\" 1}",
            "{\"a\": 1, \"a\": 2}",
            "nul",
            "{\"a\": \"\\ud800\"}",
            "{'a': 1}",
        ] {
            let (_, problem) = error_of(text);
            assert!(
                problem.starts_with("JSON parse error, "),
                "{text}: {problem}"
            );
        }
        assert!(error_of(&"[".repeat(1000)).1.starts_with("JSON parse"));
        let latin1 = Request::parse(b"{\"execute\": \"\xe9\"}");
        assert_eq!(
            latin1.call.unwrap_err().to_string(),
            "JSON parse error, invalid UTF-8"
        );
    }

    #[test]
    fn replies_echo_the_id_and_only_a_given_one() {
        assert_eq!(reply(None, Ok(json!({}))).to_string(), r#"{"return":{}}"#);
        assert_eq!(
            reply(Some(json!({"a": 1})), Ok(json!([]))).to_string(),
            r#"{"return":[],"id":{"a":1}}"#
        );
        assert_eq!(
            reply(Some(Value::Null), Err(Error::CommandNotFound("x".into()))).to_string(),
            r#"{"error":{"class":"CommandNotFound","desc":"The command x has not been found"},"id":null}"#
        );
    }
}
