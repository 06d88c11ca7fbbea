//! CHANNEL SUBSYSTEM CALL: a command block of the guest, and its answer behind it in the same page.

use super::{CHANNEL_PATH, CHANNEL_PATH_TYPE, Outcome, ProgramInterruption};

/// The command block's page.
pub const BLOCK_BYTES: usize = 4096;
/// Longest request, and the least room that its answer has.
const MAX_REQUEST_BYTES: usize = 0xff8;
const MIN_REQUEST_BYTES: usize = 16;

/// Commands.
mod code {
    pub const STORE_PATH_DESCRIPTION: u16 = 0x0002;
    pub const STORE_EVENT: u16 = 0x000e;
    pub const STORE_CHARACTERISTICS: u16 = 0x0010;
    pub const SET_DOMAIN_ATTRIBUTES: u16 = 0x0031;
}

/// Response codes.
mod response {
    pub const OK: u16 = 0x0001;
    pub const INVALID_REQUEST: u16 = 0x0003;
    pub const UNSUPPORTED: u16 = 0x0004;
    pub const NO_EVENT: u16 = 0x0005;
    pub const INVALID_FORMAT: u16 = 0x0007;
    pub const INVALID_OPERATION: u16 = 0x0101;
}

/// What a command changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    Nothing,
    /// All subchannel sets are visible.
    AllSets,
}

/// The answer to a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Where in the page it goes.
    pub offset: usize,
    /// Length, code, and data.
    pub bytes: Vec<u8>,
}

fn header(code: u16, data: &[u8]) -> Vec<u8> {
    // Four bytes of length and code, four reserved.
    let len = (data.len() + 8) as u16;
    let mut bytes = Vec::with_capacity(len.into());
    bytes.extend(len.to_be_bytes());
    bytes.extend(code.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend(data);
    bytes
}

fn word(block: &[u8; BLOCK_BYTES], index: usize) -> u32 {
    let at = index * 4;
    u32::from_be_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Answers the command in `block`.
///
/// # Errors
/// An operand exception for a request of impossible length.
pub(super) fn answer(block: &[u8; BLOCK_BYTES]) -> Outcome<(Answer, Effect)> {
    let offset = usize::from(u16::from_be_bytes([block[0], block[1]]));
    if !(MIN_REQUEST_BYTES..=MAX_REQUEST_BYTES).contains(&offset) || offset % 8 != 0 {
        return Err(ProgramInterruption::Operand);
    }
    let mut effect = Effect::Nothing;
    let mut bytes = match u16::from_be_bytes([block[2], block[3]]) {
        code::STORE_PATH_DESCRIPTION => path_description(block, offset),
        code::STORE_EVENT => plain(offset, 0x0010, response::NO_EVENT),
        code::STORE_CHARACTERISTICS => characteristics(block, offset),
        code::SET_DOMAIN_ATTRIBUTES => {
            let bytes = domain_attributes(block, offset);
            if bytes[3] == response::OK as u8 {
                effect = Effect::AllSets;
            }
            bytes
        }
        _ => header(response::UNSUPPORTED, &[]),
    };
    if bytes.len() > BLOCK_BYTES - offset {
        bytes = header(response::INVALID_REQUEST, &[]);
    }
    Ok((Answer { offset, bytes }, effect))
}

/// An answer without data to a request that must have `len` bytes.
fn plain(offset: usize, len: usize, code: u16) -> Vec<u8> {
    match offset == len {
        true => header(code, &[]),
        false => header(response::INVALID_REQUEST, &[]),
    }
}

/// Store channel-path description, formats 0 and 1.
fn path_description(block: &[u8; BLOCK_BYTES], offset: usize) -> Vec<u8> {
    if offset != 0x0010 {
        return header(response::INVALID_REQUEST, &[]);
    }
    let (selection, last, reserved) = (word(block, 1), word(block, 2), word(block, 3));
    let (first_path, last_path) = (selection as u8, last as u8);
    let cssid = selection >> 16 & 0xff;
    let format = selection >> 24 & 0x0f;
    let response_format = selection >> 8 & 0x0f;
    if selection & 0xc000_f000 != 0 || last >> 8 != 0 || reserved != 0 || last_path < first_path {
        return header(response::INVALID_REQUEST, &[]);
    }
    if format != 0 || cssid != 0 {
        return header(response::INVALID_REQUEST, &[]);
    }
    let len = match response_format {
        0 => 8,
        1 => 32,
        _ => return header(response::INVALID_FORMAT, &[]),
    };
    let mut data = Vec::new();
    if (first_path..=last_path).contains(&CHANNEL_PATH) {
        // Valid; type; ID.
        let mut description = vec![0x80, 0, CHANNEL_PATH_TYPE, CHANNEL_PATH];
        description.resize(len, 0);
        data.extend(description);
    }
    header(response::OK, &data)
}

/// Store channel-subsystem characteristics.
fn characteristics(block: &[u8; BLOCK_BYTES], offset: usize) -> Vec<u8> {
    if offset != 0x0010 || word(block, 1) & 0xf000_f000 != 0 {
        return header(response::INVALID_REQUEST, &[]);
    }
    if word(block, 2) != 0 || word(block, 3) != 0 {
        return header(response::INVALID_REQUEST, &[]);
    }
    // 510 words of general characteristics, 508 of those of this call.
    let mut data = vec![0; (510 + 508) * 4];
    // Multiple subchannel sets (45), measurement blocks of format 1 (48).
    for bit in [45, 48] {
        data[bit / 8] |= 0x80 >> (bit % 8);
    }
    header(response::OK, &data)
}

/// Set domain attributes: the guest can have more than one subchannel set.
fn domain_attributes(block: &[u8; BLOCK_BYTES], offset: usize) -> Vec<u8> {
    const ALL_SETS: u32 = 2;
    if offset != 0x0400 || word(block, 1) & 0xf0ff_0000 != 0 {
        return header(response::INVALID_REQUEST, &[]);
    }
    if word(block, 1) >> 24 & 0x0f != 0 {
        return header(response::INVALID_FORMAT, &[]);
    }
    match word(block, 1) & 0xffff {
        ALL_SETS => header(response::OK, &[]),
        _ => header(response::INVALID_OPERATION, &[]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(len: u16, code: u16, words: &[u32]) -> [u8; BLOCK_BYTES] {
        let mut block = [0; BLOCK_BYTES];
        block[..2].copy_from_slice(&len.to_be_bytes());
        block[2..4].copy_from_slice(&code.to_be_bytes());
        for (at, word) in (4..).step_by(4).zip(words) {
            block[at..at + 4].copy_from_slice(&word.to_be_bytes());
        }
        block
    }

    fn code_of(block: &[u8; BLOCK_BYTES]) -> u16 {
        let (answer, _) = answer(block).unwrap();
        let len = u16::from_be_bytes([answer.bytes[0], answer.bytes[1]]);
        assert_eq!(usize::from(len), answer.bytes.len());
        assert!(answer.offset + answer.bytes.len() <= BLOCK_BYTES);
        u16::from_be_bytes([answer.bytes[2], answer.bytes[3]])
    }

    #[test]
    fn requests_of_impossible_length_are_operand_exceptions() {
        for len in [0, 8, 12, 17, 0xff9, 0x1000, 0xffff] {
            let refused = answer(&block(len, 0x0010, &[]));
            assert_eq!(refused, Err(ProgramInterruption::Operand), "{len:#x}");
        }
    }

    #[test]
    fn every_command_with_good_and_bad_operands() {
        let table: &[(u16, u16, &[u32], u16)] = &[
            // Store path description.
            (0x10, 0x02, &[0, 0], 1),
            (0x10, 0x02, &[0, 255], 1),
            (0x10, 0x02, &[0x0000_0100, 0], 1),
            (0x10, 0x02, &[0x0000_0200, 0], 7),
            (0x10, 0x02, &[5, 4], 3),
            (0x10, 0x02, &[0x0001_0000, 0], 3),
            (0x10, 0x02, &[0x8000_0000, 0], 3),
            (0x10, 0x02, &[0, 0x100], 3),
            (0x10, 0x02, &[0, 0, 1], 3),
            (0x18, 0x02, &[0, 0], 3),
            // Store event information.
            (0x10, 0x0e, &[], 5),
            (0x20, 0x0e, &[], 3),
            // Store characteristics.
            (0x10, 0x10, &[], 1),
            (0x10, 0x10, &[0x1000_0000], 3),
            (0x10, 0x10, &[0, 1], 3),
            (0x10, 0x10, &[0, 0, 1], 3),
            (0x20, 0x10, &[], 3),
            // Set domain attributes.
            (0x400, 0x31, &[2], 1),
            (0x400, 0x31, &[0], 0x101),
            (0x400, 0x31, &[0x0100_0002], 7),
            (0x400, 0x31, &[0x8000_0002], 3),
            (0x10, 0x31, &[2], 3),
            // What is not there.
            (0x10, 0x04, &[], 4),
            (0x10, 0x33, &[], 4),
            (0x10, 0x34, &[], 4),
            (0x10, 0x4c, &[], 4),
            (0x10, 0xffff, &[], 4),
        ];
        for &(len, command, words, expected) in table {
            let code = code_of(&block(len, command, words));
            assert_eq!(code, expected, "{command:#x} {len:#x} {words:x?}");
        }
    }

    #[test]
    fn characteristics_fill_the_page_and_name_the_subchannel_sets() {
        let (answer, _) = answer(&block(0x10, 0x10, &[])).unwrap();
        assert_eq!(answer.offset + answer.bytes.len(), BLOCK_BYTES);
        assert_eq!(&answer.bytes[8..16], [0, 0, 0, 0, 0, 4, 0x80, 0]);
    }

    #[test]
    fn the_only_path_is_described_where_it_is_asked_for() {
        let (path, _) = answer(&block(0x10, 0x02, &[0, 255])).unwrap();
        assert_eq!(&path.bytes[8..], [0x80, 0, 0x32, 0, 0, 0, 0, 0]);
        let (none, _) = answer(&block(0x10, 0x02, &[1, 255])).unwrap();
        assert_eq!(none.bytes.len(), 8);
        let (long, _) = answer(&block(0x10, 0x02, &[0x100, 0])).unwrap();
        assert_eq!(long.bytes.len(), 8 + 32);
        let (_, effect) = answer(&block(0x400, 0x31, &[2])).unwrap();
        assert_eq!(effect, Effect::AllSets);
    }
}
