use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::super::testing::{ID, Machine, PROGRAM, orb};
use super::*;

const CC: u8 = 0x40;
const CD: u8 = 0x80;
const SLI: u8 = 0x20;
const SKIP: u8 = 0x10;
const IDA: u8 = 0x04;
const TIC: u8 = 0x08;
/// Device status of a good end.
const GOOD: u8 = 0x0c;
const CHECK: u8 = 0x20;
const LENGTH: u8 = 0x40;

struct Run {
    machine: Machine,
    device: u8,
    subchannel: u8,
    residual: u16,
    program: u32,
}

fn run_with(flags: u16, ccws: &[(u8, u8, u16, u32)], prepare: impl FnOnce(&Machine)) -> Run {
    let machine = Machine::enabled();
    machine.program(ccws);
    prepare(&machine);
    assert_eq!(machine.css.start(ID, &orb(flags)), 0);
    let (cc, irb) = machine.test();
    assert_eq!(cc, 0);
    Run {
        machine,
        device: irb[8],
        subchannel: irb[9],
        residual: u16::from_be_bytes([irb[10], irb[11]]),
        program: u32::from_be_bytes([irb[4], irb[5], irb[6], irb[7]]),
    }
}

fn run(ccws: &[(u8, u8, u16, u32)]) -> Run {
    run_with(0, ccws, |_| ())
}

#[test]
fn every_ccw_with_good_and_bad_operands() {
    let end = |ccws: &[_]| {
        let run = run(ccws);
        (run.device, run.subchannel, run.residual)
    };
    // Commands of every device.
    assert_eq!(end(&[(3, 0, 0, 0)]), (GOOD, 0, 0));
    assert_eq!(end(&[(0xe4, 0, 7, 0x3000)]), (GOOD, 0, 0));
    assert_eq!(end(&[(0xe4, SLI, 16, 0x3000)]), (GOOD, 0, 9));
    assert_eq!(end(&[(0xe4, 0, 16, 0x3000)]), (GOOD, LENGTH, 9));
    assert_eq!(end(&[(0x04, 0, 32, 0x3000)]), (GOOD, 0, 0));
    // A device's own, with lengths that are right, long and short.
    assert_eq!(end(&[(2, 0, 8, 0x3000)]), (GOOD, 0, 0));
    assert_eq!(end(&[(2, 0, 12, 0x3000)]), (GOOD, LENGTH, 4));
    assert_eq!(end(&[(2, SLI, 12, 0x3000)]), (GOOD, 0, 4));
    assert_eq!(end(&[(2, 0, 4, 0x3000)]), (GOOD, LENGTH, 4));
    assert_eq!(end(&[(1, SLI, 4, 0x3000)]).0, 0x02, "not enough data");
    assert_eq!(end(&[(0xff, 0, 8, 0x3000)]).0, 0x02, "unknown");
    // What the channel refuses.
    for (what, ccw) in [
        ("no command", (0x00, 0, 8, 0x3000)),
        ("no command", (0x10, 0, 8, 0x3000)),
        ("address of 32 bits", (2, 0, 8, 0x8000_3000)),
        ("address outside memory", (2, 0, 8, 0x10_0000)),
        ("address across the end", (2, 0, 8, 0x0f_fffc)),
        ("modified indirection", (2, 0x01, 8, 0x3000)),
        ("data chain without count", (2, CD, 0, 0x3000)),
        ("suspension without leave", (2, 0x02, 8, 0x3000)),
        ("misaligned list", (2, IDA, 8, 0x3002)),
        ("list outside memory", (2, IDA, 8, 0x10_0000)),
        ("transfer first", (TIC, 0, 0, PROGRAM)),
    ] {
        assert_eq!(end(&[ccw]).1 & CHECK, CHECK, "{what}");
    }
}

#[test]
fn command_chains_end_with_the_last_or_the_first_that_fails() {
    let good = run(&[(2, CC, 8, 0x3000), (1, CC, 8, 0x3000), (3, 0, 0, 0)]);
    assert_eq!((good.device, good.subchannel), (GOOD, 0));
    assert_eq!(good.program, PROGRAM + 24);
    assert_eq!(*good.machine.unit.taken.lock().unwrap(), b"ABCDEFGH");
    let failed = run(&[(0xff, CC, 0, 0), (1, 0, 8, 0x3000)]);
    assert_eq!(failed.program, PROGRAM + 8);
    assert!(failed.machine.unit.taken.lock().unwrap().is_empty());
    let wrong_length = run(&[(2, CC, 12, 0x3000), (1, 0, 8, 0x3000)]);
    assert_eq!(wrong_length.subchannel, LENGTH);
    assert_eq!(wrong_length.program, PROGRAM + 8);
    let suppressed = run(&[(2, CC | SLI, 12, 0x3000), (1, 0, 8, 0x3000)]);
    assert_eq!(suppressed.subchannel, 0);
    let interrupting = run(&[(3, CC | 0x08, 0, 0), (3, 0, 0, 0)]);
    assert_eq!((interrupting.device, interrupting.subchannel), (GOOD, 0x80));
}

#[test]
fn data_chains_scatter_and_gather() {
    let chain = [
        (2, CD, 3, 0x3000),
        (0, CD | SKIP, 1, 0x3100),
        (0, 0, 4, 0x3200),
    ];
    let end = run(&chain);
    assert_eq!((end.device, end.subchannel, end.residual), (GOOD, 0, 0));
    let read = |at| -> [u8; 4] { end.machine.mem.read_obj(GuestAddress(at)).unwrap() };
    assert_eq!(&read(0x3000), b"ABC\0");
    assert_eq!(&read(0x3100), b"\0\0\0\0", "skipped");
    assert_eq!(&read(0x3200), b"EFGH");
    // The residual count is the last CCW's.
    let long = run(&[(2, CD, 4, 0x3000), (0, 0, 16, 0x3200)]);
    assert_eq!((long.subchannel, long.residual), (LENGTH, 12));
    // A transfer within a data chain, and two in a row.
    let through = [
        (2, CD, 4, 0x3000),
        (TIC, 0, 0, PROGRAM + 24),
        (0, 0, 0, 0),
        (0, 0, 4, 0x3200),
    ];
    assert_eq!(run(&through).subchannel, 0);
    let twice = [
        (2, CD, 4, 0x3000),
        (TIC, 0, 0, PROGRAM + 16),
        (TIC, 0, 0, PROGRAM),
    ];
    assert_eq!(run(&twice).subchannel, CHECK);
}

#[test]
fn transfers_in_channel() {
    let jump = [
        (3, CC, 0, 0),
        (TIC, 0, 0, PROGRAM + 24),
        (0xff, 0, 0, 0),
        (2, 0, 8, 0x3000),
    ];
    let end = run(&jump);
    assert_eq!((end.device, end.program), (GOOD, PROGRAM + 32));
    for (flags, count, target) in [
        (CC, 0, PROGRAM),
        (0, 1, PROGRAM),
        (0, 0, PROGRAM + 4),
        (0, 0, 0x8000_0000),
        (0, 0, 0x10_0000),
    ] {
        let end = run(&[(3, CC, 0, 0), (TIC, flags, count, target)]);
        assert_eq!(end.subchannel, CHECK, "{flags:#x} {count} {target:#x}");
    }
    let twice = [
        (3, CC, 0, 0),
        (TIC, 0, 0, PROGRAM + 16),
        (TIC, 0, 0, PROGRAM),
    ];
    assert_eq!(run(&twice).subchannel, CHECK);
}

#[test]
fn a_loop_ends() {
    let end = run(&[(3, CC, 0, 0), (TIC, 0, 0, PROGRAM)]);
    assert_eq!(end.subchannel, CHECK);
    let end = run(&[(2, CD, 1, 0x3000), (TIC, 0, 0, PROGRAM)]);
    assert_eq!(end.subchannel, CHECK);
}

#[test]
fn indirect_addresses_of_both_formats() {
    let list = |words: &'static [u64], wide: bool| {
        move |machine: &Machine| {
            let mut at = 0x4000;
            for word in words {
                let address = GuestAddress(at);
                if wide {
                    machine.mem.write_obj(word.to_be_bytes(), address).unwrap();
                    at += 8;
                } else {
                    let word = (*word as u32).to_be_bytes();
                    machine.mem.write_obj(word, address).unwrap();
                    at += 4;
                }
            }
        }
    };
    let ccw = [(2, IDA, 8, 0x4000)];
    let read = |run: &Run, at| -> [u8; 4] { run.machine.mem.read_obj(GuestAddress(at)).unwrap() };
    // Format 1: blocks of 2 KiB.
    let end = run_with(0, &ccw, list(&[0x37fd, 0x5000], false));
    assert_eq!((end.device, end.subchannel), (GOOD, 0));
    assert_eq!(&read(&end, 0x37fc), b"\0ABC");
    assert_eq!(&read(&end, 0x5000), b"DEFG");
    // Format 2: blocks of 4 KiB, or of 2.
    let end = run_with(Orb::FORMAT_2_IDAW, &ccw, list(&[0x3ffe, 0x5000], true));
    assert_eq!((end.device, end.subchannel), (GOOD, 0));
    assert_eq!(&read(&end, 0x5000), b"CDEF");
    let flags = Orb::FORMAT_2_IDAW | Orb::IDAW_2K;
    let end = run_with(flags, &ccw, list(&[0x37fe, 0x5800], true));
    assert_eq!(&read(&end, 0x5800), b"CDEF");
    for (flags, words, wide) in [
        (0, &[0x37fd, 0x5001][..], false),
        (0, &[0x8000_3000][..], false),
        (Orb::FORMAT_2_IDAW, &[0x3ffe, 0x5800][..], true),
        (Orb::FORMAT_2_IDAW, &[u64::MAX - 2][..], true),
        (Orb::FORMAT_2_IDAW, &[0x10_0000][..], true),
    ] {
        let end = run_with(flags, &ccw, list(words, wide));
        assert_eq!(end.subchannel, CHECK, "{words:x?}");
    }
}

#[test]
fn format_0_has_24_bits_and_always_a_count() {
    let machine = Machine::enabled();
    let start = |ccw: [u8; 8]| {
        machine
            .mem
            .write_obj(ccw, GuestAddress(PROGRAM.into()))
            .unwrap();
        let mut request = orb(0);
        request.flags = 0;
        assert_eq!(machine.css.start(ID, &request), 0);
        let irb = machine.test().1;
        (irb[8], irb[9])
    };
    assert_eq!(start([2, 0, 0x30, 0, 0, 0, 0, 8]), (GOOD, 0));
    assert_eq!(start([3, 0, 0x30, 0, 0, 0, 0, 0]), (0, CHECK));
}

#[test]
fn programs_where_none_can_be() {
    let machine = Machine::enabled();
    for (flags, address) in [
        (Orb::FORMAT_1, 0x2004),
        (Orb::FORMAT_1, 0x10_0000),
        (Orb::FORMAT_1, 0x7fff_fff8),
        (0, 0x0100_0000),
    ] {
        let mut request = orb(0);
        (request.flags, request.program) = (flags, address);
        assert_eq!(machine.css.start(ID, &request), 0);
        assert_eq!(machine.test().1[9], CHECK, "{address:#x}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever is in memory, a start ends with a status.
    #[test]
    fn any_program_ends(
        flags in any::<u16>(),
        bytes in prop::collection::vec(any::<u8>(), 64),
        small in any::<bool>(),
    ) {
        let machine = Machine::enabled();
        let mut bytes = bytes;
        if small {
            // Addresses that are likely to be in memory, and commands that are known.
            for ccw in bytes.chunks_mut(8) {
                ccw[0] = [1, 2, 3, 4, 8, 0xe4][usize::from(ccw[0]) % 6];
                (ccw[2], ccw[4], ccw[5], ccw[6]) = (0, 0, 0, 0x20);
            }
        }
        machine.mem.write_slice(&bytes, GuestAddress(PROGRAM.into())).unwrap();
        prop_assert_eq!(machine.css.start(ID, &orb(flags)), 0);
        let schib = super::super::testing::schib(&machine.css);
        prop_assert!(schib.pmcw.parameter == 0x1234_5678);
        let (cc, _) = machine.test();
        prop_assert!(cc == 0 || flags & (Orb::SUSPEND | Orb::SUPPRESS_SUSPENDED) != 0);
    }
}
