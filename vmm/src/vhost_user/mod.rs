//! `pollux vhost-user-blk`: the disks and their iothreads for virtual machine monitors of others, behind
//! the vhost-user protocol. Needs no KVM.
//!
//! ```text
//! front end ── messages ── server ── session ── memory, rings ── Block on its iothreads
//!     │                                                             │
//!     └── kicks: eventfds that the iothread waits for or polls ─────┤
//!     └── calls: eventfds that it writes once a batch ── call ──────┘
//! ```
//! Each socket is one disk, served by a thread of its own that sees messages alone; the data path is that
//! of a VM's disks. A front end is not trusted: what it does wrong costs it its connection. One that comes
//! back finds the disk as it left it, and a back end that was killed is followed by one that finishes what
//! was under way, if the front end keeps the record (`inflight`).

mod backend;
mod call;
mod inflight;
mod memory;
mod server;
mod session;
mod sigbus;

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use devices::virtio::device::VirtioDevice as _;
use iothread::Context;
use rustix::event::{PollFd, PollFlags, poll};
use serde_json::{Map, Value};

use self::backend::Backend;
pub use self::server::Server;
use crate::config::args::RunArgs;
use crate::config::{self, Config, keyval};
use crate::qmp::machine::Machine as _;
use crate::qmp::{Listener, Monitor, Server as Qmp, event};
use crate::sandbox;
use crate::seccomp::{self, Filters};
use crate::vm::lifecycle::{Lifecycle, Outcome};
use crate::vm::signals::{Request, Signals};
use crate::vm::{Error, builder, disks, iothreads, limits, statistics};

/// Descriptors of a ring that front ends use if not told otherwise; a disk announces as many segments for a
/// request as such a ring takes.
const QUEUE_SIZE: u16 = 128;

/// The options of `vhost-user-blk`.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Unix socket for a front end: one for each --disk, in the same order
    #[arg(long, value_name = "PATH", required = true)]
    pub socket: Vec<PathBuf>,

    /// A raw image or block device, as `pollux run` takes it but for transport=; queues= [default: 1] and
    /// queue-size= [default: 128] are the most that a front end may use, and what it is told
    #[arg(long, value_name = "LIST", required = true)]
    pub disk: Vec<String>,

    /// An event loop in its own thread, as `pollux run` takes it
    #[arg(long, value_name = "LIST")]
    pub iothread: Vec<String>,

    /// Monitor for QMP clients, `pollux info` and `pollux top`: unix:SOCKET
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<String>,

    /// The disks' numbers in Prometheus' text format: FILE or file=FILE,interval=SECONDS [default interval: 10]
    #[arg(long, value_name = "LIST")]
    pub metrics: Option<String>,

    /// What the event loops do, as `pollux run` takes it
    #[arg(long, value_name = "LIST")]
    pub trace: Option<String>,

    /// Messages: LEVEL or level=warn,,iothread=debug,file=FILE [default: warn]
    #[arg(long, value_name = "LIST")]
    pub log: Option<String>,

    /// Print the statistics of loops and disks at the end
    #[arg(long)]
    pub stats: bool,

    /// System calls outside a thread's list, as `pollux run` takes it [default: on]
    #[arg(long, value_name = "MODE")]
    pub seccomp: Option<String>,

    /// on: give up all files that the options do not name, as `pollux run` takes it [default: off]
    #[arg(long, value_name = "SWITCH")]
    pub sandbox: Option<String>,

    /// Run as this user once everything is open, as `pollux run` takes it
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,

    /// Make this folder the root once everything is open, as `pollux run` takes it
    #[arg(long, value_name = "FOLDER")]
    pub chroot: Option<String>,
}

impl Options {
    fn config(&self) -> Result<Config, config::Error> {
        let keys: Vec<_> = self.disk.iter().map(|text| keys(text)).collect();
        for (keys, text) in keys.iter().zip(&self.disk) {
            let refuse = |problem| Err(config::Error::new(format!("--disk {text}"), problem));
            if keys.contains_key("transport") {
                return refuse("transport=: the front end chooses it; leave it out");
            }
            let stops = |key| keys.get(key).is_some_and(|v| v == "stop" || v == "enospc");
            if stops("rerror") || stops("werror") {
                return refuse("rerror, werror: no VM to stop here; use report or ignore");
            }
        }
        let mut config = Config::from_args(&RunArgs {
            iothread: self.iothread.clone(),
            disk: self.disk.clone(),
            qmp: self.qmp.clone(),
            metrics: self.metrics.clone(),
            trace: self.trace.clone(),
            log: self.log.clone(),
            stats: self.stats,
            seccomp: self.seccomp.clone(),
            sandbox: self.sandbox.clone(),
            user: self.user.clone(),
            chroot: self.chroot.clone(),
            ..RunArgs::default()
        })?;
        for (disk, keys) in config.disk.iter_mut().zip(&keys) {
            if !keys.contains_key("queue-size") {
                disk.queue_size = QUEUE_SIZE;
            }
        }
        if self.socket.len() != self.disk.len() {
            return Err(config::Error::new(
                format!("--socket {}", self.socket[0].display()),
                format!(
                    "{} sockets for {} disks; give one --socket for each --disk",
                    self.socket.len(),
                    self.disk.len()
                ),
            ));
        }
        Ok(config)
    }
}

/// What a disk's options say, as far as they can be read; the configuration tells what is wrong with them.
fn keys(text: &str) -> Map<String, Value> {
    keyval::parse(text, Some("path")).unwrap_or_default()
}

/// Serves the disks until a signal or the monitor ends the process. Call it from the main thread before any
/// other thread is started.
pub fn run(options: &Options) -> Result<ExitCode, Error> {
    let config = options.config()?;
    crate::logging::start(&config.log)?;
    let signals = Signals::take().map_err(Error::system("signals"))?;
    let filters = Filters::new(config.seccomp);
    call::prepare().map_err(Error::system("/proc/self/fd"))?;
    limits::raise(&config);
    let switch = sandbox::enter(&config, &options.socket)?;
    let listener = match &config.qmp {
        Some(socket) => Some(Listener::bind(&socket.0)?),
        None => None,
    };
    let lifecycle = Arc::new(Lifecycle::new().map_err(Error::system("eventfd"))?);
    let context = iothreads::main_context()?;
    let iothreads = iothreads::start_all(&config, &lifecycle)?;
    let tracer = builder::start_tracer(&config, &context, &iothreads)?;
    let blocks = disks::open(&config, &context.remote(), &iothreads)?;
    // Before any of them serves: a socket that cannot be had leaves nothing half done.
    let sockets = options.socket.iter().map(|path| {
        let refused = |error| config::Error::new("--socket", format!("{error}"));
        Listener::bind(path).map_err(refused)
    });
    let sockets = sockets.collect::<Result<Vec<_>, _>>()?;
    if let Some((user, group)) = switch.user() {
        for listener in listener.iter().chain(&sockets) {
            listener.give_to(user, group)?;
        }
    }
    switch.apply()?;
    if let Some(filters) = &filters {
        builder::install(filters, seccomp::BACK_END, &iothreads)?;
    }

    let handles: Vec<_> = blocks.iter().map(|block| block.handle()).collect();
    let (events, queue) = event::channel().map_err(Error::system("eventfd"))?;
    let backend = Backend::new(
        lifecycle.clone(),
        handles.clone(),
        iothreads,
        context.remote(),
        backend::Watchers {
            filters: filters.clone(),
            tracer: tracer.clone(),
        },
        // Without a monitor nobody takes them.
        listener.as_ref().map(|_| events).unwrap_or_default(),
    );
    let monitor = listener
        .map(|listener| Qmp::start(listener, Monitor::new(backend.clone()), queue))
        .transpose()
        .map_err(Error::system("starting the monitor's thread"))?;
    let metrics = config
        .metrics
        .as_ref()
        .map(|metrics| builder::start_metrics(metrics, backend.clone()));
    let metrics = metrics.transpose()?;
    let mut servers = Vec::new();
    for (listener, block) in sockets.into_iter().zip(blocks) {
        tracing::info!("{} at {}", block.name(), listener.path().display());
        let server = Server::start(listener, block, filters.clone());
        servers.push(server.map_err(Error::system("starting a disk's thread"))?);
    }

    if let Some(filters) = &filters {
        filters.narrow(seccomp::Thread::VhostUserMain)?;
    }
    let outcome = main_loop(signals, &lifecycle, &context)?;
    backend.ended(outcome == Outcome::Stopped(backend::QUIT.to_owned()));
    let serve = || while context.dispatch() {};
    if let Some(monitor) = monitor {
        monitor.stop(serve);
    }
    let loops = config
        .stats
        .then(|| statistics::loops(&context, &backend.iothreads()));
    // A disk may be finishing requests on the main loop.
    for server in &servers {
        server.ask_to_stop();
    }
    while !servers.iter().all(Server::is_finished) {
        serve();
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(servers);
    drop(metrics);
    if let Some(loops) = loops {
        eprint!("{loops}{}", statistics::disks(&handles));
    }
    for iothread in backend.take_iothreads() {
        // A panic in it has ended the run already and is its outcome.
        let _ = iothread.stop();
    }
    if let Some(tracer) = tracer {
        tracer.finish();
    }
    match outcome.is_good() {
        true => Ok(ExitCode::SUCCESS),
        false => {
            eprintln!("pollux: {outcome}");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Runs the loop of the disks without an iothread until the process is to end.
fn main_loop(
    mut signals: Signals,
    lifecycle: &Lifecycle,
    context: &Context,
) -> Result<Outcome, Error> {
    let pollable = context
        .pollable_fd()
        .map_err(|error| Error::MainLoop(error.into()))?;
    loop {
        if let Some(outcome) = lifecycle.outcome() {
            return Ok(outcome);
        }
        // SAFETY: each is open as long as its owner, which outlives this turn of the loop.
        let [signal, event, disks] = [signals.fd(), lifecycle.event().as_raw_fd(), pollable]
            .map(|fd| unsafe { BorrowedFd::borrow_raw(fd) });
        let mut fds = [signal, event, disks].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        // Interrupted, it looks at everything and comes again.
        let _ = poll(&mut fds, None);
        while let Some(request) = signals.pending() {
            match request {
                Request::End(by) => lifecycle.end(Outcome::Stopped(by)),
                Request::Suspend => {
                    // SAFETY: raise(3) has no preconditions.
                    unsafe { libc::raise(libc::SIGSTOP) };
                }
                Request::Resume => {}
            }
        }
        let _ = lifecycle.event().read();
        while context.dispatch() {}
    }
}
