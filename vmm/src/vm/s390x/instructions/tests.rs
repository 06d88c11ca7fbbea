use std::sync::{Arc, Mutex};

use arch::s390x::sclp::{Inventory, Sclp};
use devices::channel::{CommandError, ControlUnit, Interruptions, IoInterruption, SenseId};
use proptest::prelude::*;

use super::*;
use crate::vm::memory::GuestMemory;
use crate::vm::s390x::board::Floating;

/// Real addresses are absolute ones here, but for the prefix.
const PREFIX: u64 = 0x8_0000;
const OPERATION: u16 = 1;
const PRIVILEGED: u16 = 2;
const ADDRESSING: u16 = 5;
const SPECIFICATION: u16 = 6;
const OPERAND: u16 = 0x15;

#[derive(Default)]
struct Signals(Mutex<Vec<u32>>);

impl Interruptions for Signals {
    fn subchannel(&self, _: IoInterruption) {}
    fn withdraw(&self, _: SubchannelId) {}
    fn adapter(&self, _: u8) {}
    fn channel_report(&self) {}
}

impl Floating for Signals {
    fn service(&self, parameter: u32) {
        self.0.lock().unwrap().push(parameter);
    }
}

struct Nothing;

impl ControlUnit for Nothing {
    fn sense_id(&self) -> SenseId {
        SenseId {
            unit_type: 0x3832,
            unit_model: 2,
        }
    }
    fn command(
        &self,
        _: u8,
        _: &mut devices::channel::program::Data<'_>,
    ) -> Result<(), CommandError> {
        Err(CommandError::Rejected)
    }
    fn reset(&self) {}
}

struct TestCpu {
    memory: GuestMemory,
    registers: [u64; 16],
    problem: bool,
    code: Option<u8>,
    pending: Option<[u32; 3]>,
    fault: Fault,
}

impl Cpu for TestCpu {
    fn register(&self, number: u8) -> u64 {
        self.registers[usize::from(number)]
    }
    fn set_register(&mut self, number: u8, value: u64) {
        self.registers[usize::from(number)] = value;
    }
    fn problem_state(&self) -> bool {
        self.problem
    }
    fn prefix(&self) -> u64 {
        PREFIX
    }
    fn set_condition_code(&mut self, code: u8) {
        self.code = Some(code);
    }
    fn read(&mut self, address: u64, _: u8, bytes: &mut [u8]) -> Result<(), Fault> {
        let read = self.memory.read_slice(bytes, GuestAddress(address));
        read.map_err(|_| self.fault)
    }
    fn write(&mut self, address: u64, _: u8, bytes: &[u8]) -> Result<(), Fault> {
        let written = self.memory.write_slice(bytes, GuestAddress(address));
        written.map_err(|_| self.fault)
    }
    fn take_io_interruption(&mut self) -> Option<[u32; 3]> {
        self.pending.take()
    }
}

struct Rig {
    board: Board,
    cpu: TestCpu,
    signals: Arc<Signals>,
}

/// A machine with a megabyte, a disabled subchannel 0, and two CPUs. Register 1 names the subchannel, 5 is 0x3000, 6 is odd,
/// 7 is outside memory.
fn rig() -> Rig {
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    let inventory = Inventory {
        memory_bytes: 1 << 20,
        cpus: 2,
    };
    let sclp = Arc::new(Sclp::new(
        inventory,
        Box::new(std::io::sink()),
        Box::new(|| ()),
    ));
    let signals = Arc::new(Signals::default());
    let mut board = Board::new(memory.clone(), 2, sclp, signals.clone());
    board.channels.add(Arc::new(Nothing)).unwrap();
    let mut registers = [0; 16];
    registers[1] = 0x0001_0000;
    registers[5] = 0x3000;
    registers[6] = 0x3001;
    registers[7] = 0x10_0000;
    let cpu = TestCpu {
        memory,
        registers,
        problem: false,
        code: None,
        pending: None,
        fault: Fault::Program(ADDRESSING),
    };
    Rig {
        board,
        cpu,
        signals,
    }
}

impl Rig {
    fn run(&mut self, ipa: u16, ipb: u32) -> (Effect, Option<u8>) {
        self.cpu.code = None;
        let effect = execute(&self.board, &mut self.cpu, ipa, ipb);
        (effect, self.cpu.code)
    }

    /// The condition code of an instruction that completes.
    fn code(&mut self, ipa: u16, ipb: u32) -> Option<u8> {
        let (effect, code) = self.run(ipa, ipb);
        assert_eq!(effect, Effect::Done, "{ipa:#x}");
        code
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        self.cpu
            .memory
            .write_slice(bytes, GuestAddress(address))
            .unwrap();
    }

    fn read<const N: usize>(&self, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.cpu
            .memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    }
}

/// IPB of an operand with base register 5 and no displacement.
const GOOD: u32 = 0x5000_0000;
const ODD: u32 = 0x6000_0000;
const NOWHERE: u32 = 0x7000_0000;
/// Instructions with an operand in memory.
const WITH_OPERAND: [u16; 6] = [0xb232, 0xb233, 0xb234, 0xb235, 0xb236, 0xb239];
/// Those that name a subchannel in register 1.
const ON_SUBCHANNEL: [u16; 9] = [
    0xb230, 0xb231, 0xb232, 0xb233, 0xb234, 0xb235, 0xb238, 0xb276, 0xb276,
];

#[test]
fn nothing_is_for_the_problem_state() {
    let mut rig = rig();
    rig.cpu.problem = true;
    for ipa in WITH_OPERAND.into_iter().chain(ON_SUBCHANNEL).chain([
        0xb220, 0xb237, 0xb23b, 0xb23c, 0xb25f, 0xb274, 0x8300, 0xae00,
    ]) {
        let (effect, code) = rig.run(ipa, GOOD);
        assert_eq!(
            (effect, code),
            (Effect::Program(PRIVILEGED), None),
            "{ipa:#x}"
        );
    }
}

#[test]
fn what_is_no_instruction_is_an_operation_exception() {
    let mut rig = rig();
    for ipa in [0x0000, 0xb2ff, 0xb23a, 0xffff] {
        assert_eq!(rig.run(ipa, 0).0, Effect::Program(OPERATION), "{ipa:#x}");
    }
}

#[test]
fn operands_are_aligned_and_subchannels_named_rightly() {
    let mut rig = rig();
    for ipa in WITH_OPERAND {
        let (effect, _) = rig.run(ipa, ODD);
        assert_eq!(effect, Effect::Program(SPECIFICATION), "{ipa:#x}");
    }
    rig.cpu.registers[1] = 0;
    for ipa in ON_SUBCHANNEL {
        let (effect, _) = rig.run(ipa, GOOD);
        assert_eq!(effect, Effect::Program(OPERAND), "{ipa:#x}");
    }
}

#[test]
fn operands_outside_memory_end_as_the_cpu_says() {
    for (fault, effect) in [
        (Fault::Program(ADDRESSING), Effect::Program(ADDRESSING)),
        (Fault::Delivered, Effect::Delivered),
    ] {
        let mut rig = rig();
        rig.cpu.fault = fault;
        for ipa in [0xb232, 0xb233, 0xb234, 0xb239] {
            assert_eq!(rig.run(ipa, NOWHERE), (effect, None), "{ipa:#x}");
        }
        // Of an enabled subchannel, the status stays.
        let mut schib = [0; SCHIB_BYTES];
        schib[5] = 0x80;
        rig.write(0x3000, &schib);
        assert_eq!(rig.code(0xb232, GOOD), Some(0));
        assert_eq!(rig.code(0xb230, GOOD), Some(0));
        assert_eq!(rig.run(0xb235, NOWHERE), (effect, None));
        assert_eq!(rig.code(0xb235, GOOD), Some(0));
        assert_eq!(rig.read::<4>(0x3000), [0, 0, 0x10, 0x01]);
        rig.cpu.pending = Some([1, 2, 3]);
        assert_eq!(rig.run(0xb236, NOWHERE), (effect, None));
    }
}

#[test]
fn a_subchannel_is_stored_modified_and_started() {
    let mut rig = rig();
    assert_eq!(rig.code(0xb234, GOOD), Some(0));
    let mut schib: [u8; SCHIB_BYTES] = rig.read(0x3000);
    assert_eq!(schib[5], 1, "valid, and not enabled");
    rig.write(0x3000, &[0; ORB_BYTES]);
    assert_eq!(rig.code(0xb233, GOOD), Some(3));
    schib[5] |= 0x80;
    rig.write(0x3000, &schib);
    assert_eq!(rig.code(0xb232, GOOD), Some(0));
    // An ORB, and a NOP for it.
    rig.write(0x3000, &[0, 0, 0, 9, 0, 0x80, 0xff, 0, 0, 0, 0x40, 0]);
    rig.write(0x4000, &[3, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(rig.code(0xb233, GOOD), Some(0));
    assert_eq!(rig.code(0xb233, GOOD), Some(1));
    assert_eq!(rig.code(0xb235, GOOD), Some(0));
    assert_eq!(rig.code(0xb235, GOOD), Some(1));
    for (ipa, code) in [(0xb238, 2), (0xb276, 2), (0xb231, 0), (0xb230, 0)] {
        assert_eq!(rig.code(ipa, GOOD), Some(code), "{ipa:#x}");
    }
    rig.write(0x3000, &[0, 0, 0, 9, 0, 0x84, 0xff, 0, 0, 0, 0x40, 0]);
    assert_eq!(rig.run(0xb233, GOOD).0, Effect::Program(OPERAND));
    schib[4] = 0x07;
    rig.write(0x3000, &schib);
    assert_eq!(rig.run(0xb232, GOOD).0, Effect::Program(OPERAND));
    // None there.
    rig.cpu.registers[1] = 0x0001_0001;
    for ipa in [0xb230, 0xb231, 0xb234, 0xb235, 0xb238, 0xb276] {
        assert_eq!(rig.code(ipa, GOOD), Some(3), "{ipa:#x}");
    }
}

#[test]
fn instructions_of_the_whole_subsystem() {
    let mut rig = rig();
    assert_eq!(rig.code(0xb239, GOOD), Some(1));
    rig.cpu.registers[1] = 0;
    assert_eq!(rig.code(0xb23b, GOOD), Some(0));
    assert_eq!(rig.code(0xb239, GOOD), Some(0));
    assert_eq!(rig.read::<4>(0x3000), [0x44, 2, 0, 0]);
    assert_eq!(rig.code(0xb237, GOOD), None);
    assert_eq!(rig.code(0xb23c, GOOD), None);
    assert_eq!(rig.code(0xb274, GOOD), Some(3));
    rig.cpu.registers[1] = 7;
    assert_eq!(rig.code(0xb23b, GOOD), Some(3));
    for ipa in [0xb237, 0xb23c] {
        let (effect, _) = rig.run(ipa, GOOD);
        assert_eq!(effect, Effect::Program(OPERAND), "{ipa:#x}");
    }
    rig.cpu.registers[1] = 0xff00;
    assert_eq!(rig.run(0xb23b, GOOD).0, Effect::Program(OPERAND));
}

#[test]
fn channel_subsystem_calls() {
    let mut rig = rig();
    // The block's address is in register 5.
    let r5 = 0x0050_0000;
    assert_eq!(rig.run(0xb25f, r5).0, Effect::Program(OPERAND));
    rig.write(0x3000, &[0, 0x10, 0, 0x10]);
    assert_eq!(rig.code(0xb25f, r5), Some(0));
    assert_eq!(rig.read::<4>(0x3010), [0x0f, 0xf0, 0, 1]);
    assert_eq!(
        rig.run(0xb25f, 0x0060_0000).0,
        Effect::Program(SPECIFICATION)
    );
    assert_eq!(rig.run(0xb25f, 0x0070_0000).0, Effect::Program(ADDRESSING));
}

#[test]
fn pending_interruptions_are_tested() {
    let mut rig = rig();
    assert_eq!(rig.code(0xb236, GOOD), Some(0));
    rig.cpu.pending = Some([1, 2, 3]);
    assert_eq!(rig.code(0xb236, GOOD), Some(1));
    assert_eq!(rig.read::<12>(0x3000), [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0]);
    rig.cpu.pending = Some([1, 2, 3]);
    assert_eq!(rig.code(0xb236, 0), Some(1));
    let lowcore = rig.read::<12>(PREFIX + 0xb8);
    assert_eq!(lowcore, [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3]);
}

#[test]
fn service_calls() {
    let mut rig = rig();
    // Command in register 2, block in 3.
    let ipb = 0x0023_0000;
    rig.cpu.registers[2] = 0x0002_0001;
    rig.cpu.registers[3] = 0x4000;
    rig.write(0x4000, &[0x10, 0]);
    assert_eq!(rig.code(0xb220, ipb), Some(0));
    assert_eq!(rig.read::<2>(0x4006), [0, 0x10]);
    assert_eq!(*rig.signals.0.lock().unwrap(), [0x4000]);
    for (address, expected) in [
        (0x4001, SPECIFICATION),
        (0x8000_4000, SPECIFICATION),
        (0, SPECIFICATION),
        (0x1000, SPECIFICATION),
        (PREFIX, SPECIFICATION),
        (PREFIX + 0x1000, SPECIFICATION),
        // No length.
        (0x5000, SPECIFICATION),
        (0x10_0000, ADDRESSING),
        // The block begins in memory and ends outside.
        (0xf_fff8, ADDRESSING),
    ] {
        rig.write(0xf_fff8, &[0x10, 0]);
        rig.cpu.registers[3] = address;
        let (effect, _) = rig.run(0xb220, ipb);
        assert_eq!(effect, Effect::Program(expected), "{address:#x}");
    }
    // Across a page, and a command that is none.
    rig.cpu.registers[3] = 0x4800;
    rig.write(0x4800, &[0x10, 0]);
    assert_eq!(rig.code(0xb220, ipb), Some(0));
    assert_eq!(rig.read::<2>(0x4806), [1, 0]);
    rig.cpu.registers[2] = 0x1234;
    rig.cpu.registers[3] = 0x4000;
    assert_eq!(rig.code(0xb220, ipb), Some(0));
    assert_eq!(rig.read::<2>(0x4006), [0x01, 0xf0]);
}

#[test]
fn diagnose_codes_and_functions() {
    let mut rig = rig();
    let ipl = 0x0308_0000;
    // R1 is 2, R3 is 4.
    for (subcode, address, expected) in [
        (0, 0, Effect::Ipl(Ipl::Reset)),
        (1, 0, Effect::Ipl(Ipl::Reset)),
        (3, 0, Effect::Ipl(Ipl::Load)),
        (4, 0, Effect::Ipl(Ipl::Load)),
        (6, 0x1000, Effect::Done),
        (5, 0x1000, Effect::Done),
        (6, 0x1001, Effect::Program(SPECIFICATION)),
        (2, 0, Effect::Program(SPECIFICATION)),
        (99, 0, Effect::Program(SPECIFICATION)),
    ] {
        (rig.cpu.registers[2], rig.cpu.registers[4]) = (address, subcode);
        assert_eq!(rig.run(0x8324, ipl), (expected, None), "{subcode}");
    }
    assert_eq!(rig.cpu.registers[3], 0x102);
    let virtio = 0x0500_0000;
    for (function, subchannel) in [(0, 0x1_0000), (3, 0x1_0000), (3, 0), (u64::MAX, 0)] {
        (rig.cpu.registers[1], rig.cpu.registers[2]) = (function, subchannel);
        assert_eq!(rig.run(0x8324, virtio), (Effect::Done, None));
        // Subchannel 0 is no virtio device.
        assert_eq!(rig.cpu.registers[2] as i64, -22);
    }
    for code in [0x0288_0000, 0x0000_0000, 0x0fff_0000] {
        assert_eq!(rig.run(0x8324, code).0, Effect::Program(SPECIFICATION));
    }
}

#[test]
fn orders_to_processors() {
    let mut rig = rig();
    // R1 is 2, R3 is 4.
    rig.cpu.registers[4] = 1;
    for (order, expected) in [
        (0x04, Order::Start),
        (0x06, Order::Restart),
        (0x0b, Order::InitialReset),
        (0x0c, Order::Reset),
    ] {
        let (effect, code) = rig.run(0xae24, order << 16);
        let signal = Effect::Signal {
            cpu: 1,
            order: expected,
        };
        assert_eq!((effect, code), (signal, Some(0)));
    }
    rig.cpu.registers[2] = u64::MAX;
    assert_eq!(rig.code(0xae24, 0x00ff_0000), Some(1));
    assert_eq!(rig.cpu.registers[2], 0xffff_ffff_0000_0002);
    rig.cpu.registers[4] = 2;
    assert_eq!(rig.code(0xae24, 0x0004_0000), Some(3));
}

proptest! {
    /// Whatever a guest executes ends in an effect.
    #[test]
    fn no_instruction_makes_it_panic(
        ipa in prop_oneof![
            any::<u16>(),
            (0xb220u16..0xb280),
            (0x8300u16..0x8400),
            (0xae00u16..0xaf00),
        ],
        ipb in any::<u32>(),
        registers in prop::array::uniform16(prop_oneof![
            any::<u64>(),
            0u64..0x10_0000,
            Just(0x1_0000u64),
        ]),
        memory in prop::collection::vec(any::<u8>(), 64),
    ) {
        let mut rig = rig();
        rig.write(0x3000, &memory);
        rig.cpu.registers = registers;
        rig.run(ipa, ipb);
    }
}
