//! One subchannel: its state, the functions that instructions start, and the status they leave.

use std::sync::{Arc, Mutex, MutexGuard};

use super::format::{
    IRB_BYTES, Orb, Pmcw, SCHIB_BYTES, SENSE_BYTES, Schib, Scsw, control, device_status, irb,
    subchannel_status,
};
use super::measure::{self, Measurement};
use super::program::{End, Program};
use super::{
    CHANNEL_PATH, ControlUnit, Interruptions, IoInterruption, Outcome, SubchannelId, lock,
};
use crate::GuestMemory;

/// The mask of the only path.
const PATH: u8 = 0x80;

/// A subchannel and its device.
pub(super) struct Subchannel {
    id: SubchannelId,
    unit: Arc<dyn ControlUnit>,
    state: Mutex<State>,
    /// Held while a program runs; the state is not, so that other instructions get their condition code meanwhile and
    /// the device's own thread can raise its attention.
    sense: Mutex<[u8; SENSE_BYTES]>,
}

#[derive(Default)]
struct State {
    schib: Schib,
    orb: Orb,
    /// Sense bytes for the IRB.
    reported_sense: [u8; SENSE_BYTES],
    /// The CCW that a suspended program goes on with.
    suspended_at: u32,
    /// Changes when a function is ended from outside: the status of a program that still runs is then dropped.
    generation: u64,
}

impl State {
    fn new(id: SubchannelId) -> Self {
        let mut state = Self::default();
        let pmcw = &mut state.schib.pmcw;
        pmcw.flags = Pmcw::VALID;
        pmcw.device = id.number;
        pmcw.logical_paths = PATH;
        pmcw.paths_installed = PATH;
        pmcw.paths_operational = 0xff;
        pmcw.paths_available = PATH;
        pmcw.path_ids[0] = CHANNEL_PATH;
        state
    }

    fn operational(&self) -> bool {
        self.schib.pmcw.has(Pmcw::ENABLED)
    }

    /// A channel program waits, suspended, for RSCH or XSCH; else their condition code.
    fn suspended(&self) -> Result<(), u8> {
        let scsw = &self.schib.scsw;
        if !self.operational() {
            return Err(3);
        }
        if scsw.has(control::PENDING) {
            return Err(1);
        }
        if scsw.control & control::FUNCTIONS != control::START || !scsw.has(control::SUSPENDED) {
            return Err(2);
        }
        Ok(())
    }
}

/// What an instruction needs of the subsystem around a subchannel.
pub(super) struct Surroundings<'a> {
    pub(super) mem: &'a GuestMemory,
    pub(super) interruptions: &'a dyn Interruptions,
    pub(super) measurement: Measurement,
}

impl Subchannel {
    pub(super) fn new(id: SubchannelId, unit: Arc<dyn ControlUnit>) -> Self {
        Self {
            id,
            unit,
            state: Mutex::new(State::new(id)),
            sense: Mutex::new([0; SENSE_BYTES]),
        }
    }

    pub(super) fn id(&self) -> SubchannelId {
        self.id
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// A system reset: the device, and all that a guest has set.
    pub(super) fn reset(&self) {
        let generation = self.lock().generation;
        self.unit.reset();
        let mut state = self.lock();
        *state = State::new(self.id);
        state.generation = generation + 1;
        drop(state);
        *lock(&self.sense) = [0; SENSE_BYTES];
    }

    /// A reset of the channel path: the device's part of it.
    pub(super) fn reset_unit(&self) {
        self.unit.reset();
    }

    fn raise(&self, state: &State, interruptions: &dyn Interruptions) {
        interruptions.subchannel(IoInterruption {
            subchannel: self.id,
            parameter: state.schib.pmcw.parameter,
            isc: state.schib.pmcw.isc(),
        });
    }

    pub(super) fn is_pending(&self) -> bool {
        self.lock().schib.scsw.has(control::PENDING)
    }

    pub(super) fn store(&self) -> [u8; SCHIB_BYTES] {
        self.lock().schib.bytes()
    }

    pub(super) fn modify(&self, new: &Schib) -> u8 {
        let mut state = self.lock();
        let scsw = &state.schib.scsw;
        if scsw.has(control::PENDING) {
            return 1;
        }
        if scsw.has(control::FUNCTIONS) {
            return 2;
        }
        let was_enabled = state.operational();
        state.schib.pmcw.modify(&new.pmcw);
        state.schib.measurement_block = new.measurement_block;
        let disabled = was_enabled && !state.operational();
        drop(state);
        if disabled {
            self.unit.disabled();
        }
        0
    }

    pub(super) fn start(&self, orb: &Orb, around: &Surroundings<'_>) -> u8 {
        let mut state = self.lock();
        if !state.operational() {
            return 3;
        }
        if state.schib.scsw.has(control::PENDING) {
            return 1;
        }
        if state.schib.scsw.has(control::FUNCTIONS) {
            return 2;
        }
        if orb.path_mask & state.schib.pmcw.logical_paths & PATH == 0 {
            return 3;
        }
        state.orb = *orb;
        state.schib.pmcw.parameter = orb.parameter;
        state.schib.pmcw.last_path_used = PATH;
        state.schib.scsw = Scsw {
            flags: orb.flags & Scsw::FROM_ORB,
            control: control::START | control::START_PENDING,
            ..Scsw::default()
        };
        let generation = state.generation;
        measure::count_start(around.mem, around.measurement, &state.schib);
        drop(state);
        self.run(orb, orb.program, generation, around);
        0
    }

    pub(super) fn resume(&self, around: &Surroundings<'_>) -> u8 {
        let mut state = self.lock();
        if let Err(condition_code) = state.suspended() {
            return condition_code;
        }
        let scsw = &mut state.schib.scsw;
        scsw.control = control::START | control::RESUME_PENDING;
        let (orb, at, generation) = (state.orb, state.suspended_at, state.generation);
        measure::count_start(around.mem, around.measurement, &state.schib);
        drop(state);
        self.run(&orb, at, generation, around);
        0
    }

    fn run(&self, orb: &Orb, start: u32, generation: u64, around: &Surroundings<'_>) {
        let mut sense = lock(&self.sense);
        let end = Program::new(around.mem, *orb, start, &*self.unit, &mut sense).run();
        let mut state = self.lock();
        if state.generation != generation {
            return;
        }
        let concurrent = state.schib.pmcw.characteristics & Pmcw::CONCURRENT_SENSE != 0;
        let scsw = &mut state.schib.scsw;
        let attention = scsw.control & control::ALERT;
        match end {
            End::Suspended(at) => {
                scsw.control = control::START | control::SUSPENDED;
                scsw.program = at.wrapping_add(8);
                state.suspended_at = at;
                if !orb.has(Orb::SUPPRESS_SUSPENDED) || attention != 0 {
                    let status = control::INTERMEDIATE | control::PENDING | attention;
                    state.schib.scsw.control |= status;
                    self.raise(&state, around.interruptions);
                }
            }
            End::Done(status) => {
                scsw.program = status.program;
                scsw.device |= status.device;
                scsw.subchannel = status.subchannel;
                scsw.residual = status.residual;
                let wrong = status.device & device_status::UNIT_CHECK != 0
                    || status.subchannel & !subchannel_status::PROGRAM_CONTROLLED != 0;
                scsw.control = control::START
                    | control::PRIMARY
                    | control::SECONDARY
                    | control::PENDING
                    | attention
                    | if wrong { control::ALERT } else { 0 };
                if status.device & device_status::UNIT_CHECK != 0 && concurrent {
                    scsw.flags |= Scsw::EXTENDED_STATUS | Scsw::EXTENDED_CONTROL;
                    state.reported_sense = std::mem::replace(&mut *sense, [0; SENSE_BYTES]);
                }
                self.raise(&state, around.interruptions);
            }
        }
    }

    /// Stores the IRB by `store`, and takes the status if that goes well.
    pub(super) fn test(
        &self,
        interruptions: &dyn Interruptions,
        store: impl FnOnce(&[u8; IRB_BYTES]) -> Outcome<()>,
    ) -> Outcome {
        let mut state = self.lock();
        if !state.operational() {
            return Ok(3);
        }
        store(&irb(&state.schib.scsw, &state.reported_sense))?;
        let scsw = &mut state.schib.scsw;
        if !scsw.has(control::PENDING) {
            return Ok(1);
        }
        let under_way = control::START_PENDING | control::SUSPENDED | control::RESUME_PENDING;
        match scsw.has(under_way) && !scsw.has(control::PRIMARY) {
            true => scsw.control &= !control::STATUS,
            false => {
                *scsw = Scsw {
                    program: scsw.program,
                    ..Scsw::default()
                }
            }
        }
        state.reported_sense = [0; SENSE_BYTES];
        interruptions.withdraw(self.id);
        Ok(0)
    }

    pub(super) fn clear(&self, interruptions: &dyn Interruptions) -> u8 {
        let mut state = self.lock();
        if !state.operational() {
            return 3;
        }
        state.generation += 1;
        state.schib.scsw = Scsw {
            control: control::CLEAR | control::PENDING,
            ..Scsw::default()
        };
        state.schib.pmcw.paths_operational = 0xff;
        state.schib.pmcw.not_operational = 0;
        state.reported_sense = [0; SENSE_BYTES];
        interruptions.withdraw(self.id);
        self.raise(&state, interruptions);
        0
    }

    pub(super) fn halt(&self, interruptions: &dyn Interruptions) -> u8 {
        let mut state = self.lock();
        if !state.operational() {
            return 3;
        }
        let scsw = &mut state.schib.scsw;
        let ended = control::ALERT | control::PRIMARY | control::SECONDARY;
        let only_pending = scsw.control & control::STATUS == control::PENDING;
        if only_pending || scsw.has(control::PENDING) && scsw.has(ended) {
            return 1;
        }
        if scsw.has(control::HALT | control::CLEAR) {
            return 2;
        }
        // What is halted was a program that ran, or slept.
        let primary = match scsw.has(control::START) {
            true => control::PRIMARY,
            false => 0,
        };
        scsw.control = scsw.control & control::FUNCTIONS
            | control::HALT
            | scsw.control & control::STATUS
            | primary
            | control::PENDING;
        state.generation += 1;
        self.raise(&state, interruptions);
        0
    }

    pub(super) fn cancel(&self) -> u8 {
        let mut state = self.lock();
        if let Err(condition_code) = state.suspended() {
            return condition_code;
        }
        let scsw = &mut state.schib.scsw;
        scsw.control &= !(control::FUNCTIONS | control::ACTIVITY);
        state.generation += 1;
        0
    }
}

/// A device's way to its driver that no program of the driver began.
#[derive(Clone)]
pub struct Attention {
    subchannel: Arc<Subchannel>,
    interruptions: Arc<dyn Interruptions>,
}

impl Attention {
    pub(super) fn new(subchannel: Arc<Subchannel>, interruptions: Arc<dyn Interruptions>) -> Self {
        Self {
            subchannel,
            interruptions,
        }
    }

    /// Which subchannel.
    pub fn id(&self) -> SubchannelId {
        self.subchannel.id
    }

    /// Where interruptions go.
    pub fn interruptions(&self) -> &dyn Interruptions {
        &*self.interruptions
    }

    /// Makes an alert status pending, with its interruption. One that is pending already tells the driver enough.
    pub fn raise(&self) {
        let mut state = self.subchannel.lock();
        if !state.operational() || state.schib.scsw.has(control::PENDING) {
            return;
        }
        state.schib.scsw.control |= control::ALERT | control::PENDING;
        self.subchannel.raise(&state, &*self.interruptions);
    }
}
