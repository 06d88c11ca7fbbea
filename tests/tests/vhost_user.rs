//! `pollux vhost-user-blk` behind QEMU; see `pollux_tests::vhost_user`.

use std::process::ExitCode;

fn main() -> ExitCode {
    pollux_tests::vhost_user::main()
}
