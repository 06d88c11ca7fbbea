//! What a monitor command answers when it fails.

use serde_json::{Value, json};

/// A refused or failed request, in the classes and words that QMP clients know from QEMU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The bytes are no JSON.
    #[error("JSON parse error, {0}")]
    Syntax(String),
    /// JSON, but no request.
    #[error("QMP input {0}")]
    Input(String),
    /// No such command, or none that works here.
    #[error("The command {0} has not been found")]
    CommandNotFound(String),
    /// A command before `qmp_capabilities`.
    #[error("Expecting capabilities negotiation with 'qmp_capabilities'")]
    NotNegotiated,
    /// `qmp_capabilities` a second time.
    #[error("Capabilities negotiation is already complete, command ignored")]
    AlreadyNegotiated,
    /// An argument that the command does not have.
    #[error("Parameter '{0}' is unexpected")]
    UnexpectedArgument(String),
    /// An argument that the command needs.
    #[error("Parameter '{0}' is missing")]
    MissingArgument(String),
    /// An argument of the wrong JSON type.
    #[error("Invalid parameter type for '{name}', expected: {expected}")]
    ArgumentType {
        /// The argument.
        name: String,
        /// The type it must have.
        expected: &'static str,
    },
    /// A word that is none of an argument's choices.
    #[error("Parameter '{name}' does not accept value '{value}'")]
    ArgumentValue {
        /// The argument.
        name: String,
        /// What was given.
        value: String,
    },
    /// A device or object that does not exist.
    #[error("Device '{0}' not found")]
    DeviceNotFound(String),
    /// Too many clients at once.
    #[error("{0} clients are connected already, and that is the limit; close one")]
    TooManyClients(usize),
    /// Any other failure, in words.
    #[error("{0}")]
    Failed(String),
}

impl Error {
    /// A failure told in words.
    pub fn failed(text: impl Into<String>) -> Self {
        Self::Failed(text.into())
    }

    /// The error's class on the wire.
    pub fn class(&self) -> &'static str {
        match self {
            Self::CommandNotFound(_) | Self::NotNegotiated | Self::AlreadyNegotiated => {
                "CommandNotFound"
            }
            Self::DeviceNotFound(_) => "DeviceNotFound",
            _ => "GenericError",
        }
    }

    /// The value of the reply's `error` member.
    pub fn to_json(&self) -> Value {
        json!({"class": self.class(), "desc": self.to_string()})
    }
}
