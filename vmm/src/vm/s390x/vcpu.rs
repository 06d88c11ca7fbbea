//! A vCPU of KVM: runs the guest, and carries out what KVM leaves to the VMM.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use arch::s390x::diagnose::Ipl;
use arch::s390x::kvm::{self, Exit, KvmError};
use devices::channel::ProgramInterruption;

use super::board::Board;
use super::instructions::{Effect, execute};
use crate::vm::hypervisor::{Step, Vcpu};
use crate::vm::lifecycle::Outcome;

/// First halfword of TEST SUBCHANNEL, which has an exit of its own.
const TEST_SUBCHANNEL: u16 = 0xb235;

/// A vCPU with what its instructions reach.
pub struct KvmVcpu {
    fd: kvm::Vcpu,
    board: Arc<Board>,
}

impl KvmVcpu {
    /// The vCPU `fd` of a machine.
    pub fn new(fd: kvm::Vcpu, board: Arc<Board>) -> Self {
        Self { fd, board }
    }

    fn try_step(&mut self) -> Result<Step, KvmError> {
        let at = |vcpu: &Self| format!("at {:#x}", vcpu.fd.psw_address());
        Ok(match self.fd.enter()? {
            Exit::Interrupted => Step::Kicked,
            Exit::Instruction { ipa, ipb } => self.instruction(ipa, ipb)?,
            Exit::TestSubchannel { ipb, dequeued } => {
                let step = self.instruction(TEST_SUBCHANNEL, ipb)?;
                if let Some([word, parameter, identification]) = dequeued {
                    let isc = (identification >> 27 & 7) as u8;
                    self.board.interrupt_again(word, parameter, isc);
                }
                step
            }
            Exit::DisabledWait(code) => {
                tracing::info!("the guest waits disabled, with code {code:#x}");
                Step::End(Outcome::GuestPanic)
            }
            Exit::Stopped => Step::End(Outcome::PowerOff),
            Exit::Operation => {
                self.fd
                    .program_interrupt(ProgramInterruption::Operation as u16)?;
                Step::Continue
            }
            Exit::Reset => Step::End(Outcome::Reboot),
            Exit::Fatal { what, code } => {
                let text = format!("vcpu0: {what} ({code:#x}) {}", at(self));
                Step::End(Outcome::VcpuFailed(text))
            }
        })
    }

    fn instruction(&mut self, ipa: u16, ipb: u32) -> Result<Step, KvmError> {
        match execute(&self.board, &mut self.fd, ipa, ipb) {
            Effect::Done | Effect::Delivered | Effect::Ipl(Ipl::NoParameters(_)) => {}
            Effect::Program(code) => self.fd.program_interrupt(code)?,
            Effect::Ipl(Ipl::Load | Ipl::Reset) => return Ok(Step::End(Outcome::Reboot)),
            // There is one vCPU, which runs: nothing is to be done to start it.
            Effect::Signal { cpu, order } => {
                tracing::debug!("order {order:?} to CPU {cpu} changes nothing");
            }
        }
        Ok(Step::Continue)
    }
}

impl Vcpu for KvmVcpu {
    fn immediate_exit(&mut self) -> NonNull<AtomicU8> {
        self.fd.immediate_exit()
    }

    fn step(&mut self) -> Step {
        self.try_step().unwrap_or_else(|error| {
            let place = self.fd.psw_address();
            Step::End(Outcome::VcpuFailed(format!(
                "vcpu0 cannot go on: {error}; at {place:#x}"
            )))
        })
    }
}
