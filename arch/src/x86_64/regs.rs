//! The registers that the boot processor starts with.

use kvm_bindings::{kvm_dtable, kvm_fpu, kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress};

use crate::GuestMemory;
use crate::x86_64::error::{Error, Result};
use crate::x86_64::gdt::Segments;
use crate::x86_64::kernel::{Boot, Protocol};
use crate::x86_64::layout::{BOOT_GDT, BOOT_IDT, BOOT_PD, BOOT_PDPT, BOOT_PML4, BOOT_STACK};

const CR0_PE: u64 = 1 << 0;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
/// Bit 1 of RFLAGS is always set; interrupts are off.
const RFLAGS: u64 = 1 << 1;

const PAGE_PRESENT: u64 = 1 << 0;
const PAGE_WRITABLE: u64 = 1 << 1;
const PAGE_LARGE: u64 = 1 << 7;
/// Page directories of the boot page tables: one for each GiB.
const BOOT_PD_COUNT: u64 = 4;

/// x87 control word and MXCSR after `FNINIT` and reset: all exceptions masked.
const FCW_INIT: u16 = 0x37f;
const MXCSR_INIT: u32 = 0x1f80;

/// Sets what `boot`'s protocol wants, and writes the GDT and the page tables that it refers to.
pub fn set_boot_registers(vcpu: &VcpuFd, mem: &GuestMemory, boot: &Boot) -> Result<()> {
    let mut sregs = vcpu.get_sregs().map_err(Error::kvm("KVM_GET_SREGS"))?;
    match boot.protocol {
        Protocol::LinuxBoot64 => {
            write_page_tables(mem)?;
            set_segments(mem, &mut sregs, &Segments::long_mode())?;
            sregs.cr3 = BOOT_PML4;
            sregs.cr4 = CR4_PAE;
            sregs.cr0 = CR0_PE | CR0_ET | CR0_PG;
            sregs.efer = EFER_LME | EFER_LMA;
        }
        Protocol::Pvh => {
            set_segments(mem, &mut sregs, &Segments::protected_mode())?;
            sregs.cr3 = 0;
            sregs.cr4 = 0;
            sregs.cr0 = CR0_PE | CR0_ET;
            sregs.efer = 0;
        }
    }
    vcpu.set_sregs(&sregs)
        .map_err(Error::kvm("KVM_SET_SREGS"))?;
    vcpu.set_regs(&boot_regs(boot))
        .map_err(Error::kvm("KVM_SET_REGS"))
}

/// Sets the FPU to its state after reset; for every vCPU.
pub fn set_fpu(vcpu: &VcpuFd) -> Result<()> {
    let fpu = kvm_fpu {
        fcw: FCW_INIT,
        mxcsr: MXCSR_INIT,
        ..Default::default()
    };
    vcpu.set_fpu(&fpu).map_err(Error::kvm("KVM_SET_FPU"))
}

fn boot_regs(boot: &Boot) -> kvm_regs {
    let regs = kvm_regs {
        rip: boot.entry,
        rflags: RFLAGS,
        ..Default::default()
    };
    match boot.protocol {
        Protocol::LinuxBoot64 => kvm_regs {
            rsi: boot.boot_data,
            rsp: BOOT_STACK,
            rbp: BOOT_STACK,
            ..regs
        },
        Protocol::Pvh => kvm_regs {
            rbx: boot.boot_data,
            ..regs
        },
    }
}

fn set_segments(mem: &GuestMemory, sregs: &mut kvm_sregs, segments: &Segments) -> Result<()> {
    let table = segments.table();
    for (i, entry) in table.iter().enumerate() {
        write_u64(mem, "the GDT", BOOT_GDT + 8 * i as u64, *entry)?;
    }
    write_u64(mem, "the IDT", BOOT_IDT, 0)?;
    sregs.gdt = kvm_dtable {
        base: BOOT_GDT,
        limit: (size_of_val(&table) - 1) as u16,
        ..Default::default()
    };
    sregs.idt = kvm_dtable {
        base: BOOT_IDT,
        limit: 0,
        ..Default::default()
    };
    sregs.cs = segments.code;
    sregs.ds = segments.data;
    sregs.es = segments.data;
    sregs.fs = segments.data;
    sregs.gs = segments.data;
    sregs.ss = segments.data;
    sregs.tr = segments.tss;
    Ok(())
}

/// Maps the first 4 GiB one to one with 2 MiB pages, which every processor has.
fn write_page_tables(mem: &GuestMemory) -> Result<()> {
    const TABLE: u64 = PAGE_PRESENT | PAGE_WRITABLE;
    const WHAT: &str = "the boot page tables";
    write_u64(mem, WHAT, BOOT_PML4, BOOT_PDPT | TABLE)?;
    for i in 0..BOOT_PD_COUNT {
        write_u64(mem, WHAT, BOOT_PDPT + 8 * i, (BOOT_PD + 0x1000 * i) | TABLE)?;
    }
    for i in 0..BOOT_PD_COUNT * 512 {
        write_u64(mem, WHAT, BOOT_PD + 8 * i, (i << 21) | TABLE | PAGE_LARGE)?;
    }
    Ok(())
}

fn write_u64(mem: &GuestMemory, what: &'static str, address: u64, value: u64) -> Result<()> {
    mem.write_slice(&value.to_le_bytes(), GuestAddress(address))
        .map_err(Error::write(what, address))
}
