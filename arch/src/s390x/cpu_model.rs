//! The CPU model as the user says it. KVM gives a guest the host's own model; features are neither added nor hidden here.

use std::fmt;
use std::str::FromStr;

/// The only model.
const HOST: &str = "host";

/// The host's CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuModel;

/// A model that there is not.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no CPU model here: the only one is host, without features")]
pub struct CpuModelError(String);

impl FromStr for CpuModel {
    type Err = CpuModelError;

    fn from_str(text: &str) -> Result<CpuModel, CpuModelError> {
        match text.trim() {
            HOST => Ok(CpuModel),
            _ => Err(CpuModelError(text.to_owned())),
        }
    }
}

impl fmt::Display for CpuModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(HOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_host_is_a_model() {
        assert_eq!("host".parse(), Ok(CpuModel));
        assert_eq!(CpuModel.to_string(), "host");
        for text in ["", "z14", "host,-vx"] {
            let error = text.parse::<CpuModel>().unwrap_err().to_string();
            assert!(error.contains("the only one is host"), "{error}");
        }
    }
}
