//! What this host's KVM can do, for `pollux check`.

use kvm_ioctls::Kvm;

use super::kvm;

/// Looks at /dev/kvm: one line for each thing that is good, or an error for one that makes a VM impossible.
///
/// # Errors
/// There is no KVM.
pub fn probe() -> Result<Vec<Result<String, String>>, crate::vm::kvm::Error> {
    let kvm = kvm::open()?;
    Ok(vec![capabilities(&kvm), Ok(vcpus(&kvm)), make_vm(&kvm)])
}

fn capabilities(kvm: &Kvm) -> Result<String, String> {
    match arch::vm::check_capabilities(kvm) {
        Ok(()) => Ok("KVM has all capabilities that are needed".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn vcpus(kvm: &Kvm) -> String {
    let most = kvm.get_max_vcpus().min(arch::layout::MAX_CPUS.into());
    let recommended = kvm.get_nr_vcpus();
    format!("up to {most} vCPUs a VM; KVM recommends at most {recommended} on this host")
}

/// Makes a VM with a vCPU and throws it away.
fn make_vm(kvm: &Kvm) -> Result<String, String> {
    let attempt = || -> Result<(), String> {
        let vm = kvm::create_vm(kvm).map_err(|error| format!("KVM_CREATE_VM: {error}"))?;
        arch::vm::setup_vm(&vm).map_err(|error| error.to_string())?;
        vm.create_vcpu(0)
            .map_err(|error| format!("KVM_CREATE_VCPU: {error}"))?;
        Ok(())
    };
    match attempt() {
        Ok(()) => Ok("a VM with a vCPU can be made".to_owned()),
        Err(problem) => Err(format!(
            "a VM cannot be made: {problem}; see the host's kernel log"
        )),
    }
}
