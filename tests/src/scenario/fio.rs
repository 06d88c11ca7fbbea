//! fio in the guest: what it wrote it reads back, on all disks at once; and how Pollux and QEMU fare
//! at the same job on the same kernel and disk.

use std::fs;

use super::storage::check_sums;
use super::{Environment, Outcome, six_disks, two_iothreads};
use crate::machine::{Disk, Finished, IoThread, Machine, Vmm};

/// A job of the verifying run: engine, block size, depth, writes between two fsyncs (0: none).
struct Job {
    engine: &'static str,
    block_bytes: u64,
    depth: u32,
    fsync: u32,
}

const fn job(engine: &'static str, block_bytes: u64, depth: u32, fsync: u32) -> Job {
    Job {
        engine,
        block_bytes,
        depth,
        fsync,
    }
}

/// Rounds of jobs, one for each of the six disks: a round runs at once. Together they are both
/// engines at every block size and at both depths.
const ROUNDS: [[Job; 6]; 3] = [
    [
        job("libaio", 512, 1, 0),
        job("io_uring", 4096, 32, 0),
        job("libaio", 65536, 32, 4),
        job("io_uring", 1 << 20, 1, 0),
        job("io_uring", 512, 32, 0),
        job("libaio", 1 << 20, 32, 0),
    ],
    [
        job("libaio", 1 << 20, 1, 2),
        job("io_uring", 65536, 1, 0),
        job("io_uring", 512, 1, 16),
        job("libaio", 4096, 32, 0),
        job("libaio", 512, 32, 0),
        job("io_uring", 4096, 1, 0),
    ],
    [
        job("io_uring", 1 << 20, 32, 0),
        job("libaio", 4096, 1, 8),
        job("io_uring", 65536, 32, 0),
        job("libaio", 65536, 1, 0),
        job("io_uring", 4096, 32, 16),
        job("libaio", 16384, 32, 0),
    ],
];

/// The bytes that a job writes and then verifies.
fn span(block_bytes: u64) -> u64 {
    (block_bytes * 128).clamp(64 << 10, 8 << 20)
}

/// A fio job file for one round.
fn job_file(round: &[Job; 6], disks: &[Disk]) -> String {
    let mut file = String::from(
        "[global]\ndirect=1\nrw=randwrite\nverify=crc32c\nverify_fatal=1\nverify_async=0\n\
         thread=1\n",
    );
    for (job, disk) in round.iter().zip(disks) {
        let Job {
            engine,
            block_bytes,
            depth,
            fsync,
        } = job;
        let span = span(*block_bytes);
        // Two queues: one job on each processor, each in its own half.
        for part in 0..disk.queues {
            file += &format!(
                "[{serial}-{part}]\nfilename=${{{serial}}}\nioengine={engine}\nbs={block_bytes}\n\
                 iodepth={depth}\noffset={offset}\nsize={span}\nfsync={fsync}\n",
                serial = disk.serial,
                offset = u64::from(part) * span,
            );
            if disk.queues > 1 {
                file += &format!("cpus_allowed={part}\n");
            }
        }
    }
    file
}

pub fn verify(environment: &Environment) -> Outcome {
    let disks = six_disks(environment, 16 << 20);
    let mut script = String::new();
    for disk in &disks {
        script += &format!("export {0}=\"$(disk {0})\"\n", disk.serial);
    }
    for (number, round) in ROUNDS.iter().enumerate() {
        script += &run_fio(&format!("fio{number}"), &job_file(round, &disks));
    }
    // Around the page cache: what is on the disk.
    for disk in &disks {
        script += &format!(
            "report sum.{0} \"$(dd if=${0} bs=512k iflag=direct status=none | sha256sum)\"\n",
            disk.serial
        );
    }

    let mut machine = Machine::new(script);
    machine.iothreads = two_iothreads();
    for iothread in &mut machine.iothreads {
        // Where everything is emulated a wait takes milliseconds: with the usual limit the rule finds
        // that polling does not pay, and there is nothing to see.
        iothread.poll_max_ns = 20_000_000;
    }
    machine.disks = disks;
    let ended = environment.start(&machine).finish();
    ended.assert_success();

    let mut jobs = 0;
    for (number, round) in ROUNDS.iter().enumerate() {
        for result in results(&ended, &format!("fio{number}")) {
            let disk = machine
                .disks
                .iter()
                .position(|disk| result.name.starts_with(&disk.serial));
            let job = &round[disk.expect("a job is named by its disk")];
            let kib = span(job.block_bytes) / 1024;
            environment.note(&format!(
                "{:<8} {:<8} bs={:<8}iodepth={:<3}{:>6} write IOPS {:>6} read IOPS",
                result.name,
                job.engine,
                job.block_bytes,
                job.depth,
                result.write_iops,
                result.read_iops
            ));
            assert_eq!(result.error, 0, "{}: fio's error", result.name);
            assert_eq!(
                (result.write_kib, result.read_kib),
                (kib, kib),
                "{}",
                result.name
            );
            jobs += 1;
        }
    }
    assert_eq!(
        jobs, 21,
        "three rounds on six disks, twice on the one with two queues"
    );
    check_sums(&ended, &machine.disks);
    if environment.vmm() == Vmm::Pollux {
        check_polling(environment, &ended);
    }
    Outcome::Held
}

/// The statistics printed at the end tell, of both iothreads, that polling windows were opened, and
/// that some found work and some did not.
fn check_polling(environment: &Environment, ended: &Finished) {
    for iothread in ["io0", "io1"] {
        let title = format!("iothread {iothread}:");
        let mut lines = ended
            .messages
            .lines()
            .skip_while(|line| !line.starts_with(&title));
        let polling = lines
            .nth(1)
            .and_then(|line| line.trim_start().strip_prefix("polling: "));
        let Some(polling) = polling else {
            ended.fail(&format!("no polling statistics of {iothread}"));
        };
        environment.note(&format!("{iothread}: {polling}"));
        // The number before a word, or after one.
        let words: Vec<&str> = polling
            .split([' ', ',', '(', ')'])
            .filter(|w| !w.is_empty())
            .collect();
        let beside = |name: &str, offset: isize| {
            let at = words.iter().position(|word| *word == name);
            let number = at.and_then(|at| words.get(at.checked_add_signed(offset)?));
            number.and_then(|number| number.parse::<u64>().ok())
        };
        let figures = [
            beside("hits", -1),
            beside("misses", -1),
            beside("us", -1),
            beside("p99", 1),
        ];
        if !figures
            .iter()
            .all(|figure| figure.is_some_and(|figure| figure > 0))
        {
            ended.fail(&format!(
                "{iothread}: hits, misses, time or window are 0: {polling}"
            ));
        }
    }
}

/// What fio says of a job.
struct JobResult {
    name: String,
    error: i32,
    read_kib: u64,
    read_iops: u64,
    write_kib: u64,
    write_iops: u64,
}

/// The results that the guest reported under `key`, one a line, in fio's terse form, version 3:
/// fields 3 and 5 are name and error, 6 and 8 what was read in KiB and its IOPS, 47 and 49 the same
/// of writing, counted from 1.
fn results(ended: &Finished, key: &str) -> Vec<JobResult> {
    let mut results = Vec::new();
    for line in ended.all(key) {
        let fields: Vec<&str> = line.split(';').collect();
        if fields.len() < 49 {
            ended.fail(&format!("not a terse result of fio: {line}"));
        }
        let number = |field: usize| fields[field - 1].parse().unwrap_or(0);
        results.push(JobResult {
            name: fields[2].to_owned(),
            error: fields[4].parse().unwrap_or(-1),
            read_kib: number(6),
            read_iops: number(8),
            write_kib: number(47),
            write_iops: number(49),
        });
    }
    results
}

/// The jobs of the comparison, one after the other: name, access, depth.
const COMPARED: [(&str, &str, u32); 3] = [
    ("randread-1", "randread", 1),
    ("randread-16", "randread", 16),
    ("randwrite-1", "randwrite", 1),
];

pub fn beside_qemu(environment: &Environment) -> Outcome {
    if !crate::bed::has_program("qemu-system-x86_64") {
        return Outcome::Skipped("no qemu-system-x86_64".to_owned());
    }
    let mut file = String::from(
        "[global]\nfilename=${data0}\ndirect=1\nioengine=libaio\nbs=4k\nthread=1\nstonewall\n\
         time_based=1\nruntime=4\n",
    );
    for (name, access, depth) in COMPARED {
        file += &format!("[{name}]\nrw={access}\niodepth={depth}\n");
    }
    let script = format!("export data0=\"$(disk data0)\"\n{}", run_fio("fio", &file));
    let mut machine = Machine::new(script);
    machine.iothreads = vec![IoThread {
        id: "io0",
        poll_max_ns: 32_768,
    }];
    machine.disks = vec![environment.disk("data0", 32 << 20).on("io0")];
    // Reads of a hole are answered without the disk.
    fs::write(&machine.disks[0].path, vec![0x5a; 32 << 20]).expect("there is room");

    let mut columns = Vec::new();
    for vmm in [environment.vmm(), Vmm::Qemu] {
        let ended = environment.start_with(vmm, &machine).finish();
        ended.assert_success();
        let results = results(&ended, "fio");
        if results.len() != COMPARED.len() || results.iter().any(|result| result.error != 0) {
            ended.fail("fio reported no results without error");
        }
        columns.push(results);
    }
    environment.note("IOPS at 4 KiB, one iothread    Pollux      QEMU");
    for (ours, theirs) in columns[0].iter().zip(&columns[1]) {
        let [ours, theirs] = [ours, theirs].map(|r| (r.name.as_str(), r.read_iops + r.write_iops));
        environment.note(&format!("{:<26}{:>11}{:>10}", ours.0, ours.1, theirs.1));
        // These are no speeds (an emulated host, everything on one processor); but a monitor that
        // does a small part of what the other does has something wrong with it.
        assert!(
            ours.1 * 4 >= theirs.1,
            "{}: {} IOPS, QEMU {}",
            ours.0,
            ours.1,
            theirs.1
        );
    }
    Outcome::Held
}

/// Lines of a script that run fio on a job file and report its results under `key`.
pub(crate) fn run_fio(key: &str, job_file: &str) -> String {
    format!(
        "cat >{key}.fio <<'END'\n{job_file}END\n\
         fio --output-format=terse --terse-version=3 {key}.fio >{key}.out ||\n    \
         fail \"{key}: $(cat {key}.out)\"\n\
         while read -r line; do report {key} \"$line\"; done <{key}.out\n"
    )
}
