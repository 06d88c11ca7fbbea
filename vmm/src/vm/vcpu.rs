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

use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use super::gate::{Pass, RunGate, RunState};
use super::hypervisor::{Step, Vcpu};
use super::lifecycle::{Lifecycle, Outcome};
use crate::seccomp::{Filters, Thread};

/// What all vCPUs of a VM share.
pub struct Machine {
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

    fn attach(&self, vcpu: &mut dyn Vcpu) {
        let thread_id = rustix::thread::gettid().as_raw_nonzero().get();
        self.thread_id.store(thread_id, Ordering::Release);
        *self.lock() = Some(vcpu.immediate_exit());
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
    pub fn start(machine: Arc<Machine>, vcpus: Vec<Box<dyn Vcpu>>) -> std::io::Result<Self> {
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

fn thread_main(index: usize, mut vcpu: Box<dyn Vcpu>, machine: &Machine, kick: &Kick) {
    kick.attach(&mut *vcpu);
    // A panic on a guest's access must end the VM, not leave it without a processor.
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| run(&mut *vcpu, machine, kick)));
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

/// Runs the guest until the gate stops it (`None`) or it cannot go on.
fn run(vcpu: &mut dyn Vcpu, machine: &Machine, kick: &Kick) -> Option<Outcome> {
    // Not before the first run: until then threads are still made and files opened.
    let mut filters = machine.filters.as_ref();
    loop {
        match machine.gate.pass() {
            Pass::Go => {}
            Pass::GoAfterHold => vcpu.after_hold(),
            Pass::End => return None,
        }
        if machine.lifecycle.has_ended() {
            return None;
        }
        if let Some(Err(error)) = filters.take().map(|all| all.narrow(Thread::Vcpu)) {
            return Some(Outcome::ThreadDied(error.to_string()));
        }
        match vcpu.step() {
            Step::Continue => {}
            // The kick is taken back before the gate is looked at: whoever kicks closes the gate first.
            Step::Kicked => kick.set(0),
            Step::End(outcome) => return Some(outcome),
        }
    }
}
