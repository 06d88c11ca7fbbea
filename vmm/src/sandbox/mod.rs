//! What the process gives up before it runs a guest: `--sandbox`, `--user` and `--chroot`.
//!
//! [`enter`] comes first, before any thread is started, since what it takes away is taken from one thread and those it
//! starts: files that the configuration does not name ([`files`]), the network, capabilities, core files. [`Switch::apply`]
//! comes when everything is open: another root folder, another user. The filters of system calls come last
//! ([`crate::seccomp`]).

mod files;
mod user;

use std::path::PathBuf;

use caps::CapSet;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use self::user::User;
pub use self::user::UserSpec;
use crate::config::Config;

/// The sandbox cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no such user or group here.
    #[error(
        "--user {0}: there is no such user or group; give UID:GID in numbers, or names of /etc/passwd and /etc/group"
    )]
    Unknown(UserSpec),
    /// Only root can do it.
    #[error("{option}: {source}; run as root, or without this option")]
    Privilege {
        /// The option with its value.
        option: String,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The folder is none.
    #[error("--chroot {}: {source}; name a folder, best an empty one", path.display())]
    Chroot {
        /// The folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// Landlock.
    #[error("--sandbox on: Landlock: {0}; --sandbox off does without")]
    Landlock(#[from] landlock::RulesetError),
    /// A kernel without Landlock.
    #[error(
        "--sandbox on: this kernel has no Landlock (CONFIG_SECURITY_LANDLOCK, and lsm=landlock,… on its command line); --sandbox off does without"
    )]
    NoLandlock,
    /// Capabilities.
    #[error("--sandbox on: capabilities cannot be dropped: {0}; --sandbox off does without")]
    Capabilities(#[from] caps::errors::CapsError),
    /// Limits.
    #[error("--sandbox on: limits cannot be lowered: {0}; --sandbox off does without")]
    Limits(#[from] rustix::io::Errno),
}

impl Error {
    /// Whether the user asked for what there is not.
    pub fn is_usage(&self) -> bool {
        matches!(
            self,
            Self::Unknown(_) | Self::Privilege { .. } | Self::Chroot { .. }
        )
    }
}

/// The part that has to wait until everything is open.
#[derive(Debug)]
#[must_use]
pub struct Switch {
    chroot: Option<PathBuf>,
    user: Option<User>,
}

/// Gives up what is not needed from the start. Call it in the process' only thread. `sockets` are made besides what the
/// configuration names.
///
/// # Errors
/// Something cannot be given up, or `--user` names nobody.
pub fn enter(config: &Config, sockets: &[PathBuf]) -> Result<Switch, Error> {
    let user = match &config.user {
        Some(spec) => Some(user::look_up(spec)?),
        None => None,
    };
    if let Some(path) = &config.chroot {
        check_folder(path)?;
    }
    if config.sandbox {
        lower_limits()?;
        drop_capabilities(user.is_some())?;
        files::restrict(config, sockets)?;
    }
    Ok(Switch {
        chroot: config.chroot.clone(),
        user,
    })
}

fn check_folder(path: &std::path::Path) -> Result<(), Error> {
    let wrong = |source| Error::Chroot {
        path: path.to_owned(),
        source,
    };
    match std::fs::metadata(path).map_err(wrong)?.is_dir() {
        true => Ok(()),
        false => Err(wrong(std::io::ErrorKind::NotADirectory.into())),
    }
}

/// No core file, which would hold the guest's memory, and no more descriptors than allowed now.
fn lower_limits() -> Result<(), Error> {
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    setrlimit(Resource::Core, none)?;
    let current = getrlimit(Resource::Nofile).current;
    let descriptors = Rlimit {
        current,
        maximum: current,
    };
    Ok(setrlimit(Resource::Nofile, descriptors)?)
}

/// What root can do more than others. `later` keeps what changing the user needs; the change drops it.
fn drop_capabilities(later: bool) -> Result<(), Error> {
    if caps::has_cap(None, CapSet::Effective, caps::Capability::CAP_SETPCAP)? {
        caps::clear(None, CapSet::Bounding)?;
    }
    caps::clear(None, CapSet::Ambient)?;
    caps::clear(None, CapSet::Inheritable)?;
    if !later {
        caps::clear(None, CapSet::Effective)?;
        caps::clear(None, CapSet::Permitted)?;
    }
    Ok(())
}

impl Switch {
    /// The user and group to be, by number.
    pub fn user(&self) -> Option<(u32, u32)> {
        self.user.as_ref().map(User::numbers)
    }

    /// Changes root folder and user, for all threads.
    ///
    /// # Errors
    /// The process may not.
    pub fn apply(self) -> Result<(), Error> {
        let refused = |option: String| {
            move |errno: nix::Error| Error::Privilege {
                option,
                source: errno.into(),
            }
        };
        if let Some(path) = &self.chroot {
            let option = format!("--chroot {}", path.display());
            let changed = nix::unistd::chroot(path).and_then(|()| nix::unistd::chdir("/"));
            changed.map_err(refused(option))?;
        }
        match self.user {
            Some(user) => user
                .become_()
                .map_err(refused(format!("--user {}", user.spec()))),
            None => Ok(()),
        }
    }
}
