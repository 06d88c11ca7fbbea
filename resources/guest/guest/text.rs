//! One line of JSON at a time, on the first serial port.

use crate::cpu;

const PORT: u16 = 0x3f8;
const LINE_CONTROL: u16 = PORT + 3;
const FIFO_CONTROL: u16 = PORT + 2;
const INTERRUPT_ENABLE: u16 = PORT + 1;
const LINE_STATUS: u16 = PORT + 5;
const MODEM_CONTROL: u16 = PORT + 4;
/// Line status: a byte was received, the transmitter is empty.
const DATA_READY: u8 = 1;
const TRANSMITTER_EMPTY: u8 = 1 << 5;
/// Length of a 16550's transmit FIFO.
const FIFO_BYTES: usize = 16;

/// 8 data bits, FIFOs on, no interrupts.
pub fn init() {
    cpu::out8(INTERRUPT_ENABLE, 0);
    cpu::out8(LINE_CONTROL, 3);
    cpu::out8(FIFO_CONTROL, 7);
}

/// Lets the port interrupt on received bytes.
pub fn receive_interrupt(on: bool) {
    cpu::out8(MODEM_CONTROL, if on { 0xb } else { 0 });
    cpu::out8(INTERRUPT_ENABLE, u8::from(on));
}

/// A received byte.
pub fn receive() -> Option<u8> {
    (cpu::in8(LINE_STATUS) & DATA_READY != 0).then(|| cpu::in8(PORT))
}

fn write(bytes: &[u8]) {
    for chunk in bytes.chunks(FIFO_BYTES) {
        while cpu::in8(LINE_STATUS) & TRANSMITTER_EMPTY == 0 {
            core::hint::spin_loop();
        }
        cpu::out_bytes(PORT, chunk);
    }
}

/// A JSON object, or anything nested in it, that is printed as one line.
pub struct Json {
    buffer: [u8; 512],
    len: usize,
    /// Whether the next value needs a comma before it.
    comma: bool,
}

impl Json {
    pub fn new() -> Json {
        let mut json = Json {
            buffer: [0; 512],
            len: 0,
            comma: false,
        };
        json.raw(b"{");
        json
    }

    fn raw(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if self.len == self.buffer.len() {
                self.flush();
            }
            self.buffer[self.len] = byte;
            self.len += 1;
        }
    }

    fn flush(&mut self) {
        write(&self.buffer[..self.len]);
        self.len = 0;
    }

    fn quoted(&mut self, text: &[u8]) {
        self.raw(b"\"");
        for &byte in text {
            match byte {
                b'"' | b'\\' => self.raw(&[b'\\', byte]),
                b' '..=b'~' => self.raw(&[byte]),
                _ => {
                    let digit = |n: u8| b"0123456789abcdef"[usize::from(n & 15)];
                    self.raw(&[b'\\', b'u', b'0', b'0', digit(byte >> 4), digit(byte)]);
                }
            }
        }
        self.raw(b"\"");
    }

    fn key(&mut self, key: &str) {
        if self.comma {
            self.raw(b",");
        }
        self.comma = true;
        if !key.is_empty() {
            self.quoted(key.as_bytes());
            self.raw(b":");
        }
    }

    fn digits(&mut self, mut value: u64) {
        let mut digits = [0; 20];
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = b'0' + (value % 10) as u8;
            value /= 10;
            if value == 0 {
                break;
            }
        }
        self.raw(&digits[at..]);
    }

    /// A number; an element of an array has the empty key, here and below.
    pub fn number(&mut self, key: &str, value: u64) {
        self.key(key);
        self.digits(value);
    }

    /// A number as a string in hexadecimal, for addresses and feature bits.
    pub fn hex(&mut self, key: &str, value: u64) {
        let mut text = *b"0x0000000000000000";
        for (i, digit) in text[2..].iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[(value >> (60 - 4 * i)) as usize & 15];
        }
        let skip = (value.leading_zeros() as usize / 4).min(15);
        text.copy_within(2 + skip.., 2);
        self.string(key, &text[..18 - skip]);
    }

    pub fn string(&mut self, key: &str, value: &[u8]) {
        self.key(key);
        self.quoted(value);
    }

    pub fn flag(&mut self, key: &str, value: bool) {
        self.key(key);
        self.raw(if value { b"true" } else { b"false" });
    }

    pub fn object(&mut self, key: &str, fill: impl FnOnce(&mut Json)) {
        self.nested(key, b"{", b"}", fill);
    }

    pub fn array(&mut self, key: &str, fill: impl FnOnce(&mut Json)) {
        self.nested(key, b"[", b"]", fill);
    }

    fn nested(&mut self, key: &str, open: &[u8], close: &[u8], fill: impl FnOnce(&mut Json)) {
        self.key(key);
        self.raw(open);
        self.comma = false;
        fill(self);
        self.raw(close);
        self.comma = true;
    }

    /// Ends the object and the line.
    pub fn print(mut self) {
        self.raw(b"}\n");
        self.flush();
    }
}
