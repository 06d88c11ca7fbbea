//! vCPU threads: run the guest, answer its accesses, and say why it stopped.
//!
//! One thread a vCPU, named `vcpu<N>`. Whatever a thread decides goes to the [`Lifecycle`]; when to run and when to end
//! comes from the [`RunGate`], with a signal that makes KVM_RUN return. [`VcpuControl`] is how other threads pause them.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arch::exit::{FatalExit, describe_exit};
use devices::bus::Bus;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use super::gate::{Pass, RunGate, RunState};
use super::lifecycle::{Lifecycle, Outcome};
use super::memory::GuestMemory;
use super::reset_flag::{self, ResetFlag};
use crate::seccomp::{Filters, Thread};

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
    /// What system calls a vCPU's thread is left with, from its first run on.
    pub filters: Option<Arc<Filters>>,
}

/// Makes a vCPU leave KVM_RUN, or not enter it.
#[derive(Debug, Default)]
struct Kick {
    /// `kvm_run.immediate_exit`, while the vCPU exists.
    immediate_exit: Mutex<Option<NonNull<AtomicU8>>>,
    /// The vCPU's thread; 0 before it has begun and after it has ended.
    thread_id: AtomicI32,
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
        let thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        self.thread_id.store(thread_id, Ordering::Release);
        let byte = &raw mut vcpu.get_kvm_run().immediate_exit;
        *self.lock() = NonNull::new(byte.cast());
    }

    fn detach(&self) {
        *self.lock() = None;
        self.thread_id.store(0, Ordering::Release);
    }

    /// Makes the vCPU's thread look at the gate.
    fn kick(&self) {
        // Before the signal: whoever is about to enter KVM_RUN returns at once, whoever is in it is woken.
        self.set(1);
        let thread_id = self.thread_id.load(Ordering::Acquire);
        if thread_id > 0 {
            // SAFETY: tgkill(2) has no preconditions; a thread that has just ended is not found, and another of this
            // process in its place does nothing with this signal.
            unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread_id, SIGRTMIN()) };
        }
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
    threads: Vec<JoinHandle<()>>,
    control: VcpuControl,
}

/// A handle to the vCPUs, for any thread.
#[derive(Clone)]
pub struct VcpuControl {
    machine: Arc<Machine>,
    kicks: Vec<Arc<Kick>>,
}

/// The vCPU threads did not do as they were told.
#[derive(Debug, thiserror::Error)]
#[error("a vCPU thread does not stop: a device holds it up")]
pub struct Stuck;

/// How long a vCPU may take to finish what it is doing.
const PATIENCE: Duration = Duration::from_secs(10);

impl VcpuControl {
    /// Lets the guest run.
    pub fn release(&self) {
        self.machine.gate.set(RunState::Run);
    }

    /// Tells the vCPUs to stand still, and does not wait for them.
    pub fn hold(&self) {
        self.machine.gate.set(RunState::Hold);
        self.kick_all();
    }

    /// Makes the vCPUs stand still.
    ///
    /// # Errors
    /// One does not, within ten seconds.
    pub fn pause(&self) -> Result<(), Stuck> {
        self.hold();
        match self.machine.gate.wait_held(PATIENCE) {
            true => Ok(()),
            false => Err(Stuck),
        }
    }

    /// The vCPUs' threads, in order; 0 for one that has ended.
    pub fn thread_ids(&self) -> Vec<i32> {
        let ids = self.kicks.iter().map(|kick| &kick.thread_id);
        ids.map(|id| id.load(Ordering::Acquire)).collect()
    }

    fn kick_all(&self) {
        for kick in &self.kicks {
            kick.kick();
        }
    }
}

impl Vcpus {
    /// Starts a thread for each vCPU; they hold until [`VcpuControl::release`].
    pub fn start(machine: Arc<Machine>, vcpus: Vec<VcpuFd>) -> std::io::Result<Self> {
        register_signal_handler(SIGRTMIN(), on_kick)?;
        let kicks = vcpus.iter().map(|_| Arc::default()).collect();
        let mut started = Self {
            threads: Vec::new(),
            control: VcpuControl { machine, kicks },
        };
        let VcpuControl { machine, kicks } = started.control.clone();
        for (index, (vcpu, kick)) in vcpus.into_iter().zip(kicks).enumerate() {
            let thread = std::thread::Builder::new()
                .name(format!("vcpu{index}"))
                .spawn({
                    let machine = machine.clone();
                    // Counted here, so that nobody misses a thread that has not begun yet.
                    machine.gate.enter();
                    move || thread_main(index, vcpu, &machine, &kick)
                });
            match thread {
                Ok(thread) => started.threads.push(thread),
                Err(error) => {
                    machine.gate.leave();
                    return Err(error);
                }
            }
        }
        // From here on every thread has its id.
        machine.gate.wait_held(PATIENCE);
        Ok(started)
    }

    /// The handle for other threads.
    pub fn control(&self) -> &VcpuControl {
        &self.control
    }

    /// Ends all vCPU threads and waits for them. `serve` is called again and again meanwhile: a vCPU may be waiting for
    /// something that this thread does.
    pub fn stop(&mut self, mut serve: impl FnMut()) -> Result<(), Stuck> {
        let gate = &self.control.machine.gate;
        gate.set(RunState::Stop);
        self.control.kick_all();
        let deadline = Instant::now() + PATIENCE;
        while !gate.wait_empty(Duration::from_millis(2)) {
            if Instant::now() > deadline {
                return Err(Stuck);
            }
            serve();
        }
        for thread in self.threads.drain(..) {
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
    let mut vcpu = Vcpu {
        fd,
        machine,
        kick,
        index,
    };
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
    kick: &'a Kick,
    index: usize,
}

impl Vcpu<'_> {
    /// Runs the guest until the gate stops it (`None`) or it cannot go on.
    fn run(&mut self) -> Option<Outcome> {
        // Not before the first run: until then threads are still made and files opened.
        let mut filters = self.machine.filters.as_ref();
        loop {
            match self.machine.gate.pass() {
                Pass::Go => {}
                Pass::GoAfterHold => {
                    // So that the guest's watchdog does not take the pause for a lockup. A guest without the KVM clock
                    // cannot be told, and KVM says so.
                    let _ = self.fd.kvmclock_ctrl();
                }
                Pass::End => return None,
            }
            if self.machine.lifecycle.has_ended() {
                return None;
            }
            if let Some(Err(error)) = filters.take().map(|all| all.narrow(Thread::Vcpu)) {
                return Some(Outcome::ThreadDied(error.to_string()));
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
            Ok(VcpuExit::Intr) => {
                self.kick.set(0);
                None
            }
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
                // A kick, or a vCPU that waits for its start-up IPI. The kick is taken back before the gate is looked at:
                // whoever kicks closes the gate first.
                libc::EINTR | libc::EAGAIN => {
                    self.kick.set(0);
                    None
                }
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
