//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::tools::Tool;
use crate::{demo, guest, vhost_user};

/// A micro-VMM whose disks run on adaptively polled iothreads.
#[derive(Debug, Parser)]
#[command(name = "pollux", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do; `run` if not said.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The options of `run`.
    #[command(flatten)]
    pub run: RunArgs,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boot a virtual machine (the default)
    Run(Box<RunArgs>),
    /// The embedded guest: a program that drives disks, and needs no operating system
    #[command(subcommand)]
    Guest(guest::Command),
    /// Show what the polling rules bring and cost on this machine, in under a minute
    Demo(demo::Options),
    /// Serve disks to other virtual machine monitors over vhost-user sockets; needs no KVM
    VhostUserBlk(Box<vhost_user::Options>),
    /// Everything else
    #[command(flatten)]
    Tool(Tool),
}

/// The options of `run`. Key=value lists keep a comma that is doubled (`,,`) or in double quotes; sizes take K, M, G, T.
#[derive(Debug, Clone, Default, Args)]
pub struct RunArgs {
    /// Kernel to boot: bzImage, ELF vmlinux, or an ELF with a PVH note
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<String>,

    /// Initial RAM disk
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<String>,

    /// Kernel command line
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub cmdline: Option<String>,

    /// Guest memory: SIZE or size=SIZE,hugepages=on|off|2M|1G,prefault=on|off,shared=on|off [default: 512M]
    #[arg(long, value_name = "LIST")]
    pub memory: Option<String>,

    /// Number of vCPUs, 1 to 64 [default: 1]
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub cpus: Option<String>,

    /// CPU model: host, then features to hide or add: host,-avx512f,+x2apic [default: host]
    #[arg(long, value_name = "MODEL")]
    pub cpu: Option<String>,

    /// An event loop in its own thread:
    /// id=NAME,poll-max-ns=,poll-grow=,poll-shrink=,poll-weight=,poll-policy=weighted|per-handler|context|off|always|auto,poll-alpha=,monitor=auto|io_uring|epoll|ppoll,poll-completions=on|off,aio-max-batch=,cpus=0-1+4
    #[arg(long, value_name = "LIST")]
    pub iothread: Vec<String>,

    /// A raw image or block device:
    /// path=FILE,id=,iothread=ID|iothreads=ID:ID,vqs=0+2:1+3,queues=,queue-size=,readonly=,direct=,engine=,fixedbufs=on|off,cache=writeback|writethrough|unsafe,serial=,logical-block-size=,physical-block-size=,discard=,rerror=,werror=,transport=,locking=
    #[arg(long, value_name = "LIST")]
    pub disk: Vec<String>,

    /// Console: stdio, pty, none or file=FILE [default: stdio]
    #[arg(long, value_name = "WHERE")]
    pub serial: Option<String>,

    /// Monitor for QMP clients, `pollux info` and `pollux top`: unix:SOCKET
    #[arg(long, value_name = "SOCKET")]
    pub qmp: Option<String>,

    /// The VM's numbers in Prometheus' text format: FILE or file=FILE,interval=SECONDS [default interval: 10]
    #[arg(long, value_name = "LIST")]
    pub metrics: Option<String>,

    /// What the event loops do, for `pollux-bench trace`: FILE or
    /// file=FILE,events=PATTERN:PATTERN,max-size=SIZE,files=N [default: events=*,max-size=64M,files=8]
    #[arg(long, value_name = "LIST")]
    pub trace: Option<String>,

    /// Messages: LEVEL or level=warn,,iothread=debug,file=FILE [default: warn]
    #[arg(long, value_name = "LIST")]
    pub log: Option<String>,

    /// Print the iothreads' statistics when the guest has ended
    #[arg(long)]
    pub stats: bool,

    /// System calls outside a thread's list: on ends the VM, log lets them pass and has the kernel log them, off [default: on]
    #[arg(long, value_name = "MODE")]
    pub seccomp: Option<String>,

    /// on: give up all files that the options do not name (Landlock), network, capabilities and core files [default: off]
    #[arg(long, value_name = "SWITCH")]
    pub sandbox: Option<String>,

    /// Run as this user (USER, USER:GROUP, names or numbers) once everything is open; needs root
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,

    /// Make this folder the root once everything is open; needs root, and --user
    #[arg(long, value_name = "FOLDER")]
    pub chroot: Option<String>,

    /// Configuration as JSON, with the names of these options; options given besides are laid over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Print the resulting configuration as JSON and stop
    #[arg(long)]
    pub print_config: bool,
}

/// What an option was given.
#[derive(Debug, Clone, Copy)]
pub enum Given<'a> {
    /// A text to be read.
    Text(&'a str),
    /// Its mere presence.
    Switch,
}

impl RunArgs {
    /// The options that were given, by their key in the configuration.
    pub fn options(&self) -> Vec<(&'static str, Given<'_>)> {
        let once = [
            ("kernel", &self.kernel),
            ("initrd", &self.initrd),
            ("cmdline", &self.cmdline),
            ("memory", &self.memory),
            ("cpus", &self.cpus),
            ("cpu", &self.cpu),
            ("serial", &self.serial),
            ("qmp", &self.qmp),
            ("metrics", &self.metrics),
            ("trace", &self.trace),
            ("log", &self.log),
            ("seccomp", &self.seccomp),
            ("sandbox", &self.sandbox),
            ("user", &self.user),
            ("chroot", &self.chroot),
        ];
        let many = [("iothread", &self.iothread), ("disk", &self.disk)];
        let once = once
            .into_iter()
            .filter_map(|(key, text)| text.as_deref().map(|text| (key, Given::Text(text))));
        let many = many
            .into_iter()
            .flat_map(|(key, texts)| texts.iter().map(move |text| (key, Given::Text(text))));
        let switches = self.stats.then_some(("stats", Given::Switch));
        once.chain(many).chain(switches).collect()
    }
}
