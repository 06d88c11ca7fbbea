use proptest::prelude::*;

use super::*;

fn runs(text: &str) -> Vec<Run> {
    parse(&[text], Tool::Fio).expect("a good matrix")
}

fn message(text: &str, tool: Tool) -> String {
    parse(&[text], tool).expect_err("a bad matrix").to_string()
}

#[test]
fn nothing_said_is_one_run_of_defaults() {
    assert_eq!(
        parse::<&str>(&[], Tool::Guest).expect("empty"),
        vec![Run::default()]
    );
}

#[test]
fn the_last_axis_varies_fastest() {
    let list: Vec<_> = runs("rw=randread,randwrite bs=4k,8k iodepth=1,32")
        .iter()
        .map(|r| (r.rw, r.bs_bytes, r.iodepth))
        .collect();
    let mut expected = Vec::new();
    for rw in [Rw::RandRead, Rw::RandWrite] {
        for bs in [4096, 8192] {
            for depth in [1, 32] {
                expected.push((rw, bs, depth));
            }
        }
    }
    assert_eq!(list, expected);
}

#[test]
fn words_may_come_as_one_argument_or_many() {
    let one = parse(&["bs=4k,8k iodepth=1,2"], Tool::Fio);
    let many = parse(&["bs=4k,8k", "iodepth=1,2"], Tool::Fio);
    assert_eq!(one, many);
}

#[test]
fn ranges_are_written_out() {
    let weights: Vec<_> = runs("poll-weight=1..5")
        .iter()
        .map(|r| r.poll_weight)
        .collect();
    assert_eq!(weights, (1..=5).map(Some).collect::<Vec<_>>());
}

#[test]
fn an_axis_without_meaning_makes_no_further_runs() {
    let list = runs("poll-policy=context,per-handler,weighted poll-weight=1..5");
    assert_eq!(list.len(), 7);
    assert_eq!(runs("iothreads=0,1 poll-max-ns=0,32768").len(), 3);
    assert_eq!(
        runs("vmm=pollux,qemu poll-policy=weighted,context").len(),
        3
    );
    assert_eq!(
        runs("poll-policy=off poll-max-ns=1,2 poll-grow=2,4").len(),
        1
    );
}

#[test]
fn sizes_are_read_and_written() {
    for (text, bytes) in [("512", 512), ("4k", 4096), ("4K", 4096), ("1M", 1 << 20)] {
        assert_eq!(runs(&format!("bs={text}"))[0].bs_bytes, bytes);
    }
    assert_eq!(axes::size_text(8192), "8k");
    assert_eq!(axes::size_text(1536), "1536");
    assert_eq!(axes::bytes("99999999999T"), None);
}

#[test]
fn errors_name_axis_value_and_remedy() {
    assert_eq!(
        message("bs", Tool::Fio),
        "matrix: `bs` is not axis=value; write an axis with its values, such as bs=4k,8k"
    );
    assert_eq!(
        message("bs=4k,1000", Tool::Fio),
        "matrix: bs=1000 is not possible; bs takes a multiple of 512 bytes up to 16M, such as \
         512, 4k or 1M"
    );
    assert_eq!(
        message("bs=4k bs=8k", Tool::Fio),
        "matrix: the axis `bs` is given twice; list its values in one word: bs=a,b"
    );
    assert_eq!(
        message("bs=4k,4096", Tool::Fio),
        "matrix: bs lists 4096 twice; repetitions are asked for with --repeat"
    );
    let unknown = message("poll-wieght=1", Tool::Fio);
    assert!(unknown.contains("did you mean `poll-weight`?"), "{unknown}");
    let other = message("completion=poll", Tool::Fio);
    assert!(other.contains("there is no axis `completion`"), "{other}");
    assert!(message("poll-weight=64", Tool::Guest).contains("poll-weight takes 0"));
    assert!(message("iodepth=5..1", Tool::Guest).contains("iodepth=5..1"));
    assert!(message("iodepth=1..1024 queues=1..64", Tool::Guest).contains("65536 runs"));
    assert!(message("think-ns=0..99999999", Tool::Guest).contains("runs are more than"));
    assert!(message("bs=", Tool::Fio).contains("bs= is not possible"));
}

#[test]
fn a_run_is_named_by_the_settings_that_vary() {
    let list = runs("poll-policy=context,weighted poll-weight=2,3 iodepth=1,8");
    let layout = Layout::of(&list);
    let names: Vec<_> = list.iter().map(|r| layout.name(r)).collect();
    assert_eq!(
        names,
        [
            "context",
            "context",
            "weighted w2",
            "weighted w2",
            "weighted w3",
            "weighted w3"
        ]
    );
    let refs: Vec<_> = list.iter().collect();
    assert_eq!(layout.baselines(&refs), [0, 1, 0, 1, 0, 1]);
}

#[test]
fn without_settings_the_placement_is_compared() {
    let list = runs("rw=read,randread iothreads=1,2,4");
    let layout = Layout::of(&list);
    let refs: Vec<_> = list.iter().collect();
    assert_eq!(layout.name(refs[1]), "2 iothreads");
    assert_eq!(layout.baselines(&refs), [0, 0, 0, 3, 3, 3]);
}

#[test]
fn a_single_run_bears_the_vmm() {
    let list = runs("bs=4k,8k");
    assert_eq!(Layout::of(&list).name(&list[0]), "pollux");
}

#[test]
fn loads_share_a_vm_and_settings_do_not() {
    let a = Run::default();
    let load = Run {
        iodepth: 32,
        rw: Rw::Write,
        ..a.clone()
    };
    let setting = Run {
        poll_weight: Some(2),
        ..a.clone()
    };
    assert!(a.same_vm(&load));
    assert!(!a.same_vm(&setting));
    assert!(!a.same_vm(&Run {
        queues: 2,
        ..a.clone()
    }));
}

/// Words of one axis with some of its values.
fn a_word() -> impl Strategy<Value = (usize, Vec<&'static str>)> {
    let table: Vec<(&str, Vec<&str>)> = vec![
        (
            "rw",
            vec!["read", "write", "randread", "randwrite", "rw", "randrw"],
        ),
        ("bs", vec!["512", "4k", "1M", "1536"]),
        ("iodepth", vec!["1", "8", "1024"]),
        ("numjobs", vec!["1", "4"]),
        ("iothreads", vec!["0", "1", "64"]),
        ("vmm", vec!["pollux", "qemu"]),
        ("poll-policy", vec!["weighted", "context", "off", "always"]),
        ("poll-weight", vec!["1", "3"]),
        ("poll-max-ns", vec!["0", "32768"]),
        ("direct", vec!["on", "off"]),
    ];
    (0..table.len()).prop_flat_map(move |i| {
        let (name, values) = table[i].clone();
        let index = AXES.iter().position(|a| a.name == name).expect("an axis");
        let count = values.len();
        (
            Just(index),
            proptest::sample::subsequence(values, 1..=count),
        )
    })
}

proptest! {
    #[test]
    fn any_text_is_read_without_panic(text in "[ -~]{0,60}") {
        let _ = parse(&[text.as_str()], Tool::Guest);
    }

    #[test]
    fn runs_are_different_read_back_and_no_more_than_the_product(
        words in proptest::collection::vec(a_word(), 0..5)
    ) {
        let mut seen = std::collections::BTreeMap::new();
        for (axis, values) in words {
            seen.insert(axis, values);
        }
        let text = seen
            .iter()
            .map(|(axis, values)| format!("{}={}", AXES[*axis].name, values.join(",")))
            .collect::<Vec<_>>()
            .join(" ");
        let list = runs(&text);
        let product: usize = seen.values().map(Vec::len).product();
        prop_assert!(!list.is_empty() && list.len() <= product);
        for (i, run) in list.iter().enumerate() {
            prop_assert!(!list[..i].contains(run));
            let again = runs(&run.words());
            prop_assert_eq!(again.len(), 1);
            prop_assert_eq!(&again[0], run);
            let json = serde_json::to_string(run).expect("to JSON");
            prop_assert_eq!(&serde_json::from_str::<Run>(&json).expect("from JSON"), run);
        }
        // Two runs that are compared and bear one name would be indistinguishable.
        let layout = Layout::of(&list);
        for (i, a) in list.iter().enumerate() {
            for b in &list[..i] {
                let same = layout.comparable(a, b) && layout.name(a) == layout.name(b);
                prop_assert!(!same, "{:?} and {:?}", a, b);
            }
        }
    }
}
