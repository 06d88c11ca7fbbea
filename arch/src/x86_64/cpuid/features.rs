//! The names of CPU features, and where CPUID has them.
//!
//! Names are QEMU's; those of `/proc/cpuinfo` work as well where they differ only in `_`, `-` and
//! `.`, or are listed in [`ALIASES`]. Bits are those of the Intel SDM (volume 2, CPUID), the AMD APM
//! (volume 3, appendix E) and Linux `Documentation/virt/kvm/x86/cpuid.rst`.

/// A register of a CPUID leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Register {
    /// EAX.
    Eax,
    /// EBX.
    Ebx,
    /// ECX.
    Ecx,
    /// EDX.
    Edx,
}

/// One register full of feature bits.
pub(crate) struct Group {
    pub function: u32,
    pub index: u32,
    pub register: Register,
    /// Bit and name.
    pub names: &'static [(u32, &'static str)],
}

use Register::{Eax, Ebx, Ecx, Edx};

const fn group(
    function: u32,
    index: u32,
    register: Register,
    names: &'static [(u32, &'static str)],
) -> Group {
    Group {
        function,
        index,
        register,
        names,
    }
}

/// All features that can be named. A name that stands twice (kvmclock) means both bits.
#[rustfmt::skip]
pub(crate) const GROUPS: &[Group] = &[
    group(1, 0, Edx, &[
        (0, "fpu"), (1, "vme"), (2, "de"), (3, "pse"), (4, "tsc"), (5, "msr"), (6, "pae"),
        (7, "mce"), (8, "cx8"), (9, "apic"), (11, "sep"), (12, "mtrr"), (13, "pge"), (14, "mca"),
        (15, "cmov"), (16, "pat"), (17, "pse36"), (18, "pn"), (19, "clflush"), (21, "ds"),
        (22, "acpi"), (23, "mmx"), (24, "fxsr"), (25, "sse"), (26, "sse2"), (27, "ss"), (28, "ht"),
        (29, "tm"), (31, "pbe"),
    ]),
    group(1, 0, Ecx, &[
        (0, "pni"), (1, "pclmulqdq"), (2, "dtes64"), (3, "monitor"), (4, "ds-cpl"), (5, "vmx"),
        (6, "smx"), (7, "est"), (8, "tm2"), (9, "ssse3"), (10, "cid"), (12, "fma"), (13, "cx16"),
        (14, "xtpr"), (15, "pdcm"), (17, "pcid"), (18, "dca"), (19, "sse4.1"), (20, "sse4.2"),
        (21, "x2apic"), (22, "movbe"), (23, "popcnt"), (24, "tsc-deadline"), (25, "aes"),
        (26, "xsave"), (28, "avx"), (29, "f16c"), (30, "rdrand"), (31, "hypervisor"),
    ]),
    group(6, 0, Eax, &[(2, "arat")]),
    group(7, 0, Ebx, &[
        (0, "fsgsbase"), (1, "tsc-adjust"), (2, "sgx"), (3, "bmi1"), (4, "hle"), (5, "avx2"),
        (7, "smep"), (8, "bmi2"), (9, "erms"), (10, "invpcid"), (11, "rtm"), (14, "mpx"),
        (16, "avx512f"), (17, "avx512dq"), (18, "rdseed"), (19, "adx"), (20, "smap"),
        (21, "avx512ifma"), (23, "clflushopt"), (24, "clwb"), (25, "intel-pt"), (26, "avx512pf"),
        (27, "avx512er"), (28, "avx512cd"), (29, "sha-ni"), (30, "avx512bw"), (31, "avx512vl"),
    ]),
    group(7, 0, Ecx, &[
        (1, "avx512vbmi"), (2, "umip"), (3, "pku"), (5, "waitpkg"), (6, "avx512vbmi2"),
        (7, "shstk"), (8, "gfni"), (9, "vaes"), (10, "vpclmulqdq"), (11, "avx512vnni"),
        (12, "avx512bitalg"), (14, "avx512-vpopcntdq"), (16, "la57"), (22, "rdpid"),
        (24, "bus-lock-detect"), (25, "cldemote"), (27, "movdiri"), (28, "movdir64b"),
        (30, "sgxlc"), (31, "pks"),
    ]),
    group(7, 0, Edx, &[
        (2, "avx512-4vnniw"), (3, "avx512-4fmaps"), (4, "fsrm"), (8, "avx512-vp2intersect"),
        (10, "md-clear"), (14, "serialize"), (16, "tsx-ldtrk"), (19, "arch-lbr"), (20, "ibt"),
        (22, "amx-bf16"), (23, "avx512-fp16"), (24, "amx-tile"), (25, "amx-int8"),
        (26, "spec-ctrl"), (27, "stibp"), (28, "flush-l1d"), (29, "arch-capabilities"),
        (30, "core-capability"), (31, "ssbd"),
    ]),
    group(7, 1, Eax, &[
        (0, "sha512"), (1, "sm3"), (2, "sm4"), (4, "avx-vnni"), (5, "avx512-bf16"),
        (7, "cmpccxadd"), (10, "fzrm"), (11, "fsrs"), (12, "fsrc"), (17, "fred"), (18, "lkgs"),
        (19, "wrmsrns"), (21, "amx-fp16"), (23, "avx-ifma"), (26, "lam"),
    ]),
    group(7, 1, Edx, &[
        (4, "avx-vnni-int8"), (5, "avx-ne-convert"), (8, "amx-complex"), (10, "avx-vnni-int16"),
        (14, "prefetchiti"), (19, "avx10"),
    ]),
    group(0xd, 1, Eax, &[
        (0, "xsaveopt"), (1, "xsavec"), (2, "xgetbv1"), (3, "xsaves"), (4, "xfd"),
    ]),
    group(0x4000_0001, 0, Eax, &[
        (0, "kvmclock"), (1, "kvm-nopiodelay"), (2, "kvm-mmu"), (3, "kvmclock"), (4, "kvm-asyncpf"),
        (5, "kvm-steal-time"), (6, "kvm-pv-eoi"), (7, "kvm-pv-unhalt"), (9, "kvm-pv-tlb-flush"),
        (10, "kvm-asyncpf-vmexit"), (11, "kvm-pv-ipi"), (12, "kvm-poll-control"),
        (13, "kvm-pv-sched-yield"), (14, "kvm-asyncpf-int"), (15, "kvm-msi-ext-dest-id"),
        (24, "kvmclock-stable-bit"),
    ]),
    group(0x8000_0001, 0, Edx, &[
        (11, "syscall"), (19, "mp"), (20, "nx"), (22, "mmxext"), (25, "fxsr-opt"),
        (26, "pdpe1gb"), (27, "rdtscp"), (29, "lm"), (30, "3dnowext"), (31, "3dnow"),
    ]),
    group(0x8000_0001, 0, Ecx, &[
        (0, "lahf-lm"), (1, "cmp-legacy"), (2, "svm"), (3, "extapic"), (4, "cr8legacy"), (5, "abm"),
        (6, "sse4a"), (7, "misalignsse"), (8, "3dnowprefetch"), (9, "osvw"), (10, "ibs"),
        (11, "xop"), (12, "skinit"), (13, "wdt"), (15, "lwp"), (16, "fma4"), (17, "tce"),
        (19, "nodeid-msr"), (21, "tbm"), (22, "topoext"), (23, "perfctr-core"),
        (24, "perfctr-nb"), (29, "mwaitx"),
    ]),
    group(0x8000_0007, 0, Edx, &[(8, "invtsc")]),
    group(0x8000_0008, 0, Ebx, &[
        (0, "clzero"), (2, "xsaveerptr"), (4, "rdpru"), (9, "wbnoinvd"), (12, "ibpb"), (14, "ibrs"),
        (15, "amd-stibp"), (17, "stibp-always-on"), (24, "amd-ssbd"), (25, "virt-ssbd"),
        (26, "amd-no-ssb"), (28, "amd-psfd"),
    ]),
    group(0x8000_000a, 0, Edx, &[
        (0, "npt"), (1, "lbrv"), (2, "svm-lock"), (3, "nrip-save"), (4, "tsc-scale"),
        (5, "vmcb-clean"), (6, "flushbyasid"), (7, "decodeassists"), (10, "pause-filter"),
        (12, "pfthreshold"), (13, "avic"), (15, "v-vmsave-vmload"), (16, "vgif"), (18, "x2avic"),
        (25, "vnmi"), (28, "svme-addr-chk"),
    ]),
    group(0x8000_0021, 0, Eax, &[
        (0, "no-nested-data-bp"), (2, "lfence-always-serializing"), (6, "null-sel-clr-base"),
        (8, "auto-ibrs"), (20, "prefetchi"),
    ]),
];

/// Other names that features go by, in Linux or in manuals, and the name in [`GROUPS`].
#[rustfmt::skip]
const ALIASES: &[(&str, &str)] = &[
    ("sse3", "pni"),
    ("pclmuldq", "pclmulqdq"),
    ("tsc-deadline-timer", "tsc-deadline"),
    ("lzcnt", "abm"),
    ("ffxsr", "fxsr-opt"),
    ("sse4-1", "sse4.1"),
    ("sse4-2", "sse4.2"),
    ("sha", "sha-ni"),
    ("cr8-legacy", "cr8legacy"),
    ("avx512-vbmi", "avx512vbmi"),
    ("avx512-vbmi2", "avx512vbmi2"),
    ("avx512-vnni", "avx512vnni"),
    ("avx512-bitalg", "avx512bitalg"),
    ("tsxldtrk", "tsx-ldtrk"),
    ("user-shstk", "shstk"),
    ("constant-tsc", "invtsc"),
    ("nonstop-tsc", "invtsc"),
    ("kvm-steal-tm", "kvm-steal-time"),
];

/// Features that others stand on: without the first, the rest are taken away as well.
#[rustfmt::skip]
const DEPENDANTS: &[(&str, &[&str])] = &[
    ("fxsr", &["sse", "fxsr-opt"]),
    ("sse", &["sse2"]),
    ("sse2", &["pni", "pclmulqdq", "aes", "sha-ni", "gfni", "xsave"]),
    ("pni", &["ssse3", "sse4a"]),
    ("ssse3", &["sse4.1"]),
    ("sse4.1", &["sse4.2"]),
    ("sse4.2", &["avx"]),
    ("xsave", &["xsaveopt", "xsavec", "xgetbv1", "xsaves", "xfd", "avx", "mpx", "pku", "amx-tile"]),
    ("xsavec", &["xsaves"]),
    ("avx", &["avx2", "fma", "f16c", "xop", "fma4", "vaes", "vpclmulqdq"]),
    ("avx2", &["avx512f", "avx-vnni", "avx-ifma", "avx-vnni-int8", "avx-ne-convert",
               "avx-vnni-int16", "sha512", "sm3", "sm4", "avx10"]),
    ("avx512f", &["avx512dq", "avx512ifma", "avx512pf", "avx512er", "avx512cd", "avx512bw",
                  "avx512vl", "avx512-vpopcntdq", "avx512-4vnniw", "avx512-4fmaps",
                  "avx512-vp2intersect"]),
    ("avx512bw", &["avx512vbmi", "avx512bitalg", "avx512-bf16", "avx512-fp16"]),
    ("avx512vl", &["avx512vbmi2", "avx512vnni"]),
    ("xfd", &["amx-tile"]),
    ("amx-tile", &["amx-bf16", "amx-int8", "amx-fp16", "amx-complex"]),
    ("lm", &["la57", "lam"]),
    ("svm", &["npt", "lbrv", "svm-lock", "nrip-save", "tsc-scale", "vmcb-clean", "flushbyasid",
              "decodeassists", "pause-filter", "pfthreshold", "avic", "v-vmsave-vmload", "vgif",
              "x2avic", "vnmi", "svme-addr-chk"]),
];

/// The canonical name for what a user wrote, if there is such a feature.
pub(crate) fn canonical(written: &str) -> Option<&'static str> {
    let plain = fold(written);
    all_names().find(|name| fold(name) == plain).or_else(|| {
        let (_, name) = ALIASES.iter().find(|(alias, _)| *alias == plain)?;
        Some(*name)
    })
}

/// `_` and `.` are `-`, capitals are small.
fn fold(name: &str) -> String {
    name.to_ascii_lowercase().replace(['_', '.'], "-")
}

/// The known name that looks most like `written`.
pub(crate) fn nearest(written: &str) -> &'static str {
    let plain = fold(written);
    all_names()
        .min_by_key(|name| distance(&plain, &fold(name)))
        .unwrap_or_default()
}

/// Where the bits of a canonical name are.
pub(crate) fn bits(name: &str) -> impl Iterator<Item = (&'static Group, u32)> {
    GROUPS.iter().flat_map(move |group| {
        group
            .names
            .iter()
            .filter(move |(_, n)| *n == name)
            .map(move |(bit, _)| (group, 1 << bit))
    })
}

/// `name` and everything that stands on it.
pub(crate) fn with_dependants(name: &'static str) -> Vec<&'static str> {
    let mut all = vec![name];
    let mut next = 0;
    while let Some(&name) = all.get(next) {
        for dependant in DEPENDANTS
            .iter()
            .filter(|(base, _)| *base == name)
            .flat_map(|(_, rest)| *rest)
        {
            if !all.contains(dependant) {
                all.push(dependant);
            }
        }
        next += 1;
    }
    all
}

fn all_names() -> impl Iterator<Item = &'static str> {
    GROUPS
        .iter()
        .flat_map(|group| group.names.iter().map(|(_, name)| *name))
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, cb) in b.iter().enumerate() {
            let substitute = diagonal + usize::from(ca != *cb);
            diagonal = row[j + 1];
            row[j + 1] = substitute.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn no_bit_has_two_names_and_only_kvmclock_has_two_bits() {
        let mut seen = HashSet::new();
        for group in GROUPS {
            for (bit, name) in group.names {
                assert!(*bit < 32, "{name}");
                assert!(
                    seen.insert((group.function, group.index, group.register as u8, bit)),
                    "{name}"
                );
                let expected = if *name == "kvmclock" { 2 } else { 1 };
                assert_eq!(bits(name).count(), expected, "{name}");
            }
        }
    }

    #[test]
    fn folding_keeps_names_apart() {
        let names: HashSet<&str> = all_names().collect();
        let folded: HashSet<String> = names.iter().map(|n| fold(n)).collect();
        assert_eq!(names.len(), folded.len());
    }

    #[test]
    fn tables_refer_to_known_names() {
        let names: HashSet<&str> = all_names().collect();
        for (alias, name) in ALIASES {
            assert!(names.contains(name), "{name}");
            assert_eq!(canonical(alias), Some(*name));
        }
        for (base, rest) in DEPENDANTS {
            assert!(names.contains(base), "{base}");
            for name in *rest {
                assert!(names.contains(name), "{name}");
            }
        }
    }

    #[test]
    fn spelling_of_linux_and_of_qemu_is_understood() {
        assert_eq!(canonical("sse4_1"), Some("sse4.1"));
        assert_eq!(canonical("SSE4.1"), Some("sse4.1"));
        assert_eq!(canonical("tsc_deadline_timer"), Some("tsc-deadline"));
        assert_eq!(canonical("avx512_bitalg"), Some("avx512bitalg"));
        assert_eq!(canonical("avx513"), None);
        assert_eq!(nearest("avx513f"), "avx512f");
        assert_eq!(nearest("ssse33"), "ssse3");
    }

    #[test]
    fn what_stands_on_a_feature_goes_with_it() {
        let gone = with_dependants("xsave");
        for name in [
            "xsave",
            "avx",
            "avx2",
            "avx512f",
            "avx512vnni",
            "amx-int8",
            "pku",
        ] {
            assert!(gone.contains(&name), "{name}");
        }
        assert!(!gone.contains(&"sse2"));
        assert_eq!(with_dependants("erms"), ["erms"]);
    }

    #[test]
    fn distance_is_levenshtein() {
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(distance("same", "same"), 0);
    }
}
