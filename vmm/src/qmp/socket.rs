//! The unix socket that clients connect to.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid, fchmod};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with,
};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// Why a socket cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process listens on it.
    #[error("{0}: a running process answers on this socket; give each VM its own path")]
    InUse(String),
    /// Something else has the name.
    #[error("{0}: exists and is no socket; remove it or give another path")]
    NoSocket(String),
    /// The kernel's address structure is too small (unix(7)).
    #[error("{0}: longer than the 107 bytes that a socket's path may have; give a shorter path")]
    TooLong(String),
    /// Whatever else the system says.
    #[error("{path}: cannot make the socket: {error}; check the directory and its permissions")]
    System {
        /// The socket's path.
        path: String,
        /// The system's reason.
        error: io::Error,
    },
}

/// A listening socket; its name is removed when it is dropped.
#[derive(Debug)]
pub struct Listener {
    socket: UnixListener,
    path: PathBuf,
    /// The folder of the name, which may be out of reach later ([`crate::sandbox`]).
    folder: OwnedFd,
    /// Device and inode of the name, so that a successor's socket is not removed.
    identity: Option<(u64, u64)>,
}

impl Listener {
    /// Listens on `path`, for this user only (mode 0600). A socket left behind by a dead process is replaced.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        let name = path.display().to_string();
        let system = |error: io::Error| Error::System {
            path: name.clone(),
            error,
        };
        let address = SocketAddrUnix::new(path).map_err(|_| Error::TooLong(name.clone()))?;
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(|errno| system(errno.into()))?;
        // Before bind(2) the mode of the socket is that of the name to be: there is no moment at which others may connect.
        fchmod(&socket, Mode::RUSR | Mode::WUSR).map_err(|errno| system(errno.into()))?;
        if let Err(errno) = bind(&socket, &address) {
            if errno != rustix::io::Errno::ADDRINUSE {
                return Err(system(errno.into()));
            }
            remove_stale(path)?;
            bind(&socket, &address).map_err(|errno| system(errno.into()))?;
        }
        let folder = match path.parent() {
            Some(folder) if folder != Path::new("") => folder,
            _ => Path::new("."),
        };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder =
            rustix::fs::open(folder, flags, Mode::empty()).map_err(|errno| system(errno.into()))?;
        let mut listener = Self {
            socket: UnixListener::from(socket),
            identity: None,
            path: path.to_owned(),
            folder,
        };
        listener.identity = listener.found();
        listen(&listener.socket, BACKLOG).map_err(|errno| system(errno.into()))?;
        Ok(listener)
    }

    /// Lets another user connect, instead of this one.
    ///
    /// # Errors
    /// This user may not.
    pub fn give_to(&self, user: u32, group: u32) -> Result<(), Error> {
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        rustix::fs::chownat(&self.folder, self.name(), Some(user), Some(group), flags).map_err(
            |errno| Error::System {
                path: self.path.display().to_string(),
                error: errno.into(),
            },
        )
    }

    fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }

    /// Device and inode of what has the name now.
    fn found(&self) -> Option<(u64, u64)> {
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        let stat = rustix::fs::statat(&self.folder, self.name(), flags).ok()?;
        Some((stat.st_dev, stat.st_ino))
    }

    /// The path it listens on.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The socket, to wait on.
    pub fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// Takes a waiting connection, not blocking.
    pub fn accept(&self) -> io::Result<UnixStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream: OwnedFd = rustix::net::accept_with(&self.socket, flags)?;
        Ok(UnixStream::from(stream))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.identity.is_some() && self.identity == self.found() {
            let _ = rustix::fs::unlinkat(&self.folder, self.name(), AtFlags::empty());
        }
    }
}

/// Removes a socket on which nobody listens.
fn remove_stale(path: &Path) -> Result<(), Error> {
    let name = path.display().to_string();
    let system = |error: io::Error| Error::System {
        path: name.clone(),
        error,
    };
    match std::fs::symlink_metadata(path) {
        Ok(meta) if !meta.file_type().is_socket() => return Err(Error::NoSocket(name)),
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(system(error)),
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
        // Connected, or its queue is full: somebody is there.
        Ok(_) => return Err(Error::InUse(name)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(Error::InUse(name)),
        Err(error) => return Err(system(error)),
    }
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(system(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn message(path: &Path) -> String {
        Listener::bind(path).unwrap_err().to_string()
    }

    #[test]
    fn the_socket_is_the_users_own_and_goes_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let listener = Listener::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(
            listener.accept().unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        let _client = UnixStream::connect(&path).unwrap();
        listener.accept().unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_dead_processes_socket_is_replaced_and_a_live_ones_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        // Dropping std's listener leaves the name behind, as a killed process does.
        drop(UnixListener::bind(&path).unwrap());
        let listener = Listener::bind(&path).unwrap();
        assert!(message(&path).contains("a running process answers"));
        UnixStream::connect(&path).unwrap();
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn a_successors_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("qmp");
        let first = Listener::bind(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let second = Listener::bind(&path).unwrap();
        drop(first);
        UnixStream::connect(&path).unwrap();
        drop(second);
        assert!(!path.exists());
    }

    #[test]
    fn what_cannot_be_a_socket_is_refused_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        assert!(message(&file).contains("is no socket"));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
        assert!(message(&dir.path().join("x".repeat(120))).contains("107 bytes"));
        assert!(message(&dir.path().join("no/such")).contains("No such file"));
    }
}
