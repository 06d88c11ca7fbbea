use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::matrix::{self, Tool, Vmm};

/// A job's line as the guest prints it.
const LINE: &str = r#"{"job":"measured","rw":"randread","bs":8192,"iodepth":4,"queues":1,"completion":"irq","cpus":[0],"ok":true,"ios":1000,"iops":499,"bytes":8192000,"bytes_per_s":4096000,"reads":1000,"writes":0,"others":0,"errors":0,"unsupported":0,"timed_out":false,"elapsed_ns":2000000000,"lat_ns":{"min":900,"mean":8000,"p50":7000,"p90":9000,"p99":20000,"p99.9":30000,"max":40000},"kicks":250,"interrupts":500,"waits":3,"used_batches":10,"verified_sectors":0,"faults":0,"disks":[]}"#;

fn bed() -> GuestBed {
    GuestBed {
        programs: Programs {
            pollux: "pollux".into(),
            qemu: "qemu-system-x86_64".into(),
            qemu_accel: "kvm".into(),
            qemu_firmware: None,
            pollux_has_qmp: false,
        },
        image: "guest.elf".into(),
        disks: vec!["a".into(), "b".into()],
        ramp: Duration::from_millis(200),
        runtime: Duration::from_millis(500),
        patience: Duration::from_secs(60),
    }
}

fn run_of(text: &str) -> Run {
    matrix::parse(&[text], Tool::Guest)
        .expect("a matrix")
        .remove(0)
}

#[test]
fn a_jobs_line_becomes_a_measurement() {
    let Some(Line::Job(job)) = Line::read(LINE) else {
        panic!("a job's line")
    };
    let m = measurement(&job, Usage::default());
    assert_eq!((m.iops, m.bytes_per_second), (500.0, 4_096_000.0));
    assert_eq!(
        (m.kicks_per_io, m.interrupts_per_io),
        (Some(0.25), Some(0.5))
    );
    let latency = m.latency.expect("latency");
    assert_eq!(
        (latency.p50_ns, latency.p999_ns, latency.max_ns),
        (7000.0, 30_000.0, 40_000.0)
    );
}

#[test]
fn other_lines_are_told_apart() {
    assert!(Line::read("").is_none());
    assert!(Line::read("SeaBIOS {").is_none());
    assert!(Line::read(r#"{"guest":"pollux","cpus":1}"#).is_none());
    for line in [
        r#"{"error":"unknown option","token":"x=1"}"#,
        r#"{"job":"ramp","error":"no such disk"}"#,
        r#"{"exception":13,"rip":"0x1"}"#,
        r#"{"panic":"at a.rs"}"#,
        r#"{"done":true,"failed":0}"#,
        r#"{"job":"measured","ok":true}"#,
    ] {
        assert!(matches!(Line::read(line), Some(Line::Trouble(_))), "{line}");
    }
}

#[test]
fn the_guest_is_told_the_run_in_its_words() {
    let text = bed().cmdline(&run_of(
        "rw=randwrite bs=8k iodepth=32 completion=poll think-ns=5",
    ));
    assert_eq!(
        text,
        "rw=randwrite bs=8192 iodepth=32 queues=1 completion=poll thinktime=5ns \
         job=ramp runtime=200000000ns job=measured runtime=500000000ns \
         job=after rw=sleep runtime=500ms"
    );
    let machine = bed().machine(&run_of("disks=2"));
    assert_eq!(machine.disks.len(), 2);
    assert!(machine.disks.iter().all(|d| d.loaded && !d.readonly));
}

#[test]
fn idle_disks_have_a_driver_beside_the_loaded_one() {
    let place = tempfile::tempdir().expect("a directory");
    // Where the guest finds the loaded disk, which is the first on the PCI bus.
    for (count, loaded, idle) in [(3, 0, "1-3"), (247, 0, "1-247"), (255, 8, "0-7,9-255")] {
        let run = run_of(&format!("idle-disks={count}"));
        let text = bed().cmdline(&run);
        let job = format!(
            "job=measured disk={loaded} runtime=500000000ns \
             and=idle1 disk={idle} rw=randread ios={count} iodepth=1"
        );
        assert!(text.contains(&job), "{text}");
        let mut machine = bed().machine(&run);
        add_idle_disks(&mut machine, &run, place.path()).expect("they can be");
        assert_eq!(machine.disks.len(), 1 + count);
        let mmio = machine.disks.iter().filter(|d| d.idle == Some("mmio"));
        assert_eq!(mmio.count(), loaded);
    }
    for wrong in ["disks=2", "iothreads=0", "vmm=qemu"] {
        let run = run_of(&format!("idle-disks=1 {wrong}"));
        let mut machine = bed().machine(&run);
        assert!(add_idle_disks(&mut machine, &run, place.path()).is_err());
    }
}

/// QEMU's microvm boots the embedded guest on this machine's KVM, and both are measured for real.
#[test]
fn qemu_runs_the_guest_and_is_measured() {
    let name = "qemu_runs_the_guest_and_is_measured";
    let has_qemu = bed().programs.version(Vmm::Qemu).is_ok();
    let Some(elf) = guest_image::elf().filter(|_| has_qemu && Path::new("/dev/kvm").exists())
    else {
        println!("skipped: {name} needs qemu-system-x86_64 and /dev/kvm");
        return;
    };
    let place = tempfile::tempdir().expect("a directory");
    let (image, disk) = (place.path().join("guest"), place.path().join("disk"));
    std::fs::write(&image, elf).expect("the guest's file");
    std::fs::write(&disk, vec![1; 8 << 20]).expect("the disk");
    let mut bed = GuestBed {
        image,
        disks: vec![disk],
        ..bed()
    };
    let run = run_of("vmm=qemu bs=4k iodepth=8 poll-max-ns=0 engine=threads");
    let mut got = Vec::new();
    bed.turn(&[&run], &Stop::default(), &mut |m| got.push(m))
        .expect("a turn");
    let m = &got[0];
    assert!(m.iops > 0.0 && m.errors == 0, "{m:?}");
    assert!((m.bytes_per_second / m.iops - 4096.0).abs() < 1.0, "{m:?}");
    let names: Vec<String> = m.cpu.groups.iter().map(|g| g.group.to_string()).collect();
    for name in ["main", "IO io0", "vcpu0"] {
        assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
    }
    // The interval is that of the second job, which lasts half a second by the guest's clock.
    assert!(m.cpu.interval_ns > 400_000_000, "{m:?}");
    let error = bed.turn(
        &[&Run {
            bs_bytes: 1 << 30,
            ..run
        }],
        &Stop::default(),
        &mut |_| {},
    );
    let error = error.expect_err("larger than the disk").to_string();
    assert!(error.starts_with("in the guest: "), "{error}");
}

proptest! {
    #[test]
    fn foreign_lines_do_no_harm(line in "\\PC{0,80}", cut in 0usize..600) {
        let _ = Line::read(&line);
        let _ = Line::read(&format!("{{\"job\":{line}}}"));
        let part: String = LINE.chars().take(cut).collect();
        let _ = Line::read(&part);
    }
}
