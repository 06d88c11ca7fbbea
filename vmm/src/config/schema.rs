//! The JSON schema of the configuration file, for editors and for those who generate files.
//!
//! It is taken from the configuration types, help texts included. It is stricter than the reader, which also takes texts
//! where numbers and switches belong, as on the command line.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::Value;

use super::{Config, HugePages, IndexSet, Serial, Size};

/// The schema of a [`Config`] file.
pub fn schema() -> Value {
    let mut schema = schemars::schema_for!(Config);
    schema.insert("title".to_owned(), "Pollux virtual machine".into());
    schema.to_value()
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
}
