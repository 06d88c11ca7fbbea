//! A device and a machine for tests of the channel subsystem.

use std::sync::{Arc, Mutex};

use vm_memory::{Bytes, GuestAddress};

use super::format::{Orb, Pmcw, SCHIB_BYTES, Schib};
use super::program::Data;
use super::*;

/// What came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    Subchannel(IoInterruption),
    Withdrawn(SubchannelId),
    Adapter(u8),
    Report,
}

#[derive(Default)]
pub(crate) struct Recorder(pub(crate) Mutex<Vec<Event>>);

impl Recorder {
    pub(crate) fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
    fn push(&self, event: Event) {
        self.0.lock().unwrap().push(event);
    }
}

impl Interruptions for Recorder {
    fn subchannel(&self, interruption: IoInterruption) {
        self.push(Event::Subchannel(interruption));
    }
    fn withdraw(&self, subchannel: SubchannelId) {
        self.push(Event::Withdrawn(subchannel));
    }
    fn adapter(&self, isc: u8) {
        self.push(Event::Adapter(isc));
    }
    fn channel_report(&self) {
        self.push(Event::Report);
    }
}

/// Commands: 1 takes eight bytes, 2 gives eight, 5 fails, others are unknown.
#[derive(Default)]
pub(crate) struct Echo {
    pub(crate) taken: Mutex<Vec<u8>>,
    pub(crate) resets: Mutex<u32>,
}

impl ControlUnit for Echo {
    fn sense_id(&self) -> SenseId {
        SenseId {
            unit_type: 0x3832,
            unit_model: 2,
        }
    }
    fn command(&self, code: u8, data: &mut Data<'_>) -> Result<(), CommandError> {
        match code {
            1 => {
                data.expect(8)?;
                let bytes: [u8; 8] = data.take()?;
                self.taken.lock().unwrap().extend(bytes);
                Ok(())
            }
            2 => {
                data.expect(8)?;
                data.store(b"ABCDEFGH")
            }
            5 => Err(CommandError::Failed),
            _ => Err(CommandError::Rejected),
        }
    }
    fn reset(&self) {
        *self.resets.lock().unwrap() += 1;
    }
}

/// One megabyte, and one device on subchannel 0 of set 0.
pub(crate) struct Machine {
    pub(crate) mem: GuestMemory,
    pub(crate) css: ChannelSubsystem,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) unit: Arc<Echo>,
    pub(crate) attention: Attention,
}

pub(crate) const ID: SubchannelId = SubchannelId { set: 0, number: 0 };
/// Where tests put their program.
pub(crate) const PROGRAM: u32 = 0x2000;

impl Machine {
    pub(crate) fn new() -> Self {
        let mem = GuestMemory::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let recorder = Arc::new(Recorder::default());
        let mut css = ChannelSubsystem::new(mem.clone(), recorder.clone());
        let unit = Arc::new(Echo::default());
        let attention = css.add(unit.clone()).unwrap();
        Self {
            mem,
            css,
            recorder,
            unit,
            attention,
        }
    }

    pub(crate) fn enabled() -> Self {
        let machine = Self::new();
        let mut schib = schib(&machine.css);
        schib.pmcw.flags |= Pmcw::ENABLED | 3 << 11;
        schib.pmcw.characteristics |= Pmcw::CONCURRENT_SENSE;
        assert_eq!(machine.css.modify(ID, &schib), 0);
        machine
    }

    /// Writes CCWs of format 1 (command, flags, count, address) at [`PROGRAM`].
    pub(crate) fn program(&self, ccws: &[(u8, u8, u16, u32)]) {
        for (at, &(code, flags, count, address)) in (PROGRAM.into()..).step_by(8).zip(ccws) {
            self.mem.write_obj([code, flags], GuestAddress(at)).unwrap();
            self.mem
                .write_obj(count.to_be_bytes(), GuestAddress(at + 2))
                .unwrap();
            self.mem
                .write_obj(address.to_be_bytes(), GuestAddress(at + 4))
                .unwrap();
        }
    }

    /// The IRB that TEST SUBCHANNEL stores, and its condition code.
    pub(crate) fn test(&self) -> (u8, [u8; 64]) {
        let mut stored = [0; 64];
        let cc = self.css.test(ID, |irb| {
            stored = *irb;
            Ok(())
        });
        (cc.unwrap(), stored)
    }
}

pub(crate) fn schib(css: &ChannelSubsystem) -> Schib {
    let bytes: [u8; SCHIB_BYTES] = css.store(ID).unwrap();
    Schib::parse(&bytes).unwrap()
}

pub(crate) fn orb(flags: u16) -> Orb {
    Orb {
        parameter: 0x1234_5678,
        flags: Orb::FORMAT_1 | flags,
        path_mask: 0xff,
        program: PROGRAM,
    }
}
