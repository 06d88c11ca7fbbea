//! The channel subsystem of an s390x machine: subchannels, the channel programs that reach their devices, and the
//! commands about the subsystem itself (z/Architecture Principles of Operation, SA22-7832, chapters 13 to 17).
//!
//! It is to s390x what a bus is elsewhere, and knows no processor: whoever decodes an I/O instruction hands over its
//! operands as bytes and sets the condition code that comes back. Structures in guest memory are big-endian, and are
//! read and written as such on every host. It is compiled and tested on every host.
//!
//! A channel program runs within START SUBCHANNEL: its status is pending when the instruction ends, which the
//! architecture allows and spares a thread. Nothing else of the subsystem is held up meanwhile.

pub mod chsc;
pub mod format;
mod instructions;
pub mod measure;
pub mod program;
mod subchannel;

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::GuestMemory;
use measure::Measurement;
pub use subchannel::Attention;
use subchannel::Subchannel;

/// Subchannel sets of a channel subsystem.
pub const SETS: u8 = 4;
/// The one channel path, to which all devices are attached.
pub const CHANNEL_PATH: u8 = 0;
/// Type of that path: emulated devices, as on other hypervisors.
pub const CHANNEL_PATH_TYPE: u8 = 0x32;
/// Channel reports that wait for STORE CHANNEL REPORT WORD; what comes above that is told by an overflow.
const MAX_REPORTS: usize = 64;

/// A program interruption that an instruction ends with; the value is the interruption code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum ProgramInterruption {
    /// An instruction that is not there.
    Operation = 0x0001,
    /// A privileged instruction in the problem state.
    PrivilegedOperation = 0x0002,
    /// Storage that is protected.
    Protection = 0x0004,
    /// Storage that is not there.
    Addressing = 0x0005,
    /// A misaligned or impossible operand address or register.
    Specification = 0x0006,
    /// An operand that is not valid.
    Operand = 0x0015,
}

/// How an instruction ended: a condition code, or a program interruption.
pub type Outcome<T = u8> = Result<T, ProgramInterruption>;

/// Which subchannel: its set and its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SubchannelId {
    /// Subchannel set, 0 to 3.
    pub set: u8,
    /// Number within the set.
    pub number: u16,
}

impl SubchannelId {
    /// Always one in a subsystem-identification word.
    const ONE: u32 = 1 << 16;
    /// The word has a channel-subsystem ID.
    const HAS_CSSID: u32 = 1 << 19;

    /// The subsystem-identification word, as guests have it in general register 1.
    pub fn word(self) -> u32 {
        u32::from(self.set) << 17 | Self::ONE | u32::from(self.number)
    }

    /// Reads the word.
    ///
    /// # Errors
    /// An operand exception for one that no subchannel can have. There is one channel subsystem here, number 0.
    pub fn from_word(word: u32) -> Outcome<Self> {
        let cssid = word >> 24;
        if word & Self::ONE == 0 || word & 0x00f0_0000 != 0 || cssid != 0 {
            return Err(ProgramInterruption::Operand);
        }
        // With or without the flag, the subsystem is number 0.
        let _ = word & Self::HAS_CSSID;
        Ok(Self {
            set: (word >> 17 & 3) as u8,
            number: word as u16,
        })
    }
}

/// An I/O interruption of a subchannel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoInterruption {
    /// Whose.
    pub subchannel: SubchannelId,
    /// What the guest gave the subchannel to be recognised by.
    pub parameter: u32,
    /// Interruption subclass, 0 to 7.
    pub isc: u8,
}

/// Where interruptions go. Called by vCPU threads and by devices' threads.
pub trait Interruptions: Send + Sync {
    /// A subchannel's status is pending.
    fn subchannel(&self, interruption: IoInterruption);

    /// A subchannel's status is no longer pending: an interruption that was not taken yet must not come.
    fn withdraw(&self, subchannel: SubchannelId);

    /// An adapter has set indicators.
    fn adapter(&self, isc: u8);

    /// A channel report is pending.
    fn channel_report(&self);
}

/// What a control unit says of itself (SENSE ID).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SenseId {
    /// Type of the control unit.
    pub unit_type: u16,
    /// Its model.
    pub unit_model: u8,
}

/// Why a command was not carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandError {
    /// The device does not know the command, or not now: unit check, command reject.
    Rejected,
    /// The device is at fault: unit check, equipment check.
    Failed,
    /// Data is too short for the command, and the program did not say that it knows.
    IncorrectLength,
    /// The channel finds fault with an address.
    ProgramCheck,
}

/// A device with its control unit.
pub trait ControlUnit: Send + Sync {
    /// What it is.
    fn sense_id(&self) -> SenseId;

    /// Carries out a command. Commands of a subchannel come one at a time, from any thread.
    ///
    /// # Errors
    /// It was not carried out.
    fn command(&self, code: u8, data: &mut program::Data<'_>) -> Result<(), CommandError>;

    /// The machine or the subchannel's path was reset.
    fn reset(&self);

    /// The guest has disabled the subchannel.
    fn disabled(&self) {}
}

/// The channel subsystem of a machine.
pub struct ChannelSubsystem {
    /// Filled while the machine is built.
    subchannels: BTreeMap<SubchannelId, Arc<Subchannel>>,
    mem: GuestMemory,
    interruptions: Arc<dyn Interruptions>,
    reports: Mutex<Reports>,
    measurement: Mutex<Measurement>,
    /// The guest has asked for all subchannel sets.
    all_sets: AtomicBool,
}

#[derive(Default)]
struct Reports {
    words: VecDeque<u32>,
}

/// No number is left in any set.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the channel subsystem has no subchannel left")]
pub struct Full;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ChannelSubsystem {
    /// A subsystem without devices.
    pub fn new(mem: GuestMemory, interruptions: Arc<dyn Interruptions>) -> Self {
        Self {
            subchannels: BTreeMap::new(),
            mem,
            interruptions,
            reports: Mutex::default(),
            measurement: Mutex::default(),
            all_sets: AtomicBool::new(false),
        }
    }

    /// The number that the next device of [`ChannelSubsystem::add`] gets.
    ///
    /// # Errors
    /// [`Full`].
    pub fn next(&self) -> Result<SubchannelId, Full> {
        let number = u16::try_from(self.subchannels.len()).map_err(|_| Full)?;
        Ok(SubchannelId { set: 0, number })
    }

    /// Attaches a device; its device number is that of its subchannel. The guest does not run yet.
    ///
    /// # Errors
    /// [`Full`].
    pub fn add(&mut self, unit: Arc<dyn ControlUnit>) -> Result<Attention, Full> {
        let id = self.next()?;
        let subchannel = Arc::new(Subchannel::new(id, unit));
        self.subchannels.insert(id, subchannel.clone());
        Ok(Attention::new(subchannel, self.interruptions.clone()))
    }

    /// Resets all subchannels and devices, as a system reset does.
    pub fn reset(&self) {
        for subchannel in self.subchannels.values() {
            self.interruptions.withdraw(subchannel.id());
            subchannel.reset();
        }
        lock(&self.reports).words.clear();
        *lock(&self.measurement) = Measurement::default();
        self.all_sets.store(false, Ordering::Release);
    }

    fn find(&self, id: SubchannelId) -> Option<&Arc<Subchannel>> {
        if id.set > 0 && !self.all_sets.load(Ordering::Acquire) {
            return None;
        }
        self.subchannels.get(&id)
    }

    fn report(&self, word: u32) {
        let mut reports = lock(&self.reports);
        match reports.words.len() {
            MAX_REPORTS => {
                if let Some(last) = reports.words.back_mut() {
                    *last |= format::CRW_OVERFLOW;
                }
            }
            _ => reports.words.push_back(word),
        }
        drop(reports);
        self.interruptions.channel_report();
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
