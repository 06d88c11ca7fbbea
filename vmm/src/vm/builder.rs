//! Puts a VM together, in an order in which everything the user may have got wrong is found before anything is made.
//!
//! Configuration → /dev/kvm → boot files → memory → kernel and tables in memory → iothreads and disks → the VM and its
//! devices → console → vCPU threads, which hold until [`Vm::run`].

use std::sync::Arc;
use std::time::Duration;

use arch::image::FileRole;
use iothread::{Context, IoThread};

use super::control::{self, Control};
use super::disks::{self, Disks};
use super::error::Error;
use super::gate::RunGate;
use super::hypervisor::{BootFiles, Hypervisor, Parts};
use super::lifecycle::Lifecycle;
use super::signals::Signals;
use super::vcpu::{Machine, Vcpus};
use super::{Vm, iothreads, limits, platform};
use crate::config::{self, Config};
use crate::metrics::Writer;
use crate::qmp::{self, Listener, Monitor, Server, event};
use crate::sandbox;
use crate::seccomp::{self, Filters};
use crate::trace::Tracer;

/// Builds the VM that `config` describes. Call it from the main thread before any other thread is started.
pub fn build(config: &Config) -> Result<Vm, Error> {
    build_on::<platform::Machine>(config)
}

/// [`build`] with the machine of another hypervisor than this host's KVM.
pub fn build_on<H: Hypervisor>(config: &Config) -> Result<Vm, Error> {
    let signals = Signals::take().map_err(Error::system("signals"))?;
    let filters = Filters::new(config.seccomp);
    limits::raise(config);
    let switch = sandbox::enter(config, &[])?;
    let mut machine = H::open(config)?;
    let files = open_boot_files(config)?;
    let memory = machine.map_memory(config)?;
    let boot = machine.load(config, &files, &memory)?;
    tracing::info!("kernel: {boot}");

    let listener = match &config.qmp {
        Some(socket) => Some(Listener::bind(&socket.0)?),
        None => None,
    };
    let lifecycle = Arc::new(Lifecycle::new().map_err(Error::system("eventfd"))?);
    let context = iothreads::main_context()?;
    let iothreads = iothreads::start_all(config, &lifecycle)?;
    let tracer = start_tracer(config, &context, &iothreads)?;
    let blocks = disks::open(config, &context.remote(), &iothreads)?;

    let disks = Disks::of(&blocks);
    let hardware = machine.assemble(Parts {
        config,
        blocks,
        memory: &memory,
        lifecycle: &lifecycle,
    })?;

    let machine = Arc::new(Machine {
        lifecycle: lifecycle.clone(),
        gate: RunGate::default(),
        filters: filters.clone(),
    });
    let vcpus =
        Vcpus::start(machine, hardware.vcpus).map_err(Error::system("starting a vCPU thread"))?;
    if let (Some(listener), Some((user, group))) = (&listener, switch.user()) {
        listener.give_to(user, group)?;
    }
    switch.apply()?;
    if let Some(filters) = &filters {
        install(filters, seccomp::PROCESS, &iothreads)?;
    }
    let (events, queue) = event::channel().map_err(Error::system("eventfd"))?;
    let control = Control::new(control::Parts {
        lifecycle: lifecycle.clone(),
        vcpus: vcpus.control().clone(),
        disks: disks.handles().to_vec(),
        iothreads,
        main_loop: context.remote(),
        power_button: hardware.power_button,
        filters: filters.clone(),
        tracer: tracer.clone(),
        // Without a monitor nobody takes them.
        events: listener.as_ref().map(|_| events).unwrap_or_default(),
    });
    let monitor =
        listener.map(|listener| Server::start(listener, Monitor::new(control.clone()), queue));
    let monitor = monitor
        .transpose()
        .map_err(Error::system("starting the monitor's thread"))?;
    let metrics = config
        .metrics
        .as_ref()
        .map(|metrics| start_metrics(metrics, control.clone()));
    Ok(Vm {
        vcpus,
        disks,
        control,
        monitor,
        metrics: metrics.transpose()?,
        tracer,
        context,
        guest_console: hardware.guest_console,
        console: hardware.console,
        signals,
        lifecycle,
        print_statistics: config.stats,
        filters,
        _keep: hardware.keep,
    })
}

/// From here on no thread can do more than it needs: everything is open, and the guest has not run yet. Threads that are
/// started later are born with the filter of the one that starts them.
pub(crate) fn install(
    filters: &Arc<Filters>,
    common: &'static str,
    iothreads: &[IoThread],
) -> Result<(), Error> {
    filters.install(common)?;
    filters.narrow_workers();
    for iothread in iothreads {
        iothreads::narrow(iothread, filters)?;
    }
    Ok(())
}

/// Records the events of all loops, if the configuration says so.
pub(crate) fn start_tracer(
    config: &Config,
    context: &Context,
    iothreads: &[IoThread],
) -> Result<Option<Arc<Tracer>>, Error> {
    let tracer = config.trace.as_ref().map(Tracer::start).transpose()?;
    let tracer = tracer.map(Arc::new);
    if let Some(tracer) = &tracer {
        tracer.add(&context.remote(), "main");
        for iothread in iothreads {
            iothreads::trace(iothread, tracer);
        }
    }
    Ok(tracer)
}

/// Writes the numbers of `machine` to the file that the configuration names.
pub(crate) fn start_metrics(
    metrics: &config::Metrics,
    machine: Arc<dyn qmp::Machine>,
) -> Result<Writer, Error> {
    let file = metrics.file.clone();
    let interval = Duration::from_secs(metrics.interval.into());
    Writer::start(file.clone(), interval, machine).map_err(|error| Error::Metrics { file, error })
}

fn open_boot_files(config: &Config) -> Result<BootFiles, Error> {
    let kernel = config.kernel.as_deref().ok_or_else(|| {
        config::Error::new(
            "--kernel",
            "missing; name the kernel to boot: --kernel FILE",
        )
    })?;
    let kernel = arch::image::open(FileRole::Kernel, kernel)?;
    let initrd = match &config.initrd {
        Some(path) => Some(arch::image::open(FileRole::Initrd, path)?),
        None => None,
    };
    Ok(BootFiles { kernel, initrd })
}
