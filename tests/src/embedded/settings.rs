//! Settings changed while I/O runs.

use super::Test;

pub const TESTS: &[Test] = &[];
