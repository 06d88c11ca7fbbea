//! A CPU as an instruction sees it that is executed for the guest: whoever runs the CPU implements [`Cpu`].

/// Why an operand could not be accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The instruction ends with this program interruption.
    Program(u16),
    /// It does, and the guest has it already: KVM delivers access exceptions itself.
    Delivered,
}

/// The CPU that executes an instruction. The PSW's address is behind the instruction.
pub trait Cpu {
    /// General register `number`, 0 to 15.
    fn register(&self, number: u8) -> u64;

    /// Sets general register `number`.
    fn set_register(&mut self, number: u8, value: u64);

    /// Whether the CPU is in the problem state.
    fn problem_state(&self) -> bool;

    /// The prefix: where the CPU's lowcore is in absolute memory.
    fn prefix(&self) -> u64;

    /// Sets the PSW's condition code, 0 to 3.
    fn set_condition_code(&mut self, code: u8);

    /// Reads at a logical address, of access register `register` where those are in use.
    ///
    /// # Errors
    /// The access exception.
    fn read(&mut self, address: u64, register: u8, bytes: &mut [u8]) -> Result<(), Fault>;

    /// Writes at a logical address.
    ///
    /// # Errors
    /// The access exception.
    fn write(&mut self, address: u64, register: u8, bytes: &[u8]) -> Result<(), Fault>;

    /// Takes the I/O interruption with the highest priority that the CPU's masks let through, if there is one, for TEST
    /// PENDING INTERRUPTION: subsystem identification, parameter, identification word.
    fn take_io_interruption(&mut self) -> Option<[u32; 3]>;
}
