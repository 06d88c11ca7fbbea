//! Limits of the process that a machine may come to, raised while that is still allowed: soft ones up to the hard
//! ones. To be called before capabilities are given up.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::config::{Config, check};

/// Descriptors that a VM has besides those of its disks: KVM's, consoles, rings, the monitor's clients.
const DESCRIPTORS: u64 = 256;
/// Descriptors of a disk besides those of its queues.
const DESCRIPTORS_OF_DISK: u64 = 6;
/// Descriptors of a queue: its kick, its interrupt, what its engine has.
const DESCRIPTORS_OF_QUEUE: u64 = 4;

/// Raises what `config` needs.
pub fn raise(config: &Config) {
    raise_descriptors(config);
    if config.disk.iter().any(|disk| disk.fixedbufs == Some(true)) {
        raise_locked_memory();
    }
}

fn raise_descriptors(config: &Config) {
    let of_disk = |disk| {
        let queues = u64::from(check::queues(disk, config.cpus));
        DESCRIPTORS_OF_DISK + DESCRIPTORS_OF_QUEUE * queues
    };
    let needed = DESCRIPTORS + config.disk.iter().map(of_disk).sum::<u64>();
    let now = getrlimit(Resource::Nofile);
    if now.current.is_none_or(|current| current >= needed) {
        return;
    }
    let most = now.maximum.unwrap_or(needed);
    set(Resource::Nofile, Some(needed.min(most)), now.maximum);
}

/// Registered buffers count against RLIMIT_MEMLOCK, for those who lack CAP_IPC_LOCK.
fn raise_locked_memory() {
    if !set(Resource::Memlock, None, None) {
        let maximum = getrlimit(Resource::Memlock).maximum;
        set(Resource::Memlock, maximum, maximum);
    }
}

/// Whether it could be set. What goes beyond a limit says so when it does.
fn set(resource: Resource, current: Option<u64>, maximum: Option<u64>) -> bool {
    let set = setrlimit(resource, Rlimit { current, maximum });
    if let Err(error) = set {
        tracing::debug!(?resource, %error, "a limit stays as it is");
    }
    set.is_ok()
}
