//! `pollux check`: what this host offers, what would be slow or missing, and whether a VM can run.

mod host;
mod kvm;
mod memory;
mod ring;
mod system;

use std::fmt;

use host::Host;

/// Columns of the report.
const WIDTH: usize = 80;

/// How good something is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// As it should be.
    Good,
    /// Worth knowing.
    Note,
    /// It works, and costs speed.
    Slow,
    /// Something cannot be used; a VM runs without it.
    Missing,
    /// No VM can run.
    Fatal,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Note => "note",
            Self::Slow => "slow",
            Self::Missing => "missing",
            Self::Fatal => "FAILED",
        }
    }
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How good it is.
    pub verdict: Verdict,
    /// What was found, and what to do about it.
    pub text: String,
}

impl Finding {
    fn new(verdict: Verdict, text: impl Into<String>) -> Self {
        let text = text.into();
        Self { verdict, text }
    }
}

/// What was found about one subject.
#[derive(Debug, Clone)]
pub struct Section {
    /// The subject.
    pub title: &'static str,
    /// What was found, in the order of looking.
    pub findings: Vec<Finding>,
}

/// Everything that was found.
#[derive(Debug, Clone)]
pub struct Report(pub Vec<Section>);

impl Report {
    /// Looks at this host.
    pub fn of_this_host() -> Self {
        let host = Host::this();
        let section = |title, findings| Section { title, findings };
        Self(vec![
            section("KVM", kvm::look(&host)),
            section("Event loops and disks", ring::look(&host)),
            section("Memory", memory::look(&host)),
            section("System", system::look(&host)),
        ])
    }

    fn worst(&self) -> Verdict {
        let findings = self.0.iter().flat_map(|section| &section.findings);
        let worst = findings.map(|finding| finding.verdict).max();
        worst.unwrap_or(Verdict::Good)
    }

    /// Whether a VM can run here.
    pub fn can_run(&self) -> bool {
        self.worst() != Verdict::Fatal
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for section in &self.0 {
            writeln!(f, "{}", section.title)?;
            for finding in &section.findings {
                let mut word = finding.verdict.word();
                for line in wrap(&finding.text, WIDTH - 11) {
                    writeln!(f, "  {word:<8} {line}")?;
                    word = "";
                }
            }
        }
        f.write_str(match self.worst() {
            Verdict::Fatal => "No VM can run here.\n",
            Verdict::Missing | Verdict::Slow => "A VM can run here, with the limits above.\n",
            Verdict::Note | Verdict::Good => "A VM can run here.\n",
        })
    }
}

/// Cuts a text into lines of at most `width` characters, between words; a longer word has its own.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(verdicts: &[Verdict]) -> Report {
        let finding = |verdict: &Verdict| Finding::new(*verdict, "something");
        Report(vec![Section {
            title: "Subject",
            findings: verdicts.iter().map(finding).collect(),
        }])
    }

    #[test]
    fn only_what_is_fatal_keeps_a_vm_from_running() {
        use Verdict::{Fatal, Good, Missing, Note, Slow};
        assert!(report(&[]).can_run());
        assert!(report(&[Good, Note, Slow, Missing]).can_run());
        assert!(!report(&[Good, Fatal, Note]).can_run());
        assert_eq!(
            report(&[Good, Fatal]).to_string(),
            "Subject\n  ok       something\n  FAILED   something\nNo VM can run here.\n"
        );
        assert!(
            report(&[Good, Slow])
                .to_string()
                .ends_with("limits above.\n")
        );
        assert!(
            report(&[Note])
                .to_string()
                .ends_with("A VM can run here.\n")
        );
    }

    #[test]
    fn long_findings_are_wrapped_between_words() {
        assert_eq!(wrap("ab cd efg  h", 5), ["ab cd", "efg h"]);
        assert_eq!(wrap("a bcdefgh i", 3), ["a", "bcdefgh", "i"]);
        let report = Report::of_this_host().to_string();
        let long = report.lines().find(|line| line.chars().count() > WIDTH);
        assert_eq!(long, None);
    }

    #[test]
    fn this_host_is_looked_at_without_a_panic_and_each_finding_is_one_line() {
        let report = Report::of_this_host();
        assert_eq!(report.0.len(), 4);
        for section in &report.0 {
            assert!(!section.findings.is_empty(), "{}", section.title);
            for finding in &section.findings {
                assert!(!finding.text.contains('\n'), "{}", finding.text);
            }
        }
    }
}
