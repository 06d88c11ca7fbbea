//! The service processor (SCLP): what the machine has, a console, and a request to shut down.
//!
//! The console is the VT220 one, which carries ASCII. Blocks (SCCBs) are big-endian.

use std::collections::VecDeque;
use std::io::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Longest block in bytes.
pub const MAX_SCCB_BYTES: usize = 4096;
/// Length of a block's header.
pub const HEADER_BYTES: usize = 8;
/// Typed bytes that wait for the guest.
const MAX_INPUT_BYTES: usize = 4096;
/// In the parameter of a service signal: events wait.
const EVENTS_PENDING: u32 = 1;

/// Commands.
mod command {
    pub const READ_CPU_INFO: u32 = 0x0001_0001;
    pub const READ_SCP_INFO: u32 = 0x0002_0001;
    pub const READ_SCP_INFO_FORCED: u32 = 0x0012_0001;
    pub const WRITE_EVENT_DATA: u32 = 0x0076_0005;
    pub const READ_EVENT_DATA: u32 = 0x0077_0005;
    pub const WRITE_EVENT_MASK: u32 = 0x0078_0005;
}

/// Response codes.
mod response {
    pub const READ: u16 = 0x0010;
    pub const DONE: u16 = 0x0020;
    pub const INVALID_COMMAND: u16 = 0x01f0;
    pub const TOO_SHORT: u16 = 0x0300;
    pub const INVALID_FUNCTION: u16 = 0x40f0;
    pub const NO_EVENTS: u16 = 0x60f0;
    pub const INVALID_MASK_LENGTH: u16 = 0x74f0;
    pub const EVENT_LENGTH: u16 = 0x72f0;
    pub const EVENT_TYPE: u16 = 0x73f0;
}

/// Event types.
mod event {
    pub const VT220: u8 = 0x1a;
    pub const SIGNAL_QUIESCE: u8 = 0x1d;
}

/// Header of an event buffer in bytes.
const EVENT_HEADER_BYTES: usize = 6;
/// The guest has taken a buffer that it was given, or the SCLP one of the guest's.
const ACCEPTED: u8 = 0x80;

const fn mask(event: u8) -> u32 {
    1 << (32 - event as u32)
}

/// What the machine has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inventory {
    /// Memory, in whole MiB.
    pub memory_bytes: u64,
    /// CPUs, with addresses from 0 on.
    pub cpus: u16,
}

struct State {
    output: Box<dyn Write + Send>,
    input: VecDeque<u8>,
    quiesce: bool,
    /// What the guest wants to be sent.
    receive_mask: u32,
    /// Input was refused.
    starved: bool,
}

/// The service processor.
pub struct Sclp {
    inventory: Inventory,
    state: Mutex<State>,
    /// Input that was refused can be offered again.
    room: Box<dyn Fn() + Send + Sync>,
}

impl Sclp {
    /// A service processor whose console writes to `output`, which must not hold up a vCPU; `room` is called when input
    /// that was refused can be offered again.
    pub fn new(
        inventory: Inventory,
        output: Box<dyn Write + Send>,
        room: Box<dyn Fn() + Send + Sync>,
    ) -> Self {
        Self {
            inventory,
            state: Mutex::new(State {
                output,
                input: VecDeque::new(),
                quiesce: false,
                receive_mask: 0,
                starved: false,
            }),
            room,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out `command` on `sccb`, whose length is that of its header: [`HEADER_BYTES`] to [`MAX_SCCB_BYTES`]. The
    /// response is in it; a service signal with the block's address and [`Sclp::pending`] follows.
    pub fn call(&self, command: u32, sccb: &mut [u8]) {
        let response = match command {
            command::READ_SCP_INFO | command::READ_SCP_INFO_FORCED => self.read_scp_info(sccb),
            command::READ_CPU_INFO => self.read_cpu_info(sccb),
            command::WRITE_EVENT_MASK => self.write_event_mask(sccb),
            command::WRITE_EVENT_DATA => self.write_events(sccb),
            command::READ_EVENT_DATA => self.read_events(sccb),
            _ => response::INVALID_COMMAND,
        };
        put16(sccb, 6, response);
    }

    /// What a service signal's parameter says of waiting events.
    pub fn pending(&self) -> u32 {
        match self.lock().has_events() {
            true => EVENTS_PENDING,
            false => 0,
        }
    }

    /// Offers typed bytes; the number taken. A service signal is due if there are any.
    pub fn input(&self, bytes: &[u8]) -> usize {
        let mut state = self.lock();
        let free = match state.receive_mask & mask(event::VT220) {
            0 => 0,
            _ => MAX_INPUT_BYTES - state.input.len(),
        };
        let count = bytes.len().min(free);
        state.input.extend(&bytes[..count]);
        state.starved = count < bytes.len();
        count
    }

    /// Asks the guest to shut down. A service signal is due if this is true; else the guest does not listen.
    pub fn quiesce(&self) -> bool {
        let mut state = self.lock();
        state.quiesce = state.receive_mask & mask(event::SIGNAL_QUIESCE) != 0;
        state.quiesce
    }

    /// As after a system reset.
    pub fn reset(&self) {
        let mut state = self.lock();
        state.receive_mask = 0;
        state.quiesce = false;
    }

    fn cpu_entries(&self, sccb: &mut [u8], at: usize) -> bool {
        let len = usize::from(self.inventory.cpus) * 16;
        let Some(entries) = sccb.get_mut(at..at + len) else {
            return false;
        };
        entries.fill(0);
        for (address, entry) in (0..).zip(entries.chunks_mut(16)) {
            // Address; its type, 0, is a general-purpose CPU's.
            entry[0] = address;
        }
        true
    }

    fn read_scp_info(&self, sccb: &mut [u8]) -> u16 {
        const ENTRIES_AT: usize = 128;
        const HAS_CPU_INFO: u64 = 1 << 59;
        let len = sccb.len();
        let Some(body) = sccb.get_mut(HEADER_BYTES..ENTRIES_AT) else {
            return response::TOO_SHORT;
        };
        body.fill(0);
        if !self.cpu_entries(&mut sccb[..len], ENTRIES_AT) {
            return response::TOO_SHORT;
        }
        // Memory as a number of increments of 1 MiB; a number beyond 16 bits has a field of its own.
        let increments = self.inventory.memory_bytes >> 20;
        match u16::try_from(increments) {
            Ok(increments) => put16(sccb, 8, increments),
            Err(_) => sccb[104..112].copy_from_slice(&increments.to_be_bytes()),
        }
        sccb[10] = 1;
        put16(sccb, 16, self.inventory.cpus);
        put16(sccb, 18, ENTRIES_AT as u16);
        // No load parameter: EBCDIC blanks.
        sccb[24..32].fill(0x40);
        sccb[48..56].copy_from_slice(&HAS_CPU_INFO.to_be_bytes());
        put16(sccb, 120, self.inventory.cpus.saturating_sub(1));
        response::READ
    }

    fn read_cpu_info(&self, sccb: &mut [u8]) -> u16 {
        const ENTRIES_AT: usize = 24;
        let Some(body) = sccb.get_mut(HEADER_BYTES..ENTRIES_AT) else {
            return response::TOO_SHORT;
        };
        body.fill(0);
        if !self.cpu_entries(sccb, ENTRIES_AT) {
            return response::TOO_SHORT;
        }
        let behind = ENTRIES_AT as u16 + self.inventory.cpus * 16;
        put16(sccb, 8, self.inventory.cpus);
        put16(sccb, 10, ENTRIES_AT as u16);
        put16(sccb, 14, behind);
        response::READ
    }

    fn write_event_mask(&self, sccb: &mut [u8]) -> u16 {
        let Some(len) = get16(sccb, 10).map(usize::from) else {
            return response::TOO_SHORT;
        };
        if !(1..=1021).contains(&len) {
            return response::INVALID_MASK_LENGTH;
        }
        let Some(masks) = sccb.get_mut(12..12 + 4 * len) else {
            return response::TOO_SHORT;
        };
        let wanted = first_word(&masks[..len]);
        for (at, events) in [
            // What the guest may send, what it is sent.
            (2 * len, mask(event::VT220)),
            (3 * len, mask(event::VT220) | mask(event::SIGNAL_QUIESCE)),
        ] {
            let field = &mut masks[at..at + len];
            field.fill(0);
            for (byte, value) in field.iter_mut().zip(events.to_be_bytes()) {
                *byte = value;
            }
        }
        let mut state = self.lock();
        state.receive_mask = wanted;
        let starved = std::mem::take(&mut state.starved);
        drop(state);
        if starved {
            (self.room)();
        }
        response::DONE
    }

    fn write_events(&self, sccb: &mut [u8]) -> u16 {
        if sccb[2] != 0 {
            return response::INVALID_FUNCTION;
        }
        let mut at = HEADER_BYTES;
        if sccb.len() == at {
            return response::NO_EVENTS;
        }
        let mut response = response::DONE;
        while at < sccb.len() {
            let len = usize::from(get16(sccb, at).unwrap_or(0));
            let Some(buffer) = sccb.get_mut(at..at + len) else {
                return response::EVENT_LENGTH;
            };
            if len < EVENT_HEADER_BYTES {
                return response::EVENT_LENGTH;
            }
            match buffer[2] {
                event::VT220 => {
                    // A console that takes nothing drops it and says so.
                    let _ = self.lock().output.write_all(&buffer[EVENT_HEADER_BYTES..]);
                    buffer[3] |= ACCEPTED;
                }
                _ => response = response::EVENT_TYPE,
            }
            at += len;
        }
        response
    }

    fn read_events(&self, sccb: &mut [u8]) -> u16 {
        const SELECTIVE: u8 = 0x80;
        let mut state = self.lock();
        let wanted = match sccb[2] {
            0 => state.receive_mask,
            SELECTIVE => {
                let Some(len) = get16(sccb, 10).map(usize::from) else {
                    return response::TOO_SHORT;
                };
                match sccb.get(12..12 + len) {
                    Some(field) => first_word(field) & state.receive_mask,
                    None => return response::TOO_SHORT,
                }
            }
            _ => return response::INVALID_FUNCTION,
        };
        let variable = sccb[5] & 0x80 != 0;
        let mut at = HEADER_BYTES;
        if state.quiesce && wanted & mask(event::SIGNAL_QUIESCE) != 0 {
            // No timeout, and the machine is to shut down.
            if put_event(sccb, &mut at, event::SIGNAL_QUIESCE, &[0xff, 0xff, 0]) {
                state.quiesce = false;
            }
        }
        if !state.input.is_empty() && wanted & mask(event::VT220) != 0 {
            let room = sccb.len().saturating_sub(at + EVENT_HEADER_BYTES + 1);
            let count = state.input.len().min(room);
            if count > 0 {
                // Data of the session, as opposed to its start or end.
                let data: Vec<u8> = [0].into_iter().chain(state.input.drain(..count)).collect();
                put_event(sccb, &mut at, event::VT220, &data);
            }
        }
        if at == HEADER_BYTES {
            return match state.has_events() && wanted != 0 {
                true => response::TOO_SHORT,
                false => response::NO_EVENTS,
            };
        }
        if variable {
            put16(sccb, 0, at as u16);
        }
        let starved = std::mem::take(&mut state.starved);
        drop(state);
        if starved {
            (self.room)();
        }
        response::DONE
    }
}

impl State {
    fn has_events(&self) -> bool {
        let input = !self.input.is_empty() && self.receive_mask & mask(event::VT220) != 0;
        input || self.quiesce
    }
}

fn put_event(sccb: &mut [u8], at: &mut usize, kind: u8, data: &[u8]) -> bool {
    let len = EVENT_HEADER_BYTES + data.len();
    let Some(buffer) = sccb.get_mut(*at..*at + len) else {
        return false;
    };
    buffer[..EVENT_HEADER_BYTES].fill(0);
    put16(buffer, 0, len as u16);
    buffer[2] = kind;
    buffer[EVENT_HEADER_BYTES..].copy_from_slice(data);
    *at += len;
    true
}

fn get16(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at + 2)?;
    Some(u16::from_be_bytes([bytes[0], bytes[1]]))
}

fn put16(bytes: &mut [u8], at: usize, value: u16) {
    if let Some(field) = bytes.get_mut(at..at + 2) {
        field.copy_from_slice(&value.to_be_bytes());
    }
}

/// The first 32 bits of a mask that may be shorter.
fn first_word(field: &[u8]) -> u32 {
    let mut word = [0; 4];
    for (byte, value) in word.iter_mut().zip(field) {
        *byte = *value;
    }
    u32::from_be_bytes(word)
}

#[cfg(test)]
mod tests;
