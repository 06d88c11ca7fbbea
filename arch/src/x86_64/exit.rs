//! What to say when KVM_RUN ends and cannot go on: why, where, and what to do about it.

use std::fmt;

use kvm_bindings::{
    KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION,
    KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES, KVM_INTERNAL_ERROR_SIMUL_EX,
    KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON, kvm_regs, kvm_sregs,
};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemory;

/// Longest x86 instruction.
const MAX_INSTRUCTION_BYTES: usize = 15;
const PAGE: u64 = 4096;
const CR0_PG: u64 = 1 << 31;

/// An exit of KVM_RUN that ends the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FatalExit {
    /// KVM_EXIT_INTERNAL_ERROR.
    InternalError,
    /// KVM_EXIT_FAIL_ENTRY.
    FailEntry {
        /// `hardware_entry_failure_reason`.
        reason: u64,
        /// Host CPU that refused.
        cpu: u32,
    },
    /// KVM_EXIT_SHUTDOWN: on x86, a triple fault.
    Shutdown,
}

/// What is known about a fatal exit; its text is the message for the user, in one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExitReport {
    /// What ended.
    pub exit: FatalExit,
    /// Sub-error of an internal error.
    pub suberror: Option<u32>,
    /// Instruction pointer, if it is known. After a triple fault on AMD it is not: KVM resets the
    /// processor before it reports the exit, because the hardware leaves its state undefined.
    pub rip: Option<u64>,
    /// Privilege level.
    pub cpl: Option<u8>,
    /// Bytes at the instruction pointer; fewer than an instruction's where they cannot be read.
    pub code: Vec<u8>,
    /// Whether this host has hardware virtualization (VMX or SVM).
    pub hardware_virtualization: bool,
}

/// Describes why `vcpu` ended with `exit`. Call it before KVM_RUN is called again.
pub fn describe_exit(vcpu: &mut VcpuFd, mem: &GuestMemory, exit: FatalExit) -> ExitReport {
    let mut suberror = None;
    let mut code = Vec::new();
    if exit == FatalExit::InternalError {
        let run = vcpu.get_kvm_run();
        // SAFETY: KVM fills the `internal` member on this exit; both members of the union are
        // plain integers, so that every content is valid.
        let failure = unsafe { run.__bindgen_anon_1.emulation_failure };
        suberror = Some(failure.suberror);
        if failure.suberror == KVM_INTERNAL_ERROR_EMULATION
            && failure.ndata >= 1
            && failure.flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES) != 0
        {
            // SAFETY: as above; the flag says that KVM filled these bytes.
            let bytes = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
            let len = usize::from(bytes.insn_size).min(bytes.insn_bytes.len());
            code.extend_from_slice(&bytes.insn_bytes[..len]);
        }
    }
    let mut regs = vcpu.get_regs().ok();
    let mut sregs = vcpu.get_sregs().ok();
    if exit == FatalExit::Shutdown
        && let (Some(r), Some(s)) = (&regs, &sregs)
        && is_reset_state(r, s)
    {
        (regs, sregs) = (None, None);
    }
    if code.is_empty()
        && let (Some(regs), Some(sregs)) = (&regs, &sregs)
    {
        code = code_at(vcpu, mem, regs, sregs);
    }
    ExitReport {
        exit,
        suberror,
        rip: regs.map(|r| r.rip),
        cpl: sregs.map(|s| s.ss.dpl),
        code,
        hardware_virtualization: hardware_virtualization(),
    }
}

/// Whether these are a processor's registers after reset or INIT (Intel SDM volume 3, table 10-1).
fn is_reset_state(regs: &kvm_regs, sregs: &kvm_sregs) -> bool {
    const CR0_PE: u64 = 1 << 0;
    regs.rip == 0xfff0 && sregs.cs.base == 0xffff_0000 && sregs.cr0 & CR0_PE == 0
}

/// Reads the instruction bytes through the guest's own page tables.
fn code_at(vcpu: &VcpuFd, mem: &GuestMemory, regs: &kvm_regs, sregs: &kvm_sregs) -> Vec<u8> {
    let mut code = Vec::new();
    let mut linear = match sregs.cs.l {
        0 => sregs.cs.base.wrapping_add(regs.rip) & u64::from(u32::MAX),
        _ => regs.rip,
    };
    while code.len() < MAX_INSTRUCTION_BYTES {
        let physical = if sregs.cr0 & CR0_PG == 0 {
            linear
        } else {
            match vcpu.translate_gva(linear) {
                Ok(translation) if translation.valid != 0 => translation.physical_address,
                _ => break,
            }
        };
        let in_page = (PAGE - linear % PAGE) as usize;
        let mut bytes = vec![0; in_page.min(MAX_INSTRUCTION_BYTES - code.len())];
        match mem.read(&mut bytes, GuestAddress(physical)) {
            Ok(n) if n > 0 => code.extend_from_slice(&bytes[..n]),
            _ => break,
        }
        linear = linear.wrapping_add(bytes.len() as u64);
    }
    code
}

/// Whether the processor has VMX or SVM (CPUID leaf 1, ECX bit 5; leaf 0x80000001, ECX bit 2). A
/// KVM without either runs guest code at privilege level 0 through its instruction interpreter.
pub fn hardware_virtualization() -> bool {
    use std::arch::x86_64::__cpuid;
    let vmx = __cpuid(1).ecx & 1 << 5 != 0;
    let svm = __cpuid(0x8000_0000).eax >= 0x8000_0001 && __cpuid(0x8000_0001).ecx & 1 << 2 != 0;
    vmx || svm
}

impl fmt::Display for ExitReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exit {
            FatalExit::InternalError => {
                let suberror = self.suberror.unwrap_or(0);
                write!(
                    f,
                    "KVM internal error {suberror} ({})",
                    suberror_name(suberror)
                )?;
            }
            FatalExit::FailEntry { reason, cpu } => write!(
                f,
                "KVM could not enter the guest on host CPU {cpu} (hardware reason {reason:#x})"
            )?,
            FatalExit::Shutdown => f.write_str("the guest ended by a triple fault")?,
        }
        if let Some(rip) = self.rip {
            write!(f, " at RIP {rip:#x}")?;
        }
        if let Some(cpl) = self.cpl {
            write!(f, ", CPL {cpl}")?;
        }
        match self.code.as_slice() {
            [] if self.rip.is_none() => {
                f.write_str(" at an unknown place (KVM has reset the processor)")?;
            }
            [] => f.write_str(", instruction not readable")?,
            code => {
                f.write_str(", instruction")?;
                code.iter().try_for_each(|byte| write!(f, " {byte:02x}"))?;
                if let Some(name) = instruction_name(code) {
                    write!(f, " ({name})")?;
                }
            }
        }
        write!(f, ": {}", self.remedy())
    }
}

impl ExitReport {
    fn remedy(&self) -> &'static str {
        let emulation = self.suberror == Some(KVM_INTERNAL_ERROR_EMULATION);
        match self.exit {
            // Such a KVM runs user code on the processor, so that only other code is interpreted.
            FatalExit::InternalError
                if emulation && !self.hardware_virtualization && self.cpl != Some(3) =>
            {
                "this host has no hardware virtualization (vmx, svm), so its KVM interprets the \
                 guest's kernel and does not know this instruction; use a host that has it (pollux \
                 check tells), the nested lab, or the embedded guest"
            }
            FatalExit::InternalError if emulation => {
                "KVM had to emulate this instruction and does not know it; this happens when the \
                 guest runs into device memory or has lost its way"
            }
            FatalExit::InternalError => "see the host's kernel log",
            FatalExit::FailEntry { .. } => {
                "the guest's processor state is not valid for this host; see the host's kernel log"
            }
            FatalExit::Shutdown => {
                "an exception had no handler; the guest's console may tell what came before"
            }
        }
    }
}

fn suberror_name(suberror: u32) -> &'static str {
    match suberror {
        KVM_INTERNAL_ERROR_EMULATION => "instruction emulation failed",
        KVM_INTERNAL_ERROR_SIMUL_EX => "simultaneous exceptions",
        KVM_INTERNAL_ERROR_DELIVERY_EV => "exit while delivering an event",
        KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => "unexpected exit reason",
        _ => "unknown",
    }
}

/// Names the instructions that KVM's interpreter is known to lack.
fn instruction_name(code: &[u8]) -> Option<&'static str> {
    // Prefixes do not change what these are; only the last REX matters.
    let is_prefix = |b: &u8| {
        matches!(
            b,
            0x26 | 0x2e | 0x36 | 0x3e | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3
        )
    };
    let legacy = code.iter().take_while(|b| is_prefix(b)).count();
    let rest = code.get(legacy..)?;
    let (rex, op) = match rest {
        [rex @ 0x40..=0x4f, op @ ..] => (*rex, op),
        op => (0, op),
    };
    let wide = rex & 8 != 0;
    let digit = |modrm: u8| modrm >> 3 & 7;
    let in_memory = |modrm: u8| modrm < 0xc0;
    Some(match op {
        [0xcc, ..] => "int3",
        [0xc4 | 0xc5, ..] => "a VEX-coded instruction",
        [0x62, ..] => "an EVEX-coded instruction",
        [0x0f, 0xc7, modrm, ..] if digit(*modrm) == 1 && in_memory(*modrm) && wide => "cmpxchg16b",
        [0x0f, 0xc7, modrm, ..] if digit(*modrm) == 3 && in_memory(*modrm) => "xrstors",
        [0x0f, 0xc7, modrm, ..] if digit(*modrm) == 4 && in_memory(*modrm) => "xsavec",
        [0x0f, 0xc7, modrm, ..] if digit(*modrm) == 5 && in_memory(*modrm) => "xsaves",
        [0x0f, 0xae, modrm, ..] if digit(*modrm) == 4 && in_memory(*modrm) => "xsave",
        [0x0f, 0xae, modrm, ..] if digit(*modrm) == 5 && in_memory(*modrm) => "xrstor",
        [0x0f, 0xae, modrm, ..] if digit(*modrm) == 6 && in_memory(*modrm) => "xsaveopt",
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
