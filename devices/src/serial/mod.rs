//! A 16550A serial port: the guest's console.
//!
//! The registers are `vm-superio`'s. This module adds what a console needs around them: output that
//! cannot hold up a vCPU (see [`output`]), and input under flow control, so that a pasted file
//! arrives whole although the FIFO holds 64 bytes.
//!
//! Input belongs to the VMM's main loop: it reads the terminal, hands the bytes to
//! [`Serial::input`], keeps what was not taken, stops reading the terminal, and goes on when
//! [`Serial::input_room`] becomes readable.

mod output;

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vm_superio::Trigger;
use vm_superio::serial::NoEvents;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::bus::BusDevice;
pub use output::Output;

// Register offsets (PC16550D data sheet, table II).
const DATA: u8 = 0;
const IER: u8 = 1;
const LCR: u8 = 3;
const MCR: u8 = 4;
const LSR: u8 = 5;
const IER_RECEIVED: u8 = 1 << 0;
const LCR_DLAB: u8 = 1 << 7;
const MCR_LOOP: u8 = 1 << 4;

/// So many reads of the line status in a row, with nothing between, are a driver that polls for
/// input. Drivers read it once or twice at start-up and before a transmission.
const POLLING_READS: u8 = 4;
/// Free FIFO bytes at which waiting input is asked for: half, so that refills are not byte by byte.
const ROOM_BYTES: usize = 32;

struct Irq(EventFd);

impl Trigger for Irq {
    type E = io::Error;
    fn trigger(&self) -> io::Result<()> {
        self.0.write(1)
    }
}

struct State {
    uart: vm_superio::Serial<Irq, NoEvents, Output>,
    ier: u8,
    lcr: u8,
    mcr: u8,
    status_reads: u8,
    // Input was refused: tell the main loop when there is room.
    starved: bool,
}

impl State {
    /// Whether the driver would see a byte put into the FIFO now. A driver that starts up clears
    /// the FIFO; what was typed before that waits outside instead of being lost.
    fn receives(&self) -> bool {
        let wanted = self.ier & IER_RECEIVED != 0 || self.status_reads >= POLLING_READS;
        wanted && self.mcr & MCR_LOOP == 0
    }
}

/// The serial port.
pub struct Serial {
    state: Mutex<State>,
    room: EventFd,
}

impl Serial {
    /// Number of ports.
    pub const LEN: u64 = 8;

    /// A port that raises interrupts by writing to `irq` and sends the guest's output to `output`.
    ///
    /// # Errors
    /// No thread or eventfd could be made.
    pub fn new(irq: EventFd, output: Box<dyn Write + Send>) -> io::Result<Serial> {
        let uart = vm_superio::Serial::new(Irq(irq), Output::new(output)?);
        Ok(Serial {
            state: Mutex::new(State {
                uart,
                ier: 0,
                lcr: 0,
                mcr: 0,
                status_reads: 0,
                starved: false,
            }),
            room: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Offers typed bytes; the number taken. When it is less than all, [`Serial::input_room`]
    /// becomes readable as soon as more can be taken.
    pub fn input(&self, bytes: &[u8]) -> usize {
        let mut state = self.lock();
        let free = state.uart.fifo_capacity();
        let count = if state.receives() {
            bytes.len().min(free)
        } else {
            0
        };
        state.starved = count < bytes.len();
        if count == 0 {
            return 0;
        }
        match state.uart.enqueue_raw_bytes(&bytes[..count]) {
            Ok(taken) => taken,
            Err(error) => {
                // The bytes are in the FIFO; only the interrupt was not raised.
                tracing::warn!(%error, "serial port: interrupt failed");
                count
            }
        }
    }

    /// Readable when input that was refused can be offered again. The reader resets it by reading.
    pub fn input_room(&self) -> &EventFd {
        &self.room
    }

    /// Waits until the guest's output is written, at most `timeout`. Whether it was.
    pub fn drain(&self, timeout: Duration) -> bool {
        // Held over the wait: no vCPU runs any more when this is called.
        self.lock().uart.writer().drain(timeout)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn offer_room(&self, state: &mut State) {
        if state.starved && state.receives() && state.uart.fifo_capacity() >= ROOM_BYTES {
            state.starved = false;
            if let Err(error) = self.room.write(1) {
                tracing::warn!(%error, "serial port: input event failed");
            }
        }
    }
}

impl BusDevice for Serial {
    fn read(&self, offset: u64, data: &mut [u8]) {
        let mut state = self.lock();
        data.fill(0);
        // Byte registers: a wider access reads the first one only.
        let (Ok(register), Some(value)) = (u8::try_from(offset), data.first_mut()) else {
            return;
        };
        *value = state.uart.read(register);
        state.status_reads = match register {
            LSR => state.status_reads.saturating_add(1),
            // Reading the data that was polled for is part of polling.
            DATA if state.receives() => state.status_reads,
            _ => 0,
        };
        self.offer_room(&mut state);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let mut state = self.lock();
        let (Ok(register), Some(&value)) = (u8::try_from(offset), data.first()) else {
            return;
        };
        state.status_reads = 0;
        match register {
            IER if state.lcr & LCR_DLAB == 0 => state.ier = value,
            LCR => state.lcr = value,
            MCR => state.mcr = value,
            _ => {}
        }
        if let Err(error) = state.uart.write(register, value) {
            tracing::warn!(%error, "serial port: write failed");
        }
        self.offer_room(&mut state);
    }
}

#[cfg(test)]
mod tests;
