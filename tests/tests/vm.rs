//! The whole-VM tests; see the library's documentation.

use std::process::ExitCode;

use pollux_tests::session;

fn main() -> ExitCode {
    if std::env::args().nth(1).as_deref() == Some("--serve") {
        session::serve()
    } else {
        session::main()
    }
}
