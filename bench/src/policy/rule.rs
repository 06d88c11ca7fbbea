//! A rule with settings, as users write it: `weighted,poll-weight=2`.

use std::fmt;
use std::str::FromStr;

use iothread::policy::{Auto, Policy, PolicyKind, Weights};
use iothread::{PollSettings, SettingError, UnknownPolicy, alpha_milli, alpha_text};

/// A rule and the settings it is to have; those not given come from elsewhere.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule {
    /// The rule.
    pub kind: PolicyKind,
    given: Vec<(String, i64)>,
}

/// A text that is no rule.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No such rule.
    #[error(transparent)]
    Policy(#[from] UnknownPolicy),
    /// No such setting, or a value out of range.
    #[error(transparent)]
    Setting(#[from] SettingError),
    /// No `name=value`.
    #[error("{0:?} is no setting; write RULE,poll-weight=2,poll-max-ns=65536")]
    Form(String),
}

impl Rule {
    /// A rule that takes all its settings from elsewhere.
    #[must_use]
    pub fn plain(kind: PolicyKind) -> Self {
        Rule {
            kind,
            given: Vec::new(),
        }
    }

    /// The rules to compare: all there are, the weighted one with the usual weights.
    #[must_use]
    pub fn usual() -> Vec<Rule> {
        let with_weights = |kind| match kind {
            PolicyKind::Weighted => [2, 3, 4]
                .map(|weight| Rule {
                    kind,
                    given: vec![("poll-weight".to_owned(), weight)],
                })
                .to_vec(),
            PolicyKind::Auto => Self::autos(&[100, 300, 1000]),
            _ => vec![Rule::plain(kind)],
        };
        PolicyKind::ALL.into_iter().flat_map(with_weights).collect()
    }

    /// The rule `auto` at these exchange rates, in thousandths.
    #[must_use]
    pub fn autos(alphas_milli: &[i64]) -> Vec<Rule> {
        let rule = |alpha_milli| Rule {
            kind: PolicyKind::Auto,
            given: vec![(ALPHA.to_owned(), alpha_milli)],
        };
        alphas_milli.iter().copied().map(rule).collect()
    }

    /// Its settings over `base`.
    #[must_use]
    pub fn settings(&self, base: &PollSettings) -> PollSettings {
        let mut settings = *base;
        for (name, value) in &self.given {
            // Names and ranges were checked.
            if let Some(place) = place(&mut settings, name) {
                *place = *value;
            }
        }
        settings
    }

    /// The rule itself, over the settings `base`.
    #[must_use]
    pub fn build(&self, base: &PollSettings) -> Box<dyn Policy> {
        let settings = self.settings(base);
        if self.kind != PolicyKind::Auto {
            return self.kind.build(&settings);
        }
        let mut weights = Weights::new(&settings);
        #[allow(clippy::cast_precision_loss)] // Nanoseconds of a system call.
        for (name, value) in &self.given {
            match name.as_str() {
                KICK => weights.kick_ns = *value as f64,
                LATE => weights.late_ns = *value as f64,
                _ => {}
            }
        }
        Box::new(Auto::with_weights(&settings, weights))
    }
}

const ALPHA: &str = "poll-alpha";
/// Variants of `auto`, for comparisons only: see [`Weights`].
const KICK: &str = "kick-ns";
const LATE: &str = "late-ns";

fn place<'a>(settings: &'a mut PollSettings, name: &str) -> Option<&'a mut i64> {
    match name {
        "poll-max-ns" => Some(&mut settings.poll_max_ns),
        "poll-grow" => Some(&mut settings.poll_grow),
        "poll-shrink" => Some(&mut settings.poll_shrink),
        "poll-weight" => Some(&mut settings.poll_weight),
        ALPHA => Some(&mut settings.poll_alpha_milli),
        _ => None,
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        for (name, value) in &self.given {
            let value = match name.as_str() {
                ALPHA => alpha_text(*value),
                _ => value.to_string(),
            };
            let name = name.trim_start_matches("poll-");
            write!(f, " {name}={value}")?;
        }
        Ok(())
    }
}

impl FromStr for Rule {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let mut items = text.split(',');
        let kind: PolicyKind = items.next().unwrap_or_default().parse()?;
        let mut given = Vec::new();
        for item in items {
            let form = || Error::Form(item.to_owned());
            let (name, value) = item.split_once('=').ok_or_else(form)?;
            let value = match name {
                ALPHA => alpha_milli(value)?,
                _ => value.parse().map_err(|_| form())?,
            };
            if kind == PolicyKind::Auto && [KICK, LATE].contains(&name) && value >= 0 {
                given.push((name.to_owned(), value));
                continue;
            }
            let mut settings = PollSettings::default();
            let Some(place) = place(&mut settings, name) else {
                return Err(SettingError::Unknown { name: name.into() }.into());
            };
            *place = value;
            settings.validate()?;
            given.push((name.to_owned(), value));
        }
        Ok(Rule { kind, given })
    }
}
