//! Measures how many I/Os a second a VMM's disks give, and what they cost in CPU.
//!
//! The data's path: [`matrix`] says which runs there are; [`runner`] takes them in turns on a
//! bed, a guest on a VMM ([`fio`] or [`guest`], on machines of [`vm`] with the files of [`disks`]) or a
//! driver at a back end ([`vhost`]); [`cpu`]
//! counts the VMM's threads meanwhile; [`record`] keeps it; [`stats`] condenses repetitions;
//! [`report`] prints them. [`trace`] reads what event loops recorded, [`policy`] tries
//! polling rules on that and on simulated loads. [`cli`] ties it together.

pub mod cli;
pub mod cpu;
pub mod disks;
pub mod fio;
pub mod footprint;
pub mod guest;
pub mod matrix;
pub mod policy;
pub mod preset;
pub mod progress;
pub mod record;
pub mod report;
pub mod runner;
pub mod stats;
pub mod trace;
pub mod vhost;
pub mod vm;
