//! What a virtual machine is made of, as the user says it.
//!
//! One type, [`Config`], serves the command line and the JSON file: options are turned into the same tree of values that
//! the file gives, laid over it, and read by serde ([`de`]). [`check`] then looks at what the values mean together. Nothing
//! here touches the host: files, memory and /dev/kvm are the builder's.

pub mod args;
pub mod check;
pub(crate) mod de;
mod error;
pub mod keyval;
mod nearest;
pub mod placement;
pub mod schema;
mod sections;
mod types;

use std::path::{Path, PathBuf};

use arch::CpuModel;
use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::sandbox::UserSpec;
use crate::seccomp;

pub use error::{Error, one_line};
pub use nearest::nearest;
pub use sections::{
    Cache, Disk, Engine, ErrorPolicy, IoThread, Log, Memory, Metrics, Monitor, PollPolicy, Trace,
    Transport,
};
pub use types::{Alpha, HugePages, IndexSet, QmpSocket, Serial, Size};

/// A whole virtual machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Config {
    /// The kernel image: bzImage, ELF vmlinux, or an ELF with a PVH note.
    #[serde(default)]
    pub kernel: Option<PathBuf>,
    /// The initial RAM disk.
    #[serde(default)]
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    #[serde(default)]
    pub cmdline: String,
    /// Guest RAM.
    #[serde(default)]
    pub memory: Memory,
    /// Number of vCPUs.
    #[serde(default = "one")]
    pub cpus: u32,
    /// What the vCPUs can do.
    #[serde(default, with = "types::by_text")]
    #[schemars(with = "schema::CpuModelText")]
    pub cpu: CpuModel,
    /// Event loops.
    #[serde(default)]
    pub iothread: Vec<IoThread>,
    /// Disks, in the order of their names in the guest.
    #[serde(default)]
    pub disk: Vec<Disk>,
    /// The console.
    #[serde(default)]
    pub serial: Serial,
    /// The monitor's socket, for QMP clients.
    #[serde(default)]
    pub qmp: Option<QmpSocket>,
    /// The VM's numbers in a file.
    #[serde(default)]
    pub metrics: Option<Metrics>,
    /// What the event loops do, in a file.
    #[serde(default)]
    pub trace: Option<Trace>,
    /// Messages.
    #[serde(default)]
    pub log: Log,
    /// Print the iothreads' statistics when the guest has ended.
    #[serde(default)]
    pub stats: bool,
    /// What happens to a thread that makes a system call outside its list.
    #[serde(default)]
    pub seccomp: seccomp::Mode,
    /// Give up files that are not named here, network, capabilities and core files.
    #[serde(default)]
    pub sandbox: bool,
    /// The user, and the group, to run as once everything is open.
    #[serde(default)]
    pub user: Option<UserSpec>,
    /// The root folder once everything is open.
    #[serde(default)]
    pub chroot: Option<PathBuf>,
}

fn one() -> u32 {
    1
}

impl Config {
    /// Puts the options over the configuration file, if one is named, and checks the whole.
    pub fn from_args(args: &args::RunArgs) -> Result<Self, Error> {
        let mut tree = match &args.config {
            Some(path) => read_file(path)?,
            None => Map::new(),
        };
        for (key, option) in args.options() {
            let value = option_value(key, option)?;
            lay_over(&mut tree, key, value);
        }
        let config: Self = de::from_value(Value::Object(tree))?;
        check::check(&config)?;
        Ok(config)
    }

    /// Reads a configuration as [`Config::print`] writes it; `place` is its name in errors.
    pub fn from_json(text: &str, place: &str) -> Result<Self, Error> {
        let value = de::parse_json(text)
            .map_err(|error| Error::new(place, format!("not valid JSON: {error}")))?;
        de::from_value(value).map_err(|error| error.at(place))
    }

    /// The configuration as JSON, with all that was left to defaults.
    pub fn print(&self) -> String {
        serde_json::to_string_pretty(self).expect("the configuration types are plain data")
    }
}

fn read_file(path: &Path) -> Result<Map<String, Value>, Error> {
    let place = format!("--config {}", path.display());
    let text = std::fs::read_to_string(path).map_err(|error| {
        Error::new(
            &place,
            format!("cannot be read: {error}; name a readable JSON file"),
        )
    })?;
    let value = de::parse_json(&text)
        .map_err(|error| Error::new(&place, format!("not valid JSON: {error}")))?;
    // The types are checked here already, while it is known that the file is to blame.
    de::from_value::<Config>(value.clone()).map_err(|error| error.at(&place))?;
    match value {
        Value::Object(map) => Ok(map),
        _ => Err(Error::new(place, "not an object; write {\"kernel\": ...}")),
    }
}

/// One option as the value that the file would have for it.
fn option_value(key: &str, option: args::Given<'_>) -> Result<Value, Error> {
    let text = match option {
        args::Given::Switch => return Ok(Value::Bool(true)),
        args::Given::Text(text) => text,
    };
    let value = match key {
        "memory" => section::<Memory>(text, Some("size")),
        "iothread" => section::<IoThread>(text, Some("id")).map(in_list),
        "disk" => section::<Disk>(text, Some("path")).map(in_list),
        "metrics" => section::<Metrics>(text, Some("file")),
        "trace" => section::<Trace>(text, Some("file")),
        "qmp" => leaf::<QmpSocket>(text),
        "log" => log(text),
        "cpus" => leaf::<u32>(text),
        "cpu" => cpu_model(text),
        "serial" => leaf::<Serial>(text),
        "seccomp" => leaf::<seccomp::Mode>(text),
        "sandbox" => leaf::<bool>(text),
        _ => Ok(Value::String(text.to_owned())),
    };
    value.map_err(|error| error.at(format!("--{key} {text}")))
}

fn section<T: DeserializeOwned>(text: &str, main_key: Option<&str>) -> Result<Value, Error> {
    let value = Value::Object(keyval::parse(text, main_key)?);
    de::from_value::<T>(value.clone())?;
    Ok(value)
}

fn leaf<T: DeserializeOwned>(text: &str) -> Result<Value, Error> {
    let value = Value::String(text.to_owned());
    // The place shows the value already.
    de::from_value::<T>(value.clone()).map_err(Error::without_value)?;
    Ok(value)
}

/// `--log vmm=debug,iothread=trace` is the level alone, as logging programs have it, not keys and values.
fn log(text: &str) -> Result<Value, Error> {
    let is_key = |item: &str| item.starts_with("level=") || item.starts_with("file=");
    if text.split(',').any(is_key) {
        return section::<Log>(text, Some("level"));
    }
    let mut log = Map::new();
    log.insert("level".to_owned(), Value::String(text.to_owned()));
    Ok(Value::Object(log))
}

fn cpu_model(text: &str) -> Result<Value, Error> {
    match text.parse::<CpuModel>() {
        Ok(_) => Ok(Value::String(text.to_owned())),
        Err(error) => Err(Error::of(error::Problem::Other(error.to_string()))),
    }
}

fn in_list(value: Value) -> Value {
    Value::Array(vec![value])
}

/// Lists grow, sections take the new keys, everything else is replaced.
fn lay_over(tree: &mut Map<String, Value>, key: &str, value: Value) {
    match (tree.get_mut(key), value) {
        (Some(Value::Array(old)), Value::Array(new)) => old.extend(new),
        (Some(Value::Object(old)), Value::Object(new)) => old.extend(new),
        (_, value) => {
            tree.insert(key.to_owned(), value);
        }
    }
}

#[cfg(test)]
mod tests;
