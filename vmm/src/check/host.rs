//! The files in which the kernel tells about the host.

use std::path::PathBuf;

/// Reads under `/`, or under a directory that stands for it in tests.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// This host.
    pub fn this() -> Self {
        Self { root: "/".into() }
    }

    /// The text of a file such as `proc/cpuinfo`, without white space around it.
    pub fn read(&self, path: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.root.join(path)).ok()?;
        Some(text.trim().to_owned())
    }

    /// A number in a file.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    /// The names in a directory, sorted.
    pub fn list(&self, path: &str) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.root.join(path)) else {
            return Vec::new();
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// Whether a word is among the first processor's features.
    pub fn has_cpu_feature(&self, feature: &str) -> bool {
        let cpuinfo = self.read("proc/cpuinfo").unwrap_or_default();
        let line = cpuinfo.lines().find(|line| {
            let name = line.split(':').next().unwrap_or_default().trim();
            name == "flags" || name == "features"
        });
        line.is_some_and(|line| line.split_whitespace().any(|word| word == feature))
    }

    /// The value of a field of `/proc/meminfo`, in bytes.
    pub fn meminfo_bytes(&self, field: &str) -> Option<u64> {
        let meminfo = self.read("proc/meminfo")?;
        let line = meminfo
            .lines()
            .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kib << 10)
    }
}

/// Bytes for people: in the largest unit that leaves at least 1.
pub fn size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units.iter().find(|(_, shift)| bytes >> shift != 0) {
        Some((unit, shift)) => {
            let tenths = (u128::from(bytes) * 10) >> shift;
            match tenths % 10 {
                0 => format!("{} {unit}", tenths / 10),
                rest => format!("{}.{rest} {unit}", tenths / 10),
            }
        }
        None => format!("{bytes} bytes"),
    }
}

/// A host made of files, for tests.
#[cfg(test)]
pub struct Made {
    /// Keeps the files.
    _dir: tempfile::TempDir,
    /// To look at.
    pub host: Host,
}

#[cfg(test)]
impl Made {
    /// Files by path.
    pub fn of(files: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let root = dir.path().to_owned();
        Self {
            _dir: dir,
            host: Host { root },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_where_they_are() {
        let made = Made::of(&[
            (
                "proc/cpuinfo",
                "processor\t: 0\nvmx flags\t: x\nflags\t\t: fpu vmx\n\nprocessor: 1\n",
            ),
            ("proc/meminfo", "MemTotal:  16 kB\nMemAvailable:   3 kB\n"),
            ("sys/number", "42\n"),
        ]);
        let host = &made.host;
        assert!(host.has_cpu_feature("vmx") && !host.has_cpu_feature("svm"));
        assert!(!host.has_cpu_feature("x"));
        assert_eq!(host.meminfo_bytes("MemAvailable"), Some(3 << 10));
        assert_eq!(host.meminfo_bytes("Mem"), None);
        assert_eq!(host.number("sys/number"), Some(42));
        assert_eq!(host.list("sys"), ["number"]);
        assert!(host.list("none").is_empty() && host.read("none").is_none());
    }

    #[test]
    fn sizes_are_short() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (8 << 20, "8 MiB"),
            ((3 << 29), "1.5 GiB"),
            (u64::MAX, "16777215.9 TiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
    }
}
