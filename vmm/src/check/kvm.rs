//! Whether KVM is there, can do what is needed, and does it in hardware.

use kvm_ioctls::Kvm;

use super::host::Host;
use super::{Finding, Verdict};
use crate::vm::kvm;

/// Words among the processor's features that stand for hardware virtualization: Intel's, AMD's, IBM's.
const HARDWARE: [&str; 3] = ["vmx", "svm", "sie"];

pub fn look(host: &Host) -> Vec<Finding> {
    let mut findings = vec![hardware(host)];
    if host.has_cpu_feature("hypervisor") {
        let text = "this host is itself a virtual machine: leaving the guest and waking a thread cost more here";
        findings.push(Finding::new(Verdict::Note, text));
    }
    match kvm::open() {
        Err(error) => findings.push(Finding::new(Verdict::Fatal, error.to_string())),
        Ok(kvm) => {
            findings.push(Finding::new(
                Verdict::Good,
                "/dev/kvm opens, API version 12",
            ));
            findings.push(capabilities(&kvm));
            findings.push(vcpus(&kvm));
            findings.push(make_vm(&kvm));
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

fn capabilities(kvm: &Kvm) -> Finding {
    match arch::vm::check_capabilities(kvm) {
        Ok(()) => Finding::new(Verdict::Good, "KVM has all capabilities that are needed"),
        Err(error) => Finding::new(Verdict::Fatal, error.to_string()),
    }
}

fn vcpus(kvm: &Kvm) -> Finding {
    let most = kvm.get_max_vcpus().min(arch::layout::MAX_CPUS.into());
    let recommended = kvm.get_nr_vcpus();
    Finding::new(
        Verdict::Good,
        format!("up to {most} vCPUs a VM; KVM recommends at most {recommended} on this host"),
    )
}

/// Makes a VM with a vCPU and throws it away.
fn make_vm(kvm: &Kvm) -> Finding {
    let attempt = || -> Result<(), String> {
        let vm = kvm::create_vm(kvm).map_err(|error| format!("KVM_CREATE_VM: {error}"))?;
        arch::vm::setup_vm(&vm).map_err(|error| error.to_string())?;
        vm.create_vcpu(0)
            .map_err(|error| format!("KVM_CREATE_VCPU: {error}"))?;
        Ok(())
    };
    match attempt() {
        Ok(()) => Finding::new(Verdict::Good, "a VM with a vCPU can be made"),
        Err(problem) => Finding::new(
            Verdict::Fatal,
            format!("a VM cannot be made: {problem}; see the host's kernel log"),
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
