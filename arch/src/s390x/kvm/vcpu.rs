//! A vCPU: registers and PSW in the area that it shares with KVM, and why it left the guest.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU8;

use super::{KvmError, abi, ioctl_number, ioctl_with};
use crate::s390x::cpu::{Cpu, Fault};
use crate::s390x::psw::{self, mask};

/// Interception codes (`icptcode`).
mod intercept {
    pub const INSTRUCTION: u8 = 0x04;
    pub const PROGRAM: u8 = 0x08;
    pub const EXTERNAL: u8 = 0x14;
    pub const WAIT: u8 = 0x1c;
    pub const STOP: u8 = 0x28;
    pub const OPERATION: u8 = 0x2c;
}

/// Why KVM_RUN returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Somebody wants the thread.
    Interrupted,
    /// An instruction is to be carried out.
    Instruction {
        /// Its first halfword.
        ipa: u16,
        /// Its second and third.
        ipb: u32,
    },
    /// TEST SUBCHANNEL; KVM has taken the subchannel's interruption back.
    TestSubchannel {
        /// The instruction's second and third halfword.
        ipb: u32,
        /// The interruption that was pending: identification, parameter, identification word.
        dequeued: Option<[u32; 3]>,
    },
    /// The CPU waits for no interruption: the guest's address says why.
    DisabledWait(u64),
    /// The CPU was stopped.
    Stopped,
    /// An instruction that there is not.
    Operation,
    /// The guest resets the machine.
    Reset,
    /// The guest cannot go on; interception code, or KVM's exit reason.
    Fatal {
        /// In words.
        what: &'static str,
        /// Code or reason.
        code: u64,
    },
}

/// A vCPU.
pub struct Vcpu {
    fd: File,
    run: NonNull<abi::Run>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the vCPU and is used by whoever has it; the byte `immediate_exit` is only used atomically.
unsafe impl Send for Vcpu {}

impl Drop for Vcpu {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nothing refers to it any more.
        unsafe { libc::munmap(self.run.as_ptr().cast(), self.bytes) };
    }
}

impl Vcpu {
    pub(super) fn new(fd: File, bytes: usize) -> Result<Self, KvmError> {
        let failed = |source| KvmError {
            name: "mmap of kvm_run",
            source,
        };
        if bytes < size_of::<abi::Run>() {
            return Err(failed(io::ErrorKind::UnexpectedEof.into()));
        }
        // SAFETY: a new mapping where the kernel likes; it is not used beyond its length.
        let run = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd.as_raw_fd(),
                0,
            )
        };
        if run == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        let run = NonNull::new(run.cast()).ok_or_else(|| failed(io::ErrorKind::Other.into()))?;
        let mut vcpu = Self { fd, run, bytes };
        vcpu.run_mut().kvm_valid_regs = abi::SYNC_PREFIX | abi::SYNC_GPRS;
        Ok(vcpu)
    }

    fn run(&self) -> &abi::Run {
        // SAFETY: the mapping is at least as long and exists as long as `self`. KVM writes it only within KVM_RUN, which
        // borrows the vCPU mutably.
        unsafe { self.run.as_ref() }
    }

    fn run_mut(&mut self) -> &mut abi::Run {
        // SAFETY: as above.
        unsafe { self.run.as_mut() }
    }

    /// The byte that makes KVM_RUN return at once.
    pub fn immediate_exit(&mut self) -> NonNull<AtomicU8> {
        NonNull::from(&mut self.run_mut().immediate_exit).cast()
    }

    /// The PSW's address.
    pub fn psw_address(&self) -> u64 {
        self.run().psw_addr
    }

    /// Sets the PSW.
    pub fn set_psw(&mut self, mask: u64, address: u64) {
        let run = self.run_mut();
        (run.psw_mask, run.psw_addr) = (mask, address);
    }

    /// Runs the guest.
    ///
    /// # Errors
    /// KVM_RUN fails, and not for a signal.
    pub fn enter(&mut self) -> Result<Exit, KvmError> {
        match ioctl_number(&self.fd, "KVM_RUN", abi::RUN, 0) {
            Err(error)
                if matches!(
                    error.source.raw_os_error(),
                    Some(libc::EINTR | libc::EAGAIN)
                ) =>
            {
                Ok(Exit::Interrupted)
            }
            Err(error) => Err(error),
            Ok(_) => {
                self.run_mut().kvm_dirty_regs = 0;
                Ok(exit_of(self.run()))
            }
        }
    }

    /// Ends an instruction with a program interruption.
    ///
    /// # Errors
    /// KVM refuses it.
    pub fn program_interrupt(&mut self, code: u16) -> Result<(), KvmError> {
        self.interrupt(abi::Interrupt {
            type_: abi::PROGRAM_INT,
            parm: code.into(),
            parm64: 0,
        })
    }

    fn interrupt(&mut self, mut interrupt: abi::Interrupt) -> Result<(), KvmError> {
        // SAFETY: the structure has no address.
        unsafe {
            ioctl_with(
                &self.fd,
                "KVM_S390_INTERRUPT",
                abi::S390_INTERRUPT,
                &mut interrupt,
            )
        }?;
        Ok(())
    }

    /// Memory of the guest as the CPU reaches it; an exception is delivered by KVM.
    fn memory(
        &self,
        op: u32,
        address: u64,
        register: u8,
        buf: u64,
        len: usize,
    ) -> Result<(), Fault> {
        let mut operation = abi::MemOp {
            gaddr: address,
            flags: abi::MEMOP_F_INJECT_EXCEPTION,
            // Operands are a page at most.
            size: len as u32,
            op,
            buf,
            ar: register,
            ..Default::default()
        };
        // SAFETY: `buf` is the address of `len` bytes that the caller has borrowed for what `op` does with them.
        let result = unsafe {
            ioctl_with(
                &self.fd,
                "KVM_S390_MEM_OP",
                abi::S390_MEM_OP,
                &mut operation,
            )
        };
        match result {
            Ok(0) => Ok(()),
            Ok(_) => Err(Fault::Delivered),
            Err(error) => {
                tracing::debug!("an operand at {address:#x}: {error}");
                // Addressing exception.
                Err(Fault::Program(5))
            }
        }
    }
}

impl Cpu for Vcpu {
    fn register(&self, number: u8) -> u64 {
        self.run().regs.gprs[usize::from(number & 15)]
    }

    fn set_register(&mut self, number: u8, value: u64) {
        let run = self.run_mut();
        run.regs.gprs[usize::from(number & 15)] = value;
        run.kvm_dirty_regs |= abi::SYNC_GPRS;
    }

    fn problem_state(&self) -> bool {
        self.run().psw_mask & mask::PROBLEM != 0
    }

    fn prefix(&self) -> u64 {
        self.run().regs.prefix
    }

    fn set_condition_code(&mut self, code: u8) {
        let run = self.run_mut();
        run.psw_mask = psw::with_condition_code(run.psw_mask, code);
    }

    fn read(&mut self, address: u64, register: u8, bytes: &mut [u8]) -> Result<(), Fault> {
        let buf = bytes.as_mut_ptr() as u64;
        self.memory(abi::MEMOP_LOGICAL_READ, address, register, buf, bytes.len())
    }

    fn write(&mut self, address: u64, register: u8, bytes: &[u8]) -> Result<(), Fault> {
        let buf = bytes.as_ptr() as u64;
        self.memory(
            abi::MEMOP_LOGICAL_WRITE,
            address,
            register,
            buf,
            bytes.len(),
        )
    }

    fn take_io_interruption(&mut self) -> Option<[u32; 3]> {
        // KVM has the interruptions, and carries out TEST PENDING INTERRUPTION itself.
        None
    }
}

fn exit_of(run: &abi::Run) -> Exit {
    let fatal = |what, code| Exit::Fatal { what, code };
    match run.exit_reason {
        abi::EXIT_INTR => Exit::Interrupted,
        abi::EXIT_S390_SIEIC => {
            // SAFETY: KVM has filled this member on this exit; it is integers alone.
            let exit = unsafe { run.exit.sieic };
            match exit.icptcode {
                intercept::INSTRUCTION => Exit::Instruction {
                    ipa: exit.ipa,
                    ipb: exit.ipb,
                },
                intercept::WAIT => Exit::DisabledWait(run.psw_addr),
                intercept::STOP => Exit::Stopped,
                intercept::OPERATION => Exit::Operation,
                intercept::PROGRAM => fatal("a loop of program interruptions", 0x08),
                intercept::EXTERNAL => fatal("a loop of external interruptions", 0x14),
                code => fatal("an unknown interception", code.into()),
            }
        }
        abi::EXIT_S390_TSCH => {
            // SAFETY: as above.
            let exit = unsafe { run.exit.tsch };
            let id = u32::from(exit.subchannel_id) << 16 | u32::from(exit.subchannel_nr);
            let interruption = [id, exit.io_int_parm, exit.io_int_word];
            Exit::TestSubchannel {
                ipb: exit.ipb,
                dequeued: (exit.dequeued != 0).then_some(interruption),
            }
        }
        abi::EXIT_S390_RESET => Exit::Reset,
        abi::EXIT_FAIL_ENTRY => {
            // SAFETY: as above.
            let code = unsafe { run.exit.hardware_entry_failure_reason };
            fatal("KVM could not enter the guest", code)
        }
        abi::EXIT_INTERNAL_ERROR => {
            // SAFETY: as above.
            let code = unsafe { run.exit.suberror };
            fatal("KVM internal error", code.into())
        }
        reason => fatal("an unknown exit", reason.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(exit_reason: u32, exit: abi::ExitData) -> abi::Run {
        // SAFETY: the structure is integers alone.
        let mut run: abi::Run = unsafe { std::mem::zeroed() };
        run.exit_reason = exit_reason;
        run.psw_addr = 0x77;
        run.exit = exit;
        run
    }

    #[test]
    fn every_interception_and_exit() {
        for icptcode in 0..=255 {
            let sieic = abi::Sieic {
                icptcode,
                ipa: 0xb233,
                ipb: 0x5000_0000,
            };
            let exit = exit_of(&run(abi::EXIT_S390_SIEIC, abi::ExitData { sieic }));
            match icptcode {
                0x04 => assert_eq!(
                    exit,
                    Exit::Instruction {
                        ipa: 0xb233,
                        ipb: 0x5000_0000
                    }
                ),
                0x1c => assert_eq!(exit, Exit::DisabledWait(0x77)),
                0x28 => assert_eq!(exit, Exit::Stopped),
                0x2c => assert_eq!(exit, Exit::Operation),
                code => assert!(
                    matches!(exit, Exit::Fatal { code: told, .. } if told == u64::from(code))
                ),
            }
        }
        for (dequeued, expected) in [(0, None), (1, Some([0x1_0002, 3, 4]))] {
            let tsch = abi::Tsch {
                subchannel_id: 1,
                subchannel_nr: 2,
                io_int_parm: 3,
                io_int_word: 4,
                ipb: 5,
                dequeued,
            };
            let exit = exit_of(&run(abi::EXIT_S390_TSCH, abi::ExitData { tsch }));
            let wanted = Exit::TestSubchannel {
                ipb: 5,
                dequeued: expected,
            };
            assert_eq!(exit, wanted);
        }
        let nothing = abi::ExitData { padding: [0; 256] };
        assert_eq!(exit_of(&run(10, nothing)), Exit::Interrupted);
        assert_eq!(exit_of(&run(14, nothing)), Exit::Reset);
        for reason in [0, 9, 17, 99] {
            let exit = exit_of(&run(reason, nothing));
            assert!(matches!(exit, Exit::Fatal { .. }), "{reason}");
        }
    }
}
