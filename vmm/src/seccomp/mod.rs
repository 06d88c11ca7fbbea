//! What each kind of thread may ask of the kernel once the VM is built (seccomp(2)).
//!
//! The lists are data: `resources/seccomp/x86_64.json`, turned into BPF when the program is built (`build.rs`). One
//! filter holds for all threads from the moment everything is open; the threads that do the guest's bidding then take a
//! narrower one of their own on top. A thread that steps outside ends the process with a message that names it and the
//! call ([`violation`]).

#[cfg(target_arch = "x86_64")]
use seccompiler as install;
#[cfg(not(target_arch = "x86_64"))]
#[path = "no_install.rs"]
mod install;
mod violation;

use std::sync::Arc;
use std::sync::OnceLock;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::install::sock_filter;
use crate::vm::terminal;

/// What `build.rs` made: `SOURCE`, the lists; `TRAP` and `LOG`, their programs by what they do with other calls.
mod compiled {
    // Without lists, no instruction is made.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_imports))]
    use super::{Table, instruction};

    include!(concat!(env!("OUT_DIR"), "/seccomp.rs"));
}

/// Programs by the name of their list.
type Table = &'static [(&'static str, &'static [sock_filter])];

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
const fn instruction(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// Most memory pools of the C library.
const MALLOC_ARENAS: i32 = 8;

/// `--seccomp`: what happens to a thread that makes a call outside its list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// It ends the VM, with a message.
    #[default]
    On,
    /// The call is done, and logged by the kernel (audit, or the kernel's log).
    Log,
    /// No filters.
    Off,
}

/// The kinds of threads that have filters of their own. The name is the key in the JSON file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Thread {
    /// Signals, console, and disks without an iothread.
    Main,
    /// Runs the guest.
    Vcpu,
    /// Runs disks.
    IoThread,
    /// Does plain system calls for disks with `engine=threads`.
    Worker,
    /// The main thread of `pollux vhost-user-blk`.
    VhostUserMain,
    /// Takes the messages of a disk's front ends, in `pollux vhost-user-blk`.
    VhostUser,
}

impl Thread {
    /// Its key in the filters' source.
    pub fn key(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Vcpu => "vcpu",
            Self::IoThread => "iothread",
            Self::Worker => "worker",
            Self::VhostUserMain => "vhost_user_main",
            Self::VhostUser => "vhost_user",
        }
    }
}

/// The key of the filter for all threads of a VM.
pub const PROCESS: &str = "process";

/// The key of the filter for all threads of `pollux vhost-user-blk`.
pub const BACK_END: &str = "vhost_user_process";

/// The filters do not work here.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refuses.
    #[error(
        "--seccomp: the kernel refuses the filter of {thread}: {source}; --seccomp off does without"
    )]
    Install {
        /// Whose filter.
        thread: &'static str,
        /// Why.
        source: install::Error,
    },
}

/// The filters, to be installed in [`Filters::install`]'s order.
pub struct Filters {
    programs: Table,
}

impl Filters {
    /// The filters that do what `mode` says; none for [`Mode::Off`], and with a warning none for a processor
    /// without lists.
    pub fn new(mode: Mode) -> Option<Arc<Self>> {
        let programs = match mode {
            Mode::On => compiled::TRAP,
            Mode::Log => compiled::LOG,
            Mode::Off => return None,
        };
        if programs.is_empty() {
            tracing::warn!(
                "--seccomp: there are no filters for {} processors, system calls are not limited; \
                 --seccomp off leaves out this line",
                std::env::consts::ARCH
            );
            return None;
        }
        Some(Arc::new(Self { programs }))
    }

    /// Puts a common filter, [`PROCESS`] or [`BACK_END`], on every thread there is, and on those to come.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn install(self: &Arc<Self>, common: &'static str) -> Result<(), Error> {
        violation::install_handler();
        plain_panics();
        look_up_now();
        let program = self.program(common)?;
        install::apply_filter_all_threads(program).map_err(|source| Error::Install {
            thread: common,
            source,
        })
    }

    /// Puts the filter of its kind on the calling thread, on top of the common one.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn narrow(&self, thread: Thread) -> Result<(), Error> {
        let thread = thread.key();
        let program = self.program(thread)?;
        install::apply_filter(program).map_err(|source| Error::Install { thread, source })
    }

    fn program(&self, key: &'static str) -> Result<&'static [sock_filter], Error> {
        let mut programs = self.programs.iter();
        let found = programs.find(|(name, _)| *name == key);
        let missing = install::Error::EmptyFilter;
        found.map(|(_, program)| *program).ok_or(Error::Install {
            thread: key,
            source: missing,
        })
    }

    /// Makes every worker of the process' pool narrow itself when it starts.
    pub fn narrow_workers(self: &Arc<Self>) {
        /// The pool is the process', and so is this.
        static FILTERS: OnceLock<Arc<Filters>> = OnceLock::new();
        FILTERS.get_or_init(|| self.clone());
        devices::virtio::block::on_worker_start(|| {
            let narrowed = FILTERS.get().map(|filters| filters.narrow(Thread::Worker));
            if let Some(Err(error)) = narrowed {
                // The common filter is still on.
                tracing::error!("{error}");
            }
        });
    }
}

/// Some things are looked up on first need, from files or by calls that no list has: they are needed now.
fn look_up_now() {
    // The C library reads the number of CPUs when it makes a second pool and was given no limit, and whether memory is
    // overcommitted when it first trims one.
    // SAFETY: mallopt(3) takes numbers only.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, MALLOC_ARENAS);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
    }
    // rustix takes the auxiliary vector from prctl(2).
    let _ = rustix::param::page_size();
}

/// Panics are told without a backtrace: that would be read from files, whatever RUST_BACKTRACE says.
fn plain_panics() {
    std::panic::set_hook(Box::new(|panic| {
        terminal::restore();
        let thread = std::thread::current();
        eprintln!("thread '{}' {panic}", thread.name().unwrap_or_default());
    }));
}

/// What the source lists for `key`: names of system calls, and whether only with certain arguments.
pub fn listed(key: &str) -> Vec<(String, bool)> {
    let source: Value = serde_json::from_str(compiled::SOURCE).unwrap_or_default();
    let rules = source[key]["filter"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    let rule = |rule: &Value| {
        let name = rule["syscall"].as_str().unwrap_or_default().to_owned();
        (name, rule.get("args").is_some())
    };
    rules.iter().map(rule).collect()
}
