//! The virtual machine: configuration, memory, vCPUs and their assembly. The `pollux` binary is a thin shell around it.

pub mod config;
pub mod logging;
pub mod qmp;
pub mod threads;
pub mod vm;
