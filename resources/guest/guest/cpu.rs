//! What the processor offers at CPL 3: the services of CPL 0 (see [`crate::boot`]), ports, time,
//! interrupt counters, and the other CPUs.

use core::arch::asm;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::boot::{
    FIRST_INTERRUPT, FIRST_TSS, KERNEL_CODE, MAX_CPUS, STACK_BYTES, TRAMPOLINE, TSS_BYTES,
};
use crate::phys::{self, Addr, Shared};
use crate::text::Json;
use crate::{exit, memory};

/// One stack a CPU; each CPU uses its own only.
#[repr(C, align(64))]
pub struct Stacks([[u8; STACK_BYTES]; MAX_CPUS]);
pub static STACKS: Shared<Stacks> = Shared::new(Stacks([[0; STACK_BYTES]; MAX_CPUS]));

/// Task state segments; written by the first CPU before their CPUs start.
#[repr(C, align(64))]
pub struct Tsses([[u8; TSS_BYTES]; MAX_CPUS]);
pub static TSSES: Shared<Tsses> = Shared::new(Tsses([[0; TSS_BYTES]; MAX_CPUS]));

/// How many CPUs have started. Each takes its index from here.
pub static NEXT_CPU: AtomicU32 = AtomicU32::new(1);

/// Interrupts taken, by vector. A vector belongs to one CPU.
pub static INTERRUPTS: [AtomicU64; 256] = [const { AtomicU64::new(0) }; 256];

/// Vector, error code, RIP, CS, RFLAGS, RSP, CR2 of an exception. The first CPU to have one is the
/// only one to report.
pub static EXCEPTION: Shared<[u64; 7]> = Shared::new([0; 7]);

/// The periodic tick that ends a wait for what never comes. Vectors from here to [`WAKE`] mean the
/// same on every CPU.
const TICK: u8 = FIRST_INTERRUPT as u8;
/// Sent from one CPU to another that waits.
const WAKE: u8 = TICK + 1;
/// The serial port's interrupt.
pub const SERIAL: u8 = TICK + 2;
/// Vectors for devices.
pub const DEVICE_VECTORS: core::ops::Range<u8> = TICK + 8..0xf0;

const X2APIC_ID: u32 = 0x802;
const X2APIC_ICR: u32 = 0x830;
const X2APIC_LVT_TIMER: u32 = 0x832;
const X2APIC_INITIAL_COUNT: u32 = 0x838;
const X2APIC_DIVIDE: u32 = 0x83e;

unsafe extern "C" {
    static mut gdt: [u64; 5 + 2 * MAX_CPUS];
    static mut idt: [[u32; 4]; 256];
    static service: u8;
    static exception_stubs: u8;
    static interrupt_stubs: u8;
    static trampoline_start: u8;
    static trampoline_end: u8;
}

/// Calls service `$n` of CPL 0 (see [`crate::boot`]).
macro_rules! service {
    ($n:expr, $result:tt, $($operands:tt)*) => {
        asm!("int3", inout("eax") $n => $result, $($operands)* options(nostack))
    };
}

/// Halts until an interrupt; several that are pending need several calls.
#[inline(always)]
pub fn wait() {
    // SAFETY: the service touches INTERRUPTS only.
    unsafe { service!(0, _, inout("edx") 0 => _, out("ecx") _,) }
}

/// Stores 32 bits from CPL 0.
#[inline(always)]
pub fn store32(addr: Addr, value: u32) {
    // SAFETY: as `phys::write32`.
    unsafe { service!(1, _, in("rdi") addr, in("esi") value,) }
}

/// As [`store32`], 16 bits.
#[inline(always)]
pub fn store16(addr: Addr, value: u16) {
    // SAFETY: as `phys::write16`.
    unsafe { service!(2, _, in("rdi") addr, in("esi") u32::from(value),) }
}

pub fn write_msr(msr: u32, value: u64) {
    let (low, high) = (value as u32, (value >> 32) as u32);
    // SAFETY: the callers write MSRs of the local APIC and the clock, which Rust knows nothing of.
    unsafe { service!(3, _, in("edi") msr, in("esi") low, in("edx") high, out("ecx") _,) }
}

pub fn read_msr(msr: u32) -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: reading has no effect on memory.
    unsafe { service!(4, low, in("edi") msr, out("edx") high, out("ecx") _,) }
    u64::from(high) << 32 | u64::from(low)
}

/// Writes bytes to a port from CPL 0.
pub fn out_bytes(port: u16, bytes: &[u8]) {
    // SAFETY: reads `bytes` only.
    unsafe {
        service!(5, _,
            inout("rsi") bytes.as_ptr() => _,
            in("r8") bytes.len(),
            in("dx") port,
            out("rcx") _,
        )
    }
}

/// CPUID as the VMM presents it: at CPL 3 some machines show the host's.
pub fn cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let (eax, ebx, ecx, edx): (u32, u32, u32, u32);
    // SAFETY: no effect on memory; the service hands EBX over in R9.
    unsafe {
        service!(6, eax,
            in("edi") leaf,
            in("esi") subleaf,
            out("edx") edx,
            out("r8") _, out("r9") ebx, out("r10") ecx, out("rcx") _,
        );
    }
    [eax, ebx, ecx, edx]
}

/// Ends the guest by a triple fault.
pub fn triple_fault() -> ! {
    // SAFETY: does not return.
    unsafe { service!(7, _,) }
    halt()
}

/// Halts this CPU for good.
pub fn halt() -> ! {
    loop {
        // SAFETY: does not return.
        unsafe { service!(8, _,) }
    }
}

macro_rules! ports {
    ($out:ident, $in:ident, $type:ty, $register:tt) => {
        pub fn $out(port: u16, value: $type) {
            // SAFETY: a port access does not touch memory that Rust knows of.
            unsafe { asm!(concat!("out dx, ", $register), in("dx") port, in($register) value, options(nostack)) }
        }

        pub fn $in(port: u16) -> $type {
            let value;
            // SAFETY: as above.
            unsafe { asm!(concat!("in ", $register, ", dx"), in("dx") port, out($register) value, options(nostack)) }
            value
        }
    };
}
ports!(out8, in8, u8, "al");
ports!(out32, in32, u32, "eax");

/// The time-stamp counter.
#[inline(always)]
pub fn tsc() -> u64 {
    let (low, high): (u32, u32);
    // SAFETY: no effect on memory.
    unsafe {
        asm!("rdtsc", out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags))
    }
    u64::from(high) << 32 | u64::from(low)
}

/// Time-stamp counter ticks a second, set once at the start.
static TSC_HZ: AtomicU64 = AtomicU64::new(0);

pub fn tsc_hz() -> u64 {
    TSC_HZ.load(Ordering::Relaxed)
}

/// Where the frequency came from, for the report.
pub fn find_tsc_hz(given: u64) -> &'static str {
    let (hz, source) = if given != 0 {
        (given, "option")
    } else if let Some(hz) = tsc_hz_of_kvm_clock() {
        (hz, "kvmclock")
    } else if let Some(hz) = tsc_hz_of_cpuid() {
        (hz, "cpuid")
    } else {
        (2_000_000_000, "assumed")
    };
    TSC_HZ.store(hz, Ordering::Relaxed);
    source
}

/// KVM's paravirtual clock tells the factor from ticks to nanoseconds.
fn tsc_hz_of_kvm_clock() -> Option<u64> {
    const MSR_KVM_SYSTEM_TIME_NEW: u32 = 0x4b56_4d01;
    let [_, b, c, d] = cpuid(0x4000_0000, 0);
    if [b, c, d] != [0x4b4d_564b, 0x564b_4d56, 0x4d] || cpuid(0x4000_0001, 0)[0] & 1 << 3 == 0 {
        return None;
    }
    // pvclock_vcpu_time_info: the factor is at 24 (32 bits), the shift at 28 (signed 8 bits).
    let page = memory::alloc(64, 64, false)?;
    phys::fill(page, 0, 64);
    write_msr(MSR_KVM_SYSTEM_TIME_NEW, page | 1);
    let (factor, shift) = (phys::read32(page + 24), phys::read8(page + 28) as i8);
    write_msr(MSR_KVM_SYSTEM_TIME_NEW, 0);
    if factor == 0 {
        return None;
    }
    // ns = (ticks << shift) * factor >> 32
    let ticks = (1_000_000_000u128 << 32) / u128::from(factor);
    let hz = if shift >= 0 {
        ticks >> shift
    } else {
        ticks << -shift
    };
    Some(hz as u64)
}

/// Leaf 0x15: crystal frequency and the ratio to it.
fn tsc_hz_of_cpuid() -> Option<u64> {
    if cpuid(0, 0)[0] < 0x15 {
        return None;
    }
    let [denominator, numerator, crystal, _] = cpuid(0x15, 0);
    if denominator == 0 || numerator == 0 || crystal == 0 {
        return None;
    }
    Some(u64::from(crystal) * u64::from(numerator) / u64::from(denominator))
}

/// Nanoseconds of `ticks`.
pub fn ticks_to_ns(ticks: u64) -> u64 {
    (u128::from(ticks) * 1_000_000_000 / u128::from(tsc_hz())) as u64
}

/// Ticks of `ns`.
pub fn ns_to_ticks(ns: u64) -> u64 {
    (u128::from(ns) * u128::from(tsc_hz()) / 1_000_000_000) as u64
}

/// Fills the IDT: until then an exception is a triple fault.
pub fn fill_idt() {
    #[allow(clippy::needless_range_loop)] // `idt` is the processor's, no slice of ours.
    for vector in 0..256usize {
        let (stubs, step, index) = if vector < FIRST_INTERRUPT {
            (&raw const exception_stubs, 16, vector)
        } else {
            (&raw const interrupt_stubs, 32, vector - FIRST_INTERRUPT)
        };
        let handler = stubs.addr() as u32 + step * index as u32;
        // INT3 is how CPL 3 calls the services; its gate is open to it.
        let (handler, kind) = match vector {
            3 => ((&raw const service).addr() as u32, 0xee00),
            _ => (handler, 0x8e00),
        };
        let gate = [
            u32::from(KERNEL_CODE) << 16 | handler & 0xffff,
            handler & 0xffff_0000 | kind,
            0,
            0,
        ];
        // SAFETY: the first CPU alone runs; nothing but the processor reads the table.
        unsafe { (&raw mut idt[vector]).write_volatile(gate) };
    }
}

/// Reports the exception in [`EXCEPTION`] and ends the guest.
pub extern "C" fn exception_main() -> ! {
    static REPORTED: AtomicU32 = AtomicU32::new(0);
    if REPORTED.swap(1, Ordering::AcqRel) != 0 {
        halt();
    }
    let [vector, code, rip, cs, rflags, rsp, cr2] = *EXCEPTION.get();
    let mut json = Json::new();
    json.number("exception", vector);
    json.hex("code", code);
    json.hex("rip", rip);
    json.hex("cs", cs);
    json.hex("rflags", rflags);
    json.hex("rsp", rsp);
    json.hex("cr2", cr2);
    json.print();
    exit::failure()
}

/// x2APIC identifiers by CPU index; each CPU writes its own before it counts itself as ready.
static APIC_IDS: [AtomicU32; MAX_CPUS] = [const { AtomicU32::new(0) }; MAX_CPUS];
/// CPUs that reached [`other_cpu_main`], the first one included.
static READY: AtomicU32 = AtomicU32::new(1);
/// What a CPU other than the first shall run: an index + 1 for [`crate::worker::run`], 0 for nothing.
static WORK: [AtomicU32; MAX_CPUS] = [const { AtomicU32::new(0) }; MAX_CPUS];

pub fn apic_id(cpu: usize) -> u32 {
    APIC_IDS[cpu].load(Ordering::Relaxed)
}

/// Notes the first CPU's APIC identifier.
pub fn note_first_cpu() {
    APIC_IDS[0].store(read_msr(X2APIC_ID) as u32, Ordering::Relaxed);
}

/// A periodic interrupt on this CPU, so that a wait always ends.
pub fn start_tick(period_ns: u64) {
    // KVM's local APIC timer counts nanoseconds.
    write_msr(X2APIC_DIVIDE, 0xb);
    write_msr(X2APIC_LVT_TIMER, 1 << 17 | u64::from(TICK));
    write_msr(X2APIC_INITIAL_COUNT, period_ns);
}

/// One interrupt on this CPU after `ns`, in place of the periodic one.
pub fn start_timer(ns: u64) {
    write_msr(X2APIC_LVT_TIMER, u64::from(TICK));
    write_msr(X2APIC_INITIAL_COUNT, ns.clamp(1, u64::from(u32::MAX)));
}

/// Wakes a CPU from [`wait`].
pub fn wake(cpu: usize) {
    write_msr(X2APIC_ICR, u64::from(apic_id(cpu)) << 32 | u64::from(WAKE));
}

/// Starts all other CPUs by INIT and SIPI. `expected` is how many CPUs there are, 0 if unknown; then
/// it is those that report within a time. Returns how many run.
pub fn start_others(expected: usize) -> usize {
    if expected == 1 {
        return 1;
    }
    for cpu in 1..MAX_CPUS {
        let tss = TSSES.as_ptr().addr() as u64 + (cpu * TSS_BYTES) as u64;
        // Exceptions of all CPUs share one report, but not the stack they start on: take the end of
        // the CPU's own stack, which the exception ends anyway.
        let stack = STACKS.as_ptr().addr() as u64 + (cpu * STACK_BYTES) as u64 + 2048;
        phys::write32(tss + 4, stack as u32);
        phys::write32(tss + 100, 104 << 16);
        let low = (TSS_BYTES as u64 - 1) | (tss & 0xff_ffff) << 16 | 0x89 << 40 | (tss >> 24) << 56;
        let entry = usize::from(FIRST_TSS) / 8 + 2 * cpu;
        // SAFETY: no CPU uses this entry yet.
        unsafe { (&raw mut gdt[entry]).write_volatile(low) };
    }
    let start = (&raw const trampoline_start).addr();
    let len = (&raw const trampoline_end).addr() - start;
    phys::copy(start as u64, TRAMPOLINE, len);
    // INIT, then SIPI twice, to all but this CPU.
    write_msr(X2APIC_ICR, 0xc_4500);
    spin_ns(1_000_000);
    for _ in 0..2 {
        write_msr(X2APIC_ICR, 0xc_4600 | TRAMPOLINE >> 12);
        spin_ns(200_000);
    }
    let begin = tsc();
    let (mut seen, mut last_news) = (1, begin);
    loop {
        let ready = READY.load(Ordering::Acquire);
        let now = tsc();
        if ready != seen {
            (seen, last_news) = (ready, now);
        }
        let waited_ns = ticks_to_ns(now - last_news);
        let enough = if expected == 0 {
            NEXT_CPU.load(Ordering::Relaxed) == seen && waited_ns > 50_000_000
        } else {
            seen as usize >= expected.min(MAX_CPUS) || waited_ns > 2_000_000_000
        };
        if enough {
            return seen as usize;
        }
        core::hint::spin_loop();
    }
}

pub fn spin_ns(ns: u64) {
    let end = tsc() + ns_to_ticks(ns);
    while tsc() < end {
        core::hint::spin_loop();
    }
}

/// What the CPUs other than the first do: work when told, else halt.
pub extern "C" fn other_cpu_main(cpu: u32) -> ! {
    let cpu = cpu as usize;
    APIC_IDS[cpu].store(read_msr(X2APIC_ID) as u32, Ordering::Relaxed);
    READY.fetch_add(1, Ordering::AcqRel);
    loop {
        let work = WORK[cpu].load(Ordering::Acquire);
        if work == 0 {
            wait();
            continue;
        }
        crate::worker::run(work as usize - 1);
        WORK[cpu].store(0, Ordering::Release);
        wake(0);
    }
}

/// Lets another CPU run worker `index`.
pub fn give_work(cpu: usize, index: usize) {
    WORK[cpu].store(index as u32 + 1, Ordering::Release);
    wake(cpu);
}

/// True while a CPU has not finished its work.
pub fn is_working(cpu: usize) -> bool {
    WORK[cpu].load(Ordering::Acquire) != 0
}
