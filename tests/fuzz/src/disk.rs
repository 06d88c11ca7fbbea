//! Requests of a driver that knows the rules, and of one that breaks some, against a disk in a vector.
//!
//! A request without faults must be answered as the specification says (VIRTIO 1.2, section 5.2.6);
//! one with faults must be answered somehow, or make the device want a reset, after which it works.

use std::cell::RefCell;

use arbitrary::{Arbitrary, Unstructured};
use vm_memory::{Bytes, GuestAddress};

use crate::machine::{DESC, DISK_BYTES, Descriptor, End, Machine, QUEUE_SIZE};

const SECTOR: u64 = 512;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Where a request's indirect table, header, data and status lie.
const TABLE: u64 = 0x8000;
const HEADER: u64 = 0xa000;
const STATUS: u64 = 0xb000;
const DATA: u64 = 0x10_0000;
/// Longest data of a request.
const MAX_DATA: u32 = 80 << 10;

#[derive(Debug, Arbitrary)]
struct Input {
    event_idx: bool,
    requests: Vec<Request>,
}

#[derive(Debug, Arbitrary)]
struct Request {
    kind: Kind,
    sector: u8,
    far: Option<u64>,
    /// Whole sectors, then bytes besides.
    sectors: u8,
    odd_bytes: Option<u8>,
    range_sectors: u8,
    range_flags: u8,
    fill: u8,
    /// Lengths of the pieces that the data is cut into.
    cuts: Vec<u16>,
    indirect: bool,
    faults: Vec<Fault>,
}

#[derive(Debug, Clone, Copy, Arbitrary)]
enum Kind {
    In,
    Out,
    Flush,
    GetId,
    Discard,
    WriteZeroes,
    Other(u32),
}

impl Kind {
    fn number(self) -> u32 {
        match self {
            Self::In => 0,
            Self::Out => 1,
            Self::Flush => 4,
            Self::GetId => 8,
            Self::Discard => 11,
            Self::WriteZeroes => 13,
            Self::Other(number) => number,
        }
    }
}

#[derive(Debug, Arbitrary)]
enum Fault {
    Address(u8, u64),
    Length(u8, u32),
    Flags(u8, u16),
    Next(u8, u16),
    Head(u16),
    Ahead(u16),
}

/// What the driver expects of a request.
#[derive(Debug, PartialEq)]
enum Expected {
    Status(u8),
    /// Status 0, and this is read.
    Data(Vec<u8>),
}

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// The target.
pub fn requests(input: &[u8]) {
    thread_local! {
        static MACHINE: RefCell<Machine> = RefCell::default();
    }
    let Ok(input) = Input::arbitrary_take_rest(Unstructured::new(input)) else {
        return;
    };
    MACHINE.with_borrow_mut(|machine| {
        machine.start(input.event_idx);
        let mut model = machine.image();
        for request in input.requests.iter().take(16) {
            if !one(machine, &mut model, request) {
                machine.start(input.event_idx);
                model = machine.image();
            }
        }
        machine.reset();
        assert!(
            machine.image() == model,
            "the image is not what was written"
        );
    });
}

/// Sends a request. False if the device was left in a state that only a reset ends.
fn one(machine: &mut Machine, model: &mut [u8], request: &Request) -> bool {
    let sector = request.far.unwrap_or(request.sector.into());
    let mut header = [0; 16];
    header[..4].copy_from_slice(&request.kind.number().to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    machine
        .mem
        .write_slice(&header, GuestAddress(HEADER))
        .unwrap();
    machine.mem.write_obj(0xffu8, GuestAddress(STATUS)).unwrap();

    let bytes = data_bytes(request);
    let payload = payload(request, bytes);
    machine
        .mem
        .write_slice(&payload, GuestAddress(DATA))
        .unwrap();
    let reads = matches!(request.kind, Kind::In | Kind::GetId | Kind::Other(_));
    let mut chain = vec![(HEADER, 16, 0)];
    chain.extend(pieces(bytes, request, if reads { WRITE } else { 0 }));
    chain.push((STATUS, 1, WRITE));

    let last = chain.len() - 1;
    let mut table: Vec<Descriptor> = (1u16..)
        .zip(&chain)
        .map(|(next, &(address, len, flags))| Descriptor {
            address,
            len,
            flags: flags | NEXT,
            next,
        })
        .collect();
    table[last].flags &= !NEXT;
    let (mut head, mut ahead) = (0, 0);
    let faults = &request.faults[..request.faults.len().min(3)];
    for fault in faults {
        let at = |index: u8| usize::from(index) % (last + 1);
        match *fault {
            Fault::Address(index, address) => table[at(index)].address = address,
            Fault::Length(index, len) => table[at(index)].len = len,
            Fault::Flags(index, flags) => table[at(index)].flags = flags,
            Fault::Next(index, next) => table[at(index)].next = next,
            Fault::Head(wrong) => head = wrong,
            // Once round would be no request at all, and no answer.
            Fault::Ahead(count) => ahead = count % u16::MAX,
        }
    }
    let base = if request.indirect { TABLE } else { DESC };
    for (index, descriptor) in (0..).zip(&table) {
        machine.describe(base, index, *descriptor);
    }
    if request.indirect {
        let indirect = Descriptor {
            address: TABLE,
            len: 16 * table.len() as u32,
            flags: INDIRECT,
            next: 0,
        };
        machine.describe(DESC, 0, indirect);
    }
    machine.offer(head, ahead);
    let end = machine.wait();
    if !faults.is_empty() {
        // Anything goes but a hang; what was written where is not known.
        return false;
    }
    assert_eq!(end, End::Used, "{request:?}");
    let expected = expected(request, sector, bytes, &payload, model);
    let status: u8 = machine.mem.read_obj(GuestAddress(STATUS)).unwrap();
    match expected {
        Expected::Status(wanted) => assert_eq!(status, wanted, "{request:?}"),
        Expected::Data(wanted) => {
            assert_eq!(status, OK, "{request:?}");
            let mut data = vec![0; wanted.len()];
            machine
                .mem
                .read_slice(&mut data, GuestAddress(DATA))
                .unwrap();
            assert!(data == wanted, "{request:?}");
        }
    }
    if matches!(request.kind, Kind::Discard) {
        // Discarded sectors may read as anything, but always the same until they are written.
        model.copy_from_slice(&machine.image());
    }
    true
}

fn data_bytes(request: &Request) -> u32 {
    match request.kind {
        Kind::In | Kind::Out | Kind::Other(_) => {
            let sectors = u32::from(request.sectors) % 160 * SECTOR as u32;
            (sectors + u32::from(request.odd_bytes.unwrap_or(0))).min(MAX_DATA)
        }
        Kind::GetId => 20,
        Kind::Discard | Kind::WriteZeroes => 16,
        Kind::Flush => 0,
    }
}

fn payload(request: &Request, bytes: u32) -> Vec<u8> {
    match request.kind {
        Kind::Discard | Kind::WriteZeroes => {
            let sector = request.far.unwrap_or(request.sector.into());
            let mut range = sector.to_le_bytes().to_vec();
            range.extend(u32::from(request.range_sectors).to_le_bytes());
            range.extend(u32::from(request.range_flags).to_le_bytes());
            range
        }
        _ => (0..bytes)
            .map(|at| request.fill ^ (at % 251) as u8)
            .collect(),
    }
}

/// The data's descriptors: as many pieces as the queue has room for, the last with what is left.
fn pieces(bytes: u32, request: &Request, flags: u16) -> Vec<(u64, u32, u16)> {
    let room = usize::from(QUEUE_SIZE) - 3;
    let mut pieces = Vec::new();
    let mut at = 0;
    let cuts = request.cuts.iter().map(|cut| u32::from(*cut)).take(room);
    for cut in cuts.filter(|cut| *cut > 0).chain([u32::MAX]) {
        let len = cut.min(bytes - at);
        if len == 0 {
            break;
        }
        pieces.push((DATA + u64::from(at), len, flags));
        at += len;
    }
    pieces
}

/// What a working disk answers, and what the model holds then.
fn expected(
    request: &Request,
    sector: u64,
    bytes: u32,
    payload: &[u8],
    model: &mut [u8],
) -> Expected {
    let capacity = DISK_BYTES as u64 / SECTOR;
    let within = |sectors: u64| {
        sector
            .checked_add(sectors)
            .is_some_and(|end| end <= capacity)
    };
    let range = |sectors: u64| {
        let begin = (sector * SECTOR) as usize;
        begin..begin + (sectors * SECTOR) as usize
    };
    match request.kind {
        Kind::In | Kind::Out | Kind::Other(0 | 1) => {
            let sectors = u64::from(bytes) / SECTOR;
            if !u64::from(bytes).is_multiple_of(SECTOR) || !within(sectors) {
                return Expected::Status(IOERR);
            }
            match request.kind {
                Kind::In | Kind::Other(0) => Expected::Data(model[range(sectors)].to_vec()),
                Kind::Out => {
                    model[range(sectors)].copy_from_slice(payload);
                    Expected::Status(OK)
                }
                // A write whose data the device could only write to: it has none.
                _ if within(0) => Expected::Status(OK),
                _ => Expected::Status(IOERR),
            }
        }
        Kind::Flush | Kind::Other(4) => Expected::Status(OK),
        Kind::GetId => {
            let mut serial = b"fuzz".to_vec();
            serial.resize(20, 0);
            Expected::Data(serial)
        }
        Kind::Discard | Kind::WriteZeroes => {
            let zeroes = matches!(request.kind, Kind::WriteZeroes);
            let unmap_only = if zeroes { 1 } else { 0 };
            if request.range_flags & !unmap_only != 0 {
                return Expected::Status(UNSUPP);
            }
            let sectors = u64::from(request.range_sectors);
            if !within(sectors) {
                return Expected::Status(IOERR);
            }
            if zeroes {
                model[range(sectors)].fill(0);
            }
            Expected::Status(OK)
        }
        Kind::Other(8) => Expected::Status(if bytes > 0 { OK } else { UNSUPP }),
        Kind::Other(_) => Expected::Status(UNSUPP),
    }
}
