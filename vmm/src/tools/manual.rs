//! The manual page: what clap knows of the command line, and what the configuration types know of the keys of its lists.

use std::fmt::Write as _;
use std::io;

use clap::Command;
use serde_json::Value;

use crate::config::schema::schema;

/// Options whose values are lists of keys, and their types in the schema.
const LISTS: [(&str, &str); 6] = [
    ("--memory", "Memory"),
    ("--iothread", "IoThread"),
    ("--disk", "Disk"),
    ("--metrics", "Metrics"),
    ("--trace", "Trace"),
    ("--log", "Log"),
];

const STATUS: &str = "\
.SH \"EXIT STATUS\"
.TP
0
The guest ended well, or was ended by the user.
.TP
1
A failure: the guest's kernel panicked, a vCPU or a thread cannot go on, the host refused something.
.TP
2
Wrong usage: an option, the configuration file, or a file that it names.
";

const EXAMPLES: &str = "\
.SH EXAMPLES
.PP
Boot a kernel with a root disk on the main loop and a fast disk on an iothread, and watch it from another terminal:
.PP
.nf
.RS
pollux \\-\\-kernel vmlinux \\-\\-cmdline \"console=ttyS0 root=/dev/vda ro\" \\-\\-memory 1G \\-\\-cpus 2 \\e
    \\-\\-iothread id=io0 \\-\\-disk path=root.img,readonly=on \\e
    \\-\\-disk path=/dev/nvme0n1,iothread=io0 \\-\\-qmp unix:/run/vm.sock
pollux top /run/vm.sock
.RE
.fi
";

/// The page of `subcommand`, or of the whole.
pub fn page(subcommand: Option<&str>, mut command: Command) -> io::Result<Vec<u8>> {
    // Building gives the subcommands their full names.
    command.build();
    let part = subcommand.and_then(|name| command.find_subcommand(name));
    let runs = part.is_none_or(|part| part.get_name() == "run");
    let mut text = Vec::new();
    clap_mangen::Man::new(part.cloned().unwrap_or(command)).render(&mut text)?;
    if runs {
        text.extend_from_slice(keys().as_bytes());
        text.extend_from_slice(STATUS.as_bytes());
        text.extend_from_slice(EXAMPLES.as_bytes());
    }
    Ok(text)
}

/// A section for each list of keys.
fn keys() -> String {
    let schema = schema();
    let mut text = String::new();
    for (option, name) in LISTS {
        // Writing to a string does not fail, here and below.
        let _ = writeln!(text, ".SH \"KEYS OF {}\"", roff(option));
        let properties = schema["$defs"][name]["properties"].as_object();
        for (key, property) in properties.into_iter().flatten() {
            let _ = writeln!(text, ".TP\n\\fB{}\\fR=", roff(key));
            let description = property["description"].as_str().unwrap_or_default();
            let mut line = description.to_owned();
            let words = words(property, &schema);
            if !words.is_empty() {
                let _ = write!(line, " One of {}.", words.join(", "));
            }
            if let Some(default) = default(&property["default"]) {
                let _ = write!(line, " [default: {default}]");
            }
            let _ = writeln!(text, "{}", roff(&line));
        }
    }
    text
}

/// The words that a key's value may be, if it is one of several.
fn words(property: &Value, schema: &Value) -> Vec<String> {
    let nullable = property["anyOf"][0]["$ref"].as_str();
    let Some(reference) = property["$ref"].as_str().or(nullable) else {
        return Vec::new();
    };
    let name = reference.rsplit('/').next().unwrap_or_default();
    let choices = schema["$defs"][name]["oneOf"].as_array();
    let words = choices.into_iter().flatten();
    words
        .filter_map(|choice| choice["const"].as_str().map(str::to_owned))
        .collect()
}

/// A default as one would write it; none where it stands for "not given".
fn default(value: &Value) -> Option<String> {
    match value {
        Value::String(text) if text.is_empty() => None,
        Value::String(text) => Some(text.clone()),
        Value::Bool(true) => Some("on".to_owned()),
        Value::Bool(false) => Some("off".to_owned()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

/// Text with what roff would take for commands escaped.
fn roff(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    match text.starts_with(['.', '\'']) {
        true => format!("\\&{text}"),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::config::args::Cli;

    fn text(subcommand: Option<&str>) -> String {
        String::from_utf8(page(subcommand, Cli::command()).unwrap()).unwrap()
    }

    #[test]
    fn there_is_a_page_for_the_whole_and_for_each_tool() {
        assert!(text(None).contains(".TH pollux 1"));
        for name in ["run", "check", "info", "top", "schema", "completions"] {
            let page = text(Some(name)).replace("\\-", "-");
            assert!(page.contains(&format!(".TH pollux-{name} 1")), "{page}");
        }
        assert!(!text(Some("check")).contains("EXIT STATUS"));
    }

    #[test]
    fn keys_of_lists_are_explained_with_choices_and_defaults() {
        let page = text(Some("run")).replace("\\-", "-");
        for part in [
            ".SH \"KEYS OF --iothread\"\n",
            ".TP\n\\fBpoll-max-ns\\fR=\nLongest time to poll before blocking, in nanoseconds; 0 turns polling off. [default: 32768]\n",
            "One of weighted, per-handler, context, off, always, auto. [default: weighted]\n",
            "[default: 0.1]",
            ".SH \"KEYS OF --disk\"\n",
            "\\fBreadonly\\fR=\nThe guest may not write. [default: off]\n",
            ".SH EXAMPLES\n",
        ] {
            assert!(page.contains(part), "{part}");
        }
        let sections = page.split(".SH \"KEYS OF ").skip(1);
        for section in sections {
            assert!(section.contains(".TP"), "{section}");
        }
        // No line that roff takes for a command but those meant.
        let known = [
            ".SH", ".TP", ".PP", ".RS", ".RE", ".nf", ".fi", ".ie", ".el", ".TH", ".br",
        ];
        let odd = page.lines().find(|line| {
            line.starts_with(['.', '\'']) && !known.iter().any(|known| line.starts_with(known))
        });
        assert_eq!(odd, None);
    }
}
