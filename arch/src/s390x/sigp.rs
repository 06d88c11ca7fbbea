//! SIGNAL PROCESSOR: the orders that KVM leaves to the VMM once the VMM sets the CPUs' states (KVM_SET_MP_STATE).

/// What an order does to the CPU that it names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Let it run.
    Start,
    /// Let it run with the restart PSW.
    Restart,
    /// Reset it and its clocks and controls.
    InitialReset,
    /// Reset it.
    Reset,
}

/// How an order ends: with a condition code, and the status that condition code 1 comes with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Accepted: do it, condition code 0.
    Accepted(Order),
    /// Condition code 1 with this status in the low half of R1.
    Status(u32),
    /// No such CPU: condition code 3.
    NotOperational,
}

/// Status: the order is not known.
const INVALID_ORDER: u32 = 0x02;
/// Status: the parameter is not valid, or the mode is set already.
const INVALID_PARAMETER: u32 = 0x100;

/// Answers order `order` for CPU `address` of `cpus`.
pub fn answer(order: u8, address: u64, cpus: u16) -> Answer {
    // The address is 16 bits of its register.
    if address as u16 >= cpus {
        return Answer::NotOperational;
    }
    match order {
        0x04 => Answer::Accepted(Order::Start),
        0x06 => Answer::Accepted(Order::Restart),
        0x0b => Answer::Accepted(Order::InitialReset),
        0x0c => Answer::Accepted(Order::Reset),
        // Set architecture: z/Architecture is the only one.
        0x12 => Answer::Status(INVALID_PARAMETER),
        _ => Answer::Status(INVALID_ORDER),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order() {
        for order in 0..=255 {
            let expected = match order {
                0x04 => Answer::Accepted(Order::Start),
                0x06 => Answer::Accepted(Order::Restart),
                0x0b => Answer::Accepted(Order::InitialReset),
                0x0c => Answer::Accepted(Order::Reset),
                0x12 => Answer::Status(0x100),
                _ => Answer::Status(2),
            };
            assert_eq!(answer(order, 1, 2), expected, "{order:#x}");
            assert_eq!(answer(order, 2, 2), Answer::NotOperational);
        }
        assert_eq!(answer(4, 0xffff_0001, 2), Answer::Accepted(Order::Start));
    }
}
