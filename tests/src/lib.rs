//! Whole-VM tests: what a user does with `pollux`, with a stock Debian kernel and a Debian userland.
//!
//! ```text
//! scenario/   what must hold, written once
//! machine.rs  a VM as a scenario describes it, run by pollux or, beside it, by QEMU's microvm
//! qmp.rs      a client of the machine's monitor
//! guest.rs    what the guest boots, and the script that it runs
//! bed.rs      where that happens: on this host's KVM or in the nested lab
//! lab.rs      the nested lab: an emulated machine with a real KVM, fed one scenario at a time
//! session.rs  the test program's two sides: it reports results here and runs scenarios there
//! lab/        scripts that make and start the lab; `lab/run` runs any command in it
//! ```
//!
//! `vhost_user.rs` is `pollux vhost-user-blk` behind an emulated QEMU machine, on the host.
//!
//! Besides, `embedded/` has the tests with the embedded guest, which need neither Debian nor the lab.
//!
//! The test program `vm` is one binary. With hardware KVM it runs the scenarios itself; otherwise it
//! starts the lab, has itself run there with `--serve`, and reports what comes back.

pub mod bed;
pub mod embedded;
pub mod guest;
pub mod lab;
pub mod machine;
pub mod qmp;
pub mod scenario;
pub mod session;
pub mod vhost_user;
