//! Whether KVM is there, can do what is needed, and does it in hardware.

use super::host::Host;
use super::{Finding, Verdict};
use crate::vm::platform;

/// Words among the processor's features that stand for hardware virtualization: Intel's, AMD's, IBM's.
const HARDWARE: [&str; 3] = ["vmx", "svm", "sie"];

pub fn look(host: &Host) -> Vec<Finding> {
    let mut findings = vec![hardware(host)];
    if host.has_cpu_feature("hypervisor") {
        let text = "this host is itself a virtual machine: leaving the guest and waking a thread cost more here";
        findings.push(Finding::new(Verdict::Note, text));
    }
    match platform::probe::probe() {
        Err(error) => findings.push(Finding::new(Verdict::Fatal, error.to_string())),
        Ok(results) => {
            findings.push(Finding::new(
                Verdict::Good,
                "/dev/kvm opens, API version 12",
            ));
            findings.extend(results.into_iter().map(|result| match result {
                Ok(text) => Finding::new(Verdict::Good, text),
                Err(text) => Finding::new(Verdict::Fatal, text),
            }));
        }
    }
    findings.extend(halt_polling(host));
    findings
}

fn hardware(host: &Host) -> Finding {
    let found = HARDWARE.iter().find(|word| host.has_cpu_feature(word));
    match found {
        Some(word) => Finding::new(
            Verdict::Good,
            format!("hardware virtualization: the processor has {word}"),
        ),
        None => Finding::new(
            Verdict::Slow,
            "hardware virtualization: none to be seen (no vmx, svm or sie in /proc/cpuinfo). If /dev/kvm works all the \
             same, it interprets the guest's kernel code: Linux may not boot, the embedded guest runs",
        ),
    }
}

/// KVM's own polling, before a vCPU that has nothing to do gives up its CPU: it adds to ours.
fn halt_polling(host: &Host) -> Option<Finding> {
    let ns = host.number("sys/module/kvm/parameters/halt_poll_ns")?;
    let text = match ns {
        0 => "KVM does not poll when a vCPU halts (halt_poll_ns=0)".to_owned(),
        _ => format!(
            "KVM polls up to {ns} ns when a vCPU halts (kvm.halt_poll_ns): CPU time beside that of the iothreads"
        ),
    };
    Some(Finding::new(Verdict::Note, text))
}

#[cfg(test)]
mod tests {
    use super::super::host::Made;
    use super::*;

    #[test]
    fn hardware_virtualization_is_read_from_the_processors_features() {
        for (cpuinfo, verdict) in [
            ("flags : fpu vmx", Verdict::Good),
            ("flags : fpu svm", Verdict::Good),
            ("features : esan3 sie", Verdict::Good),
            ("flags : fpu hypervisor", Verdict::Slow),
            ("", Verdict::Slow),
        ] {
            let made = Made::of(&[("proc/cpuinfo", cpuinfo)]);
            assert_eq!(hardware(&made.host).verdict, verdict, "{cpuinfo}");
        }
    }

    #[test]
    fn kvms_own_polling_is_told() {
        let path = "sys/module/kvm/parameters/halt_poll_ns";
        for (text, part) in [("0", "does not poll"), ("200000", "up to 200000 ns")] {
            let made = Made::of(&[(path, text)]);
            let finding = halt_polling(&made.host).unwrap();
            assert!(finding.text.contains(part), "{}", finding.text);
        }
        assert_eq!(halt_polling(&Made::of(&[]).host), None);
    }
}
