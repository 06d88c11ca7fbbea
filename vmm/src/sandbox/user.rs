//! Another user to run as: `--user`.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use nix::unistd::{self, Gid, Uid};

use super::Error;

/// `USER`, `USER:GROUP`, by name or number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserSpec(String);

impl FromStr for UserSpec {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for UserSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A user and the one group that is left to the process.
#[derive(Debug)]
pub(super) struct User {
    spec: UserSpec,
    uid: Uid,
    gid: Gid,
}

/// Finds out who is meant. A user given by a number that has no entry needs a group, too.
pub(super) fn look_up(spec: &UserSpec) -> Result<User, Error> {
    let unknown = || Error::Unknown(spec.clone());
    let (user, group) = match spec.0.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (spec.0.as_str(), None),
    };
    let entry = match user.parse() {
        Ok(uid) => unistd::User::from_uid(Uid::from_raw(uid)),
        Err(_) => unistd::User::from_name(user),
    };
    let entry = entry.ok().flatten();
    let uid = user.parse().map(Uid::from_raw).ok();
    let uid = uid.or(entry.as_ref().map(|entry| entry.uid));
    let gid = match group {
        None => entry.map(|entry| entry.gid),
        Some(group) => match group.parse() {
            Ok(gid) => Some(Gid::from_raw(gid)),
            Err(_) => unistd::Group::from_name(group)
                .ok()
                .flatten()
                .map(|g| g.gid),
        },
    };
    Ok(User {
        spec: spec.clone(),
        uid: uid.ok_or_else(unknown)?,
        gid: gid.ok_or_else(unknown)?,
    })
}

impl User {
    pub(super) fn spec(&self) -> &UserSpec {
        &self.spec
    }

    pub(super) fn numbers(&self) -> (u32, u32) {
        (self.uid.as_raw(), self.gid.as_raw())
    }

    /// For all threads of the process: the C library sees to that.
    pub(super) fn become_(&self) -> nix::Result<()> {
        unistd::setgroups(&[])?;
        unistd::setgid(self.gid)?;
        unistd::setuid(self.uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Option<(u32, u32)> {
        let user = look_up(&text.parse().unwrap()).ok()?;
        Some((user.uid.as_raw(), user.gid.as_raw()))
    }

    #[test]
    fn users_are_found_by_name_and_number() {
        assert_eq!(found("root"), Some((0, 0)));
        assert_eq!(found("0"), Some((0, 0)));
        assert_eq!(found("root:7"), Some((0, 7)));
        assert_eq!(found("4000000:root"), Some((4_000_000, 0)));
        assert_eq!(found("4000000"), None, "no group");
        for nobody in ["", ":", "no-such-user", "root:no-such-group", "-1", "root:"] {
            assert_eq!(found(nobody), None, "{nobody}");
        }
    }
}
