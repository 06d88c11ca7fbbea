//! Command lines and configuration files.

use clap::Parser;
use vmm::config::Config;
use vmm::config::args::Cli;

/// The target: the first byte chooses between a file and a command line, whose words are lines.
pub fn parse(input: &[u8]) {
    let Some((choice, rest)) = input.split_first() else {
        return;
    };
    let text = String::from_utf8_lossy(rest);
    if choice % 2 == 0 {
        match Config::from_json(&text, "fuzz") {
            Ok(config) => {
                let again = Config::from_json(&config.print(), "fuzz").unwrap();
                assert_eq!(again, config, "printed and read back");
                let _ = vmm::config::check::check(&config);
            }
            Err(error) => one_line(&error.to_string()),
        }
        return;
    }
    let words = std::iter::once("pollux").chain(text.lines());
    let Ok(cli) = Cli::try_parse_from(words) else {
        return;
    };
    // A file that the input names is not its own.
    if cli.command.is_some() || cli.run.config.is_some() {
        return;
    }
    match Config::from_args(&cli.run) {
        Ok(config) => {
            let again = Config::from_json(&config.print(), "fuzz").unwrap();
            assert_eq!(again, config, "printed and read back");
        }
        Err(error) => one_line(&error.to_string()),
    }
}

fn one_line(message: &str) {
    assert!(
        !message.is_empty() && !message.contains('\n'),
        "one line: {message:?}"
    );
}
