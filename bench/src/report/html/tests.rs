use super::*;
use crate::report::tests::sample;

#[test]
fn dates_are_those_of_the_calendar() {
    for (unix, text) in [
        (0, "1970-01-01 00:00 UTC"),
        (951_782_400, "2000-02-29 00:00 UTC"),
        (1_735_689_599, "2024-12-31 23:59 UTC"),
        (4_107_542_400, "2100-03-01 00:00 UTC"),
    ] {
        assert_eq!(date(unix), text);
    }
}

/// Every element that is opened is closed, in order.
fn check_nesting(page: &str) {
    let mut open: Vec<&str> = Vec::new();
    let style = page.find("<style>").expect("a style") + 1..page.find("</style>").expect("its end");
    for (at, _) in page
        .match_indices('<')
        .filter(|(at, _)| !style.contains(at))
    {
        let tag = &page[at + 1..at + page[at..].find('>').expect("an end")];
        let name = tag
            .split([' ', '/'])
            .find(|w| !w.is_empty())
            .expect("a name");
        if tag.starts_with('!') || tag.ends_with('/') || name == "meta" {
            continue;
        }
        match tag.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name), "at {at}: {}", &page[at..at + 40]),
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn the_page_is_whole_and_needs_nothing_else() {
    let mut results = sample();
    results.conditions.processor = "A <b> & \"c\"".into();
    let page = html(&results);
    check_nesting(&page);
    assert!(page.contains("A &lt;b&gt; &amp; &quot;c&quot;"));
    for foreign in ["http:", "https:", "<script", "<link", "src=", "NaN", "inf"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    // Two loads, each with its four charts and the bars, and a legend of three runs.
    assert_eq!(page.matches("<section ").count(), 2);
    for chart in [
        "IOPS against CPU",
        "latency",
        "polling windows",
        "CPU of an I/O by thread",
    ] {
        assert!(page.contains(&format!("8k d8: {chart}")), "{chart}");
    }
    assert_eq!(
        page.matches("w2: 120000 IOPS (118800 to 121200)").count(),
        2
    );
    assert!(page.contains("<b>w2</b>, 120\u{202f}000 (+20% to "));
    assert!(page.contains("class=\"better\">+20.0%"));
    assert!(page.contains("class=\"noise\">+0.5% noise"));
}

#[test]
fn a_page_can_be_made_of_failures() {
    let mut results = sample();
    for record in &mut results.runs {
        record.rounds = vec![None];
    }
    results.runs[1].rounds.clear();
    let page = html(&results);
    check_nesting(&page);
    assert!(page.contains("failed") && page.contains("not measured"));
    assert!(!page.contains("<section "));
}

#[test]
fn a_back_end_without_a_guest_has_one_picture_of_cpu_and_its_system_calls() {
    let mut results = sample();
    for record in &mut results.runs {
        for m in record.rounds.iter_mut().flatten() {
            m.cpu.groups.retain(|usage| usage.group.is_io());
            m.syscalls_per_io = Some(0.25);
        }
    }
    let page = html(&results);
    check_nesting(&page);
    assert!(page.contains("CPU of the back end") && !page.contains("CPU of the whole VMM"));
    assert!(!page.contains("vCPU exits"));
    assert!(page.contains("<th>syscalls/io</th>") && page.contains("<td>0.250</td>"));
}

#[test]
fn thousands_are_set_apart() {
    let texts = [0.0, 999.0, 1000.0, 1_234_567.0].map(thousands);
    assert_eq!(
        texts,
        ["0", "999", "1\u{202f}000", "1\u{202f}234\u{202f}567"]
    );
}
