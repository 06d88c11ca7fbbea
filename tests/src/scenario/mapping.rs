//! Queues on iothreads in every way: sixteen disks on one iothread, sixteen on two in turn, sixteen
//! on eight by lists, and one with four queues on four, all verified by fio at once.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use serde_json::json;

use super::storage::check_sums;
use super::{Environment, Outcome};
use crate::machine::{Disk, IoThread, Machine, Vmm};

const CPUS: usize = 4;
const IOTHREADS: [&str; 8] = ["io0", "io1", "io2", "io3", "io4", "io5", "io6", "io7"];
/// Disks of each way.
const DISKS: usize = 16;
/// What a job of fio writes and verifies.
const SPAN_BYTES: u64 = 64 << 10;

/// Runs the jobs, then tells every disk's contents and how the one with four queues is set up.
const SCRIPT: &str = r#"
for entry in /sys/block/vd*; do
    read -r serial <"$entry/serial"
    export "$serial=/dev/${entry##*/}"
done
fio --minimal /tmp/jobs >/tmp/fio 2>&1 || fail "fio: $(tail -n 5 /tmp/fio)"
echo 3 >/proc/sys/vm/drop_caches
sha256sum /dev/vd* | while read -r sum device; do
    read -r serial </sys/block/${device#/dev/}/serial
    report "sum.$serial" "$sum  -"
done
cd /sys/block/${quad#/dev/}
report quad.cpus $(cat mq/0/cpu_list) $(cat mq/1/cpu_list) $(cat mq/2/cpu_list) $(cat mq/3/cpu_list)
device=$(readlink -f device)
grep "${device##*/}-req" /proc/interrupts | while read -r line; do report quad.vector "$line"; done
report done
read -r line
"#;

pub fn mapping(environment: &Environment) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("about Pollux's own options".to_owned());
    }
    let disks = disks(environment);
    let mut machine = Machine::new(script(&disks));
    machine.cpus = CPUS as u32;
    machine.memory_mib = 384;
    machine.monitor = true;
    machine.iothreads = IOTHREADS
        .map(|id| IoThread {
            id,
            poll_max_ns: 32_768,
        })
        .into();
    machine.disks = disks;
    let mut running = environment.start(&machine);
    running.wait_for("done");

    // Each iothread has had requests, and none of them failed.
    let mut monitor = running.monitor();
    for iothread in IOTHREADS {
        let polling = monitor.execute("x-query-polling", json!({"id": iothread}));
        let counter = |name: &str| polling[0][name].as_u64().unwrap_or(0);
        environment.note(&format!(
            "{iothread}: {} requests, {} windows polled",
            counter("completions"),
            counter("windows")
        ));
        assert!(counter("completions") > 0, "{iothread} was idle: {polling}");
        assert_eq!(counter("errors"), 0, "{iothread}: {polling}");
    }
    let quad = monitor.disk("quad");
    let mapped = json!([
        {"iothread": "io0", "vqs": [0]}, {"iothread": "io1", "vqs": [1]},
        {"iothread": "io2", "vqs": [2]}, {"iothread": "io3", "vqs": [3]},
    ]);
    assert_eq!(quad["iothread-vq-mapping"], mapped, "{quad}");

    running.send("end");
    let ended = running.finish();
    ended.assert_success();
    check_sums(&ended, &machine.disks);

    // One queue and one vector a processor.
    assert_eq!(ended.value("quad.cpus"), "0 1 2 3");
    let vectors = ended.all("quad.vector");
    assert_eq!(vectors.len(), CPUS, "{vectors:?}");
    let mut owners = BTreeSet::new();
    for vector in vectors {
        // IRQ, a count a processor, and more.
        let counts = vector.split_whitespace().skip(1).take(CPUS);
        let busy: Vec<usize> = (0..)
            .zip(counts)
            .filter(|(_, count)| *count != "0")
            .map(|(cpu, _)| cpu)
            .collect();
        assert_eq!(busy.len(), 1, "a queue interrupts one processor: {vector}");
        owners.extend(busy);
    }
    assert_eq!(owners.len(), CPUS, "every processor has its own queue");
    Outcome::Held
}

fn disks(environment: &Environment) -> Vec<Disk> {
    let disk = |serial: String| environment.disk(&serial, 128 << 10);
    let one = (0..DISKS).map(|n| disk(format!("one{n:02}")).on("io0"));
    let two = (0..DISKS).map(|n| {
        disk(format!("two{n:02}"))
            .with_queues(2)
            .with_options("iothreads=io0:io1")
    });
    let eight = (0..DISKS).map(|n| {
        let [first, second] = [n % 8, (n + 1) % 8].map(|at| IOTHREADS[at]);
        disk(format!("eight{n:02}"))
            .with_queues(3)
            .with_options(format!("iothreads={first}:{second},vqs=0+2:1"))
    });
    let quad = environment
        .disk("quad", 512 << 10)
        .with_queues(4)
        .with_options("iothreads=io0:io1:io2:io3");
    one.chain(two).chain(eight).chain([quad]).collect()
}

/// One job a disk, each on a processor, and so on a queue, of its own choice; on the disk with four
/// queues one a processor.
fn script(disks: &[Disk]) -> String {
    let mut jobs = format!(
        "[global]\ndirect=1\nrw=randwrite\nbs=4k\niodepth=4\nsize={SPAN_BYTES}\nverify=crc32c\n\
         verify_fatal=1\nverify_async=0\nthread=1\nioengine=libaio\n"
    );
    for (number, disk) in disks.iter().enumerate() {
        let serial = &disk.serial;
        let processors = match disk.serial.as_str() {
            "quad" => 0..CPUS,
            _ => (number + number / 8) % CPUS..(number + number / 8) % CPUS + 1,
        };
        for (part, processor) in (0..).zip(processors) {
            // Writing to a string does not fail.
            let _ = writeln!(
                jobs,
                "[{serial}-{part}]\nfilename=${{{serial}}}\noffset={}\ncpus_allowed={processor}",
                part * SPAN_BYTES
            );
        }
    }
    format!("cat >/tmp/jobs <<'END'\n{jobs}END\n{SCRIPT}")
}
