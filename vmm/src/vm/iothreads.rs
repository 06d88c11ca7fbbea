//! The event loops: one for the main thread, and the iothreads that the user asked for.

use std::sync::Arc;

use iothread::{
    Context, ContextConfig, IoThread, IoThreadConfig, MonitorKind, PolicyKind, PollSettings,
};

use super::lifecycle::{Lifecycle, Outcome};
use crate::config::{self, Monitor, PollPolicy};
use crate::seccomp::{self, Filters};
use crate::trace::Tracer;

/// Why an event loop does not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An iothread.
    #[error("--iothread id={id}: {source}")]
    IoThread {
        /// Its id.
        id: String,
        /// The reason.
        source: iothread::Error,
    },
    /// CPUs that this process cannot use.
    #[error(
        "--iothread id={id}: cpus={cpu} is not a CPU that this process may use; give some of {usable}"
    )]
    Cpu {
        /// The iothread's id.
        id: String,
        /// The first such CPU.
        cpu: u32,
        /// Those there are.
        usable: config::IndexSet,
    },
    /// The main thread's.
    #[error("main loop: {0}")]
    Main(iothread::Error),
}

impl Error {
    /// Whether the user asked for what this host does not have.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Cpu { .. } => true,
            Self::IoThread { source, .. } => matches!(
                source,
                iothread::Error::Setting(_)
                    | iothread::Error::Monitor { .. }
                    | iothread::Error::Affinity { .. }
            ),
            Self::Main(_) => false,
        }
    }
}

/// The loop for disks without an iothread. It lives inside the main loop and never polls.
pub fn main_context() -> Result<Context, Error> {
    let settings = PollSettings {
        poll_max_ns: 0,
        ..PollSettings::default()
    };
    Context::new(ContextConfig {
        name: "main".to_owned(),
        settings,
        ..ContextConfig::default()
    })
    .map_err(Error::Main)
}

/// Starts all that are configured, in their order.
pub fn start_all(
    config: &config::Config,
    lifecycle: &Arc<Lifecycle>,
) -> Result<Vec<IoThread>, Error> {
    let iothreads = config.iothread.iter();
    iothreads
        .map(|iothread| start(iothread, lifecycle))
        .collect()
}

/// Starts an iothread. Should it ever panic, the run ends.
pub fn start(config: &config::IoThread, lifecycle: &Arc<Lifecycle>) -> Result<IoThread, Error> {
    check_cpus(config)?;
    let lifecycle = lifecycle.clone();
    let cpus: Vec<usize> = config.cpus.0.iter().map(|cpu| *cpu as usize).collect();
    let iothread = IoThread::start(IoThreadConfig {
        id: config.id.clone(),
        cpus: (!cpus.is_empty()).then_some(cpus),
        context: ContextConfig {
            name: config.id.clone(),
            monitor: monitor(config.monitor),
            policy: policy(config.poll_policy),
            settings: settings(config),
            poll_completions: config.poll_completions,
            ..ContextConfig::default()
        },
        on_panic: Some(Arc::new(move |id: &str, message: &str| {
            lifecycle.end(Outcome::ThreadDied(format!(
                "iothread {id} panicked: {message}"
            )));
        })),
    });
    iothread.map_err(|source| Error::IoThread {
        id: config.id.clone(),
        source,
    })
}

/// Leaves an iothread the system calls that it needs.
pub fn narrow(iothread: &IoThread, filters: &Arc<Filters>) -> Result<(), seccomp::Error> {
    let filters = filters.clone();
    let call = move |_: &Context| filters.narrow(seccomp::Thread::IoThread);
    // One that has panicked calls nothing any more, and its panic ends the run.
    iothread.remote().call(call).unwrap_or(Ok(()))
}

/// Records an iothread's events when they are on.
pub fn trace(iothread: &IoThread, tracer: &Tracer) {
    tracer.add(iothread.remote(), &format!("IO {}", iothread.id()));
}

/// The polling settings of an iothread, as its loop takes them.
pub fn settings(config: &config::IoThread) -> PollSettings {
    PollSettings {
        poll_max_ns: config.poll_max_ns,
        poll_grow: config.poll_grow,
        poll_shrink: config.poll_shrink,
        poll_weight: config.poll_weight,
        poll_alpha_milli: config.poll_alpha.0,
        aio_max_batch: config.aio_max_batch,
    }
}

fn monitor(monitor: Monitor) -> MonitorKind {
    match monitor {
        Monitor::Auto => MonitorKind::Auto,
        Monitor::IoUring => MonitorKind::IoUring,
        Monitor::Epoll => MonitorKind::Epoll,
        Monitor::Ppoll => MonitorKind::Ppoll,
    }
}

fn policy(policy: PollPolicy) -> PolicyKind {
    match policy {
        PollPolicy::Weighted => PolicyKind::Weighted,
        PollPolicy::PerHandler => PolicyKind::PerHandler,
        PollPolicy::Context => PolicyKind::Context,
        PollPolicy::Off => PolicyKind::Off,
        PollPolicy::Always => PolicyKind::Always,
        PollPolicy::Auto => PolicyKind::Auto,
    }
}

/// The kernel ignores CPUs that it does not have as long as one is left; the user should know.
fn check_cpus(config: &config::IoThread) -> Result<(), Error> {
    if config.cpus.0.is_empty() {
        return Ok(());
    }
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return Ok(());
    };
    let usable =
        |cpu: &u32| (*cpu as usize) < rustix::thread::CpuSet::MAX_CPU && set.is_set(*cpu as usize);
    match config.cpus.0.iter().find(|cpu| !usable(cpu)) {
        None => Ok(()),
        Some(cpu) => {
            let all = 0..u32::try_from(rustix::thread::CpuSet::MAX_CPU).unwrap_or(0);
            Err(Error::Cpu {
                id: config.id.clone(),
                cpu: *cpu,
                usable: config::IndexSet(all.filter(usable).collect()),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> config::IoThread {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_panic_in_an_iothread_ends_the_run_with_its_name_and_message() {
        let lifecycle = Arc::new(Lifecycle::new().unwrap());
        let iothread = start(&config(r#"{"id": "io7"}"#), &lifecycle).unwrap();
        iothread.remote().run(|_| panic!("a test"));
        assert!(iothread.stop().is_err());
        let outcome = lifecycle.outcome().unwrap();
        assert_eq!(
            outcome.to_string(),
            "internal error: iothread io7 panicked: a test"
        );
        assert!(!outcome.is_good());
    }

    #[test]
    fn cpus_that_there_are_not_are_named_with_those_there_are() {
        let lifecycle = Arc::new(Lifecycle::new().unwrap());
        for cpu in ["9999", "0+9999", "65535"] {
            let error = start(
                &config(&format!(r#"{{"id": "io0", "cpus": "{cpu}"}}"#)),
                &lifecycle,
            )
            .unwrap_err();
            assert!(error.is_usage());
            let last = cpu.rsplit('+').next().unwrap();
            let text = error.to_string();
            assert!(
                text.contains(&format!("cpus={last} ")) && text.contains("give some of 0"),
                "{text}"
            );
        }
    }
}
