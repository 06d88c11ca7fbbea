//! A vCPU of KVM: runs the guest, answers its accesses, and says why it stopped.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use arch::exit::{FatalExit, describe_exit};
use kvm_ioctls::{VcpuExit, VcpuFd};

use super::Buses;
use super::reset_flag::{self, ResetFlag};
use crate::vm::hypervisor::{Step, Vcpu};
use crate::vm::lifecycle::Outcome;
use crate::vm::memory::GuestMemory;

/// A vCPU with what its accesses reach.
pub struct KvmVcpu {
    /// The vCPU in KVM.
    pub fd: VcpuFd,
    /// Its number.
    pub index: u8,
    /// Devices.
    pub buses: Arc<Buses>,
    /// Guest RAM: it stays mapped as long as a vCPU may run.
    pub memory: GuestMemory,
}

impl Vcpu for KvmVcpu {
    fn immediate_exit(&mut self) -> NonNull<AtomicU8> {
        NonNull::from(&mut self.fd.get_kvm_run().immediate_exit).cast()
    }

    fn after_hold(&mut self) {
        // So that the guest's watchdog does not take the pause for a lockup. A guest without the KVM clock cannot be told,
        // and KVM says so.
        let _ = self.fd.kvmclock_ctrl();
    }

    fn step(&mut self) -> Step {
        match self.fd.run() {
            Ok(VcpuExit::IoOut(port, data)) => {
                let data: *const [u8] = data;
                let width = self.port_width();
                // SAFETY: the data lies in the vCPU's shared mapping, which `fd` keeps, and nobody writes it before the
                // next KVM_RUN.
                for item in unsafe { &*data }.chunks(width) {
                    if !self.buses.pio.write(port.into(), item) {
                        tracing::trace!("port {port:#x}: nobody takes {item:x?}");
                    }
                }
                Step::Continue
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                let data: *mut [u8] = data;
                let width = self.port_width();
                // SAFETY: as above, and no other reference to it is alive.
                for item in unsafe { &mut *data }.chunks_mut(width) {
                    if !self.buses.pio.read(port.into(), item) {
                        tracing::trace!("port {port:#x}: nobody answers");
                    }
                }
                Step::Continue
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                if !self.buses.mmio.write(address, data) {
                    tracing::trace!("address {address:#x}: nobody takes {data:x?}");
                }
                Step::Continue
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                if !self.buses.mmio.read(address, data) {
                    tracing::trace!("address {address:#x}: nobody answers");
                }
                Step::Continue
            }
            Ok(VcpuExit::Intr) => Step::Kicked,
            Ok(VcpuExit::Shutdown) => Step::End(self.shutdown()),
            Ok(VcpuExit::InternalError) => Step::End(self.fatal(FatalExit::InternalError)),
            Ok(VcpuExit::FailEntry(reason, cpu)) => {
                Step::End(self.fatal(FatalExit::FailEntry { reason, cpu }))
            }
            Ok(exit) => {
                let what = format!("{exit:?}");
                Step::End(self.failed(&what))
            }
            Err(error) => match error.errno() {
                // A kick, or a vCPU that waits for its start-up IPI.
                libc::EINTR | libc::EAGAIN => Step::Kicked,
                _ => {
                    let what = format!("KVM_RUN failed: {error}");
                    Step::End(self.failed(&what))
                }
            },
        }
    }
}

impl KvmVcpu {
    /// Bytes of one port access; a string instruction makes several in one exit.
    fn port_width(&mut self) -> usize {
        // SAFETY: after KVM_EXIT_IO the `io` member of the union is the one that KVM filled.
        let size = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.io.size };
        usize::from(size.max(1))
    }

    /// KVM_EXIT_SHUTDOWN: a triple fault, by accident or to reset the machine.
    fn shutdown(&mut self) -> Outcome {
        match reset_flag::read(&self.memory) {
            ResetFlag::Warm => Outcome::GuestPanic,
            ResetFlag::Cold => Outcome::Reboot,
            ResetFlag::Untouched => {
                let report = describe_exit(&mut self.fd, &self.memory, FatalExit::Shutdown);
                Outcome::TripleFault(format!("vcpu{}: {report}", self.index))
            }
        }
    }

    /// An exit whose reasons `arch` can tell.
    fn fatal(&mut self, exit: FatalExit) -> Outcome {
        let report = describe_exit(&mut self.fd, &self.memory, exit);
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
