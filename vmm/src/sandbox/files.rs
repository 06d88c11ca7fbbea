//! The files that are left: those that the configuration names (Landlock, `landlock(7)`).

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, RestrictionStatus, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};

use super::Error;
use crate::config::{Config, Serial};

/// What of Landlock is used where the kernel has it.
const VERSION: ABI = ABI::V6;

/// What may be done beneath a path.
#[derive(Debug, PartialEq, Eq)]
struct Rule {
    path: PathBuf,
    access: BitFlags<AccessFs>,
}

impl Rule {
    fn new(path: impl Into<PathBuf>, access: impl Into<BitFlags<AccessFs>>) -> Self {
        Self {
            path: path.into(),
            access: access.into(),
        }
    }
}

/// Restricts this thread, and those it starts, to the files of `config` and to making `sockets`; takes network and foreign
/// abstract sockets away.
pub(super) fn restrict(config: &Config, sockets: &[PathBuf]) -> Result<(), Error> {
    let ruleset = Ruleset::default()
        .handle_access(AccessFs::from_all(VERSION))?
        .handle_access(AccessNet::from_all(VERSION))?
        .scope(Scope::from_all(VERSION))?
        .create()?;
    let status = rules(config)
        .into_iter()
        .chain(sockets.iter().map(|path| socket(path)))
        .try_fold(ruleset, add)?
        .restrict_self()?;
    match status {
        RestrictionStatus {
            ruleset: RulesetStatus::NotEnforced,
            ..
        } => Err(Error::NoLandlock),
        _ => Ok(()),
    }
}

/// A path that is not there is left out: whoever opens it has a better message.
fn add(ruleset: RulesetCreated, rule: Rule) -> Result<RulesetCreated, Error> {
    match PathFd::new(&rule.path) {
        Ok(path) => Ok(ruleset.add_rule(PathBeneath::new(path, rule.access))?),
        Err(_) => Ok(ruleset),
    }
}

fn rules(config: &Config) -> Vec<Rule> {
    let read = BitFlags::from(AccessFs::ReadFile);
    let read_folder = read | AccessFs::ReadDir;
    let device = read | AccessFs::WriteFile | AccessFs::IoctlDev;
    // Made anew, replaced by renaming, or removed.
    let made =
        read | AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::Truncate | AccessFs::RemoveFile;
    let mut rules = vec![
        Rule::new("/dev/kvm", device),
        // Sizes and limits of memory pages, block devices and io_uring.
        Rule::new("/sys/kernel/mm/hugepages", read_folder),
        Rule::new("/sys/dev/block", read_folder),
        Rule::new("/sys/devices", read_folder),
        Rule::new("/proc/meminfo", read),
        Rule::new("/proc/sys/kernel/io_uring_disabled", read),
    ];
    let boot = [&config.kernel, &config.initrd];
    rules.extend(boot.into_iter().flatten().map(|path| Rule::new(path, read)));
    rules.extend(config.disk.iter().map(|disk| match disk.readonly {
        true => Rule::new(&disk.path, read | AccessFs::IoctlDev),
        false => Rule::new(&disk.path, device | AccessFs::Truncate),
    }));
    if let Some(socket) = &config.qmp {
        rules.push(self::socket(&socket.0));
    }
    if let Some(metrics) = &config.metrics {
        rules.push(Rule::new(folder_of(&metrics.file), made));
    }
    if let Some(trace) = &config.trace {
        rules.push(Rule::new(folder_of(&trace.file), made));
    }
    match &config.serial {
        Serial::File(path) => rules.push(Rule::new(folder_of(path), made)),
        Serial::Pty => {
            rules.push(Rule::new("/dev/ptmx", device));
            rules.push(Rule::new("/dev/pts", device | AccessFs::ReadDir));
        }
        Serial::Stdio | Serial::None => {}
    }
    rules
}

/// A name that is made and removed.
fn socket(path: &Path) -> Rule {
    Rule::new(folder_of(path), AccessFs::MakeSock | AccessFs::RemoveFile)
}

fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => ".".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may(config: &str, path: &str) -> BitFlags<AccessFs> {
        let config = Config::from_json(config, "test").unwrap();
        let rules = rules(&config).into_iter();
        rules
            .filter(|rule| rule.path == Path::new(path))
            .fold(BitFlags::EMPTY, |all, rule| all | rule.access)
    }

    #[test]
    fn each_path_is_allowed_what_it_is_for() {
        let config = r#"{"kernel": "/k", "disk": [{"path": "/d"}, {"path": "/r", "readonly": true}],
            "qmp": "unix:s/q", "metrics": {"file": "m"}, "trace": {"file": "/t/t"}, "serial": "file=/l/c"}"#;
        assert_eq!(may(config, "/k"), AccessFs::ReadFile);
        assert!(may(config, "/d").contains(AccessFs::ReadFile | AccessFs::WriteFile));
        assert!(!may(config, "/r").contains(AccessFs::WriteFile));
        assert_eq!(may(config, "s"), AccessFs::MakeSock | AccessFs::RemoveFile);
        assert!(may(config, ".").contains(AccessFs::MakeReg));
        assert!(may(config, "/l").contains(AccessFs::MakeReg));
        assert!(may(config, "/t").contains(AccessFs::MakeReg | AccessFs::RemoveFile));
        assert_eq!(may(config, "/"), BitFlags::EMPTY);
    }
}
