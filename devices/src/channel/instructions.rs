//! The I/O instructions, with their operands fetched and their results not yet stored. Each returns its condition code.

use std::sync::atomic::Ordering;

use super::format::{IRB_BYTES, Orb, SCHIB_BYTES, Schib};
use super::subchannel::{Subchannel, Surroundings};
use super::{
    CHANNEL_PATH, ChannelSubsystem, Outcome, ProgramInterruption, SubchannelId, chsc, lock,
};

/// Condition code of an instruction on a subchannel that is not there.
const NOT_OPERATIONAL: u8 = 3;
/// Channel report: solicited, of a channel path, that has been initialised.
const PATH_INITIALIZED: u32 = 1 << 30 | 4 << 24 | 2 << 16;

impl ChannelSubsystem {
    fn on(&self, id: SubchannelId, act: impl FnOnce(&Subchannel) -> u8) -> u8 {
        self.find(id).map_or(NOT_OPERATIONAL, |found| act(found))
    }

    fn around(&self) -> Surroundings<'_> {
        Surroundings {
            mem: &self.mem,
            interruptions: &*self.interruptions,
            measurement: *lock(&self.measurement),
        }
    }

    /// START SUBCHANNEL.
    pub fn start(&self, id: SubchannelId, orb: &Orb) -> u8 {
        let around = self.around();
        self.on(id, |subchannel| subchannel.start(orb, &around))
    }

    /// RESUME SUBCHANNEL.
    pub fn resume(&self, id: SubchannelId) -> u8 {
        let around = self.around();
        self.on(id, |subchannel| subchannel.resume(&around))
    }

    /// CLEAR SUBCHANNEL.
    pub fn clear(&self, id: SubchannelId) -> u8 {
        self.on(id, |subchannel| subchannel.clear(&*self.interruptions))
    }

    /// HALT SUBCHANNEL.
    pub fn halt(&self, id: SubchannelId) -> u8 {
        self.on(id, |subchannel| subchannel.halt(&*self.interruptions))
    }

    /// CANCEL SUBCHANNEL.
    pub fn cancel(&self, id: SubchannelId) -> u8 {
        self.on(id, Subchannel::cancel)
    }

    /// MODIFY SUBCHANNEL.
    pub fn modify(&self, id: SubchannelId, schib: &Schib) -> u8 {
        self.on(id, |subchannel| subchannel.modify(schib))
    }

    /// STORE SUBCHANNEL: what to store with condition code 0, or nothing with 3.
    pub fn store(&self, id: SubchannelId) -> Option<[u8; SCHIB_BYTES]> {
        self.find(id).map(|subchannel| subchannel.store())
    }

    /// TEST SUBCHANNEL. `store` stores the block; the status is kept if it cannot.
    ///
    /// # Errors
    /// What `store` says.
    pub fn test(
        &self,
        id: SubchannelId,
        store: impl FnOnce(&[u8; IRB_BYTES]) -> Outcome<()>,
    ) -> Outcome {
        match self.find(id) {
            Some(subchannel) => subchannel.test(&*self.interruptions, store),
            None => Ok(NOT_OPERATIONAL),
        }
    }

    /// Whether a subchannel's status waits for TEST SUBCHANNEL.
    pub fn is_pending(&self, id: SubchannelId) -> bool {
        self.find(id).is_some_and(|found| found.is_pending())
    }

    /// STORE CHANNEL REPORT WORD. `store` stores it; it is kept if that cannot be.
    ///
    /// # Errors
    /// What `store` says.
    pub fn store_report(&self, store: impl FnOnce(u32) -> Outcome<()>) -> Outcome {
        let mut reports = lock(&self.reports);
        let word = reports.words.front().copied();
        store(word.unwrap_or(0))?;
        reports.words.pop_front();
        Ok(u8::from(word.is_none()))
    }

    /// RESET CHANNEL PATH, with general register 1.
    ///
    /// # Errors
    /// An operand exception.
    pub fn reset_path(&self, register_1: u64) -> Outcome {
        let register_1 = register_1 as u32;
        if register_1 & 0xff00_ff00 != 0 || register_1 >> 16 != 0 {
            return Err(ProgramInterruption::Operand);
        }
        if register_1 != u32::from(CHANNEL_PATH) {
            return Ok(NOT_OPERATIONAL);
        }
        for subchannel in self.subchannels.values() {
            subchannel.reset_unit();
        }
        self.report(PATH_INITIALIZED | register_1);
        Ok(0)
    }

    /// SET ADDRESS LIMIT, with general register 1. Programs ask for the check in their ORB; it is not made here, where
    /// all of a guest's memory is its own.
    ///
    /// # Errors
    /// An operand exception.
    pub fn set_address_limit(&self, register_1: u64) -> Outcome<()> {
        match register_1 & 0x8000_ffff {
            0 => Ok(()),
            _ => Err(ProgramInterruption::Operand),
        }
    }

    /// SET CHANNEL MONITOR, with general registers 1 and 2.
    ///
    /// # Errors
    /// An operand exception.
    pub fn set_monitor(&self, register_1: u64, register_2: u64) -> Outcome<()> {
        const MEASURE: u64 = 2;
        let measure = register_1 & MEASURE != 0;
        if register_1 & 0x0fff_fffc != 0 || measure && register_2 & 0x1f != 0 {
            return Err(ProgramInterruption::Operand);
        }
        lock(&self.measurement).origin = measure.then_some(register_2);
        Ok(())
    }

    /// CHANNEL SUBSYSTEM CALL with the guest's command block; the answer, to be stored behind the request.
    ///
    /// # Errors
    /// An operand exception.
    pub fn call(&self, block: &[u8; chsc::BLOCK_BYTES]) -> Outcome<chsc::Answer> {
        let (answer, effect) = chsc::answer(block)?;
        if effect == chsc::Effect::AllSets {
            self.all_sets.store(true, Ordering::Release);
        }
        Ok(answer)
    }
}
