//! Objects as a tree of names with properties: the iothreads, under `/objects`.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::error::Error;
use super::super::machine::IoThreadView;
use super::{Empty, Monitor};

/// The properties of an iothread that can be set: integers, but for [`ALPHA`].
const SETTINGS: [&str; 6] = [
    "poll-max-ns",
    "poll-grow",
    "poll-shrink",
    "poll-weight",
    ALPHA,
    "aio-max-batch",
];

/// A number from 0 to 10.
const ALPHA: &str = "poll-alpha";

#[derive(Debug, Deserialize, JsonSchema)]
struct Path {
    path: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Property {
    path: String,
    property: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct Assignment {
    path: String,
    property: String,
    value: Value,
}

#[derive(Debug, Serialize, JsonSchema)]
struct PropertyInfo {
    name: String,
    #[serde(rename = "type")]
    kind: String,
}

impl PropertyInfo {
    fn new(name: &str, kind: &str) -> Self {
        Self {
            name: name.to_owned(),
            kind: kind.to_owned(),
        }
    }
}

/// What a path leads to.
enum Object {
    Root,
    Objects,
    IoThread(IoThreadView),
}

impl Object {
    fn kind(&self) -> &'static str {
        match self {
            Self::Root | Self::Objects => "container",
            Self::IoThread(_) => "iothread",
        }
    }
}

pub(super) fn register(monitor: &mut Monitor) {
    monitor.offer("qom-list", qom_list);
    monitor.offer("qom-get", qom_get);
    monitor.offer("qom-set", qom_set);
}

/// Finds an object by its absolute path, or an iothread by its id alone.
fn resolve(monitor: &Monitor, path: &str) -> Result<Object, Error> {
    let mut names = path.split('/').filter(|name| !name.is_empty());
    let iothread = match (path.starts_with('/'), names.next(), names.next()) {
        (true, None, _) => return Ok(Object::Root),
        (_, Some("objects"), None) => return Ok(Object::Objects),
        (_, Some("objects"), Some(id)) if names.next().is_none() => Some(id),
        (false, Some(id), None) => Some(id),
        _ => None,
    };
    let mut views = monitor.machine.iothreads().into_iter();
    views
        .find(|view| iothread == Some(view.id.as_str()))
        .map(Object::IoThread)
        .ok_or_else(|| Error::DeviceNotFound(path.to_owned()))
}

fn qom_list(monitor: &Monitor, arguments: Path) -> Result<Vec<PropertyInfo>, Error> {
    let object = resolve(monitor, &arguments.path)?;
    let mut list = vec![PropertyInfo::new("type", "string")];
    match &object {
        Object::Root => list.push(PropertyInfo::new("objects", "child<container>")),
        Object::Objects => {
            let views = monitor.machine.iothreads().into_iter();
            list.extend(views.map(|view| PropertyInfo::new(&view.id, "child<iothread>")));
        }
        Object::IoThread(_) => {
            list.extend(SETTINGS.iter().map(|name| {
                let kind = if *name == ALPHA { "number" } else { "int" };
                PropertyInfo::new(name, kind)
            }));
            list.push(PropertyInfo::new("poll-policy", "string"));
        }
    }
    Ok(list)
}

fn qom_get(monitor: &Monitor, arguments: Property) -> Result<Value, Error> {
    let object = resolve(monitor, &arguments.path)?;
    let name = arguments.property;
    let found = match &object {
        _ if name == "type" => Some(json!(object.kind())),
        Object::Root if name == "objects" => Some(json!("/objects")),
        Object::Objects => {
            let mut views = monitor.machine.iothreads().into_iter();
            let view = views.find(|view| view.id == name);
            view.map(|view| json!(format!("/objects/{}", view.id)))
        }
        Object::IoThread(view) => property(view, &name),
        Object::Root => None,
    };
    found.ok_or_else(|| not_found(&object, &name))
}

fn property(view: &IoThreadView, name: &str) -> Option<Value> {
    let settings = view.remote.settings();
    Some(match name {
        "poll-max-ns" => json!(settings.poll_max_ns),
        "poll-grow" => json!(settings.poll_grow),
        "poll-shrink" => json!(settings.poll_shrink),
        "poll-weight" => json!(settings.poll_weight),
        ALPHA => json!(alpha(settings.poll_alpha_milli)),
        "aio-max-batch" => json!(settings.aio_max_batch),
        "poll-policy" => json!(view.remote.policy().name()),
        _ => return None,
    })
}

#[allow(clippy::cast_precision_loss)] // At most 10000.
pub(super) fn alpha(milli: i64) -> f64 {
    milli as f64 / 1000.0
}

fn qom_set(monitor: &Monitor, arguments: Assignment) -> Result<Empty, Error> {
    let object = resolve(monitor, &arguments.path)?;
    let name = arguments.property;
    let view = match &object {
        Object::IoThread(view) if SETTINGS.contains(&name.as_str()) => view,
        Object::IoThread(_) if name == "type" || name == "poll-policy" => {
            return Err(Error::failed(format!(
                "Property 'iothread.{name}' is not writable"
            )));
        }
        _ => return Err(not_found(&object, &name)),
    };
    let value = match &arguments.value {
        Value::Number(number) if name == ALPHA => {
            let text = number.to_string();
            let milli = iothread::alpha_milli(&text);
            milli.map_err(|error| Error::failed(error.to_string()))?
        }
        // Beyond 63 bits it is an integer, but never in range.
        Value::Number(number) if number.is_u64() => number.as_i64().unwrap_or(i64::MIN),
        Value::Number(number) if number.is_i64() => number.as_i64().unwrap_or(i64::MIN),
        _ => {
            let expected = if name == ALPHA { "number" } else { "integer" };
            return Err(Error::ArgumentType { name, expected });
        }
    };
    let set = view.remote.set(&name, value);
    set.map(|()| Empty {})
        .map_err(|error| Error::failed(error.to_string()))
}

fn not_found(object: &Object, name: &str) -> Error {
    Error::failed(format!("Property '{}.{name}' not found", object.kind()))
}
