//! `pollux vhost-user-blk` as a process, with front ends of three kinds: the driver of the `virtio-driver`
//! crate, one written by hand for what that crate does not do, and hostile ones. None of it needs KVM.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

#[path = "vhost_user/cases.rs"]
mod cases;
mod common;
#[path = "vhost_user/driver.rs"]
mod driver;
#[path = "vhost_user/front.rs"]
mod front;
#[path = "vhost_user/hostile.rs"]
mod hostile;
#[path = "vhost_user/recovery.rs"]
mod recovery;
#[path = "vhost_user/served.rs"]
mod served;
#[path = "vhost_user/service.rs"]
mod service;
