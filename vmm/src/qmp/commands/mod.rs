//! The commands: a table of names, types and functions, and the monitor that runs them against a [`Machine`].

mod block;
mod hmp;
mod iothread;
mod polling;
mod qom;
mod query;
mod run;
mod trace;

use std::sync::Arc;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::Error;
use super::event::{BlockIoError, PanicData, ShutdownData};
use super::machine::{Ability, Machine};
use super::message::Call;
use super::schema::{Direction, Types};
use super::server::Commands;

/// No arguments, or nothing to return.
#[derive(Debug, Default, Serialize, Deserialize, JsonSchema)]
pub struct Empty {}

type Run = Box<dyn Fn(&Monitor, Map<String, Value>) -> Result<Value, Error> + Send + Sync>;

/// A command that this monitor offers.
struct Command {
    name: &'static str,
    /// Names of the types of the arguments and of what is returned.
    arguments: String,
    returns: String,
    run: Run,
}

/// Executes commands on a machine.
pub struct Monitor {
    machine: Arc<dyn Machine>,
    types: Types,
    commands: Vec<Command>,
    /// Events by name, and the names of their data's types.
    events: Vec<(&'static str, String)>,
}

impl Monitor {
    /// A monitor that offers what `machine` can do.
    pub fn new(machine: Arc<dyn Machine>) -> Self {
        let mut monitor = Self {
            machine,
            types: Types::default(),
            commands: Vec::new(),
            events: Vec::new(),
        };
        query::register(&mut monitor);
        run::register(&mut monitor);
        iothread::register(&mut monitor);
        qom::register(&mut monitor);
        polling::register(&mut monitor);
        block::register(&mut monitor);
        hmp::register(&mut monitor);
        trace::register(&mut monitor);
        let shutdown = monitor.types.add::<ShutdownData>(Direction::Out);
        let io_error = monitor.types.add::<BlockIoError>(Direction::Out);
        let panic = monitor.types.add::<PanicData>(Direction::Out);
        let nothing = monitor.types.add::<Empty>(Direction::Out);
        monitor.events = vec![
            ("SHUTDOWN", shutdown.clone()),
            ("RESET", shutdown),
            ("STOP", nothing.clone()),
            ("RESUME", nothing.clone()),
            ("POWERDOWN", nothing),
            ("BLOCK_IO_ERROR", io_error),
            ("GUEST_PANICKED", panic),
        ];
        monitor
    }

    /// Offers the command `name`.
    fn offer<A, R>(&mut self, name: &'static str, run: fn(&Self, A) -> Result<R, Error>)
    where
        A: DeserializeOwned + JsonSchema + 'static,
        R: Serialize + JsonSchema + 'static,
    {
        let run = move |monitor: &Self, arguments: Map<String, Value>| {
            // The types were checked; what is left is a number out of the range of its Rust type, or the like.
            let arguments = serde_json::from_value(Value::Object(arguments))
                .map_err(|error| Error::failed(error.to_string()))?;
            let value = run(monitor, arguments)?;
            serde_json::to_value(value).map_err(|error| Error::failed(error.to_string()))
        };
        let command = Command {
            name,
            arguments: self.types.add::<A>(Direction::In),
            returns: self.types.add::<R>(Direction::Out),
            run: Box::new(run),
        };
        self.commands.push(command);
    }

    /// Offers it if the machine can do what it takes.
    fn offer_if<A, R>(
        &mut self,
        ability: Ability,
        name: &'static str,
        run: fn(&Self, A) -> Result<R, Error>,
    ) where
        A: DeserializeOwned + JsonSchema + 'static,
        R: Serialize + JsonSchema + 'static,
    {
        if self.machine.can(ability) {
            self.offer(name, run);
        }
    }
}

impl Commands for Monitor {
    fn execute(&self, call: Call) -> Result<Value, Error> {
        let Call { command, arguments } = call;
        let found = self.commands.iter().find(|known| known.name == command);
        let found = found.ok_or(Error::CommandNotFound(command))?;
        self.types.check_arguments(&found.arguments, &arguments)?;
        let value = (found.run)(self, arguments)?;
        debug_assert_eq!(self.types.conforms(&found.returns, &value), Ok(()));
        Ok(value)
    }
}

#[cfg(test)]
mod tests;
