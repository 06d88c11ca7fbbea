//! What runs in the guest: a shell script and one job file for each run.
//!
//! The script announces each job's measured interval on the console, so that the host counts CPU
//! only then, and writes what fio, mpstat and the kernel say into the job's slot of the results
//! disk; a console of 10 µs a byte is too slow for that.
//!
//! Lines on the console: `@pollux-bench begin N`, `@pollux-bench end N`,
//! `@pollux-bench done N STATUS`.

use std::fmt::Write as _;

use crate::matrix::{Run, axis};

/// Begins the lines that are for the host.
pub const MARK: &str = "@pollux-bench";
/// Serial number of the results disk.
pub const RESULTS_SERIAL: &str = "pollux-results";
/// Size of a job's slot on the results disk.
pub const SLOT_BYTES: u64 = 4 << 20;
/// Where the guest's init looks for the files, relative to the root of the RAM disk.
const DIRECTORY: &str = "lab";

/// Serial number of the `index`-th loaded disk.
pub fn serial(index: u32) -> String {
    format!("pollux-load{index}")
}

/// How long a job runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Times {
    /// Before anything is measured.
    pub ramp_s: u64,
    /// Of the measured interval.
    pub runtime_s: u64,
}

/// One job of the guest.
#[derive(Clone, Debug)]
pub enum Job {
    /// From the matrix: fio runs somewhat longer than the interval.
    Matrix(Box<Run>),
    /// A file of the user's: the interval is all of it, but for the ramp.
    File(String),
}

/// The files for `jobs` on `disks` loaded disks.
pub fn files(jobs: &[Job], disks: u32, times: Times) -> Vec<(String, Vec<u8>)> {
    let mut files = vec![(
        format!("{DIRECTORY}/script"),
        script(jobs, disks, times).into_bytes(),
    )];
    for (number, job) in jobs.iter().enumerate() {
        let text = match job {
            Job::Matrix(run) => job_file(run, disks, times),
            Job::File(text) => format!("{PRERUN}{text}"),
        };
        files.push((format!("{DIRECTORY}/job{number}.fio"), text.into_bytes()));
    }
    files
}

/// Every job says when it really begins: fio takes a while until then.
const PRERUN: &str = "[global]\nexec_prerun=touch /run/lab/started\n";

/// The job file of a run. Each disk is a section, so that `numjobs` counts for each disk.
fn job_file(run: &Run, disks: u32, times: Times) -> String {
    let word = |name: &str| axis(name).and_then(|a| (a.get)(run)).unwrap_or_default();
    let ioengine = run.ioengine.clone().unwrap_or_else(|| "libaio".into());
    // The interval must lie within the time that fio measures, whatever the guest's clock and
    // the start of a process cost.
    let slack_s = 1 + times.runtime_s / 10;
    let mut text = String::from(PRERUN);
    let _ = write!(
        text,
        "ioengine={ioengine}\ndirect=1\nrw={}\nbs={}\niodepth={}\nnumjobs={}\n\
         time_based=1\nramp_time={}\nruntime={}\nnorandommap=1\ngroup_reporting=1\n",
        word("rw"),
        word("bs"),
        run.iodepth,
        run.numjobs,
        times.ramp_s,
        times.runtime_s + slack_s,
    );
    for disk in 0..disks {
        let _ = write!(text, "[disk{disk}]\nfilename=${{DISK{disk}}}\n");
    }
    text
}

/// The script. Shell of POSIX; fio, mpstat and dd are the guest's.
fn script(jobs: &[Job], disks: u32, times: Times) -> String {
    let mut text = String::from(
        r#"export LC_ALL=C S_TIME_FORMAT=ISO
by_serial() {
    for disk in /sys/block/*; do
        if [ "$(cat "$disk/serial" 2>/dev/null)" = "$1" ]; then
            echo "/dev/${disk##*/}"
            return
        fi
    done
    echo "MARK failed no disk with the serial number $1" >&2
}
say() { echo "MARK $*"; }
frame() {
    for file; do
        [ -e "$file" ] || continue
        echo "@file $file $(wc -c <"$file")"
        cat "$file"
    done
    echo "@end"
}
# bring N STATUS: everything of job N into its slot.
bring() {
    frame fio.json fio.err mpstat.json interrupts.begin interrupts.end >slot
    dd if=slot of="$RESULTS" bs=65536 seek=$(($1 * SLOT_BLOCKS)) conv=notrunc,fsync 2>/dev/null
    say "done $1 $2"
    rm -f fio.json fio.err mpstat.json interrupts.* slot started ./*.prerun.txt
}
# start N: fio runs, and the job has begun.
start() {
    fio --output-format=json --output=fio.json "job$1.fio" >fio.err 2>&1 &
    fio=$!
    until [ -e started ] || ! kill -0 $fio 2>/dev/null; do sleep 0.05; done
}
# interrupt PID: until it has ended; it may not have begun to heed the signal.
interrupt() {
    tries=0
    while kill -0 "$1" 2>/dev/null; do
        tries=$((tries + 1))
        if [ $tries -le 50 ]; then kill -INT "$1"; else kill -KILL "$1"; fi
        sleep 0.1
    done
}
# matrix N RAMP RUNTIME
matrix() {
    start "$1"
    sleep "$2"
    cat /proc/interrupts >interrupts.begin
    say "begin $1"
    if command -v mpstat >/dev/null; then mpstat -o JSON "$3" 1 >mpstat.json; else sleep "$3"; fi
    say "end $1"
    cat /proc/interrupts >interrupts.end
    wait $fio
    bring "$1" $?
}
# file N RAMP
file() {
    start "$1"
    sleep "$2"
    cat /proc/interrupts >interrupts.begin
    say "begin $1"
    if command -v mpstat >/dev/null; then mpstat -o JSON 1 >mpstat.json & mpstat=$!; else mpstat=; fi
    wait $fio
    status=$?
    say "end $1"
    cat /proc/interrupts >interrupts.end
    if [ -n "$mpstat" ]; then interrupt $mpstat; fi
    bring "$1" $status
}
"#,
    )
    .replace("MARK", MARK)
    .replace("SLOT_BLOCKS", &(SLOT_BYTES >> 16).to_string());
    for disk in 0..disks {
        let _ = writeln!(text, "export DISK{disk}=$(by_serial {})", serial(disk));
    }
    let _ = writeln!(text, "RESULTS=$(by_serial {RESULTS_SERIAL})");
    for (number, job) in jobs.iter().enumerate() {
        let _ = match job {
            Job::Matrix(_) => {
                writeln!(text, "matrix {number} {} {}", times.ramp_s, times.runtime_s)
            }
            Job::File(_) => writeln!(text, "file {number} {}", times.ramp_s),
        };
    }
    text
}

/// A line of the console that is for the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Mark {
    /// The measured interval of a job begins.
    Begin(usize),
    /// It ends.
    End(usize),
    /// The job's slot is written; fio's exit status.
    Done(usize, i32),
    /// Something is wrong with the machine.
    Failed(String),
}

/// Reads a console line. What the kernel prints may stand before it.
pub fn mark(line: &str) -> Option<Mark> {
    let rest = line[line.find(MARK)? + MARK.len()..].trim();
    let (word, rest) = rest.split_once(' ')?;
    let mut numbers = rest.split(' ').map(str::parse::<i64>);
    let mut number = || numbers.next().and_then(Result::ok);
    let index = |n: Option<i64>| n.and_then(|n| usize::try_from(n).ok());
    match word {
        "begin" => index(number()).map(Mark::Begin),
        "end" => index(number()).map(Mark::End),
        "done" => {
            let job = index(number())?;
            let status = number().and_then(|n| i32::try_from(n).ok())?;
            Some(Mark::Done(job, status))
        }
        "failed" => Some(Mark::Failed(rest.into())),
        _ => None,
    }
}

/// The files in a slot, by name. What is cut short or foreign ends the list.
pub fn unframe(mut bytes: &[u8]) -> Vec<(String, Vec<u8>)> {
    let mut files = Vec::new();
    while let Some(end) = bytes.iter().position(|b| *b == b'\n') {
        let header = String::from_utf8_lossy(&bytes[..end]).into_owned();
        let mut words = header
            .strip_prefix("@file ")
            .unwrap_or_default()
            .rsplitn(2, ' ');
        let size: Option<usize> = words.next().and_then(|w| w.parse().ok());
        let (Some(size), Some(name)) = (size, words.next()) else {
            break;
        };
        let Some(content) = bytes.get(end + 1..).and_then(|rest| rest.get(..size)) else {
            break;
        };
        files.push((name.to_string(), content.to_vec()));
        bytes = &bytes[end + 1 + size..];
    }
    files
}
