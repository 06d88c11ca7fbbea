//! The command line: what to do, in words that fio's users know.
//!
//! `key=value` tokens. Those before the first `job=NAME` are defaults for all jobs. `job=NAME` begins a
//! job that runs after those before it, `and=NAME` one that runs beside the job before it, on other
//! CPUs.
//!
//! | key | values | default |
//! |---|---|---|
//! | `rw` | `read` `write` `randread` `randwrite` `rw` `randrw` `verify` `flush` `discard` `writezeroes` `getid` `notify` `echo` `sleep` `none` | `randread` |
//! | `bs` | bytes of one request, `k` `m` `g` | 4k |
//! | `iodepth` | requests in flight in each queue | 1 |
//! | `ios` | requests of the job | once through the region |
//! | `runtime` | time to run, `ns` `us` `ms` `s`, seconds if bare | until `ios` |
//! | `offset`, `size` | the region of the disk | all of it |
//! | `bound` | `off`: the region may end beyond the disk | on |
//! | `disk` | disks, as `0,2-3` or `all` | all |
//! | `queues` | queues used on each disk | 1 |
//! | `queue_size` | entries | what the device offers, at most 256 |
//! | `numjobs` | CPUs that share the job's queues | as many as useful |
//! | `cpu` | first of these CPUs | next free one |
//! | `completion` | `irq` (halt until an interrupt) `poll` (look at the used ring) `strict` (as `irq`, but look only after an interrupt, and count it as a fault when none comes) | `irq` |
//! | `kick` | `user`: notify from CPL 3; `kernel`: from CPL 0 | `user` |
//! | `event_idx`, `indirect` | whether the feature is accepted | on |
//! | `segs` | data segments a request | 1 |
//! | `cut` | `even`, or `odd`: at any byte, header and status cut or merged too | `even` |
//! | `rwmixread` | percentage of reads of `rw` and `randrw` | 50 |
//! | `fsync` | a flush after so many writes | 0, never |
//! | `thinktime`, `thinktime_blocks` | pause (microseconds if bare) after so many requests | 0, 1 |
//! | `verify` | `off`, `gen:N` (generation N exactly), `self` (any generation), `track` (what this guest wrote last), `zero` | `off` |
//! | `report` | a line for each flush while the job runs: `flush`, or `off` | `off` |
//! | `mem` | `low` or `high` (above 4 GiB): where rings and buffers lie | `low` |
//! | `ack_ro` | whether a read-only disk's feature is accepted | on |
//! | `wce` | sets the cache mode through the configuration: `on` `off` | as it is |
//! | `unmap` | UNMAP flag of write zeroes | off |
//! | `timeout` | longest wait for any completion | 10s |
//! | `seed` | of the random numbers | 1 |
//! | `until` | `others`: run until the jobs beside it that are no I/O have ended; `done` | `done` |
//! | `hostile` | cases of `hostile/cases.rs`, `a,b` or `all`, on the first of the disks; with `runtime` the device is left in its state for so long; `list` prints their names | |
//!
//! For the whole guest: `exit=acpi|debug|reset|triple|halt|panic|fault` with `exit_register=` and
//! `exit_value=`, `cpus=` (how many to start, all if absent), `tsc_hz=`, `pci=off|cf8|ecam`, `ecam=`,
//! and `virtio_mmio.device=SIZE@BASE:IRQ` as Linux has it.

use core::mem::MaybeUninit;

/// Most jobs on one command line.
pub const MAX_JOBS: usize = 64;
/// Most disks that the guest drives.
pub const MAX_DISKS: usize = 256;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Read,
    Write,
    RandRead,
    RandWrite,
    Mixed,
    RandMixed,
    Verify,
    Flush,
    Discard,
    WriteZeroes,
    GetId,
    /// Notifications without requests; their latency is what one costs the guest.
    Notify,
    Echo,
    Sleep,
    None,
    Hostile,
}

impl Kind {
    pub fn is_random(self) -> bool {
        matches!(self, Kind::RandRead | Kind::RandWrite | Kind::RandMixed)
    }

    /// As the command line has it.
    pub fn name(self) -> &'static [u8] {
        match self {
            Kind::Read => b"read",
            Kind::Write => b"write",
            Kind::RandRead => b"randread",
            Kind::RandWrite => b"randwrite",
            Kind::Mixed => b"rw",
            Kind::RandMixed => b"randrw",
            Kind::Verify => b"verify",
            Kind::Flush => b"flush",
            Kind::Discard => b"discard",
            Kind::WriteZeroes => b"writezeroes",
            Kind::GetId => b"getid",
            Kind::Notify => b"notify",
            Kind::Echo => b"echo",
            Kind::Sleep => b"sleep",
            Kind::None => b"none",
            Kind::Hostile => b"hostile",
        }
    }

    /// Whether it drives disks by the worker's loop.
    pub fn is_io(self) -> bool {
        !matches!(self, Kind::Echo | Kind::Sleep | Kind::None | Kind::Hostile)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verify {
    Off,
    Generation(u32),
    Itself,
    Track,
    Zero,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Exit {
    Acpi = 1,
    Debug,
    Reset,
    Triple,
    Halt,
    Panic,
    /// A page fault, which is reported; then a triple fault.
    Fault,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pci {
    Auto,
    Off,
    Cf8,
    Ecam,
}

/// Disks by index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskSet([u64; MAX_DISKS / 64]);

impl DiskSet {
    pub const ALL: DiskSet = DiskSet([u64::MAX; MAX_DISKS / 64]);
    const EMPTY: DiskSet = DiskSet([0; MAX_DISKS / 64]);

    pub fn contains(&self, disk: usize) -> bool {
        disk < MAX_DISKS && self.0[disk / 64] >> (disk % 64) & 1 != 0
    }

    fn insert(&mut self, disk: usize) {
        self.0[disk / 64] |= 1 << (disk % 64);
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub name: &'a [u8],
    /// Jobs of one step run at the same time.
    pub step: usize,
    pub kind: Kind,
    pub block_bytes: u32,
    pub depth: usize,
    pub ios: u64,
    pub runtime_ns: u64,
    pub offset: u64,
    pub size: u64,
    pub bound: bool,
    pub disks: DiskSet,
    pub queues: usize,
    pub queue_size: u16,
    pub workers: usize,
    pub cpu: Option<usize>,
    pub poll: bool,
    pub strict: bool,
    pub kick_at_cpl0: bool,
    pub event_idx: bool,
    pub indirect: bool,
    pub segments: usize,
    pub odd: bool,
    pub read_percent: u64,
    pub fsync: u64,
    pub think_ns: u64,
    pub think_ios: u64,
    pub verify: Verify,
    pub report_flushes: bool,
    pub high: bool,
    pub ack_read_only: bool,
    pub write_cache: Option<bool>,
    pub unmap: bool,
    pub timeout_ns: u64,
    pub seed: u64,
    pub until_others: bool,
    pub hostile: &'a [u8],
}

impl Job<'_> {
    const DEFAULT: Job<'static> = Job {
        name: b"",
        step: 0,
        kind: Kind::RandRead,
        block_bytes: 4096,
        depth: 1,
        ios: 0,
        runtime_ns: 0,
        offset: 0,
        size: u64::MAX,
        bound: true,
        disks: DiskSet::ALL,
        queues: 1,
        queue_size: 256,
        workers: 0,
        cpu: None,
        poll: false,
        strict: false,
        kick_at_cpl0: false,
        event_idx: true,
        indirect: true,
        segments: 1,
        odd: false,
        read_percent: 50,
        fsync: 0,
        think_ns: 0,
        think_ios: 1,
        verify: Verify::Off,
        report_flushes: false,
        high: false,
        ack_read_only: true,
        write_cache: None,
        unmap: false,
        timeout_ns: 10_000_000_000,
        seed: 1,
        until_others: false,
        hostile: b"",
    };
}

/// A virtio-mmio device of the command line.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct MmioDevice {
    pub base: u64,
    pub irq: u32,
}

pub struct Options<'a> {
    /// The first `job_count` are set. Not an array of defaults, so that the static takes no place in
    /// the image.
    jobs: [MaybeUninit<Job<'a>>; MAX_JOBS],
    job_count: usize,
    pub mmio: [MmioDevice; MAX_DISKS],
    pub mmio_count: usize,
    pub cpus: usize,
    pub tsc_hz: u64,
    pub exit: Option<Exit>,
    pub exit_register: Option<u64>,
    pub exit_value: Option<u8>,
    pub pci: Pci,
    pub ecam: u64,
}

/// A token that is not understood, and why.
#[derive(Debug, PartialEq, Eq)]
pub struct Error<'a> {
    pub token: &'a [u8],
    pub reason: &'static str,
}

/// Tokens meant for Linux that a VMM may add to any command line.
const IGNORED: [&[u8]; 8] = [
    b"console",
    b"reboot",
    b"panic",
    b"root",
    b"quiet",
    b"ro",
    b"rw",
    b"earlyprintk",
];

impl<'a> Options<'a> {
    pub const EMPTY: Options<'static> = Options {
        jobs: [MaybeUninit::uninit(); MAX_JOBS],
        job_count: 0,
        mmio: [MmioDevice { base: 0, irq: 0 }; MAX_DISKS],
        mmio_count: 0,
        cpus: 0,
        tsc_hz: 0,
        exit: None,
        exit_register: None,
        exit_value: None,
        pci: Pci::Auto,
        ecam: 0,
    };

    pub fn jobs(&self) -> &[Job<'a>] {
        // SAFETY: `job_count` jobs are set.
        unsafe { self.jobs[..self.job_count].assume_init_ref() }
    }

    fn last_job(&mut self) -> Option<&mut Job<'a>> {
        // SAFETY: `job_count` jobs are set.
        unsafe { self.jobs[..self.job_count].assume_init_mut() }.last_mut()
    }

    /// Adds what `text` says to the options.
    pub fn parse(&mut self, text: &'a [u8]) -> Result<(), Error<'a>> {
        let mut defaults = Job::DEFAULT;
        for token in text.split(|b| b.is_ascii_whitespace()) {
            if token.is_empty() {
                continue;
            }
            let (key, value) = match token.iter().position(|&b| b == b'=') {
                Some(at) => (&token[..at], &token[at + 1..]),
                None => (token, &b""[..]),
            };
            self.token(key, value, &mut defaults)
                .map_err(|reason| Error { token, reason })?;
        }
        Ok(())
    }

    fn token(
        &mut self,
        key: &'a [u8],
        value: &'a [u8],
        defaults: &mut Job<'a>,
    ) -> Result<(), &'static str> {
        match key {
            b"job" | b"and" => {
                if self.job_count == MAX_JOBS {
                    return Err("too many jobs");
                }
                let step = match self.jobs().last() {
                    Some(last) => last.step + usize::from(key == b"job"),
                    None => 0,
                };
                self.jobs[self.job_count].write(Job {
                    name: value,
                    step,
                    ..*defaults
                });
                self.job_count += 1;
            }
            b"virtio_mmio.device" => {
                let device = mmio_device(value).ok_or("not SIZE@BASE:IRQ")?;
                *self
                    .mmio
                    .get_mut(self.mmio_count)
                    .ok_or("too many devices")? = device;
                self.mmio_count += 1;
            }
            b"cpus" => self.cpus = number(value)? as usize,
            b"tsc_hz" => self.tsc_hz = number(value)?,
            b"ecam" => self.ecam = number(value)?,
            b"exit_register" => self.exit_register = Some(number(value)?),
            b"exit_value" => {
                self.exit_value = Some(u8::try_from(number(value)?).map_err(|_| "above 255")?);
            }
            b"exit" => {
                self.exit = Some(match value {
                    b"acpi" => Exit::Acpi,
                    b"debug" => Exit::Debug,
                    b"reset" => Exit::Reset,
                    b"triple" => Exit::Triple,
                    b"halt" => Exit::Halt,
                    b"panic" => Exit::Panic,
                    b"fault" => Exit::Fault,
                    _ => return Err("not one of acpi debug reset triple halt panic fault"),
                });
            }
            b"pci" => {
                self.pci = match value {
                    b"off" => Pci::Off,
                    b"cf8" => Pci::Cf8,
                    b"ecam" => Pci::Ecam,
                    _ => return Err("not one of off cf8 ecam"),
                };
            }
            b"rw" if value.is_empty() => (),
            _ => {
                let job = self.last_job().unwrap_or(defaults);
                if !job_token(job, key, value)? && !IGNORED.contains(&key) && !key.contains(&b'.') {
                    return Err("unknown option");
                }
            }
        }
        Ok(())
    }
}

/// Sets one option of a job. False if there is no such option.
fn job_token<'a>(job: &mut Job<'a>, key: &[u8], value: &'a [u8]) -> Result<bool, &'static str> {
    match key {
        b"rw" => {
            job.kind = match value {
                b"read" => Kind::Read,
                b"write" => Kind::Write,
                b"randread" => Kind::RandRead,
                b"randwrite" => Kind::RandWrite,
                b"rw" => Kind::Mixed,
                b"randrw" => Kind::RandMixed,
                b"verify" => Kind::Verify,
                b"flush" => Kind::Flush,
                b"discard" => Kind::Discard,
                b"writezeroes" => Kind::WriteZeroes,
                b"getid" => Kind::GetId,
                b"notify" => Kind::Notify,
                b"echo" => Kind::Echo,
                b"sleep" => Kind::Sleep,
                b"none" => Kind::None,
                _ => return Err("no such kind of job"),
            }
        }
        b"bs" => {
            let bytes = number(value)?;
            if bytes == 0 || bytes > 64 << 20 {
                return Err("not from 1 to 64m");
            }
            job.block_bytes = bytes as u32;
        }
        b"iodepth" => job.depth = at_least_one(value)?,
        b"ios" => job.ios = number(value)?,
        b"runtime" => job.runtime_ns = time_ns(value, 1_000_000_000)?,
        b"offset" => job.offset = number(value)?,
        b"size" => job.size = number(value)?,
        b"bound" => job.bound = on_off(value)?,
        b"disk" => job.disks = disk_set(value)?,
        b"queues" => job.queues = at_least_one(value)?,
        b"queue_size" => {
            let size = u16::try_from(number(value)?).map_err(|_| "above 65535")?;
            if !size.is_power_of_two() || size > 32768 {
                return Err("not a power of two up to 32768");
            }
            job.queue_size = size;
        }
        b"numjobs" => job.workers = at_least_one(value)?,
        b"cpu" => job.cpu = Some(number(value)? as usize),
        b"completion" => {
            (job.poll, job.strict) = match value {
                b"irq" => (false, false),
                b"poll" => (true, false),
                b"strict" => (false, true),
                _ => return Err("not irq, poll or strict"),
            }
        }
        b"kick" => job.kick_at_cpl0 = choose(value, b"kernel", b"user", "not user or kernel")?,
        b"event_idx" => job.event_idx = on_off(value)?,
        b"indirect" => job.indirect = on_off(value)?,
        b"segs" => job.segments = at_least_one(value)?,
        b"cut" => job.odd = choose(value, b"odd", b"even", "not even or odd")?,
        b"rwmixread" => {
            job.read_percent = number(value)?;
            if job.read_percent > 100 {
                return Err("above 100");
            }
        }
        b"fsync" => job.fsync = number(value)?,
        b"thinktime" => job.think_ns = time_ns(value, 1000)?,
        b"thinktime_blocks" => job.think_ios = at_least_one(value)? as u64,
        b"verify" => {
            job.verify = match value {
                b"off" => Verify::Off,
                b"self" => Verify::Itself,
                b"track" => Verify::Track,
                b"zero" => Verify::Zero,
                _ => {
                    let text = value.strip_prefix(b"gen:").ok_or("no such way to verify")?;
                    Verify::Generation(u32::try_from(number(text)?).map_err(|_| "too large")?)
                }
            }
        }
        b"report" => job.report_flushes = choose(value, b"flush", b"off", "not flush or off")?,
        b"mem" => job.high = choose(value, b"high", b"low", "not low or high")?,
        b"ack_ro" => job.ack_read_only = on_off(value)?,
        b"wce" => job.write_cache = Some(on_off(value)?),
        b"unmap" => job.unmap = on_off(value)?,
        b"timeout" => job.timeout_ns = time_ns(value, 1_000_000_000)?,
        b"seed" => job.seed = number(value)?,
        b"until" => job.until_others = choose(value, b"others", b"done", "not others or done")?,
        b"hostile" => {
            job.kind = Kind::Hostile;
            job.hostile = value;
        }
        _ => return Ok(false),
    }
    Ok(true)
}

fn choose(value: &[u8], yes: &[u8], no: &[u8], error: &'static str) -> Result<bool, &'static str> {
    if value == yes {
        Ok(true)
    } else if value == no {
        Ok(false)
    } else {
        Err(error)
    }
}

fn on_off(value: &[u8]) -> Result<bool, &'static str> {
    choose(value, b"on", b"off", "not on or off")
}

fn at_least_one(value: &[u8]) -> Result<usize, &'static str> {
    match number(value)? {
        0 => Err("must be at least 1"),
        n => Ok(n as usize),
    }
}

/// Decimal or 0x hexadecimal digits, and what follows them.
fn digits(text: &[u8]) -> Result<(u64, &[u8]), &'static str> {
    let (base, text) = match text.strip_prefix(b"0x") {
        Some(rest) => (16, rest),
        None => (10, text),
    };
    let mut value = 0u64;
    let mut len = 0;
    for &byte in text {
        let Some(digit) = char::from(byte).to_digit(base) else {
            break;
        };
        value = value
            .checked_mul(u64::from(base))
            .and_then(|v| v.checked_add(u64::from(digit)))
            .ok_or("number too large")?;
        len += 1;
    }
    if len == 0 {
        return Err("not a number");
    }
    Ok((value, &text[len..]))
}

/// A number with an optional suffix `k`, `m`, `g`.
fn number(text: &[u8]) -> Result<u64, &'static str> {
    let (value, suffix) = digits(text)?;
    let shift = match suffix {
        b"" => 0,
        b"k" | b"K" => 10,
        b"m" | b"M" => 20,
        b"g" | b"G" => 30,
        _ => return Err("not a number with an optional suffix k, m or g"),
    };
    value.checked_mul(1 << shift).ok_or("number too large")
}

/// A time with an optional unit; `bare_ns` is the unit of a bare number.
fn time_ns(text: &[u8], bare_ns: u64) -> Result<u64, &'static str> {
    let (value, unit) = digits(text)?;
    let factor = match unit {
        b"" => bare_ns,
        b"ns" => 1,
        b"us" => 1000,
        b"ms" => 1_000_000,
        b"s" => 1_000_000_000,
        _ => return Err("not a time with a unit ns, us, ms or s"),
    };
    value.checked_mul(factor).ok_or("number too large")
}

fn disk_set(text: &[u8]) -> Result<DiskSet, &'static str> {
    if text == b"all" {
        return Ok(DiskSet::ALL);
    }
    let mut set = DiskSet::EMPTY;
    for part in text.split(|&b| b == b',') {
        let (first, rest) = digits(part)?;
        let last = match rest {
            b"" => first,
            _ => number(rest.strip_prefix(b"-").ok_or("not a list of disks")?)?,
        };
        if first > last || last >= MAX_DISKS as u64 {
            return Err("not a list of disks below 256");
        }
        for disk in first..=last {
            set.insert(disk as usize);
        }
    }
    Ok(set)
}

/// `SIZE@BASE:IRQ`.
fn mmio_device(text: &[u8]) -> Option<MmioDevice> {
    let at = text.iter().position(|&b| b == b'@')?;
    let (base, rest) = digits(&text[at + 1..]).ok()?;
    let (irq, _) = digits(rest.strip_prefix(b":")?).ok()?;
    Some(MmioDevice {
        base,
        irq: u32::try_from(irq).ok()?,
    })
}

#[cfg(test)]
#[path = "options/tests.rs"] // As this file is also part of the library's tests.
mod tests;
