//! Measures how many I/Os a second a VMM's disks give, and what they cost in CPU.
//!
//! The data's path: [`matrix`] says which runs there are, [`runner`] takes them in turns on a
//! bed (a guest on a VMM), [`cpu`] counts the VMM's threads meanwhile, [`stats`] condenses
//! repetitions, [`report`] prints them.

pub mod cpu;
pub mod matrix;
pub mod record;
pub mod report;
pub mod runner;
pub mod stats;
pub mod vm;
