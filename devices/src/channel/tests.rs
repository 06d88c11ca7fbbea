use vm_memory::{Bytes, GuestAddress};

use super::format::{Orb, Pmcw};
use super::testing::{Event, ID, Machine, orb, schib};
use super::*;

const INTERRUPTION: IoInterruption = IoInterruption {
    subchannel: ID,
    parameter: 0x1234_5678,
    isc: 3,
};
const NOWHERE: SubchannelId = SubchannelId { set: 0, number: 1 };

fn control(irb: &[u8; 64]) -> u16 {
    u16::from_be_bytes([irb[2], irb[3]])
}

#[test]
fn identification_words() {
    let id = SubchannelId { set: 2, number: 7 };
    assert_eq!(id.word(), 0x0005_0007);
    assert_eq!(SubchannelId::from_word(0x0005_0007), Ok(id));
    // With the flag, the subsystem is still number 0.
    assert_eq!(SubchannelId::from_word(0x000d_0007), Ok(id));
    for word in [0x0004_0007, 0xfe0d_0007, 0x0011_0000, 0x0101_0000, 0] {
        let refused = SubchannelId::from_word(word);
        assert_eq!(refused, Err(ProgramInterruption::Operand), "{word:#x}");
    }
}

#[test]
fn a_program_is_started_its_status_tested_and_gone() {
    let machine = Machine::enabled();
    machine.program(&[(2, 0, 8, 0x3000)]);
    assert_eq!(machine.css.start(ID, &orb(0)), 0);
    let events = machine.recorder.take();
    assert_eq!(events, [Event::Subchannel(INTERRUPTION)]);
    let data: [u8; 8] = machine.mem.read_obj(GuestAddress(0x3000)).unwrap();
    assert_eq!(&data, b"ABCDEFGH");
    // Until the status is taken nothing else starts.
    assert_eq!(machine.css.start(ID, &orb(0)), 1);
    assert_eq!(machine.css.modify(ID, &schib(&machine.css)), 1);
    assert_eq!(machine.css.resume(ID), 1);
    assert_eq!(machine.css.halt(ID), 1);
    assert_eq!(machine.css.cancel(ID), 1);
    let (cc, irb) = machine.test();
    assert_eq!(cc, 0);
    assert_eq!(control(&irb), 0x4007);
    assert_eq!(&irb[4..12], [0, 0, 0x20, 8, 0x0c, 0, 0, 0]);
    assert_eq!(machine.recorder.take(), [Event::Withdrawn(ID)]);
    assert_eq!(machine.test().0, 1);
}

#[test]
fn instructions_on_a_subchannel_that_is_disabled_or_not_there() {
    let machine = Machine::new();
    for id in [ID, NOWHERE, SubchannelId { set: 1, number: 0 }] {
        let css = &machine.css;
        for cc in [
            css.start(id, &orb(0)),
            css.resume(id),
            css.clear(id),
            css.halt(id),
            css.cancel(id),
            css.test(id, |_| panic!("nothing is stored")).unwrap(),
        ] {
            assert_eq!(cc, 3, "{id:?}");
        }
        assert_eq!(css.store(id).is_some(), id == ID);
        let modified = css.modify(id, &schib(css));
        assert_eq!(modified, if id == ID { 0 } else { 3 });
    }
    assert!(machine.recorder.take().is_empty());
}

#[test]
fn no_path_no_start() {
    let machine = Machine::enabled();
    let mut request = orb(0);
    request.path_mask = 0x7f;
    assert_eq!(machine.css.start(ID, &request), 3);
}

#[test]
fn a_unit_check_brings_its_sense_bytes() {
    let machine = Machine::enabled();
    machine.program(&[(0x77, 0, 0, 0)]);
    assert_eq!(machine.css.start(ID, &orb(0)), 0);
    let (cc, irb) = machine.test();
    assert_eq!((cc, control(&irb)), (0, 0x4017));
    assert_eq!((irb[8], irb[9]), (0x02, 0));
    assert_eq!(irb[32], 0x80, "command reject");
    machine.program(&[(5, 0, 0, 0)]);
    assert_eq!(machine.css.start(ID, &orb(0)), 0);
    assert_eq!(machine.test().1[32], 0x10, "equipment check");
    // Without concurrent sense the driver asks for it.
    let mut modified = schib(&machine.css);
    modified.pmcw.characteristics = 0;
    assert_eq!(machine.css.modify(ID, &modified), 0);
    machine.program(&[(0x77, 0, 0, 0)]);
    assert_eq!(machine.css.start(ID, &orb(0)), 0);
    assert_eq!(machine.test().1[32], 0);
    machine.program(&[(0x04, 0x20, 1, 0x3000)]);
    assert_eq!(machine.css.start(ID, &orb(0)), 0);
    let sense: u8 = machine.mem.read_obj(GuestAddress(0x3000)).unwrap();
    assert_eq!(sense, 0x80);
}

#[test]
fn a_program_suspends_itself_and_is_resumed_cancelled_halted_or_cleared() {
    let suspended = || {
        let machine = Machine::enabled();
        machine.program(&[(2, 0x40, 8, 0x3000), (1, 0x02, 8, 0x3000)]);
        assert_eq!(machine.css.start(ID, &orb(Orb::SUSPEND)), 0);
        machine
    };
    let machine = suspended();
    let events = machine.recorder.take();
    assert_eq!(events, [Event::Subchannel(INTERRUPTION)]);
    let (cc, irb) = machine.test();
    assert_eq!((cc, control(&irb)), (0, 0x4029));
    assert_eq!(machine.css.start(ID, &orb(0)), 2);
    assert_eq!(machine.css.modify(ID, &schib(&machine.css)), 2);
    // The flag is still there: suspended again, with another status.
    assert_eq!(machine.css.resume(ID), 0);
    assert_eq!(machine.css.resume(ID), 1);
    assert_eq!(machine.test().0, 0);
    machine.program(&[(2, 0x40, 8, 0x3000), (1, 0, 8, 0x3000)]);
    assert_eq!(machine.css.resume(ID), 0);
    assert_eq!(*machine.unit.taken.lock().unwrap(), b"ABCDEFGH");
    assert_eq!(control(&machine.test().1), 0x4007);
    assert_eq!(machine.css.resume(ID), 2);
    assert_eq!(machine.css.cancel(ID), 2);

    let machine = suspended();
    assert_eq!(machine.css.cancel(ID), 1);
    machine.test();
    assert_eq!(machine.css.cancel(ID), 0);
    assert_eq!(machine.css.start(ID, &orb(Orb::SUSPEND)), 0);

    let machine = suspended();
    machine.test();
    assert_eq!(machine.css.halt(ID), 0);
    assert_eq!(control(&machine.test().1), 0x6005);

    let machine = suspended();
    assert_eq!(machine.css.clear(ID), 0);
    assert_eq!(control(&machine.test().1), 0x1001);
    // And the program is gone.
    assert_eq!(machine.css.resume(ID), 2);
}

#[test]
fn suspension_without_leave_or_without_word() {
    let machine = Machine::enabled();
    machine.program(&[(1, 0x02, 8, 0x3000)]);
    assert_eq!(machine.css.start(ID, &orb(0)), 0);
    assert_eq!(machine.test().1[9], 0x20, "program check");
    let quiet = orb(Orb::SUSPEND | Orb::SUPPRESS_SUSPENDED);
    machine.recorder.take();
    assert_eq!(machine.css.start(ID, &quiet), 0);
    assert!(machine.recorder.take().is_empty());
    assert_eq!(machine.test().0, 1);
}

#[test]
fn clear_and_halt_of_an_idle_subchannel() {
    let machine = Machine::enabled();
    assert_eq!(machine.css.clear(ID), 0);
    // Clearing again is always possible, halting is not.
    assert_eq!(machine.css.clear(ID), 0);
    assert_eq!(machine.css.halt(ID), 1);
    assert_eq!(control(&machine.test().1), 0x1001);
    assert_eq!(machine.css.halt(ID), 0);
    assert_eq!(control(&machine.test().1), 0x2001);
}

#[test]
fn a_status_that_cannot_be_stored_is_kept() {
    let machine = Machine::enabled();
    machine.program(&[(2, 0, 8, 0x3000)]);
    assert_eq!(machine.css.start(ID, &orb(0)), 0);
    let refused = machine
        .css
        .test(ID, |_| Err(ProgramInterruption::Addressing));
    assert_eq!(refused, Err(ProgramInterruption::Addressing));
    assert!(machine.css.is_pending(ID) && !machine.css.is_pending(NOWHERE));
    assert_eq!(machine.test().0, 0);
    assert!(!machine.css.is_pending(ID));
}

#[test]
fn attention_is_an_alert_and_waits_for_no_program() {
    let machine = Machine::enabled();
    machine.attention.raise();
    machine.attention.raise();
    assert_eq!(machine.recorder.take().len(), 1, "one is enough");
    assert_eq!(control(&machine.test().1), 0x0011);
    let machine = Machine::new();
    machine.attention.raise();
    assert!(machine.recorder.take().is_empty(), "disabled");
}

#[test]
fn channel_reports_wait_in_order_and_overflow() {
    let machine = Machine::new();
    let css = &machine.css;
    let next = || {
        let mut word = 1;
        let cc = css.store_report(|stored| {
            word = stored;
            Ok(())
        });
        (cc.unwrap(), word)
    };
    assert_eq!(next(), (1, 0));
    assert_eq!(css.reset_path(0), Ok(0));
    assert_eq!(machine.recorder.take(), [Event::Report]);
    assert_eq!(*machine.unit.resets.lock().unwrap(), 1);
    let refused = css.store_report(|_| Err(ProgramInterruption::Protection));
    assert_eq!(refused, Err(ProgramInterruption::Protection));
    assert_eq!(next(), (0, 0x4402_0000));
    assert_eq!(next(), (1, 0));
    for _ in 0..=MAX_REPORTS {
        assert_eq!(css.reset_path(0), Ok(0));
    }
    let words: Vec<u32> = std::iter::from_fn(|| Some(next()).filter(|n| n.0 == 0))
        .map(|next| next.1)
        .collect();
    assert_eq!(words.len(), MAX_REPORTS);
    assert_eq!(words[MAX_REPORTS - 1], 0x6402_0000);
}

#[test]
fn registers_of_instructions_without_subchannel() {
    let machine = Machine::new();
    let css = &machine.css;
    let operand = Err(ProgramInterruption::Operand);
    assert_eq!(css.reset_path(1), Ok(3));
    for register in [0x0000_0100, 0x0001_0000, 0x8000_0000] {
        assert_eq!(css.reset_path(register), operand, "{register:#x}");
    }
    assert_eq!(css.set_address_limit(0x7fff_0000), Ok(()));
    for register in [1, 0x8000_0000] {
        let refused = css.set_address_limit(register);
        assert_eq!(refused, Err(ProgramInterruption::Operand));
    }
    assert_eq!(css.set_monitor(0, 1), Ok(()));
    assert_eq!(css.set_monitor(2, 0x20), Ok(()));
    for registers in [(2, 1), (4, 0), (0x0800_0000, 0)] {
        let refused = css.set_monitor(registers.0, registers.1);
        assert_eq!(refused, Err(ProgramInterruption::Operand), "{registers:x?}");
    }
}

#[test]
fn measurement_counts_starts_where_the_guest_wants_it() {
    let machine = Machine::enabled();
    machine.program(&[(3, 0, 0, 0)]);
    let run = || {
        assert_eq!(machine.css.start(ID, &orb(0)), 0);
        machine.test();
    };
    let mut modified = schib(&machine.css);
    modified.pmcw.flags |= Pmcw::MEASURE;
    modified.pmcw.measurement_index = 2;
    assert_eq!(machine.css.modify(ID, &modified), 0);
    run();
    machine.css.set_monitor(2, 0x8000).unwrap();
    run();
    run();
    let count: [u8; 2] = machine.mem.read_obj(GuestAddress(0x8040)).unwrap();
    assert_eq!(count, [0, 2]);
    modified.pmcw.characteristics |= Pmcw::MEASURE_FORMAT_1;
    modified.measurement_block = 0x9000;
    assert_eq!(machine.css.modify(ID, &modified), 0);
    run();
    let count: [u8; 4] = machine.mem.read_obj(GuestAddress(0x9000)).unwrap();
    assert_eq!(count, [0, 0, 0, 1]);
    // Blocks outside memory are no reason to stop.
    modified.measurement_block = u64::MAX;
    assert_eq!(machine.css.modify(ID, &modified), 0);
    run();
    machine.css.set_monitor(2, !0x1f).unwrap();
    modified.pmcw.characteristics = 0;
    assert_eq!(machine.css.modify(ID, &modified), 0);
    run();
}

#[test]
fn only_what_a_guest_may_change_is_changed() {
    let machine = Machine::new();
    let before = schib(&machine.css);
    let mut wish = before;
    wish.pmcw.flags = 0xf8ff & !Pmcw::VALID;
    wish.pmcw.device = 0x7777;
    wish.pmcw.paths_installed = 0;
    wish.pmcw.path_ids = [9; 8];
    wish.pmcw.parameter = 5;
    assert_eq!(machine.css.modify(ID, &wish), 0);
    let after = schib(&machine.css);
    assert_eq!(after.pmcw.device, before.pmcw.device);
    assert_eq!(after.pmcw.path_ids, before.pmcw.path_ids);
    assert_eq!(after.pmcw.paths_installed, before.pmcw.paths_installed);
    assert_eq!(after.pmcw.parameter, 5);
    assert!(after.pmcw.has(Pmcw::VALID) && after.pmcw.has(Pmcw::ENABLED));
    assert_eq!(after.pmcw.isc(), 7);
}

#[test]
fn a_system_reset_leaves_a_subsystem_as_new() {
    let machine = Machine::enabled();
    machine.attention.raise();
    machine.css.reset_path(0).unwrap();
    machine.css.reset();
    assert_eq!(schib(&machine.css), schib(&Machine::new().css));
    assert_eq!(machine.css.store_report(|_| Ok(())), Ok(1));
}
