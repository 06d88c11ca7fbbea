//! Messages on standard error, or in a file.

use std::fs::OpenOptions;
use std::sync::Mutex;

use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use crate::config::{Error, Log};

/// Sends messages where `log` says, from now on.
pub fn start(log: &Log) -> Result<(), Error> {
    let levels: Targets = log
        .level
        .parse()
        .map_err(|error| Error::new(format!("--log {}", log.level), format!("{error}")))?;
    let layer = tracing_subscriber::fmt::layer().with_target(true);
    let registry = tracing_subscriber::registry().with(levels);
    match &log.file {
        Some(path) => {
            let place = format!("--log file={}", path.display());
            let file = OpenOptions::new()
                .append(true)
                .create(true)
                .open(path)
                .map_err(|error| {
                    Error::new(place, format!("{error}; name a file that can be written"))
                })?;
            registry
                .with(layer.with_ansi(false).with_writer(Mutex::new(file)))
                .init();
        }
        None => {
            let layer = layer
                .without_time()
                .with_ansi(false)
                .with_writer(std::io::stderr);
            registry.with(layer).init();
        }
    }
    Ok(())
}
