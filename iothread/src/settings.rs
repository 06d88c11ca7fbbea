//! The settings of polling: names, ranges, defaults, and how other threads change them.

use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};

use crate::error::SettingError;
use crate::policy::PolicyKind;

/// Default of `poll-max-ns`.
pub const POLL_MAX_NS: i64 = 32768;
/// What `poll-grow=0` means to every rule.
pub const POLL_GROW: i64 = 2;
/// What `poll-shrink=0` means to the weighted rule; to the older rules it means "drop to 0".
pub const POLL_SHRINK: i64 = 2;
/// What `poll-weight=0` means.
pub const POLL_WEIGHT: i64 = 3;

/// Default of `poll-alpha`, in thousandths.
pub const POLL_ALPHA_MILLI: i64 = 100;
/// The largest `poll-alpha`, in thousandths.
pub const POLL_ALPHA_MAX_MILLI: i64 = 10_000;

/// Settings of a loop, named as QEMU's iothread properties. 0 means "the default of the rule",
/// except for `poll_max_ns`, where it switches polling off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollSettings {
    /// `poll-max-ns`: longest time to poll before sleeping, in nanoseconds; 0 switches polling off.
    pub poll_max_ns: i64,
    /// `poll-grow`: factor by which the window grows.
    pub poll_grow: i64,
    /// `poll-shrink`: divisor by which the window shrinks.
    pub poll_shrink: i64,
    /// `poll-weight`: shift of the weighted rule; the larger, the less the recent interval counts.
    pub poll_weight: i64,
    /// `poll-alpha`, in thousandths: what CPU time is worth to the rule `auto`. At 250, 1 % more events
    /// a second are worth 4 % more CPU time an event.
    pub poll_alpha_milli: i64,
    /// `aio-max-batch`: most requests that an engine gathers before it submits; 0 is the engine's
    /// own choice. The loop only carries it.
    pub aio_max_batch: i64,
}

impl Default for PollSettings {
    fn default() -> Self {
        PollSettings {
            poll_max_ns: POLL_MAX_NS,
            poll_grow: 0,
            poll_shrink: 0,
            poll_weight: 0,
            poll_alpha_milli: POLL_ALPHA_MILLI,
            aio_max_batch: 0,
        }
    }
}

const ALPHA: &str = "poll-alpha";

const NAMES: [(&str, i64); 6] = [
    ("poll-max-ns", i64::MAX),
    ("poll-grow", i64::MAX),
    ("poll-shrink", i64::MAX),
    ("poll-weight", 63),
    (ALPHA, POLL_ALPHA_MAX_MILLI),
    ("aio-max-batch", i64::MAX),
];

fn check(index: usize, value: i64) -> Result<(), SettingError> {
    let (name, max) = NAMES[index];
    if (0..=max).contains(&value) {
        return Ok(());
    }
    if name == ALPHA {
        return Err(SettingError::Alpha {
            value: alpha_text(value),
        });
    }
    Err(SettingError::Range {
        name,
        value,
        min: 0,
        max,
    })
}

impl PollSettings {
    fn values(&self) -> [i64; 6] {
        [
            self.poll_max_ns,
            self.poll_grow,
            self.poll_shrink,
            self.poll_weight,
            self.poll_alpha_milli,
            self.aio_max_batch,
        ]
    }

    /// Checks every value against its range.
    ///
    /// # Errors
    /// [`SettingError::Range`] for the first one that is out of it.
    pub fn validate(&self) -> Result<(), SettingError> {
        for (index, value) in self.values().into_iter().enumerate() {
            check(index, value)?;
        }
        Ok(())
    }

    /// Sets one value by its name, for example `poll-weight`; `poll-alpha` in thousandths.
    ///
    /// # Errors
    /// An unknown name, or a value out of range; then nothing is changed.
    pub fn set(&mut self, name: &str, value: i64) -> Result<(), SettingError> {
        let index = index_of(name)?;
        check(index, value)?;
        *[
            &mut self.poll_max_ns,
            &mut self.poll_grow,
            &mut self.poll_shrink,
            &mut self.poll_weight,
            &mut self.poll_alpha_milli,
            &mut self.aio_max_batch,
        ][index] = value;
        Ok(())
    }

    /// The values in effect under `policy`: a 0 that means a default is replaced by it.
    #[must_use]
    pub fn effective(&self, policy: PolicyKind) -> PollSettings {
        let or = |value: i64, default: i64| if value == 0 { default } else { value };
        let shrink_default = match policy {
            PolicyKind::PerHandler | PolicyKind::Context => 0,
            _ => POLL_SHRINK,
        };
        PollSettings {
            poll_max_ns: self.poll_max_ns,
            poll_grow: or(self.poll_grow, POLL_GROW),
            poll_shrink: or(self.poll_shrink, shrink_default),
            poll_weight: or(self.poll_weight, POLL_WEIGHT),
            poll_alpha_milli: self.poll_alpha_milli,
            aio_max_batch: self.aio_max_batch,
        }
    }
}

fn index_of(name: &str) -> Result<usize, SettingError> {
    NAMES
        .iter()
        .position(|(known, _)| *known == name)
        .ok_or_else(|| SettingError::Unknown { name: name.into() })
}

/// `poll-alpha` as users write it, in thousandths: `0.3` is 300.
///
/// # Errors
/// [`SettingError::Alpha`] if it is no number from 0 to 10; decimals after the third are rounded.
pub fn alpha_milli(text: &str) -> Result<i64, SettingError> {
    let refused = || SettingError::Alpha { value: text.into() };
    let value: f64 = text.trim().parse().map_err(|_| refused())?;
    if !(0.0..=10.0).contains(&value) {
        return Err(refused());
    }
    #[allow(clippy::cast_possible_truncation)] // At most 10000.
    let milli = (value * 1000.0).round() as i64;
    Ok(milli)
}

/// The same the other way: `300` is `0.3`.
#[must_use]
pub fn alpha_text(milli: i64) -> String {
    #[allow(clippy::cast_precision_loss)] // Prints exactly what is in range.
    let value = milli as f64 / 1000.0;
    value.to_string()
}

/// The settings as threads share them. The loop compares one generation number an iteration.
#[derive(Debug)]
pub(crate) struct SharedSettings {
    generation: AtomicU32,
    values: [AtomicI64; 6],
}

impl SharedSettings {
    pub(crate) fn new(settings: &PollSettings) -> Self {
        SharedSettings {
            generation: AtomicU32::new(1),
            values: settings.values().map(AtomicI64::new),
        }
    }

    /// Changes with every store; the loop reloads when it differs from what it has seen.
    #[inline]
    pub(crate) fn generation(&self) -> u32 {
        // Acquire pairs with the Release in `set`: a new number comes with the new values.
        self.generation.load(Ordering::Acquire)
    }

    pub(crate) fn load(&self) -> PollSettings {
        let [
            poll_max_ns,
            poll_grow,
            poll_shrink,
            poll_weight,
            poll_alpha_milli,
            aio_max_batch,
        ] = [0, 1, 2, 3, 4, 5].map(|i: usize| self.values[i].load(Ordering::Relaxed));
        PollSettings {
            poll_max_ns,
            poll_grow,
            poll_shrink,
            poll_weight,
            poll_alpha_milli,
            aio_max_batch,
        }
    }

    pub(crate) fn set(&self, name: &str, value: i64) -> Result<(), SettingError> {
        let index = index_of(name)?;
        check(index, value)?;
        self.values[index].store(value, Ordering::Relaxed);
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }

    pub(crate) fn set_all(&self, settings: &PollSettings) -> Result<(), SettingError> {
        settings.validate()?;
        for (cell, value) in self.values.iter().zip(settings.values()) {
            cell.store(value, Ordering::Relaxed);
        }
        self.generation.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_names_the_setting_the_range_and_the_value() {
        let mut settings = PollSettings::default();
        let error = settings.set("poll-weight", 64).unwrap_err();
        assert_eq!(
            error.to_string(),
            "poll-weight value must be in range [0, 63], not 64"
        );
        assert_eq!(settings, PollSettings::default());
        for (name, max) in NAMES {
            assert!(settings.set(name, -1).is_err(), "{name}");
            assert!(settings.set(name, max).is_ok(), "{name}");
        }
        assert!(settings.validate().is_ok());
        settings.poll_grow = -7;
        assert!(settings.validate().is_err());
    }

    #[test]
    fn alpha_is_written_with_decimals_and_kept_in_thousandths() {
        for (text, milli) in [
            ("0", 0),
            ("0.3", 300),
            ("1", 1000),
            ("10", 10_000),
            ("0.0005", 1),
        ] {
            assert_eq!(alpha_milli(text), Ok(milli), "{text}");
        }
        assert_eq!(
            [0, 300, 1000, 1005].map(alpha_text),
            ["0", "0.3", "1", "1.005"]
        );
        for text in ["-0.1", "10.01", "", "nan", "inf", "0,3"] {
            let error = alpha_milli(text).unwrap_err().to_string();
            assert!(
                error.contains("[0, 10]") && error.ends_with(text),
                "{error}"
            );
        }
        let error = PollSettings::default().set("poll-alpha", 10_001);
        assert!(error.unwrap_err().to_string().ends_with("not 10.001"));
    }

    #[test]
    fn unknown_name_is_refused() {
        let error = PollSettings::default().set("poll_max", 1).unwrap_err();
        assert!(error.to_string().contains("poll_max"));
    }

    #[test]
    fn zero_reads_back_as_the_default() {
        let zero = PollSettings::default();
        let weighted = zero.effective(PolicyKind::Weighted);
        assert_eq!(
            (
                weighted.poll_grow,
                weighted.poll_shrink,
                weighted.poll_weight
            ),
            (2, 2, 3)
        );
        assert_eq!(weighted.poll_max_ns, 32768);
        assert_eq!(zero.effective(PolicyKind::PerHandler).poll_shrink, 0);
        assert_eq!(zero.effective(PolicyKind::Context).poll_grow, 2);
    }

    #[test]
    fn a_store_changes_the_generation_and_a_refusal_does_not() {
        let shared = SharedSettings::new(&PollSettings::default());
        let before = shared.generation();
        assert!(shared.set("poll-weight", 99).is_err());
        assert_eq!(shared.generation(), before);
        shared.set("poll-grow", 5).unwrap();
        assert_ne!(shared.generation(), before);
        assert_eq!(shared.load().poll_grow, 5);
    }
}
