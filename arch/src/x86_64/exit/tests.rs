use super::*;

fn report(exit: FatalExit, suberror: Option<u32>, code: &[u8], hardware: bool) -> ExitReport {
    ExitReport {
        exit,
        suberror,
        rip: Some(0xffff_ffff_8100_0000),
        cpl: Some(0),
        code: code.to_vec(),
        hardware_virtualization: hardware,
    }
}

#[test]
fn interpreter_case_names_instruction_and_remedy() {
    let text = report(FatalExit::InternalError, Some(1), &[0xcc, 0x90], false).to_string();
    assert_eq!(
        text,
        "KVM internal error 1 (instruction emulation failed) at RIP 0xffffffff81000000, CPL 0, \
         instruction cc 90 (int3): this host has no hardware virtualization (vmx, svm), so its KVM \
         interprets the guest's kernel and does not know this instruction; use a host that has it \
         (pollux check tells), the nested lab, or the embedded guest"
    );
    // Not where KVM uses the processor itself.
    let text = report(FatalExit::InternalError, Some(1), &[0xcc], true).to_string();
    assert!(!text.contains("no hardware virtualization"), "{text}");
    let user = ExitReport {
        cpl: Some(3),
        ..report(FatalExit::InternalError, Some(1), &[0xcc], false)
    };
    let text = user.to_string();
    assert!(!text.contains("no hardware virtualization"), "{text}");
    assert!(text.contains("device memory"), "{text}");
}

#[test]
fn every_kind_is_one_line_with_its_place() {
    for (exit, part) in [
        (FatalExit::Shutdown, "triple fault"),
        (
            FatalExit::InternalError,
            "internal error 3 (exit while delivering",
        ),
        (
            FatalExit::FailEntry {
                reason: 0x8000_0021,
                cpu: 3,
            },
            "on host CPU 3 (hardware reason 0x80000021)",
        ),
    ] {
        let suberror = (exit == FatalExit::InternalError).then_some(3);
        let text = report(exit, suberror, &[], false).to_string();
        assert!(text.contains(part), "{text}");
        assert!(text.contains("RIP 0xffffffff81000000"), "{text}");
        assert!(text.contains("instruction not readable"), "{text}");
        assert!(!text.contains('\n'), "{text}");
    }
}

#[test]
fn instructions_that_the_interpreter_lacks_are_named() {
    for (code, name) in [
        (&[0xcc][..], Some("int3")),
        (&[0xf0, 0x48, 0x0f, 0xc7, 0x0f], Some("cmpxchg16b")),
        (&[0xf0, 0x0f, 0xc7, 0x0f], None),
        (&[0x48, 0x0f, 0xae, 0x27], Some("xsave")),
        (&[0x0f, 0xae, 0x2f], Some("xrstor")),
        (&[0x0f, 0xae, 0xe8], None),
        (&[0x48, 0x0f, 0xc7, 0x1f], Some("xrstors")),
        (
            &[0xc4, 0xe2, 0xf9, 0xf7, 0xc0],
            Some("a VEX-coded instruction"),
        ),
        (&[0x62, 0xf1, 0x7c, 0x48], Some("an EVEX-coded instruction")),
        (&[0x0f, 0xae], None),
        (&[0x66], None),
        (&[0x48], None),
        (&[], None),
    ] {
        assert_eq!(instruction_name(code), name, "{code:x?}");
    }
}

#[test]
fn registers_that_kvm_has_reset_are_not_reported() {
    let regs = kvm_regs {
        rip: 0xfff0,
        ..Default::default()
    };
    let mut sregs = kvm_sregs::default();
    sregs.cs.base = 0xffff_0000;
    sregs.cr0 = 0x6000_0010;
    assert!(is_reset_state(&regs, &sregs));
    sregs.cr0 |= 1;
    assert!(!is_reset_state(&regs, &sregs));
    let report = ExitReport {
        rip: None,
        cpl: None,
        ..report(FatalExit::Shutdown, None, &[], true)
    };
    assert_eq!(
        report.to_string(),
        "the guest ended by a triple fault at an unknown place (KVM has reset the processor): an \
         exception had no handler; the guest's console may tell what came before"
    );
}
