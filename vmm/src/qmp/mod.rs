//! Control of a running VM over a unix socket, in QEMU's monitor protocol (QMP).
//!
//! ```text
//! bytes → framing → message → commands → reply
//!                                ↓
//!                             the VM → event → every client
//! ```
//! A client is greeted, negotiates (`qmp_capabilities`), then sends commands; each is answered in turn. The classes and
//! words of errors, the order of events and replies, and the field names are those that QMP clients know from QEMU. What
//! is not offered is not listed by `query-commands`.

mod client;
mod commands;
mod error;
pub mod event;
mod framing;
pub mod machine;
mod message;
mod schema;
mod server;
pub mod session;
mod socket;
#[cfg(test)]
pub(crate) mod testing;

pub use commands::Monitor;
pub use error::Error;
pub use event::{Event, Sink};
pub use machine::Machine;
pub use message::Call;
pub use server::{Commands, MAX_CLIENTS, Server};
pub use socket::{Error as SocketError, Listener};
