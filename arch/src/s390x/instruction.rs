//! Instructions that come to the VMM, decoded from what an interception tells of them: the first halfword (IPA) and the
//! two that follow (IPB).

/// An operand address of a base register and a displacement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Operand {
    /// General register, and access register; 0 is none.
    pub base: u8,
    /// 12 bits.
    pub displacement: u16,
}

impl Operand {
    fn parse(ipb: u32) -> Self {
        Self {
            base: (ipb >> 28) as u8,
            displacement: (ipb >> 16 & 0xfff) as u16,
        }
    }

    /// The address, with `register` giving general registers.
    pub fn address(self, register: impl FnOnce(u8) -> u64) -> u64 {
        let base = match self.base {
            0 => 0,
            base => register(base),
        };
        base.wrapping_add(self.displacement.into())
    }
}

/// What is executed for the guest. Registers are numbers from 0 to 15.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // The names are the architecture's; R fields are named as in the book.
pub enum Instruction {
    /// SERVICE CALL: command and block.
    ServiceCall {
        r1: u8,
        r2: u8,
    },
    ClearSubchannel,
    HaltSubchannel,
    ModifySubchannel(Operand),
    StartSubchannel(Operand),
    StoreSubchannel(Operand),
    TestSubchannel(Operand),
    TestPendingInterruption(Operand),
    SetAddressLimit,
    ResumeSubchannel,
    StoreChannelReport(Operand),
    ResetChannelPath,
    SetChannelMonitor,
    /// CHANNEL SUBSYSTEM CALL: the block's address is in a register.
    ChannelSubsystemCall {
        r1: u8,
    },
    /// SIGNAL ADAPTER, of queued direct I/O.
    SignalAdapter,
    CancelSubchannel,
    /// DIAGNOSE, with its code's operand.
    Diagnose {
        r1: u8,
        r3: u8,
        code: Operand,
    },
    /// SIGNAL PROCESSOR, with its order's operand.
    SignalProcessor {
        r1: u8,
        r3: u8,
        order: Operand,
    },
}

/// Length in bytes of every instruction in [`Instruction`].
pub const INSTRUCTION_BYTES: u64 = 4;

/// Decodes; `None` is an operation exception.
pub fn decode(ipa: u16, ipb: u32) -> Option<Instruction> {
    let operand = Operand::parse(ipb);
    let r1 = (ipa >> 4 & 0xf) as u8;
    let r3 = (ipa & 0xf) as u8;
    // Where the registers of an RRE instruction are.
    let (rre1, rre2) = ((ipb >> 20 & 0xf) as u8, (ipb >> 16 & 0xf) as u8);
    Some(match ipa {
        0xb220 => Instruction::ServiceCall { r1: rre1, r2: rre2 },
        0xb230 => Instruction::ClearSubchannel,
        0xb231 => Instruction::HaltSubchannel,
        0xb232 => Instruction::ModifySubchannel(operand),
        0xb233 => Instruction::StartSubchannel(operand),
        0xb234 => Instruction::StoreSubchannel(operand),
        0xb235 => Instruction::TestSubchannel(operand),
        0xb236 => Instruction::TestPendingInterruption(operand),
        0xb237 => Instruction::SetAddressLimit,
        0xb238 => Instruction::ResumeSubchannel,
        0xb239 => Instruction::StoreChannelReport(operand),
        0xb23b => Instruction::ResetChannelPath,
        0xb23c => Instruction::SetChannelMonitor,
        0xb25f => Instruction::ChannelSubsystemCall { r1: rre1 },
        0xb274 => Instruction::SignalAdapter,
        0xb276 => Instruction::CancelSubchannel,
        0x8300..=0x83ff => Instruction::Diagnose {
            r1,
            r3,
            code: operand,
        },
        0xae00..=0xaeff => Instruction::SignalProcessor {
            r1,
            r3,
            order: operand,
        },
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_and_their_operands() {
        let operand = Operand {
            base: 0xa,
            displacement: 0xbcd,
        };
        let ipb = 0xabcd_0000;
        for (ipa, instruction) in [
            (0xb230, Instruction::ClearSubchannel),
            (0xb231, Instruction::HaltSubchannel),
            (0xb232, Instruction::ModifySubchannel(operand)),
            (0xb233, Instruction::StartSubchannel(operand)),
            (0xb234, Instruction::StoreSubchannel(operand)),
            (0xb235, Instruction::TestSubchannel(operand)),
            (0xb236, Instruction::TestPendingInterruption(operand)),
            (0xb237, Instruction::SetAddressLimit),
            (0xb238, Instruction::ResumeSubchannel),
            (0xb239, Instruction::StoreChannelReport(operand)),
            (0xb23b, Instruction::ResetChannelPath),
            (0xb23c, Instruction::SetChannelMonitor),
            (0xb274, Instruction::SignalAdapter),
            (0xb276, Instruction::CancelSubchannel),
            (0xb220, Instruction::ServiceCall { r1: 0xc, r2: 0xd }),
            (0xb25f, Instruction::ChannelSubsystemCall { r1: 0xc }),
            (
                0x8324,
                Instruction::Diagnose {
                    r1: 2,
                    r3: 4,
                    code: operand,
                },
            ),
            (
                0xae56,
                Instruction::SignalProcessor {
                    r1: 5,
                    r3: 6,
                    order: operand,
                },
            ),
        ] {
            assert_eq!(decode(ipa, ipb), Some(instruction), "{ipa:#x}");
        }
        // Neighbours, and what else there is.
        for ipa in [
            0xb21f, 0xb221, 0xb23a, 0xb23d, 0xb25e, 0xb275, 0xb277, 0x82ff, 0x8400, 0,
        ] {
            assert_eq!(decode(ipa, ipb), None, "{ipa:#x}");
        }
    }

    #[test]
    fn addresses_wrap_and_register_0_is_none() {
        let operand = Operand {
            base: 5,
            displacement: 0x10,
        };
        assert_eq!(
            operand.address(|register| u64::from(register) << 12),
            0x5010
        );
        assert_eq!(operand.address(|_| u64::MAX), 0xf);
        let none = Operand { base: 0, ..operand };
        assert_eq!(none.address(|_| panic!("not asked")), 0x10);
    }
}
