//! The block device with a driver in the test, on real iothreads and files.

mod alignment;
mod backends;
mod basics;
mod board;
mod cutting;
mod discard;
mod faults;
mod fixedbufs;
mod hostile;
mod hot_path;
mod lifecycle;
mod load;
mod model;
mod policies;
mod rig;
