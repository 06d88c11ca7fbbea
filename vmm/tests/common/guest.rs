//! Guests of a few instructions, as PVH kernels: 32-bit protected mode, no paging, no interrupts.
//!
//! They run everywhere KVM does, also where guest kernel code is interpreted.

use guest_image::pvh::BASE;
pub use guest_image::pvh::elf;

const SERIAL: u16 = 0x3f8;
const LINE_STATUS: u16 = SERIAL + 5;
const SLEEP_CONTROL: u16 = 0x600;
const RESET_REGISTER: u16 = 0x602;
const KEYBOARD_COMMAND: u16 = 0x64;
const PANIC_REGISTER: u16 = 0x505;
const RESET_FLAG: u32 = 0x472;

/// Machine code under construction.
#[derive(Default)]
pub struct Program(Vec<u8>);

impl Program {
    pub fn new() -> Self {
        Self::default()
    }

    fn code(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// `mov dx, port; mov al, value; out dx, al`
    pub fn out(self, port: u16, value: u8) -> Self {
        let [low, high] = port.to_le_bytes();
        self.code(&[0x66, 0xba, low, high, 0xb0, value, 0xee])
    }

    pub fn print(self, text: &str) -> Self {
        text.bytes()
            .fold(self, |program, byte| program.out(SERIAL, byte))
    }

    /// Prints with one string instruction: `rep outsb`.
    pub fn print_string(self, text: &str) -> Self {
        let count = u8::try_from(text.len()).unwrap();
        let address = BASE + u32::try_from(self.0.len()).unwrap() + 2;
        // jmp over the text
        let program = self.code(&[0xeb, count]).code(text.as_bytes());
        let [low, high] = SERIAL.to_le_bytes();
        program
            .code(&[0xbe])
            .code(&address.to_le_bytes()) // mov esi, address
            .code(&[0xb9, count, 0, 0, 0]) // mov ecx, count
            .code(&[0x66, 0xba, low, high, 0xfc]) // mov dx, port; cld
            .code(&[0xf3, 0x6e]) // rep outsb
    }

    /// `mov word [address], value`
    fn store16(self, address: u32, value: u16) -> Self {
        self.code(&[0x66, 0xc7, 0x05])
            .code(&address.to_le_bytes())
            .code(&value.to_le_bytes())
    }

    pub fn power_off(self) -> Vec<u8> {
        self.out(SLEEP_CONTROL, 5 << 2 | 1 << 5).hang()
    }

    /// As Linux reboots: the reset flag, then the reset register.
    pub fn reset(self, flag: Option<u16>) -> Vec<u8> {
        self.flag(flag).out(RESET_REGISTER, 1).hang()
    }

    /// The same by the keyboard controller.
    pub fn reset_by_keyboard(self, flag: Option<u16>) -> Vec<u8> {
        self.flag(flag).out(KEYBOARD_COMMAND, 0xfe).hang()
    }

    fn flag(self, flag: Option<u16>) -> Self {
        match flag {
            Some(value) => self.store16(RESET_FLAG, value),
            None => self,
        }
    }

    /// An exception without a handler: `ud2`.
    pub fn triple_fault(self, flag: Option<u16>) -> Vec<u8> {
        self.flag(flag).code(&[0x0f, 0x0b]).hang()
    }

    /// As the pvpanic driver reports a panic.
    pub fn report_panic(self) -> Self {
        self.out(PANIC_REGISTER, 1)
    }

    /// `int3`, which an interpreting KVM does not know.
    pub fn breakpoint(self) -> Vec<u8> {
        self.code(&[0xcc]).hang()
    }

    /// Runs for ever: `jmp $`
    pub fn spin(self) -> Vec<u8> {
        self.code(&[0xeb, 0xfe]).0
    }

    /// Sleeps for ever: `cli; hlt; jmp hlt`
    pub fn hang(self) -> Vec<u8> {
        self.code(&[0xfa, 0xf4, 0xeb, 0xfd]).0
    }

    /// Sends back what it receives; `q` powers off.
    pub fn echo(self) -> Vec<u8> {
        let [status_low, status_high] = LINE_STATUS.to_le_bytes();
        let [data_low, data_high] = SERIAL.to_le_bytes();
        self.code(&[0x66, 0xba, status_low, status_high]) // again: mov dx, LSR
            .code(&[0xec, 0xa8, 0x01, 0x74, 0xfb]) // wait: in al, dx; test al, 1; jz wait
            .code(&[0x66, 0xba, data_low, data_high]) // mov dx, data
            .code(&[0xec, 0xee]) // in al, dx; out dx, al
            .code(&[0x3c, b'q', 0x75, 0xed]) // cmp al, 'q'; jne again
            .power_off()
    }
}
