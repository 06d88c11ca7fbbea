//! Channel programs: CCWs with chaining, transfers in channel and indirect addressing, and what became of them.

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _};

use super::format::{Orb, SENSE_BYTES, device_status, sense, subchannel_status};
use super::{CommandError, ControlUnit};
use crate::GuestMemory;

/// CCW flags.
mod flag {
    pub const CHAIN_DATA: u8 = 0x80;
    pub const CHAIN_COMMAND: u8 = 0x40;
    pub const SUPPRESS_LENGTH: u8 = 0x20;
    pub const SKIP: u8 = 0x10;
    pub const PROGRAM_INTERRUPTION: u8 = 0x08;
    pub const INDIRECT: u8 = 0x04;
    pub const SUSPEND: u8 = 0x02;
    pub const MODIFIED_INDIRECT: u8 = 0x01;
}

/// Commands that every device here knows.
mod command {
    pub const NOP: u8 = 0x03;
    pub const BASIC_SENSE: u8 = 0x04;
    pub const SENSE_ID: u8 = 0xe4;
}

/// CCWs that one start may run through. The architecture lets a channel end a program that transfers no data for 255
/// CCWs; a limit is needed because a program may be a loop, and nothing else stops it here.
const MAX_CCWS: u32 = 1024;
/// Data areas of one command: those of a data chain, each cut by its IDAWs.
const MAX_AREAS: usize = 4096;
const CCW_BYTES: u32 = 8;

/// A channel-command word, whatever its format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Ccw {
    code: u8,
    flags: u8,
    count: u16,
    address: u32,
}

impl Ccw {
    fn parse(bytes: [u8; 8], format_1: bool) -> Self {
        let [b0, b1, b2, b3, b4, b5, b6, b7] = bytes;
        match format_1 {
            true => Self {
                code: b0,
                flags: b1,
                count: u16::from_be_bytes([b2, b3]),
                address: u32::from_be_bytes([b4, b5, b6, b7]),
            },
            false => Self {
                code: b0,
                flags: b4,
                count: u16::from_be_bytes([b6, b7]),
                address: u32::from_be_bytes([0, b1, b2, b3]),
            },
        }
    }

    fn has(self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// The data of one command: where it is, and how much of it has been transferred.
pub struct Data<'a> {
    mem: &'a GuestMemory,
    /// Address and length in bytes.
    areas: Vec<(u64, u32)>,
    /// For each area, whether nothing is stored there.
    skip: Vec<bool>,
    total_bytes: u32,
    done_bytes: u32,
    suppress_length: bool,
    incorrect_length: bool,
}

impl Data<'_> {
    /// Length in bytes that the program has given.
    pub fn len(&self) -> u32 {
        self.total_bytes
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.total_bytes == 0
    }

    /// Says how long the command's data is. More is put up with, and told to the program unless it asked not to.
    ///
    /// # Errors
    /// There is less.
    pub fn expect(&mut self, bytes: u32) -> Result<(), CommandError> {
        self.at_most(bytes);
        match self.total_bytes < bytes {
            // VIRTIO 1.2, 4.3.1.2: a check condition where the length is suppressed and too short.
            true if self.suppress_length => Err(CommandError::Rejected),
            true => Err(CommandError::IncorrectLength),
            false => Ok(()),
        }
    }

    /// Says how long the command's data is at most; less is as good.
    pub fn at_most(&mut self, bytes: u32) {
        self.incorrect_length = self.total_bytes > bytes && !self.suppress_length;
    }

    /// Takes the next bytes that the program sends.
    ///
    /// # Errors
    /// They are not in guest memory; or there are fewer.
    pub fn take<const N: usize>(&mut self) -> Result<[u8; N], CommandError> {
        let mut bytes = [0; N];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    /// Fills `buf` with the next bytes that the program sends.
    ///
    /// # Errors
    /// As [`Data::take`].
    pub fn read(&mut self, buf: &mut [u8]) -> Result<(), CommandError> {
        let mem = self.mem;
        self.each(buf.len(), |address, at, len, _| {
            mem.read_slice(&mut buf[at..at + len], GuestAddress(address))
        })
    }

    /// Looks at the data at `offset`, whichever way the command transfers.
    ///
    /// # Errors
    /// As [`Data::take`].
    pub fn peek<const N: usize>(&mut self, offset: u32) -> Result<[u8; N], CommandError> {
        let done = std::mem::replace(&mut self.done_bytes, offset.min(self.total_bytes));
        let bytes = self.take();
        self.done_bytes = done;
        bytes
    }

    /// Stores `bytes` where the program wants them; those beyond its area are left out.
    ///
    /// # Errors
    /// The area is not in guest memory.
    pub fn store(&mut self, bytes: &[u8]) -> Result<(), CommandError> {
        let room = (self.total_bytes - self.done_bytes) as usize;
        let bytes = &bytes[..bytes.len().min(room)];
        let mem = self.mem;
        self.each(bytes.len(), |address, at, len, skip| match skip {
            true => Ok(()),
            false => mem.write_slice(&bytes[at..at + len], GuestAddress(address)),
        })
    }

    /// Calls `transfer` with address, offset, length and skip flag of each piece of the next `len` bytes.
    fn each(
        &mut self,
        len: usize,
        mut transfer: impl FnMut(u64, usize, usize, bool) -> Result<(), vm_memory::GuestMemoryError>,
    ) -> Result<(), CommandError> {
        if len > (self.total_bytes - self.done_bytes) as usize {
            return Err(CommandError::Rejected);
        }
        let (mut passed, mut at) = (0u32, 0usize);
        for (&(address, area), &skip) in self.areas.iter().zip(&self.skip) {
            if at == len {
                break;
            }
            let offset = (self.done_bytes - passed).min(area);
            let piece = ((area - offset) as usize).min(len - at);
            if piece > 0 {
                transfer(address + u64::from(offset), at, piece, skip)
                    .map_err(|_| CommandError::ProgramCheck)?;
                at += piece;
                self.done_bytes += piece as u32;
            }
            passed += area;
        }
        Ok(())
    }
}

/// How a channel program ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// It is done, well or not.
    Done(Status),
    /// It has suspended itself before the CCW at this address.
    Suspended(u32),
}

/// The status that a program ends with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Status {
    /// Absolute address, 8 above the last CCW.
    pub program: u32,
    /// Device status.
    pub device: u8,
    /// Subchannel status.
    pub subchannel: u8,
    /// Bytes not transferred.
    pub residual: u16,
}

/// A program that is under way.
pub struct Program<'a> {
    mem: &'a GuestMemory,
    orb: Orb,
    unit: &'a dyn ControlUnit,
    sense: &'a mut [u8; SENSE_BYTES],
    /// Address of the next CCW.
    next: u32,
    ccws: u32,
    interrupted: bool,
}

/// The channel finds fault with the program.
struct ProgramCheck;

impl<'a> Program<'a> {
    /// The program of `orb`, from the CCW at `start` on; `sense` are the device's sense bytes.
    pub fn new(
        mem: &'a GuestMemory,
        orb: Orb,
        start: u32,
        unit: &'a dyn ControlUnit,
        sense: &'a mut [u8; SENSE_BYTES],
    ) -> Self {
        Self {
            mem,
            orb,
            unit,
            sense,
            next: start,
            ccws: 0,
            interrupted: false,
        }
    }

    /// Runs it to its end.
    pub fn run(mut self) -> End {
        let mut first = true;
        loop {
            let Ok(ccw) = self.fetch(first) else {
                return self.checked(0);
            };
            if ccw.has(flag::SUSPEND) {
                match self.orb.has(Orb::SUSPEND) {
                    true => return End::Suspended(self.next.wrapping_sub(CCW_BYTES)),
                    false => return self.checked(ccw.count),
                }
            }
            first = false;
            let Ok((mut data, last)) = self.gather(ccw) else {
                return self.checked(ccw.count);
            };
            let result = self.execute(ccw.code, &mut data);
            let left = data.total_bytes - data.done_bytes;
            let residual = left.min(u32::from(last.count)) as u16;
            let short = data.incorrect_length;
            let mut status = self.status(residual);
            match result {
                Ok(()) => {
                    status.device = device_status::CHANNEL_END | device_status::DEVICE_END;
                }
                Err(CommandError::ProgramCheck) => return self.checked(residual),
                Err(CommandError::IncorrectLength) => {
                    status.device = device_status::CHANNEL_END | device_status::DEVICE_END;
                    status.subchannel |= subchannel_status::INCORRECT_LENGTH;
                    return End::Done(status);
                }
                Err(error) => {
                    *self.sense = [0; SENSE_BYTES];
                    self.sense[0] = match error {
                        CommandError::Failed => sense::EQUIPMENT_CHECK,
                        _ => sense::COMMAND_REJECT,
                    };
                    status.device = device_status::UNIT_CHECK;
                    return End::Done(status);
                }
            }
            if short {
                status.subchannel |= subchannel_status::INCORRECT_LENGTH;
                return End::Done(status);
            }
            if !last.has(flag::CHAIN_COMMAND) {
                return End::Done(status);
            }
        }
    }

    fn status(&self, residual: u16) -> Status {
        Status {
            program: self.next,
            residual,
            subchannel: match self.interrupted {
                true => subchannel_status::PROGRAM_CONTROLLED,
                false => 0,
            },
            ..Status::default()
        }
    }

    fn checked(&self, residual: u16) -> End {
        let mut status = self.status(residual);
        status.subchannel |= subchannel_status::PROGRAM_CHECK;
        End::Done(status)
    }

    /// The next CCW that is no transfer in channel.
    fn fetch(&mut self, first: bool) -> Result<Ccw, ProgramCheck> {
        let ccw = self.fetch_one()?;
        if !self.is_transfer(ccw) {
            return self.valid(ccw);
        }
        // Not as the first, and not one after another.
        let target = self.transfer_target(ccw)?;
        if first {
            return Err(ProgramCheck);
        }
        self.next = target;
        let ccw = self.fetch_one()?;
        match self.is_transfer(ccw) {
            true => Err(ProgramCheck),
            false => self.valid(ccw),
        }
    }

    fn fetch_one(&mut self) -> Result<Ccw, ProgramCheck> {
        let at = self.next;
        // Whatever is wrong with it, the status points behind it.
        self.next = at.wrapping_add(CCW_BYTES) & 0x7fff_ffff;
        self.ccws += 1;
        let format_1 = self.orb.has(Orb::FORMAT_1);
        let reach = if format_1 { 1 << 31 } else { 1 << 24 };
        if self.ccws > MAX_CCWS || !at.is_multiple_of(CCW_BYTES) || at >= reach {
            return Err(ProgramCheck);
        }
        let bytes = self.mem.read_obj(GuestAddress(at.into()));
        Ok(Ccw::parse(bytes.map_err(|_| ProgramCheck)?, format_1))
    }

    fn is_transfer(&self, ccw: Ccw) -> bool {
        match self.orb.has(Orb::FORMAT_1) {
            true => ccw.code == 0x08,
            false => ccw.code & 0x0f == 0x08,
        }
    }

    fn transfer_target(&self, ccw: Ccw) -> Result<u32, ProgramCheck> {
        let plain = ccw.flags == 0 && ccw.count == 0;
        match (self.orb.has(Orb::FORMAT_1), plain) {
            // Format 1 has zeroes where a transfer has nothing to say.
            (true, false) => Err(ProgramCheck),
            _ => Ok(ccw.address),
        }
    }

    fn valid(&mut self, ccw: Ccw) -> Result<Ccw, ProgramCheck> {
        let format_1 = self.orb.has(Orb::FORMAT_1);
        // The low four bits of a command are not all zero; format 0 always has a count, and so has a data chain.
        let no_command = ccw.code & 0x0f == 0;
        let no_count = ccw.count == 0 && (!format_1 || ccw.has(flag::CHAIN_DATA));
        let bad_address = format_1 && ccw.address & 1 << 31 != 0;
        if no_command || no_count || bad_address || ccw.has(flag::MODIFIED_INDIRECT) {
            return Err(ProgramCheck);
        }
        self.interrupted |= ccw.has(flag::PROGRAM_INTERRUPTION);
        Ok(ccw)
    }

    /// The data of a command, and the last CCW of its data chain.
    fn gather(&mut self, first: Ccw) -> Result<(Data<'a>, Ccw), ProgramCheck> {
        let mut data = Data {
            mem: self.mem,
            areas: Vec::new(),
            skip: Vec::new(),
            total_bytes: 0,
            done_bytes: 0,
            suppress_length: false,
            incorrect_length: false,
        };
        let mut ccw = first;
        loop {
            self.add_area(ccw, &mut data)?;
            if !ccw.has(flag::CHAIN_DATA) {
                break;
            }
            // The command of a CCW in a data chain does not count, and need not be one.
            let mut next = self.fetch_one()?;
            if self.is_transfer(next) {
                self.next = self.transfer_target(next)?;
                next = self.fetch_one()?;
                if self.is_transfer(next) {
                    return Err(ProgramCheck);
                }
            }
            next.code = first.code;
            ccw = self.valid(next)?;
        }
        // In a data chain only the last CCW's flag counts.
        data.suppress_length = ccw.has(flag::SUPPRESS_LENGTH);
        Ok((data, ccw))
    }

    fn add_area(&self, ccw: Ccw, data: &mut Data<'_>) -> Result<(), ProgramCheck> {
        let skip = ccw.has(flag::SKIP);
        let count = u32::from(ccw.count);
        if !ccw.has(flag::INDIRECT) {
            return push(data, u64::from(ccw.address), count, skip);
        }
        let format_2 = self.orb.has(Orb::FORMAT_2_IDAW);
        let block = match format_2 && !self.orb.has(Orb::IDAW_2K) {
            true => 4096,
            false => 2048u64,
        };
        let word = if format_2 { 8 } else { 4u64 };
        let mut list = u64::from(ccw.address);
        if list % word != 0 {
            return Err(ProgramCheck);
        }
        let mut left = count;
        let mut first = true;
        while left > 0 {
            let address = self.indirect_address(list, format_2)?;
            // Only the first word may point into a block.
            if !first && address % block != 0 {
                return Err(ProgramCheck);
            }
            let room = (block - address % block) as u32;
            let len = left.min(room);
            push(data, address, len, skip)?;
            left -= len;
            list += word;
            first = false;
        }
        Ok(())
    }

    fn indirect_address(&self, at: u64, format_2: bool) -> Result<u64, ProgramCheck> {
        if format_2 {
            let word = self.mem.read_obj(GuestAddress(at));
            return Ok(u64::from_be_bytes(word.map_err(|_| ProgramCheck)?));
        }
        let word = self.mem.read_obj(GuestAddress(at));
        let address = u32::from_be_bytes(word.map_err(|_| ProgramCheck)?);
        match address & 1 << 31 {
            0 => Ok(address.into()),
            _ => Err(ProgramCheck),
        }
    }

    fn execute(&mut self, code: u8, data: &mut Data<'_>) -> Result<(), CommandError> {
        match code {
            command::NOP => Ok(()),
            command::BASIC_SENSE => {
                data.at_most(SENSE_BYTES as u32);
                let sense = std::mem::replace(self.sense, [0; SENSE_BYTES]);
                data.store(&sense)
            }
            command::SENSE_ID => {
                let id = self.unit.sense_id();
                let [high, low] = id.unit_type.to_be_bytes();
                // Byte 0 is always ones; no device type, no CIWs.
                let bytes = [0xff, high, low, id.unit_model, 0, 0, 0];
                data.at_most(bytes.len() as u32);
                data.store(&bytes)
            }
            _ => self.unit.command(code, data),
        }
    }
}

fn push(data: &mut Data<'_>, address: u64, len: u32, skip: bool) -> Result<(), ProgramCheck> {
    if data.areas.len() == MAX_AREAS {
        return Err(ProgramCheck);
    }
    let total = data.total_bytes.checked_add(len).ok_or(ProgramCheck)?;
    // Addresses wrap nowhere: 64 bits of address and 16 of count.
    if address.checked_add(len.into()).is_none() || !reaches(data.mem, address, len, skip) {
        return Err(ProgramCheck);
    }
    data.areas.push((address, len));
    data.skip.push(skip);
    data.total_bytes = total;
    Ok(())
}

/// Whether the area is in memory; what is skipped need not be.
fn reaches(mem: &GuestMemory, address: u64, len: u32, skip: bool) -> bool {
    skip || len == 0 || mem.check_range(GuestAddress(address), len as usize)
}

#[cfg(test)]
mod tests;
