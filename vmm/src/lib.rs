//! The virtual machine: configuration, memory, vCPUs and their assembly. The `pollux` binary is a thin shell around it.

pub mod check;
pub mod config;
pub mod demo;
pub mod guest;
pub mod logging;
pub mod metrics;
pub mod qmp;
pub mod sandbox;
pub mod seccomp;
pub mod threads;
pub mod tools;
pub mod top;
pub mod trace;
pub mod vhost_user;
pub mod vm;
