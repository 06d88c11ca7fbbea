//! Drivers that break the rules: each case of the guest's hostile mode on a live VM, while another
//! disk on the same iothread goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::disk::Image;
use super::vm::{Ended, Running, Vm};
use super::{Bench, Test};

pub const TESTS: &[Test] = &[
    Test::new("hostile_on_mmio", |bench| {
        all_cases(bench, "transport=mmio", false)
    }),
    Test::new("hostile_on_mmio_read_only", |bench| {
        all_cases(bench, "transport=mmio,readonly=on", true)
    }),
    Test::new("hostile_on_pci", |bench| {
        all_cases(bench, "transport=pci", false)
    })
    .needs_pci(),
    Test::new("hostile_on_pci_read_only", |bench| {
        all_cases(bench, "transport=pci,readonly=on", true)
    })
    .needs_pci(),
    Test::new("hostile_engine_threads", |bench| {
        all_cases(bench, "engine=threads", false)
    }),
    Test::new("hostile_engine_native", |bench| {
        all_cases(bench, "engine=native,direct=on", false)
    }),
    Test::new(
        "hostile_costs_nothing_while_broken",
        costs_nothing_while_broken,
    ),
    Test::new("hostile_vm_stops_while_broken", stops_while_broken),
];

/// What the device may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// A used element with status OK, IOERR or UNSUPP.
    Ok,
    IoErr,
    Unsupported,
    /// NEEDS_RESET with a configuration interrupt, and quiet until the reset.
    NeedsReset,
    /// A used element, but no status: never right.
    NoStatus,
    /// No answer, and nothing wrong.
    Silence,
}

use Outcome::{IoErr, NeedsReset, NoStatus, Ok as Good, Silence, Unsupported};

/// A request that has no faultless reading: refused, or the device asks for a reset.
const REFUSED: &[Outcome] = &[IoErr, NeedsReset];
/// Odd but harmless: anything but a hang.
const ANY_ANSWER: &[Outcome] = &[Good, IoErr, Unsupported, NeedsReset];
const ANYTHING: &[Outcome] = &[Good, IoErr, Unsupported, NeedsReset, NoStatus, Silence];

/// What is right for each case, on a disk that can be written.
const EXPECTED: &[(&str, &[Outcome])] = &[
    ("avail_jump", &[NeedsReset]),
    ("avail_jump_far", &[NeedsReset]),
    ("avail_back", &[NeedsReset]),
    ("head_out_of_range", &[NeedsReset]),
    ("head_far_out_of_range", &[NeedsReset]),
    ("same_head_many_times", ANY_ANSWER),
    ("kick_without_requests", &[Silence]),
    ("kick_of_no_queue", &[Silence]),
    ("loop_of_two", &[NeedsReset]),
    ("loop_to_itself", &[NeedsReset]),
    ("next_out_of_range", &[NeedsReset]),
    ("chain_of_4_gib", REFUSED),
    ("chain_of_4_gib_exactly", REFUSED),
    ("chain_longer_than_queue", REFUSED),
    ("data_of_length_zero", ANY_ANSWER),
    ("descriptor_of_length_zero", ANY_ANSWER),
    ("only_an_empty_descriptor", &[NeedsReset]),
    ("indirect_in_indirect", REFUSED),
    ("indirect_and_next", REFUSED),
    ("indirect_not_negotiated", ANY_ANSWER),
    ("indirect_of_odd_length", REFUSED),
    ("indirect_of_length_zero", &[NeedsReset]),
    ("indirect_of_4_gib", &[NeedsReset]),
    ("indirect_outside_memory", &[NeedsReset]),
    ("indirect_loop", &[NeedsReset]),
    ("indirect_next_out_of_range", &[NeedsReset]),
    ("data_outside_memory", REFUSED),
    ("data_outside_memory_write", REFUSED),
    ("data_wraps", REFUSED),
    ("data_in_device_memory", REFUSED),
    ("data_across_the_end_of_memory", REFUSED),
    ("header_outside_memory", REFUSED),
    ("status_outside_memory", &[NeedsReset]),
    ("status_not_writable", &[NeedsReset]),
    ("no_status", &[NeedsReset]),
    ("header_short", REFUSED),
    ("header_writable", REFUSED),
    ("readable_after_writable", ANY_ANSWER),
    ("read_into_readable", ANY_ANSWER),
    ("write_from_writable", ANY_ANSWER),
    ("unknown_type", &[Unsupported]),
    ("read_beyond_the_end", &[IoErr]),
    ("write_beyond_the_end", &[IoErr]),
    ("read_across_the_end", &[IoErr]),
    ("write_across_the_end", &[IoErr]),
    ("sector_overflows", &[IoErr]),
    ("sector_is_the_largest", &[IoErr]),
    ("read_of_513_bytes", &[IoErr]),
    ("write_of_511_bytes", &[IoErr]),
    ("id_of_one_byte", &[Good, IoErr]),
    ("id_without_data", &[Good, IoErr, NeedsReset]),
    ("discard_without_payload", &[Unsupported]),
    ("discard_of_short_payload", &[NeedsReset]),
    ("discard_of_two_segments", &[Unsupported]),
    ("discard_with_unmap", &[Unsupported]),
    ("discard_with_unknown_flag", &[Unsupported]),
    ("discard_too_large", &[IoErr]),
    ("discard_beyond_the_end", &[IoErr]),
    ("discard_overflows", &[IoErr]),
    ("discard_of_nothing", &[Good]),
    ("zeroes_with_unknown_flag", &[Unsupported]),
    ("zeroes_too_large", &[IoErr]),
    ("zeroes_beyond_the_end", &[IoErr]),
    ("zeroes_of_short_payload", &[NeedsReset]),
    ("zeroes_of_nothing", &[Good]),
    ("write_to_read_only", &[IoErr]),
    ("write_to_read_only_not_acknowledged", &[IoErr]),
    ("discard_on_read_only", &[IoErr, Unsupported]),
    ("zeroes_on_read_only", &[IoErr, Unsupported]),
    ("flush_on_read_only", &[Good]),
    ("id_on_read_only", &[Good]),
    ("queue_size_zero", &[NeedsReset]),
    ("queue_size_not_a_power_of_two", &[NeedsReset]),
    ("queue_size_too_large", &[NeedsReset]),
    ("descriptors_unaligned", &[NeedsReset]),
    ("available_unaligned", &[NeedsReset]),
    ("used_unaligned", &[NeedsReset]),
    ("descriptors_outside_memory", &[NeedsReset]),
    ("available_outside_memory", &[NeedsReset]),
    ("used_outside_memory", &[NeedsReset]),
    ("used_in_device_memory", &[NeedsReset]),
    ("used_across_the_end_of_memory", &[NeedsReset]),
    ("descriptors_wrap", &[NeedsReset]),
    ("rings_absent", ANYTHING),
    ("rings_of_another_size_when_ready", ANYTHING),
    ("driver_ok_without_queues", ANYTHING),
    ("driver_ok_without_features", ANYTHING),
    ("kick_before_driver_ok", ANYTHING),
    ("features_not_offered", ANYTHING),
    ("status_of_all_ones", ANYTHING),
    ("odd_register_accesses", &[Silence]),
    ("reset_in_flight", &[Silence]),
    ("descriptors_change_in_flight", ANYTHING),
];

/// Cases in which the driver itself writes NEEDS_RESET, or never gets as far as DRIVER_OK: no
/// configuration interrupt, and no silence, is to be expected.
const NO_DRIVER: &[&str] = &[
    "status_of_all_ones",
    "driver_ok_without_features",
    "features_not_offered",
];

/// Bytes of both disks.
const LEN: u64 = 4 << 20;

/// The hostile disk, which stays as it was except its last sector, and the one that goes on.
struct Disks {
    victim: Image,
    other: Image,
    _directory: tempfile::TempDir,
}

impl Disks {
    fn new(bench: &Bench) -> Disks {
        let directory = bench.directory();
        let victim = Image::new(&directory, "victim", LEN);
        let bytes: Vec<u8> = (0..LEN).map(|i| (i >> 9) as u8 ^ 0x77).collect();
        victim.write(0, &bytes);
        let other = Image::new(&directory, "other", LEN);
        Disks {
            victim,
            other,
            _directory: directory,
        }
    }

    fn start(&self, bench: &Bench, jobs: &str, options: &str) -> Running {
        let vm = Vm::new(bench, jobs).cpus(2).iothread("id=io0");
        let vm = vm.disk(&self.victim, &format!("iothread=io0,{options}"));
        vm.disk(&self.other, "iothread=io0").start()
    }
}

fn all_cases(bench: &Bench, options: &str, is_read_only: bool) {
    let disks = Disks::new(bench);
    let before = disks.victim.bytes();
    let jobs = "job=hostile hostile=all disk=0 \
        and=other rw=randrw bs=4k iodepth=8 disk=1 verify=track until=others";
    let mut vm = disks.start(bench, jobs, options);
    let mut seen = BTreeMap::new();
    let other = loop {
        let line = vm.wait_for("line of a case", |line| line["job"].is_string());
        match line["hostile"].as_str() {
            Some(name) => drop(seen.insert(name.to_owned(), line)),
            None => break line,
        }
    };
    vm.wait_for("last line", |line| line["done"] == true);
    let end = vm.end();
    let wrong: Vec<_> = seen
        .iter()
        .filter_map(|(name, line)| judge(name, line, is_read_only).err())
        .collect();
    if !wrong.is_empty() {
        end.fail(&format!("{options}: {}", wrong.join("\n")));
    }
    check_other(&end, &other);
    let known: BTreeSet<_> = EXPECTED.iter().map(|(name, _)| *name).collect();
    let ran: BTreeSet<_> = seen.keys().map(String::as_str).collect();
    let left_out: Vec<_> = known
        .symmetric_difference(&ran)
        .filter(|name| !name.contains("read_only"))
        .collect();
    assert!(
        left_out.is_empty(),
        "cases that did not run or are not judged: {left_out:?}"
    );
    // A request that is refused touches nothing. Some cases are granted, on the first sectors that the
    // ranges name or on the last one.
    let after = disks.victim.bytes();
    let same = |range: std::ops::Range<usize>| before[range.clone()] == after[range];
    assert!(
        same(8 << 9..(LEN as usize) - 512),
        "the disk's middle has changed"
    );
    assert!(
        !is_read_only || before == after,
        "a read-only disk has changed"
    );
    end.expect(0, "");
}

/// The other disk has done much, without an error.
fn check_other(end: &Ended, line: &Value) {
    if line["ok"] != true || line["ios"].as_u64().unwrap_or(0) < 100 {
        end.fail(&format!("the other disk was disturbed: {line}"));
    }
}

fn judge(name: &str, line: &Value, is_read_only: bool) -> Result<(), String> {
    let Some((_, expected)) = EXPECTED.iter().find(|(known, _)| *known == name) else {
        return Err(format!("{name}: no expectation"));
    };
    let is_true = |key: &str| line[key] == true;
    for key in [
        "worked_before",
        "canary",
        "untouched_after_reset",
        "reset",
        "works_after_reset",
    ] {
        if !is_true(key) {
            return Err(format!("{name}: {key} is false: {line}"));
        }
    }
    let needs_reset = is_true("needs_reset");
    let has_driver = !NO_DRIVER.contains(&name);
    if needs_reset && has_driver && (line["config_interrupts"] == 0 || !is_true("quiet")) {
        return Err(format!(
            "{name}: broken without a configuration interrupt, or not quiet: {line}"
        ));
    }
    let statuses: Vec<_> = line["answers"].as_array().into_iter().flatten().collect();
    let mut outcomes: Vec<_> = statuses
        .iter()
        .map(|answer| match answer["status"].as_u64() {
            Some(0) => Good,
            Some(1) => IoErr,
            Some(2) => Unsupported,
            _ => NoStatus,
        })
        .collect();
    if needs_reset {
        outcomes.push(NeedsReset);
    } else if statuses.is_empty() {
        outcomes.push(Silence);
    }
    // On a read-only disk what writes is refused whatever else is wrong with it.
    let writes = ["write", "discard", "zeroes", "chain_of", "sector_is"]
        .iter()
        .any(|word| name.contains(word));
    let refused = |outcome| is_read_only && writes && [IoErr, Unsupported].contains(outcome);
    match outcomes
        .iter()
        .find(|outcome| !expected.contains(outcome) && !refused(*outcome))
    {
        None => Ok(()),
        Some(outcome) => Err(format!(
            "{name}: {outcome:?}, expected {expected:?}: {line}"
        )),
    }
}

/// Cases of each kind that leave a device broken.
const BREAKING: &[&str] = &[
    "avail_jump",
    "loop_of_two",
    "status_not_writable",
    "descriptors_outside_memory",
];

/// A broken device, with an iothread that would poll it.
fn hold(bench: &Bench, disks: &Disks, case: &str, runtime: &str) -> Running {
    let jobs = format!("job=hostile hostile={case} disk=0 runtime={runtime}");
    let vm = Vm::new(bench, &jobs).iothread("id=io0,poll-max-ns=32768");
    let mut vm = vm.disk(&disks.victim, "iothread=io0").start();
    vm.wait_for("hold", |line| line["holding"] == case);
    vm
}

fn costs_nothing_while_broken(bench: &Bench) {
    let disks = Disks::new(bench);
    for case in BREAKING {
        let mut vm = hold(bench, &disks, case, "1500ms");
        let before = vm.cpu_ms("");
        thread::sleep(Duration::from_millis(1000));
        let used = vm.cpu_ms("") - before;
        assert!(
            used < 200,
            "{case}: {used} ms of CPU in a second with a broken device"
        );
        let line = vm.wait_for("line of the case", |line| line["hostile"] == *case);
        assert_eq!(line["needs_reset"], true, "{line}");
        assert_eq!(line["works_after_reset"], true, "{line}");
        vm.good_end();
    }
}

fn stops_while_broken(bench: &Bench) {
    let disks = Disks::new(bench);
    for case in BREAKING {
        let vm = hold(bench, &disks, case, "600s");
        vm.signal("TERM");
        vm.end().expect(0, "sigterm");
    }
}
