//! vCPU threads: run the guest, answer its accesses, and say why it stopped.
//!
//! One thread a vCPU, named `vcpu<N>`. Whatever a thread decides goes to the [`Lifecycle`]; when to run and when to end
//! comes from the [`RunGate`], with a signal that makes KVM_RUN return.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arch::exit::{FatalExit, describe_exit};
use devices::bus::Bus;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use super::lifecycle::{Lifecycle, Outcome};
use super::memory::GuestMemory;
use super::reset_flag::{self, ResetFlag};

/// What all vCPUs of a VM share.
pub struct Machine {
    /// Port I/O.
    pub pio: Bus,
    /// Memory-mapped I/O.
    pub mmio: Bus,
    /// Guest RAM.
    pub memory: GuestMemory,
    /// Where the end is reported.
    pub lifecycle: Arc<Lifecycle>,
    /// When to run.
    pub gate: RunGate,
}

/// What the vCPU threads should do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunState {
    /// Wait.
    Hold,
    /// Run the guest.
    Run,
    /// End.
    Stop,
}

/// Holds, releases and ends the vCPU threads.
#[derive(Debug)]
pub struct RunGate {
    shared: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    wanted: RunState,
    /// Threads that have been started and have not ended.
    alive: usize,
}

impl Default for RunGate {
    fn default() -> Self {
        Self {
            shared: Mutex::new(GateState {
                wanted: RunState::Hold,
                alive: 0,
            }),
            changed: Condvar::new(),
        }
    }
}

impl RunGate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, wanted: RunState) {
        self.lock().wanted = wanted;
        self.changed.notify_all();
    }

    /// Blocks while the state is [`RunState::Hold`]; whether to run afterwards.
    fn pass(&self) -> bool {
        let state = self
            .changed
            .wait_while(self.lock(), |state| state.wanted == RunState::Hold)
            .unwrap_or_else(PoisonError::into_inner);
        state.wanted == RunState::Run
    }

    fn enter(&self) {
        self.lock().alive += 1;
    }

    fn leave(&self) {
        self.lock().alive -= 1;
        self.changed.notify_all();
    }

    /// Waits until no thread is left; false if `patience` runs out first.
    fn wait_empty(&self, patience: Duration) -> bool {
        let (state, _) = self
            .changed
            .wait_timeout_while(self.lock(), patience, |state| state.alive > 0)
            .unwrap_or_else(PoisonError::into_inner);
        state.alive == 0
    }
}

/// Makes a vCPU leave KVM_RUN, or not enter it.
#[derive(Debug, Default)]
struct Kick {
    /// `kvm_run.immediate_exit`, while the vCPU exists.
    immediate_exit: Mutex<Option<NonNull<AtomicU8>>>,
}

// SAFETY: the pointer is to an atomic byte in a mapping that exists while it is `Some`, and the mutex guards that.
unsafe impl Send for Kick {}
// SAFETY: as above.
unsafe impl Sync for Kick {}

impl Kick {
    fn lock(&self) -> MutexGuard<'_, Option<NonNull<AtomicU8>>> {
        self.immediate_exit
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn attach(&self, vcpu: &mut VcpuFd) {
        let byte = &raw mut vcpu.get_kvm_run().immediate_exit;
        *self.lock() = NonNull::new(byte.cast());
    }

    fn detach(&self) {
        *self.lock() = None;
    }

    fn set(&self, value: u8) {
        if let Some(byte) = *self.lock() {
            // SAFETY: the mapping exists while the pointer is there, and we hold the lock. KVM reads the byte at the start
            // of KVM_RUN; nothing else in this process touches it.
            unsafe { byte.as_ref() }.store(value, Ordering::SeqCst);
        }
    }
}

/// The running vCPUs.
pub struct Vcpus {
    threads: Vec<(JoinHandle<()>, Arc<Kick>)>,
    machine: Arc<Machine>,
}

/// The vCPU threads did not end.
#[derive(Debug, thiserror::Error)]
#[error("a vCPU thread does not stop: a device holds it up")]
pub struct Stuck;

/// How long a vCPU may take to finish what it is doing.
const PATIENCE: Duration = Duration::from_secs(10);

impl Vcpus {
    /// Starts a thread for each vCPU; they hold until [`Vcpus::release`].
    pub fn start(machine: Arc<Machine>, vcpus: Vec<VcpuFd>) -> std::io::Result<Self> {
        register_signal_handler(SIGRTMIN(), on_kick)?;
        let mut started = Self {
            threads: Vec::new(),
            machine,
        };
        for (index, vcpu) in vcpus.into_iter().enumerate() {
            let kick = Arc::new(Kick::default());
            let thread = std::thread::Builder::new()
                .name(format!("vcpu{index}"))
                .spawn({
                    let (machine, kick) = (started.machine.clone(), kick.clone());
                    // Counted here, so that nobody misses a thread that has not begun yet.
                    machine.gate.enter();
                    move || thread_main(index, vcpu, &machine, &kick)
                });
            match thread {
                Ok(thread) => started.threads.push((thread, kick)),
                Err(error) => {
                    started.machine.gate.leave();
                    return Err(error);
                }
            }
        }
        Ok(started)
    }

    /// Lets the guest run.
    pub fn release(&self) {
        self.machine.gate.set(RunState::Run);
    }

    /// Ends all vCPU threads and waits for them. `serve` is called again and again meanwhile: a vCPU may be waiting for
    /// something that this thread does.
    pub fn stop(&mut self, mut serve: impl FnMut()) -> Result<(), Stuck> {
        self.machine.gate.set(RunState::Stop);
        for (thread, kick) in &self.threads {
            // Before the signal: whoever is about to enter KVM_RUN returns at once, whoever is in it is woken.
            kick.set(1);
            if let Err(error) = thread.kill(SIGRTMIN()) {
                tracing::debug!(%error, "a vCPU thread takes no signal; it has ended");
            }
        }
        let deadline = Instant::now() + PATIENCE;
        while !self.machine.gate.wait_empty(Duration::from_millis(2)) {
            if Instant::now() > deadline {
                return Err(Stuck);
            }
            serve();
        }
        for (thread, _) in self.threads.drain(..) {
            // Its panics are caught inside.
            let _ = thread.join();
        }
        Ok(())
    }
}

impl Drop for Vcpus {
    fn drop(&mut self) {
        if let Err(error) = self.stop(|| ()) {
            tracing::error!("{error}");
        }
    }
}

extern "C" fn on_kick(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

fn thread_main(index: usize, mut fd: VcpuFd, machine: &Machine, kick: &Kick) {
    kick.attach(&mut fd);
    let mut vcpu = Vcpu { fd, machine, index };
    // A panic on a guest's access must end the VM, not leave it without a processor.
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| vcpu.run()));
    kick.detach();
    match result {
        Ok(None) => {}
        Ok(Some(outcome)) => machine.lifecycle.end(outcome),
        Err(payload) => machine.lifecycle.end(Outcome::ThreadDied(format!(
            "thread vcpu{index} panicked: {}",
            panic_text(&*payload)
        ))),
    }
    machine.gate.leave();
}

/// What a panic said.
pub fn panic_text(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

struct Vcpu<'a> {
    fd: VcpuFd,
    machine: &'a Machine,
    index: usize,
}

impl Vcpu<'_> {
    /// Runs the guest until the gate stops it (`None`) or it cannot go on.
    fn run(&mut self) -> Option<Outcome> {
        loop {
            if !self.machine.gate.pass() || self.machine.lifecycle.has_ended() {
                return None;
            }
            if let Some(outcome) = self.step() {
                return Some(outcome);
            }
        }
    }

    /// One KVM_RUN and what it asks for.
    fn step(&mut self) -> Option<Outcome> {
        match self.fd.run() {
            Ok(VcpuExit::IoOut(port, data)) => {
                let data: *const [u8] = data;
                let width = self.port_width();
                // SAFETY: the data lies in the vCPU's shared mapping, which `fd` keeps, and nobody writes it before the
                // next KVM_RUN.
                for item in unsafe { &*data }.chunks(width) {
                    if !self.machine.pio.write(port.into(), item) {
                        tracing::trace!("port {port:#x}: nobody takes {item:x?}");
                    }
                }
                None
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                let data: *mut [u8] = data;
                let width = self.port_width();
                // SAFETY: as above, and no other reference to it is alive.
                for item in unsafe { &mut *data }.chunks_mut(width) {
                    if !self.machine.pio.read(port.into(), item) {
                        tracing::trace!("port {port:#x}: nobody answers");
                    }
                }
                None
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                if !self.machine.mmio.write(address, data) {
                    tracing::trace!("address {address:#x}: nobody takes {data:x?}");
                }
                None
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                if !self.machine.mmio.read(address, data) {
                    tracing::trace!("address {address:#x}: nobody answers");
                }
                None
            }
            Ok(VcpuExit::Intr) => None,
            Ok(VcpuExit::Shutdown) => Some(self.shutdown()),
            Ok(VcpuExit::InternalError) => Some(self.fatal(FatalExit::InternalError)),
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                Some(self.fatal(FatalExit::FailEntry { reason, cpu }))
            }
            Ok(exit) => {
                let what = format!("{exit:?}");
                Some(self.failed(&what))
            }
            Err(error) => match error.errno() {
                // A kick, or a vCPU that waits for its start-up IPI.
                libc::EINTR | libc::EAGAIN => None,
                _ => {
                    let what = format!("KVM_RUN failed: {error}");
                    Some(self.failed(&what))
                }
            },
        }
    }

    /// Bytes of one port access; a string instruction makes several in one exit.
    fn port_width(&mut self) -> usize {
        // SAFETY: after KVM_EXIT_IO the `io` member of the union is the one that KVM filled.
        let size = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.io.size };
        usize::from(size.max(1))
    }

    /// KVM_EXIT_SHUTDOWN: a triple fault, by accident or to reset the machine.
    fn shutdown(&mut self) -> Outcome {
        match reset_flag::read(&self.machine.memory) {
            ResetFlag::Warm => Outcome::GuestPanic,
            ResetFlag::Cold => Outcome::Reboot,
            ResetFlag::Untouched => {
                let report = describe_exit(&mut self.fd, &self.machine.memory, FatalExit::Shutdown);
                Outcome::TripleFault(format!("vcpu{}: {report}", self.index))
            }
        }
    }

    /// An exit whose reasons `arch` can tell.
    fn fatal(&mut self, exit: FatalExit) -> Outcome {
        let report = describe_exit(&mut self.fd, &self.machine.memory, exit);
        Outcome::VcpuFailed(format!("vcpu{}: {report}", self.index))
    }

    /// Anything else.
    fn failed(&mut self, what: &str) -> Outcome {
        let place = match self.fd.get_regs() {
            Ok(regs) => format!("RIP {:#x}", regs.rip),
            Err(error) => format!("registers unknown: {error}"),
        };
        Outcome::VcpuFailed(format!("vcpu{} cannot go on: {what}; {place}", self.index))
    }
}
