//! Values with a notation of their own: sizes, index lists, page sizes, the console.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::sandbox::UserSpec;

/// A number of bytes, written with K, M, G or T (powers of 1024) or bare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u64);

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
        let shift = match &text[digits.len()..] {
            "" | "B" => 0,
            "K" | "k" | "KiB" => 10,
            "M" | "m" | "MiB" => 20,
            "G" | "g" | "GiB" => 30,
            "T" | "t" | "TiB" => 40,
            _ => return Err("not a size; give a whole number with K, M, G or T".to_owned()),
        };
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return Err("not a size; give a whole number with K, M, G or T".to_owned());
        }
        digits
            .parse::<u64>()
            .ok()
            .and_then(|count| count.checked_mul(1 << shift))
            .map(Size)
            .ok_or_else(|| "more bytes than 64 bits hold; give a smaller size".to_owned())
    }
}

impl fmt::Display for Size {
    /// The largest unit that divides the size.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (shift, unit) in [(40, "T"), (30, "G"), (20, "M"), (10, "K")] {
            if self.0 != 0 && self.0.is_multiple_of(1 << shift) {
                return write!(f, "{}{unit}", self.0 >> shift);
            }
        }
        write!(f, "{}", self.0)
    }
}

/// A set of indices (host CPUs, virtqueues): `0-2+5`; commas are taken for plus signs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IndexSet(pub BTreeSet<u32>);

/// The largest index taken, so that a slip of the finger does not fill the memory.
const MAX_INDEX: u32 = 65535;

impl FromStr for IndexSet {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut set = BTreeSet::new();
        if text.is_empty() {
            return Ok(Self(set));
        }
        let number = |digits: &str| {
            digits
                .parse::<u32>()
                .ok()
                .filter(|n| *n <= MAX_INDEX && digits.bytes().all(|b| b.is_ascii_digit()))
                .ok_or_else(|| {
                    format!("not a list of numbers up to {MAX_INDEX}; give for example 0-2+5")
                })
        };
        for part in text.split(['+', ',']) {
            let (low, high) = part.split_once('-').unwrap_or((part, part));
            let (low, high) = (number(low)?, number(high)?);
            if low > high {
                return Err(format!("range {part} runs backwards; write {high}-{low}"));
            }
            for index in low..=high {
                if !set.insert(index) {
                    return Err(format!("{index} is listed twice; list it once"));
                }
            }
        }
        Ok(Self(set))
    }
}

impl fmt::Display for IndexSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut indices = self.0.iter().copied().peekable();
        let mut separator = "";
        while let Some(low) = indices.next() {
            let mut high = low;
            while let Some(next) = indices.next_if_eq(&(high + 1)) {
                high = next;
            }
            match high - low {
                0 => write!(f, "{separator}{low}")?,
                _ => write!(f, "{separator}{low}-{high}")?,
            }
            separator = "+";
        }
        Ok(())
    }
}

/// Whether guest memory is made of huge pages, and of which.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HugePages {
    /// Ordinary pages; the kernel may still use transparent huge pages.
    #[default]
    Off,
    /// Huge pages of the host's default size.
    On,
    /// Huge pages of this size in bytes, a power of two.
    Size(Size),
}

impl FromStr for HugePages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" | "false" | "no" => Ok(Self::Off),
            "on" | "true" | "yes" => Ok(Self::On),
            _ => match text.parse::<Size>() {
                Ok(size) if size.0.is_power_of_two() && size.0 >= 65536 => Ok(Self::Size(size)),
                _ => Err(
                    "no page size; give on, off, or a size that the host has, such as 2M"
                        .to_owned(),
                ),
            },
        }
    }
}

impl fmt::Display for HugePages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::On => f.write_str("on"),
            Self::Size(size) => size.fmt(f),
        }
    }
}

/// What the guest's serial port is connected to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Serial {
    /// Standard input and output.
    #[default]
    Stdio,
    /// Output goes to a file, which is made anew; there is no input.
    File(PathBuf),
    /// A new pseudo-terminal, whose name is told on standard error.
    Pty,
    /// Nothing: output is dropped.
    None,
}

impl FromStr for Serial {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "stdio" => Ok(Self::Stdio),
            "pty" => Ok(Self::Pty),
            "none" => Ok(Self::None),
            _ => match text.strip_prefix("file=") {
                Some("") => Err("no file name; give file=PATH".to_owned()),
                Some(path) => Ok(Self::File(path.into())),
                None => Err("no such console; give stdio, pty, none or file=PATH".to_owned()),
            },
        }
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stdio => f.write_str("stdio"),
            Self::File(path) => write!(f, "file={}", path.display()),
            Self::Pty => f.write_str("pty"),
            Self::None => f.write_str("none"),
        }
    }
}

/// Where the monitor (QMP) listens: a unix socket, written `unix:PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QmpSocket(pub PathBuf);

impl FromStr for QmpSocket {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("no path; give unix:PATH".to_owned()),
            Some(path) => Ok(Self(path.into())),
            None => Err(format!("not a socket; did you mean unix:{text}?")),
        }
    }
}

impl fmt::Display for QmpSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix:{}", self.0.display())
    }
}

/// An exchange rate from 0 to 10, kept in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Alpha(pub i64);

impl FromStr for Alpha {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let milli = iothread::alpha_milli(text);
        milli.map(Self).map_err(|error| error.to_string())
    }
}

impl fmt::Display for Alpha {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&iothread::alpha_text(self.0))
    }
}

/// Serde by the text form; a number or a switch counts as its text.
macro_rules! as_text {
    ($($name:ty => $expected:literal)*) => {$(
        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;
                impl de::Visitor<'_> for Text {
                    type Value = $name;
                    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                        f.write_str($expected)
                    }
                    fn visit_str<E: de::Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(E::custom)
                    }
                    fn visit_u64<E: de::Error>(self, number: u64) -> Result<$name, E> {
                        self.visit_str(&number.to_string())
                    }
                    fn visit_f64<E: de::Error>(self, number: f64) -> Result<$name, E> {
                        self.visit_str(&number.to_string())
                    }
                    fn visit_bool<E: de::Error>(self, on: bool) -> Result<$name, E> {
                        self.visit_str(if on { "on" } else { "off" })
                    }
                }
                deserializer.deserialize_any(Text)
            }
        }
    )*};
}

as_text! {
    Size => "a size such as 512M"
    Alpha => "a number from 0 to 10 such as 0.3"
    IndexSet => "a list of numbers such as \"0-2+5\""
    HugePages => "on, off or a page size such as \"2M\""
    Serial => "stdio, pty, none or file=PATH"
    QmpSocket => "a socket: \"unix:PATH\""
    UserSpec => "a user such as \"nobody\" or \"1000:1000\""
}

/// Serde for a foreign type by its text form: `#[serde(with = "by_text")]`.
pub mod by_text {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes the text form.
    pub fn serialize<T: Display, S: Serializer>(
        value: &T,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_str(value)
    }

    /// Reads the text form.
    pub fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
    where
        T: FromStr<Err: Display>,
        D: Deserializer<'de>,
    {
        String::deserialize(deserializer)?
            .parse()
            .map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("4k", 4096),
            ("64M", 64 << 20),
            ("3GiB", 3 << 30),
            ("1T", 1 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in [
            "",
            "M",
            "1.5G",
            "-1",
            "+1",
            "1Q",
            "1 G",
            "0x10",
            "18446744073709551616",
            "16777216T",
            "é",
        ] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn index_sets() {
        let set = |items: &[u32]| Ok(IndexSet(items.iter().copied().collect()));
        assert_eq!("".parse(), set(&[]));
        assert_eq!("2-3".parse(), set(&[2, 3]));
        assert_eq!("0+2-4,7".parse(), set(&[0, 2, 3, 4, 7]));
        for text in [
            "a",
            "1-",
            "-1",
            "3-1",
            "1+1",
            "0-2+2",
            "65536",
            "0-4294967295",
            "1++2",
            "+1",
        ] {
            assert!(text.parse::<IndexSet>().is_err(), "{text}");
        }
    }

    #[test]
    fn consoles_and_page_sizes() {
        assert_eq!("file=/a,b".parse(), Ok(Serial::File("/a,b".into())));
        for text in ["", "file=", "tcp:1", "Stdio"] {
            assert!(text.parse::<Serial>().is_err(), "{text}");
        }
        assert_eq!("2M".parse(), Ok(HugePages::Size(Size(2 << 20))));
        for text in ["", "3M", "4k", "maybe"] {
            assert!(text.parse::<HugePages>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn printed_is_read_back(bytes: u64, indices in prop::collection::btree_set(0u32..=MAX_INDEX, 0..40),
                                near in prop::collection::btree_set(0u32..12, 0..12)) {
            prop_assert_eq!(Size(bytes).to_string().parse(), Ok(Size(bytes)));
            for set in [indices, near] {
                let set = IndexSet(set);
                prop_assert_eq!(set.to_string().parse(), Ok(set));
            }
        }

        #[test]
        fn no_text_panics(text in ".{0,12}") {
            let _ = text.parse::<Size>();
            let _ = text.parse::<IndexSet>();
            let _ = text.parse::<HugePages>();
            let _ = text.parse::<Serial>();
        }
    }
}
