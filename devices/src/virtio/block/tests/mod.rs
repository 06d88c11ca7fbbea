//! The block device with a driver in the test, on real iothreads and files.

mod basics;
mod rig;
