//! Walking a descriptor chain.

use std::marker::PhantomData;

use super::{Error, MAX_SIZE};
use crate::virtio::ram::Ram;

/// Bytes of a descriptor in its table.
const BYTES: usize = 16;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// One buffer of a chain, as the driver described it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Guest address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u32,
    /// The device writes to it; else it reads from it.
    pub writable: bool,
}

/// The buffers of a chain in order; an indirect table's entries take the place of the descriptor
/// that refers to it. After an error there are no more.
pub struct Chain<'a> {
    ram: &'a Ram,
    table: *const u8,
    table_len: u32,
    next: Option<u16>,
    // Descriptors left before the chain must be a loop; over tables, before it is too long.
    table_left: u32,
    total_left: u32,
    indirect_allowed: bool,
    in_indirect: bool,
    _table: PhantomData<&'a [u8]>,
}

impl<'a> Chain<'a> {
    #[inline]
    pub(super) fn new(
        ram: &'a Ram,
        table: *const u8,
        size: u16,
        indirect_allowed: bool,
        head: u16,
    ) -> Chain<'a> {
        Chain {
            ram,
            table,
            table_len: u32::from(size),
            next: Some(head),
            table_left: u32::from(size),
            total_left: u32::from(MAX_SIZE),
            indirect_allowed,
            in_indirect: false,
            _table: PhantomData,
        }
    }

    #[inline]
    fn read(&self, index: u16) -> (u64, u32, u16, u16) {
        // SAFETY: `index` is below `table_len`, and the table is in RAM that `ram` keeps mapped.
        let entry = unsafe { self.table.add(usize::from(index) * BYTES) };
        let bytes: [u64; 2] = if entry.addr() % align_of::<u64>() == 0 {
            // SAFETY: 16 bytes within the table, aligned as just seen.
            unsafe { entry.cast::<[u64; 2]>().read_volatile() }
        } else {
            // An indirect table may be anywhere.
            // SAFETY: 16 bytes within the table; bytes need no alignment.
            let raw = unsafe { entry.cast::<[u8; BYTES]>().read_volatile() };
            let half = |at: usize| u64::from_ne_bytes(std::array::from_fn(|i| raw[at + i]));
            [half(0), half(8)]
        };
        let rest = u64::from_le(bytes[1]);
        (
            u64::from_le(bytes[0]),
            rest as u32,
            (rest >> 32) as u16,
            (rest >> 48) as u16,
        )
    }

    fn enter_indirect(&mut self, addr: u64, len: u32, flags: u16) -> Result<(), Error> {
        if !self.indirect_allowed {
            return Err(Error::Indirect("not negotiated"));
        }
        if self.in_indirect {
            return Err(Error::Indirect("inside an indirect table"));
        }
        if flags & NEXT != 0 {
            return Err(Error::Indirect("it has a next"));
        }
        let entries = len / BYTES as u32;
        if !len.is_multiple_of(BYTES as u32) || entries == 0 || entries > u32::from(u16::MAX) {
            return Err(Error::Indirect("table size"));
        }
        self.table = self
            .ram
            .contiguous(addr, u64::from(len))
            .ok_or(Error::Indirect("table outside guest RAM"))?;
        self.table_len = entries;
        self.table_left = entries;
        self.in_indirect = true;
        self.next = Some(0);
        Ok(())
    }

    #[inline]
    fn step(&mut self, index: u16) -> Result<Option<Descriptor>, Error> {
        if u32::from(index) >= self.table_len {
            return Err(Error::Index {
                index,
                len: self.table_len,
            });
        }
        if self.table_left == 0 || self.total_left == 0 {
            return Err(Error::Loop);
        }
        self.table_left -= 1;
        let (addr, len, flags, next) = self.read(index);
        if flags & INDIRECT != 0 {
            self.enter_indirect(addr, len, flags)?;
            return Ok(None);
        }
        self.total_left -= 1;
        self.next = (flags & NEXT != 0).then_some(next);
        Ok(Some(Descriptor {
            addr,
            len,
            writable: flags & WRITE != 0,
        }))
    }
}

impl Iterator for Chain<'_> {
    type Item = Result<Descriptor, Error>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let index = self.next.take()?;
            // An indirect descriptor yields nothing itself and sends us into its table, at most
            // once a chain.
            match self.step(index).transpose() {
                Some(result) => return Some(result),
                None => continue,
            }
        }
    }
}
