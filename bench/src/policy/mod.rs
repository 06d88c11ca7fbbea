//! Polling rules without a VM: [`replay`] of what a loop recorded, and a closed-loop [`sim`]ulation.
//! Both run the event loop's own policy code.

pub mod calibrate;
mod random;
pub mod replay;
pub mod rule;
pub mod sim;
#[cfg(test)]
mod tests;

pub use rule::Rule;
