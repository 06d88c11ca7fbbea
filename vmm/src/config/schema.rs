//! The JSON schema of the configuration file, for editors and for those who generate files.
//!
//! It is taken from the configuration types, help texts included. It is stricter than the reader, which also takes texts
//! where numbers and switches belong, as on the command line.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value;

use super::{Alpha, Config, HugePages, IndexSet, QmpSocket, Serial, Size, UserSpec};

/// The schema of a [`Config`] file.
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(Config).to_value();
    schema["title"] = "Pollux virtual machine".into();
    schema
}

/// Stands for [`arch::CpuModel`], which knows no schemas.
pub(super) struct CpuModelText;

/// Types that are written as texts in a notation of their own.
macro_rules! notations {
    ($($name:ty, $word:literal => $schema:tt)*) => {$(
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                $word.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!($schema)
            }
        }
    )*};
}

notations! {
    Size, "Size" => {
        "type": ["string", "integer"],
        "description": "A number of bytes, with K, M, G or T as powers of 1024.",
        "pattern": "^[0-9]+(B|[KkMmGgTt]|[KMGT]iB)?$",
        "minimum": 0,
        "examples": ["512M", "1G"]
    }
    Alpha, "Alpha" => {
        "type": ["number", "string"],
        "description": "A number from 0 to 10.",
        "pattern": "^[0-9]+([.][0-9]+)?$",
        "minimum": 0,
        "maximum": 10,
        "examples": [0.3]
    }
    IndexSet, "IndexSet" => {
        "type": "string",
        "description": "Numbers and ranges of numbers, joined by plus signs.",
        "pattern": "^([0-9]+(-[0-9]+)?([+,][0-9]+(-[0-9]+)?)*)?$",
        "examples": ["0-2+5"]
    }
    CpuModelText, "CpuModel" => {
        "type": "string",
        "description": "The host's CPU, features added with + and hidden with -.",
        "pattern": "^host(,[+-][^,]+)*$",
        "examples": ["host", "host,-avx512f"]
    }
    HugePages, "HugePages" => {
        "type": ["string", "boolean"],
        "description": "Whether memory is made of huge pages, or their size.",
        "pattern": "^(on|off|[0-9]+([KkMmGgTt]|[KMGT]iB)?)$",
        "examples": ["off", "2M"]
    }
    Serial, "Serial" => {
        "type": "string",
        "description": "Where the console goes.",
        "pattern": "^(stdio|pty|none|file=.+)$",
        "examples": ["stdio", "file=console.log"]
    }
    UserSpec, "UserSpec" => {
        "type": ["string", "integer"],
        "description": "A user, and a group, by name or number.",
        "minimum": 0,
        "examples": ["nobody", "1000:1000"]
    }
    QmpSocket, "QmpSocket" => {
        "type": "string",
        "description": "A unix socket.",
        "pattern": "^unix:.+$",
        "examples": ["unix:/run/vm.sock"]
    }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::super::check;
    use super::*;

    fn published() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/config")
    }

    #[test]
    fn the_published_schema_is_that_of_the_types() {
        let path = published().join("schema.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let file: Value = serde_json::from_str(&text).unwrap();
        let remedy = "write it anew: pollux schema > resources/config/schema.json";
        assert!(file == schema(), "{}: {remedy}", path.display());
    }

    #[test]
    fn the_published_examples_are_good_configurations_and_print_as_they_are_read() {
        let mut examples = 0;
        for entry in std::fs::read_dir(published()).unwrap() {
            let path = entry.unwrap().path();
            if path.ends_with("schema.json") {
                continue;
            }
            let place = path.display().to_string();
            let text = std::fs::read_to_string(&path).unwrap();
            let config = Config::from_json(&text, &place).unwrap();
            check::check(&config).unwrap();
            assert_eq!(Config::from_json(&config.print(), &place).unwrap(), config);
            examples += 1;
        }
        assert_eq!(examples, 3);
    }
}
