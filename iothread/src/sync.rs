//! The atomics of the lock-free parts (`notify`, `inbox`, `sequence`). These modules name nothing
//! else of the crate: `tests/loom.rs` compiles the same files over loom's atomics.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering, fence},
};
