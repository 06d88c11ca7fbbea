//! A rule with settings, as users write it: `weighted,poll-weight=2`.

use std::fmt;
use std::str::FromStr;

use iothread::policy::{Policy, PolicyKind};
use iothread::{PollSettings, SettingError, UnknownPolicy};

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
            _ => vec![Rule::plain(kind)],
        };
        PolicyKind::ALL.into_iter().flat_map(with_weights).collect()
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
        self.kind.build(&self.settings(base))
    }
}

fn place<'a>(settings: &'a mut PollSettings, name: &str) -> Option<&'a mut i64> {
    match name {
        "poll-max-ns" => Some(&mut settings.poll_max_ns),
        "poll-grow" => Some(&mut settings.poll_grow),
        "poll-shrink" => Some(&mut settings.poll_shrink),
        "poll-weight" => Some(&mut settings.poll_weight),
        _ => None,
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        for (name, value) in &self.given {
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
        let kind = items.next().unwrap_or_default().parse()?;
        let mut given = Vec::new();
        for item in items {
            let form = || Error::Form(item.to_owned());
            let (name, value) = item.split_once('=').ok_or_else(form)?;
            let value = value.parse().map_err(|_| form())?;
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
