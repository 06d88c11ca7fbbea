//! Listing, making and ending iothreads.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::super::error::Error;
use super::super::machine::{Ability, IoThreadView};
use super::{Empty, Monitor};
use crate::config::{self, check};

/// What `query-iothreads` says of each: settings in effect, so that one left at 0 shows its default.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(super) struct IoThreadInfo {
    pub id: String,
    pub thread_id: i32,
    pub poll_max_ns: i64,
    pub poll_grow: i64,
    pub poll_shrink: i64,
    pub poll_weight: i64,
    pub aio_max_batch: i64,
}

impl From<IoThreadView> for IoThreadInfo {
    fn from(view: IoThreadView) -> Self {
        let settings = view.remote.settings();
        Self {
            id: view.id,
            thread_id: view.thread_id,
            poll_max_ns: settings.poll_max_ns,
            poll_grow: settings.poll_grow,
            poll_shrink: settings.poll_shrink,
            poll_weight: settings.poll_weight,
            aio_max_batch: settings.aio_max_batch,
        }
    }
}

/// The kinds of objects that can be added.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum ObjectType {
    Iothread,
}

/// An object to add: the options of `--iothread`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
struct ObjectOptions {
    #[serde(rename = "qom-type")]
    _qom_type: ObjectType,
    #[serde(flatten)]
    iothread: config::IoThread,
}

#[derive(Debug, Deserialize, JsonSchema)]
struct ObjectId {
    id: String,
}

pub(super) fn register(monitor: &mut Monitor) {
    monitor.offer("query-iothreads", query_iothreads);
    monitor.offer_if(Ability::ChangeIoThreads, "object-add", object_add);
    monitor.offer_if(Ability::ChangeIoThreads, "object-del", object_del);
}

pub(super) fn query_iothreads(monitor: &Monitor, _: Empty) -> Result<Vec<IoThreadInfo>, Error> {
    let views = monitor.machine.iothreads().into_iter();
    Ok(views.map(IoThreadInfo::from).collect())
}

fn object_add(monitor: &Monitor, options: ObjectOptions) -> Result<Empty, Error> {
    let config = options.iothread;
    check::check_iothread_id(&config.id)
        .map_err(|problem| Error::failed(format!("id={}: {problem}", config.id)))?;
    check::check_iothread(&config).map_err(Error::Failed)?;
    if is_known(monitor, &config.id) {
        return Err(Error::failed(format!(
            "id={}: there is an iothread of this id; give another",
            config.id
        )));
    }
    monitor.machine.add_iothread(&config).map(|()| Empty {})
}

fn object_del(monitor: &Monitor, object: ObjectId) -> Result<Empty, Error> {
    let id = object.id;
    if !is_known(monitor, &id) {
        return Err(Error::failed(format!("object '{id}' not found")));
    }
    let disks = monitor.machine.disks();
    let uses = |queues: &[Option<String>]| queues.iter().flatten().any(|user| *user == id);
    if let Some(disk) = disks.iter().find(|disk| uses(&disk.queues)) {
        return Err(Error::failed(format!(
            "object '{id}' is in use by disk '{}'; move that with blockdev-change-iothread first",
            disk.id
        )));
    }
    monitor.machine.remove_iothread(&id).map(|()| Empty {})
}

fn is_known(monitor: &Monitor, id: &str) -> bool {
    let views = monitor.machine.iothreads();
    views.iter().any(|view| view.id == id)
}
