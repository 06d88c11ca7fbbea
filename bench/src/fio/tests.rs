use std::process::Command;

use proptest::prelude::*;

use super::*;
use crate::matrix::{self, Tool};
use script::{MARK, SLOT_BYTES, files, mark, unframe};

const TIMES: Times = Times {
    ramp_s: 1,
    runtime_s: 5,
};

/// A job as fio 3.33 prints it, cut down to what is read.
const FIO: &str = r#"fio: this platform is slow
{"fio version": "fio-3.33", "jobs": [
 {"jobname": "disk0", "error": 0,
  "read": {"iops": 100.5, "bw": 402, "bw_bytes": 411648, "total_ios": 300,
   "clat_ns": {"max": 5000, "mean": 1000.0,
    "percentile": {"50.000000": 900, "90.000000": 1500, "99.000000": 2000, "99.900000": 4000}}},
  "write": {"iops": 50.0, "bw": 200, "bw_bytes": 204800, "total_ios": 100,
   "clat_ns": {"max": 9000, "mean": 2000.0,
    "percentile": {"50.000000": 1800, "90.000000": 1900, "99.000000": 1950, "99.900000": 8000}}},
  "trim": {"iops": 0.0, "total_ios": 0}}]}
fio: and it ends with a warning
"#;

#[test]
fn fio_is_read_with_warnings_around_it() {
    let result = output::fio(FIO).expect("fio's JSON");
    assert_eq!((result.iops, result.ios), (150.5, 400));
    assert_eq!(result.bytes_per_second, 616_448.0);
    let latency = result.latency.expect("latencies");
    assert_eq!(
        (latency.mean_ns, latency.p50_ns, latency.p99_ns),
        (1250.0, 1800.0, 2000.0)
    );
    assert_eq!((latency.p999_ns, latency.max_ns), (8000.0, 9000.0));
}

#[test]
fn what_is_no_result_of_fio_is_said() {
    let error = |text: &str| output::fio(text).expect_err("no result").to_string();
    assert!(error("").contains("it is empty"));
    assert!(error("sh: fio: not found").contains("sh: fio: not found"));
    assert!(error("{\"jobs\": []}").contains("no jobs"));
    assert!(error("{\"jobs\": [{").contains("JSON"));
    let failed = error(&FIO.replace("\"error\": 0", "\"error\": 5"));
    assert!(
        failed.contains("disk0") && failed.contains("Input/output error"),
        "{failed}"
    );
}

#[test]
fn mpstat_and_interrupts_are_read() {
    let sample = |idle: f64| {
        format!(
            r#"{{"timestamp": "x", "cpu-load": [{{"cpu": "all", "usr": 10.0, "nice": 1.0,
            "sys": 20.0, "iowait": 2.0, "irq": 0.5, "soft": 3.0, "steal": 0.25, "idle": {idle}}},
            {{"cpu": "0", "usr": 99.0, "idle": 0.0}}]}}"#
        )
    };
    let text = format!(
        r#"{{"sysstat": {{"hosts": [{{"nodename": "lab", "statistics": [{}, {}]}}]}}}}"#,
        sample(60.0),
        sample(50.0)
    );
    let cpu = output::mpstat(&text).expect("mpstat's JSON");
    assert_eq!(
        (cpu.usr, cpu.sys, cpu.idle, cpu.steal),
        (11.0, 20.0, 55.0, 0.25)
    );
    assert!(output::mpstat("{}").is_err());
    assert!(output::mpstat("").is_err());
    let interrupts = "           CPU0       CPU1\n  4:         22         1   IO-APIC   4-edge      ttyS0\n \
                      5:        100         20   IO-APIC   5-edge      virtio0\n \
                      24:          3          4   PCI-MSI 524288-edge      virtio1-req.0\n";
    assert_eq!(output::virtio_interrupts(interrupts), 127);
}

#[test]
fn marks_are_found_behind_kernel_messages() {
    assert_eq!(mark("@pollux-bench begin 3"), Some(Mark::Begin(3)));
    assert_eq!(
        mark("[ 1.2] clock@pollux-bench end 0\r"),
        Some(Mark::End(0))
    );
    assert_eq!(mark("@pollux-bench done 1 137"), Some(Mark::Done(1, 137)));
    assert_eq!(
        mark("@pollux-bench failed no disk x"),
        Some(Mark::Failed("no disk x".into()))
    );
    for line in [
        "",
        "begin 3",
        "@pollux-bench",
        "@pollux-bench begin x",
        "@pollux-bench done 1",
    ] {
        assert_eq!(mark(line), None, "{line}");
    }
}

#[test]
fn a_job_file_of_a_run_has_a_section_for_each_disk() {
    let run = matrix::parse(
        &["rw=randwrite bs=8k iodepth=4 numjobs=2 disks=2"],
        Tool::Fio,
    );
    let run = run.expect("a matrix").remove(0);
    let list = files(&[Job::Matrix(Box::new(run))], 2, TIMES);
    let (name, text) = &list[1];
    let text = String::from_utf8_lossy(text);
    assert_eq!(name, "lab/job0.fio");
    for line in [
        "rw=randwrite",
        "bs=8k",
        "numjobs=2",
        "runtime=6",
        "filename=${DISK1}",
    ] {
        assert!(text.lines().any(|l| l == line), "{line}: {text}");
    }
}

#[test]
fn a_users_job_file_is_understood() {
    let text = "[global]\nramp_time=2s\nruntime=1m\nreadwrite = randwrite\nbs=4k\n\
                [a]\niodepth=4\n[b]\niodepth=8\nruntime=5\n; runtime=100\n";
    let file = JobFile::read(text, 2);
    assert_eq!(
        (file.ramp_s, file.runtime_s, file.writes, file.differs),
        (2, 65, true, true)
    );
    assert!(file.text.starts_with("filename=${DISK0}:${DISK1}\n"));
    let mut run = Run::default();
    file.describe(&mut run);
    assert_eq!((run.rw, run.iodepth), (matrix::Rw::RandWrite, 4));
    let own = JobFile::read("[x]\nfilename=${DISK0}\nrw=read\n", 1);
    assert!(own.text.starts_with("[x]") && !own.writes && !own.differs);
}

/// `cpio`, where the machine has it, unpacks what we pack.
#[test]
fn the_overlay_is_an_archive_of_newc() {
    let content = vec![b"a".to_vec(), Vec::new(), vec![0, 1, 2, 3, 4]];
    let names = ["lab/script", "lab/empty", "top"];
    let list: Vec<(String, Vec<u8>)> = names
        .iter()
        .map(|n| (*n).to_string())
        .zip(content.clone())
        .collect();
    let bytes = overlay::archive(&list);
    assert_eq!(bytes.len() % 4, 0);
    let place = tempfile::tempdir().expect("a directory");
    std::fs::write(place.path().join("a.cpio"), &bytes).expect("written");
    let status = Command::new("sh")
        .current_dir(place.path())
        .args([
            "-c",
            "command -v cpio >/dev/null || exit 77; cpio --quiet -i <a.cpio",
        ])
        .status()
        .expect("sh");
    if status.code() == Some(77) {
        println!("skipped: the_overlay_is_an_archive_of_newc needs cpio");
        return;
    }
    assert!(status.success());
    for (name, content) in list {
        assert_eq!(
            std::fs::read(place.path().join(&name)).expect("unpacked"),
            content,
            "{name}"
        );
    }
}

#[test]
fn an_initrd_gets_its_overlay_at_a_boundary() {
    let place = tempfile::tempdir().expect("a directory");
    let (from, to) = (place.path().join("a"), place.path().join("b"));
    std::fs::write(&from, [7; 5]).expect("written");
    overlay::append(&from, &[("x".into(), vec![9])], &to).expect("appended");
    let bytes = std::fs::read(to).expect("read");
    assert_eq!((&bytes[..5], &bytes[5..8]), (&[7; 5][..], &[0; 3][..]));
    assert!(bytes[8..].starts_with(b"070701"));
}

/// Runs the guest's script on this host: a directory of "disks" in place of /sys/block, files in
/// place of devices, and fio of the host. So the script, fio's output and mpstat's are real.
#[test]
fn the_script_runs_real_fio_and_its_slots_are_read() {
    if Command::new("fio").arg("--version").output().is_err() {
        println!("skipped: the_script_runs_real_fio_and_its_slots_are_read needs fio");
        return;
    }
    let place = tempfile::tempdir().expect("a directory");
    let root = place.path();
    let at = |name: &str| root.join(name);
    for (disk, serial) in [
        ("r", script::RESULTS_SERIAL.to_string()),
        ("d", script::serial(0)),
    ] {
        std::fs::create_dir_all(at("block").join(disk)).expect("mkdir");
        std::fs::write(at("block").join(disk).join("serial"), serial).expect("serial");
    }
    std::fs::create_dir(at("dev")).expect("mkdir");
    std::fs::write(at("dev/d"), vec![1; 4 << 20]).expect("disk");
    std::fs::write(
        at("dev/r"),
        vec![0; 3 * usize::try_from(SLOT_BYTES).expect("size")],
    )
    .expect("results");
    let times = Times {
        ramp_s: 0,
        runtime_s: 1,
    };
    // O_DIRECT and libaio are the guest's business.
    let run = matrix::parse(&["rw=randrw ioengine=psync"], Tool::Fio)
        .expect("a matrix")
        .remove(0);
    let jobs = [
        Job::Matrix(Box::new(run)),
        Job::File("[a]\nrw=randread\nfilename=${DISK0}\nruntime=3\ntime_based\n".into()),
        Job::File("[a]\nrw=nonsense\nfilename=${DISK0}\n".into()),
    ];
    for (name, content) in files(&jobs, 1, times) {
        let local = |text: &str| {
            text.replace("/sys/block", &at("block").to_string_lossy())
                .replace(
                    "\"/dev/${disk",
                    &format!("\"{}/${{disk", at("dev").display()),
                )
                .replace("/run/lab/started", &at("started").to_string_lossy())
                .replace("direct=1", "direct=0")
        };
        let file = at(name.strip_prefix("lab/").expect("in lab/"));
        std::fs::write(file, local(&String::from_utf8_lossy(&content))).expect("script");
    }
    let output = Command::new("sh")
        .current_dir(root)
        .arg("script")
        .output()
        .expect("sh");
    let console = String::from_utf8_lossy(&output.stdout);
    let marks: Vec<Mark> = console.lines().filter_map(mark).collect();
    assert_eq!(
        marks[..5],
        [
            Mark::Begin(0),
            Mark::End(0),
            Mark::Done(0, 0),
            Mark::Begin(1),
            Mark::End(1)
        ]
    );
    assert!(
        matches!(marks.last(), Some(Mark::Done(2, status)) if *status != 0),
        "{marks:?}"
    );
    let results = File::open(at("dev/r")).expect("results");
    let cpu = || Usage {
        interval_ns: 1_000_000_000,
        ..Usage::default()
    };
    for number in 0..2 {
        let slot = read_slot(&results, number).expect("a slot");
        let m = measurement(&slot, 0, cpu()).expect("a measurement");
        assert!(
            m.iops > 0.0 && m.bytes_per_second > m.iops * 4000.0,
            "{m:?}"
        );
        let latency = m.latency.expect("latency");
        assert!(
            latency.p50_ns > 0.0 && latency.p50_ns <= latency.max_ns,
            "{latency:?}"
        );
        if Command::new("mpstat").arg("-V").output().is_ok() {
            let idle = m.guest_cpu.expect("mpstat").idle;
            assert!((0.0..=100.0).contains(&idle), "{idle}");
        }
    }
    let slot = read_slot(&results, 2).expect("a slot");
    let error = measurement(&slot, 1, cpu())
        .expect_err("fio refused")
        .to_string();
    assert!(error.contains("nonsense"), "{error}");
}

proptest! {
    #[test]
    fn frames_are_read_back(
        list in proptest::collection::vec(
            ("[a-z.]{1,8}", proptest::collection::vec(any::<u8>(), 0..50)), 0..5),
        cut in 0usize..400,
    ) {
        let mut bytes = Vec::new();
        for (name, content) in &list {
            bytes.extend_from_slice(format!("@file {name} {}\n", content.len()).as_bytes());
            bytes.extend_from_slice(content);
        }
        bytes.extend_from_slice(b"@end\n");
        bytes.extend_from_slice(&[0; 100]);
        prop_assert_eq!(&unframe(&bytes), &list);
        // Cut anywhere: what is whole is there, and nothing else.
        let part = unframe(&bytes[..cut.min(bytes.len())]);
        prop_assert_eq!(&part[..], &list[..part.len()]);
    }

    #[test]
    fn foreign_bytes_do_no_harm(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        line in "[ -~]{0,40}",
    ) {
        let _ = unframe(&bytes);
        let _ = mark(&format!("{MARK} {line}"));
        let _ = output::fio(&line);
        let _ = output::mpstat(&line);
        let _ = output::virtio_interrupts(&line);
        let _ = JobFile::read(&line, 1);
    }
}
