use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use super::*;

/// A host's table: vendor, highest basic leaf, and what the tests look at.
fn host(vendor: &[u8; 12], max: u32) -> CpuId {
    let word = |i: usize| u32::from_le_bytes(vendor[i..i + 4].try_into().unwrap());
    let leaf = |function, eax, ebx, ecx, edx| kvm_cpuid_entry2 {
        function,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    };
    let sub = |function, index, eax, ebx| kvm_cpuid_entry2 {
        function,
        index,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax,
        ebx,
        ..Default::default()
    };
    CpuId::from_entries(&[
        leaf(0, max, word(0), word(8), word(4)),
        // APIC id 7 of 16; xsave, avx, fma, x2apic; fxsr, sse, sse2, ht.
        leaf(
            1,
            0x8_0f12,
            0x0710_0800,
            1 << 26 | 1 << 28 | 1 << 12 | 1 << 21,
            0x1700_0000,
        ),
        // L1 data, L3, end.
        sub(4, 0, 0x3c00_4121, 0),
        sub(4, 1, 0x3c03_c163, 0),
        sub(4, 2, 0, 0),
        // avx2, erms, avx512f.
        sub(7, 0, 0, 1 << 5 | 1 << 9 | 1 << 16),
        sub(0xb, 0, 1, 2),
        sub(0xb, 1, 4, 16),
        sub(0xd, 0, 0xe7, 0x340),
        sub(0xd, 1, 0xf, 0x340),
        sub(0xd, 2, 0x100, 0x240),
        sub(0xd, 5, 0x40, 0x440),
        sub(0x1f, 0, 1, 2),
        leaf(KVM_SIGNATURE, 0x4000_0001, 0, 0, 0),
        leaf(KVM_FEATURES, 0x0100_7efb, 0, 0, 0),
        leaf(0x8000_0000, 0x8000_0021, 0, 0, 0),
        // syscall, nx, lm, invtsc elsewhere; lahf-lm, svm.
        leaf(0x8000_0001, 0, 0, 1 | 1 << 2, 1 << 11 | 1 << 20 | 1 << 29),
        leaf(0x8000_0008, 0x3030, 0, 0x4_700f, 0),
        leaf(0x8000_000a, 1, 8, 0, 0xff),
        sub(0x8000_001d, 0, 0x4_4121, 0),
        sub(0x8000_001d, 3, 0x3_c163, 0),
        leaf(0x8000_001e, 7, 0x103, 0x1, 0),
        sub(0x8000_0026, 0, 1, 2),
    ])
    .unwrap()
}

fn intel() -> CpuId {
    host(b"GenuineIntel", 0x20)
}

fn amd() -> CpuId {
    host(b"AuthenticAMD", 0x10)
}

fn cpuid(supported: &CpuId, model: &str, cpus: u8) -> Cpuid {
    Cpuid::from_supported(supported, true, &model.parse().unwrap(), cpus).unwrap()
}

fn find(table: &CpuId, function: u32, index: u32) -> Option<kvm_cpuid_entry2> {
    table
        .as_slice()
        .iter()
        .find(|e| e.function == function && e.index == index)
        .copied()
}

fn get(table: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
    find(table, function, index).unwrap_or_else(|| panic!("leaf {function:#x}.{index}"))
}

#[test]
fn each_vcpu_has_its_apic_id_in_every_leaf() {
    for (supported, amd) in [(intel(), false), (amd(), true)] {
        let cpuid = cpuid(&supported, "host", 6);
        for index in 0..6 {
            let table = cpuid.for_vcpu(index, None).unwrap();
            let id = u32::from(index);
            assert_eq!(get(&table, 1, 0).ebx >> 24, id);
            for level in 0..3 {
                assert_eq!(get(&table, 0xb, level).edx, id);
            }
            if amd {
                assert_eq!(get(&table, 0x8000_001e, 0).eax, id);
                assert_eq!(get(&table, 0x8000_001e, 0).ebx, id);
            } else {
                assert_eq!(get(&table, 0x1f, 1).edx, id);
            }
        }
    }
}

#[test]
fn topology_is_one_package_of_cores() {
    let table = cpuid(&intel(), "host", 6).for_vcpu(0, None).unwrap();
    assert_eq!(get(&table, 1, 0).ebx >> 16 & 0xff, 8);
    assert_eq!(get(&table, 1, 0).ebx & 0xffff, 0x0800);
    assert_ne!(get(&table, 1, 0).edx & 1 << 28, 0);
    for function in [0xb, 0x1f] {
        let level = |i| {
            let e = get(&table, function, i);
            (e.eax, e.ebx, e.ecx)
        };
        assert_eq!(level(0), (0, 1, 0x100));
        assert_eq!(level(1), (3, 6, 0x201));
        assert_eq!(level(2), (0, 0, 2));
    }
    // L1 is a core's own, L3 is shared by all; 8 core ids in the package.
    assert_eq!(get(&table, 4, 0).eax, 7 << 26 | 0x121);
    assert_eq!(get(&table, 4, 1).eax, 7 << 26 | 7 << 14 | 0x163);
    assert_eq!(get(&table, 4, 2).eax, 0);
}

#[test]
fn amd_leaves_count_cores() {
    let table = cpuid(&amd(), "host", 6).for_vcpu(3, None).unwrap();
    assert_eq!(get(&table, 0x8000_0008, 0).ecx, 0x4_3005);
    assert_ne!(get(&table, 0x8000_0001, 0).ecx & 2, 0);
    assert_eq!(get(&table, 0x8000_001d, 0).eax >> 14 & 0xfff, 0);
    assert_eq!(get(&table, 0x8000_001d, 3).eax >> 14 & 0xfff, 5);
    let e = get(&table, 0x8000_001e, 0);
    assert_eq!((e.eax, e.ebx, e.ecx), (3, 3, 0));
    assert!(find(&table, 0x8000_0026, 0).is_none());
    // Not above the host's highest leaf.
    assert!(find(&table, 0x1f, 0).is_none());
}

#[test]
fn one_cpu_is_not_called_many() {
    let table = cpuid(&amd(), "host", 1).for_vcpu(0, None).unwrap();
    assert_eq!(get(&table, 1, 0).edx & 1 << 28, 0);
    assert_eq!(get(&table, 1, 0).ebx >> 16 & 0xff, 1);
    assert_eq!(get(&table, 0x8000_0001, 0).ecx & 2, 0);
    assert_eq!(get(&table, 0xb, 1).eax, 0);
    for cpus in [0, 65] {
        let error = Cpuid::from_supported(&amd(), true, &CpuModel::default(), cpus).unwrap_err();
        assert!(matches!(error, Error::CpuCount { .. }), "{error}");
    }
}

#[test]
fn guest_sees_kvm_and_the_frequencies() {
    let cpuid = cpuid(&amd(), "host", 2);
    let table = cpuid.for_vcpu(0, Some(2_450_000)).unwrap();
    let e = get(&table, KVM_SIGNATURE, 0);
    let name: Vec<u8> = [e.ebx, e.ecx, e.edx]
        .iter()
        .flat_map(|r| r.to_le_bytes())
        .collect();
    assert_eq!(name, b"KVMKVMKVM\0\0\0");
    assert_eq!(e.eax, FREQUENCIES);
    assert_eq!(get(&table, KVM_FEATURES, 0).eax, 0x0100_7efb);
    assert_eq!(get(&table, FREQUENCIES, 0).eax, 2_450_000);
    assert_ne!(get(&table, 1, 0).ecx & 1 << 31, 0, "hypervisor");
    assert_ne!(get(&table, 1, 0).ecx & 1 << 24, 0, "tsc-deadline");
    assert!(find(&table, TSC_LEAF, 0).is_none());
    let unknown = cpuid.for_vcpu(0, None).unwrap();
    assert!(find(&unknown, FREQUENCIES, 0).is_none());
    assert_eq!(get(&unknown, KVM_SIGNATURE, 0).eax, KVM_FEATURES);

    let table = self::cpuid(&intel(), "host", 2)
        .for_vcpu(1, Some(2_450_000))
        .unwrap();
    let e = get(&table, TSC_LEAF, 0);
    let khz = u64::from(e.ecx) / 1000 * u64::from(e.ebx) / u64::from(e.eax);
    assert_eq!(khz, 2_450_000);
    assert_eq!(cpuid.physical_address_bits(), 0x30);
}

#[test]
fn features_are_taken_away_with_what_stands_on_them() {
    let table = cpuid(&intel(), "host,-avx,-hypervisor", 1)
        .for_vcpu(0, None)
        .unwrap();
    assert_eq!(get(&table, 1, 0).ecx & (1 << 28 | 1 << 12 | 1 << 31), 0);
    assert_eq!(get(&table, 7, 0).ebx, 1 << 9);
    // AVX and AVX-512 state is gone; the x87 and SSE state stays.
    assert_eq!(get(&table, 0xd, 0).eax, 0x3);
    assert!(find(&table, 0xd, 2).is_none());
    assert!(find(&table, 0xd, 5).is_none());
    assert_ne!(get(&table, 0xd, 1).eax & 1, 0);

    let table = cpuid(&intel(), "host,-avx512f", 1)
        .for_vcpu(0, None)
        .unwrap();
    assert_eq!(get(&table, 0xd, 0).eax, 0x7);
    assert!(find(&table, 0xd, 2).is_some());

    let table = cpuid(&intel(), "host,-xsave", 1).for_vcpu(0, None).unwrap();
    assert!(find(&table, 0xd, 0).is_none());
    let table = cpuid(&amd(), "host,-svm", 1).for_vcpu(0, None).unwrap();
    assert!(find(&table, 0x8000_000a, 0).is_none());
    assert!(
        find(
            &cpuid(&amd(), "host", 1).for_vcpu(0, None).unwrap(),
            0x8000_000a,
            0
        )
        .is_some()
    );
}

#[test]
fn demanded_features_must_be_there() {
    cpuid(&intel(), "host,+avx2,+x2apic,+hypervisor,+kvmclock", 1);
    for missing in ["invtsc", "sha-ni", "amx-tile"] {
        let model = format!("host,+{missing}").parse().unwrap();
        let error = Cpuid::from_supported(&intel(), true, &model, 1).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("CPU feature {missing} is not there on this host: leave +{missing} out")
        );
        assert_eq!(error.option(), Some("--cpu"));
    }
}

#[test]
fn features_that_kvm_shows_against_the_model_are_told() {
    let cpuid = cpuid(&intel(), "host,-avx,-erms,-sha-ni", 1);
    let as_set = cpuid.for_vcpu(0, None).unwrap();
    assert!(cpuid.shown_nevertheless(&as_set).is_empty());
    assert_eq!(cpuid.shown_nevertheless(&intel()), ["avx", "erms"]);
}
