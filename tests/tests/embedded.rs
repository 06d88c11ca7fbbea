//! Whole-VM tests with the embedded guest; see `pollux_tests::embedded`.

use std::process::ExitCode;

fn main() -> ExitCode {
    pollux_tests::embedded::main(env!("CARGO_TARGET_TMPDIR"))
}
