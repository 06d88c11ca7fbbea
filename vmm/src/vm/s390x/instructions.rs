//! Instructions that are carried out for the guest: operands fetched, the right part of the machine asked, results stored,
//! the condition code set. What a guest gets wrong ends in the architecture's program interruption.

use arch::s390x::cpu::{Cpu, Fault};
use arch::s390x::diagnose::{self, Ipl};
use arch::s390x::instruction::{Instruction, Operand, decode};
use arch::s390x::sclp;
use arch::s390x::sigp::{self, Answer, Order};
use devices::channel::chsc::BLOCK_BYTES;
use devices::channel::format::{ORB_BYTES, Orb, SCHIB_BYTES, Schib};
use devices::channel::{Outcome, ProgramInterruption, SubchannelId};
use vm_memory::{Bytes, GuestAddress};

use super::board::Board;

/// What an instruction leaves to whoever runs the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: the CPU goes on.
    Done,
    /// A program interruption with this code.
    Program(u16),
    /// The guest has its interruption already.
    Delivered,
    /// Load or reset the machine.
    Ipl(Ipl),
    /// Carry out an order for CPU `cpu`, whose restart or start parameter is nothing.
    Signal {
        /// The CPU.
        cpu: u16,
        /// The order.
        order: Order,
    },
}

/// An instruction does not complete.
enum Stop {
    Fault(Fault),
    Effect(Effect),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<ProgramInterruption> for Stop {
    fn from(interruption: ProgramInterruption) -> Self {
        Self::Fault(Fault::Program(interruption as u16))
    }
}

/// Carries out the instruction of an interception with `ipa` and `ipb`, on the CPU that met it.
pub fn execute(board: &Board, cpu: &mut dyn Cpu, ipa: u16, ipb: u32) -> Effect {
    let Some(instruction) = decode(ipa, ipb) else {
        return Effect::Program(ProgramInterruption::Operation as u16);
    };
    // All of them are privileged.
    if cpu.problem_state() {
        return Effect::Program(ProgramInterruption::PrivilegedOperation as u16);
    }
    match carry_out(board, cpu, instruction) {
        Ok(Some(code)) => {
            cpu.set_condition_code(code);
            Effect::Done
        }
        Ok(None) => Effect::Done,
        Err(Stop::Fault(Fault::Program(code))) => Effect::Program(code),
        Err(Stop::Fault(Fault::Delivered)) => Effect::Delivered,
        Err(Stop::Effect(effect)) => effect,
    }
}

/// The condition code, if the instruction sets one.
fn carry_out(
    board: &Board,
    cpu: &mut dyn Cpu,
    instruction: Instruction,
) -> Result<Option<u8>, Stop> {
    let channels = &board.channels;
    let code = match instruction {
        Instruction::ServiceCall { r1, r2 } => service_call(board, cpu, r1, r2)?,
        Instruction::ClearSubchannel => channels.clear(subchannel(cpu)?),
        Instruction::HaltSubchannel => channels.halt(subchannel(cpu)?),
        Instruction::ResumeSubchannel => channels.resume(subchannel(cpu)?),
        Instruction::CancelSubchannel => channels.cancel(subchannel(cpu)?),
        Instruction::ModifySubchannel(operand) => {
            let mut block = [0; SCHIB_BYTES];
            fetch(cpu, operand, &mut block)?;
            let schib = Schib::parse(&block)?;
            channels.modify(subchannel(cpu)?, &schib)
        }
        Instruction::StartSubchannel(operand) => {
            let mut block = [0; ORB_BYTES];
            fetch(cpu, operand, &mut block)?;
            let orb = Orb::parse(&block)?;
            channels.start(subchannel(cpu)?, &orb)
        }
        Instruction::StoreSubchannel(operand) => {
            let address = aligned(cpu, operand)?;
            match channels.store(subchannel(cpu)?) {
                Some(block) => {
                    cpu.write(address, operand.base, &block)?;
                    0
                }
                None => 3,
            }
        }
        Instruction::TestSubchannel(operand) => {
            let address = aligned(cpu, operand)?;
            let id = subchannel(cpu)?;
            storing(|keep| channels.test(id, |irb| keep(cpu.write(address, operand.base, irb))))?
        }
        Instruction::StoreChannelReport(operand) => {
            let address = aligned(cpu, operand)?;
            storing(|keep| {
                channels.store_report(|word| {
                    keep(cpu.write(address, operand.base, &word.to_be_bytes()))
                })
            })?
        }
        Instruction::TestPendingInterruption(operand) => {
            test_pending_interruption(board, cpu, operand)?
        }
        Instruction::SetAddressLimit => {
            channels.set_address_limit(cpu.register(1))?;
            return Ok(None);
        }
        Instruction::ResetChannelPath => channels.reset_path(cpu.register(1))?,
        Instruction::SetChannelMonitor => {
            channels.set_monitor(cpu.register(1), cpu.register(2))?;
            return Ok(None);
        }
        Instruction::ChannelSubsystemCall { r1 } => channel_call(board, cpu, r1)?,
        // No device here is one of queued direct I/O.
        Instruction::SignalAdapter => 3,
        Instruction::Diagnose { r1, r3, code } => return diagnose(board, cpu, r1, r3, code),
        Instruction::SignalProcessor { r1, r3, order } => signal(board, cpu, r1, r3, order)?,
    };
    Ok(Some(code))
}

/// Runs something that stores through a callback of the channel subsystem, whose errors are only program interruptions,
/// and gives back what the CPU really said.
fn storing(
    run: impl FnOnce(&mut dyn FnMut(Result<(), Fault>) -> Outcome<()>) -> Outcome,
) -> Result<u8, Stop> {
    let mut fault = None;
    let result = run(&mut |stored| {
        stored.map_err(|error| {
            fault = Some(error);
            ProgramInterruption::Addressing
        })
    });
    match (fault, result) {
        (Some(fault), _) => Err(fault.into()),
        (None, result) => Ok(result?),
    }
}

/// The subchannel that general register 1 names.
fn subchannel(cpu: &dyn Cpu) -> Outcome<SubchannelId> {
    SubchannelId::from_word(cpu.register(1) as u32)
}

/// The address of an operand that is a whole word's.
fn aligned(cpu: &dyn Cpu, operand: Operand) -> Outcome<u64> {
    match operand.address(|register| cpu.register(register)) {
        address if address % 4 == 0 => Ok(address),
        _ => Err(ProgramInterruption::Specification),
    }
}

fn fetch(cpu: &mut dyn Cpu, operand: Operand, bytes: &mut [u8]) -> Result<(), Stop> {
    let address = aligned(cpu, operand)?;
    Ok(cpu.read(address, operand.base, bytes)?)
}

fn test_pending_interruption(
    board: &Board,
    cpu: &mut dyn Cpu,
    operand: Operand,
) -> Result<u8, Stop> {
    let address = aligned(cpu, operand)?;
    let Some([identification, parameter, word]) = cpu.take_io_interruption() else {
        return Ok(0);
    };
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&identification.to_be_bytes());
    bytes[4..8].copy_from_slice(&parameter.to_be_bytes());
    bytes[8..].copy_from_slice(&word.to_be_bytes());
    match address {
        0 => {
            let lowcore = GuestAddress(cpu.prefix() + arch::s390x::psw::lowcore::SUBCHANNEL);
            board
                .memory
                .write_slice(&bytes, lowcore)
                .map_err(|_| ProgramInterruption::Addressing)?;
        }
        _ => cpu.write(address, operand.base, &bytes[..8])?,
    }
    Ok(1)
}

fn channel_call(board: &Board, cpu: &mut dyn Cpu, r1: u8) -> Result<u8, Stop> {
    let address = cpu.register(r1);
    if !address.is_multiple_of(BLOCK_BYTES as u64) {
        return Err(ProgramInterruption::Specification.into());
    }
    let mut block = [0; BLOCK_BYTES];
    cpu.read(address, r1, &mut block)?;
    let answer = board.channels.call(&block)?;
    cpu.write(address + answer.offset as u64, r1, &answer.bytes)?;
    Ok(0)
}

fn service_call(board: &Board, cpu: &mut dyn Cpu, r1: u8, r2: u8) -> Result<u8, Stop> {
    const BOUNDARY_VIOLATION: u16 = 0x0100;
    const LOWCORE_BYTES: u64 = 8192;
    let command = cpu.register(r1) as u32;
    let word = cpu.register(r2) as u32;
    let address = u64::from(word);
    // 31 bits, a doubleword, and neither of the two lowcores: there a real address is not the absolute one.
    let prefixed = (cpu.prefix()..cpu.prefix() + LOWCORE_BYTES).contains(&address);
    if word & 0x8000_0007 != 0 || address < LOWCORE_BYTES || prefixed {
        return Err(ProgramInterruption::Specification.into());
    }
    let nowhere = |_| ProgramInterruption::Addressing;
    let at = GuestAddress(address);
    let len: [u8; 2] = board.memory.read_obj(at).map_err(nowhere)?;
    let len = usize::from(u16::from_be_bytes(len));
    if !(sclp::HEADER_BYTES..=sclp::MAX_SCCB_BYTES).contains(&len) {
        return Err(ProgramInterruption::Specification.into());
    }
    let mut sccb = vec![0; len];
    board.memory.read_slice(&mut sccb, at).map_err(nowhere)?;
    // A block lies in one page.
    match address % 4096 + len as u64 > 4096 {
        true => sccb[6..8].copy_from_slice(&BOUNDARY_VIOLATION.to_be_bytes()),
        false => board.sclp.call(command, &mut sccb),
    }
    board.memory.write_slice(&sccb, at).map_err(nowhere)?;
    board.floating.service(word | board.sclp.pending());
    Ok(0)
}

fn diagnose(
    board: &Board,
    cpu: &mut dyn Cpu,
    r1: u8,
    r3: u8,
    code: Operand,
) -> Result<Option<u8>, Stop> {
    // The code is the operand's low 16 bits.
    let code = code.address(|register| cpu.register(register)) as u16;
    match code {
        diagnose::IPL => match diagnose::ipl(cpu.register(r3), r1, cpu.register(r1)) {
            Some(Ipl::NoParameters(answer)) => cpu.set_register(r1 + 1, answer),
            Some(ipl) => return Err(Stop::Effect(Effect::Ipl(ipl))),
            None => return Err(ProgramInterruption::Specification.into()),
        },
        diagnose::VIRTIO => {
            let accepted = cpu.register(1) == diagnose::VIRTIO_CCW_NOTIFY
                && board.notify(cpu.register(2) as u32, cpu.register(3));
            let answer = if accepted {
                0
            } else {
                -i64::from(libc::EINVAL)
            };
            cpu.set_register(2, answer as u64);
        }
        // There is no watchdog, and nothing else either.
        _ => return Err(ProgramInterruption::Specification.into()),
    }
    Ok(None)
}

fn signal(board: &Board, cpu: &mut dyn Cpu, r1: u8, r3: u8, order: Operand) -> Result<u8, Stop> {
    // The order is the operand's low 8 bits.
    let order = order.address(|register| cpu.register(register)) as u8;
    let target = cpu.register(r3);
    match sigp::answer(order, target, board.cpus) {
        Answer::NotOperational => Ok(3),
        Answer::Status(status) => {
            let high = cpu.register(r1) & !0xffff_ffff;
            cpu.set_register(r1, high | u64::from(status));
            Ok(1)
        }
        Answer::Accepted(order) => {
            cpu.set_condition_code(0);
            Err(Stop::Effect(Effect::Signal {
                cpu: target as u16,
                order,
            }))
        }
    }
}

#[cfg(test)]
mod tests;
