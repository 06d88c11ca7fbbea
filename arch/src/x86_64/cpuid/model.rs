//! `--cpu host,-feature,+feature`.

use std::fmt;
use std::str::FromStr;

use crate::x86_64::cpuid::features::{canonical, nearest};

/// What the guest's processors are: the host's, with features taken away or demanded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuModel {
    /// Canonical names, in the order given.
    without: Vec<&'static str>,
    with: Vec<&'static str>,
}

impl CpuModel {
    /// Features to hide from the guest.
    pub fn without(&self) -> &[&'static str] {
        &self.without
    }

    /// Features that the host must have.
    pub fn with(&self) -> &[&'static str] {
        &self.with
    }
}

/// A `--cpu` value that cannot be understood or provided.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CpuModelError {
    /// Only `host` is there.
    #[error("CPU model {0:?} is unknown: give host")]
    UnknownModel(String),
    /// Something that is neither `+name` nor `-name`.
    #[error("{0:?} is no change of a feature: write +{0} or -{0}")]
    NoSign(String),
    /// A sign without a name, or two commas.
    #[error("a feature's name is missing: write host,-feature,+feature")]
    NoName,
    /// No such feature.
    #[error("CPU feature {written:?} is unknown: the nearest name is {nearest}")]
    UnknownFeature {
        /// As given.
        written: String,
        /// Known name that looks most like it.
        nearest: &'static str,
    },
    /// Both `+` and `-`, or the same twice.
    #[error("CPU feature {0} is given twice: give it once")]
    Twice(&'static str),
    /// `+feature`, but neither the processor nor KVM has it.
    #[error("CPU feature {0} is not there on this host: leave +{0} out")]
    NotOnHost(&'static str),
}

impl FromStr for CpuModel {
    type Err = CpuModelError;

    fn from_str(text: &str) -> Result<CpuModel, CpuModelError> {
        let mut items = text.split(',').map(str::trim);
        match items.next() {
            Some("host") => {}
            other => {
                return Err(CpuModelError::UnknownModel(
                    other.unwrap_or_default().to_owned(),
                ));
            }
        }
        let mut model = CpuModel::default();
        for item in items {
            let (list, written) = match item.split_at_checked(1) {
                Some(("-", written)) => (&mut model.without, written),
                Some(("+", written)) => (&mut model.with, written),
                _ if item.is_empty() => return Err(CpuModelError::NoName),
                _ => return Err(CpuModelError::NoSign(item.to_owned())),
            };
            if written.is_empty() {
                return Err(CpuModelError::NoName);
            }
            let name = canonical(written).ok_or_else(|| CpuModelError::UnknownFeature {
                written: written.to_owned(),
                nearest: nearest(written),
            })?;
            list.push(name);
            let count = |list: &[&str]| list.iter().filter(|n| **n == name).count();
            if count(&model.with) + count(&model.without) > 1 {
                return Err(CpuModelError::Twice(name));
            }
        }
        Ok(model)
    }
}

impl fmt::Display for CpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("host")?;
        self.without.iter().try_for_each(|n| write!(f, ",-{n}"))?;
        self.with.iter().try_for_each(|n| write!(f, ",+{n}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn features_are_read_and_written_back() {
        let model: CpuModel = "host, -AVX512F,+sse4_2".parse().unwrap();
        assert_eq!(model.without(), ["avx512f"]);
        assert_eq!(model.with(), ["sse4.2"]);
        assert_eq!(model.to_string(), "host,-avx512f,+sse4.2");
        assert_eq!("host".parse(), Ok(CpuModel::default()));
    }

    #[test]
    fn each_mistake_has_its_message() {
        for (text, message) in [
            ("", "CPU model \"\" is unknown: give host"),
            ("max,-avx", "CPU model \"max\" is unknown: give host"),
            (
                "host,avx",
                "\"avx\" is no change of a feature: write +avx or -avx",
            ),
            (
                "host,",
                "a feature's name is missing: write host,-feature,+feature",
            ),
            (
                "host,-",
                "a feature's name is missing: write host,-feature,+feature",
            ),
            (
                "host,-avx5",
                "CPU feature \"avx5\" is unknown: the nearest name is avx",
            ),
            (
                "host,-avx,+AVX",
                "CPU feature avx is given twice: give it once",
            ),
            (
                "host,-sse3,-pni",
                "CPU feature pni is given twice: give it once",
            ),
        ] {
            let error = text.parse::<CpuModel>().unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }

    proptest! {
        #[test]
        fn any_text_gives_a_model_that_reads_back_or_an_error(text in "(host)?[-+,a-z0-9_.é]{0,30}") {
            if let Ok(model) = text.parse::<CpuModel>() {
                prop_assert_eq!(model.to_string().parse(), Ok(model));
            }
        }
    }
}
