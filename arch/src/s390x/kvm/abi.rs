//! The kernel's interface as it is in memory: `linux/kvm.h` and `asm/kvm.h` of s390x.
#![allow(missing_docs)] // Fields and numbers have the kernel's names; its documentation says what they are.

const fn io(number: u64) -> u64 {
    0xae00 | number
}

const fn iow<T>(number: u64) -> u64 {
    1 << 30 | (size_of::<T>() as u64) << 16 | io(number)
}

const fn iowr<T>(number: u64) -> u64 {
    3 << 30 | (size_of::<T>() as u64) << 16 | io(number)
}

pub const CREATE_VM: u64 = io(0x01);
pub const CHECK_EXTENSION: u64 = io(0x03);
pub const GET_VCPU_MMAP_SIZE: u64 = io(0x04);
pub const CREATE_VCPU: u64 = io(0x41);
pub const SET_USER_MEMORY_REGION: u64 = iow::<UserspaceMemoryRegion>(0x46);
pub const CREATE_IRQCHIP: u64 = io(0x60);
/// The structure's head alone counts: its entries follow.
pub const SET_GSI_ROUTING: u64 = iow::<[u32; 2]>(0x6a);
pub const IRQFD: u64 = iow::<Irqfd>(0x76);
pub const IOEVENTFD: u64 = iow::<IoEventFd>(0x79);
pub const RUN: u64 = io(0x80);
pub const S390_INTERRUPT: u64 = iow::<Interrupt>(0x94);
pub const S390_INITIAL_RESET: u64 = io(0x97);
pub const ENABLE_CAP: u64 = iow::<EnableCap>(0xa3);
pub const S390_MEM_OP: u64 = iow::<MemOp>(0xb1);
pub const CREATE_DEVICE: u64 = iowr::<CreateDevice>(0xe0);
pub const SET_DEVICE_ATTR: u64 = iow::<DeviceAttr>(0xe1);

pub const CAP_IRQFD: u32 = 32;
pub const CAP_IOEVENTFD: u32 = 36;
pub const CAP_SYNC_REGS: u32 = 74;
pub const CAP_S390_CSS_SUPPORT: u32 = 85;
pub const CAP_DEVICE_CTRL: u32 = 89;
pub const CAP_S390_IRQCHIP: u32 = 99;
pub const CAP_S390_MEM_OP: u32 = 108;
pub const CAP_IMMEDIATE_EXIT: u32 = 136;

pub const EXIT_FAIL_ENTRY: u32 = 9;
pub const EXIT_INTR: u32 = 10;
pub const EXIT_S390_SIEIC: u32 = 13;
pub const EXIT_S390_RESET: u32 = 14;
pub const EXIT_INTERNAL_ERROR: u32 = 17;
pub const EXIT_S390_TSCH: u32 = 22;

pub const PROGRAM_INT: u32 = 0xfffe_0001;
pub const MACHINE_CHECK: u32 = 0xfffe_1000;
pub const INT_SERVICE: u32 = 0xffff_2401;

/// Type of an I/O interruption: `KVM_S390_INT_IO`.
pub const fn int_io(adapter: bool, set: u8, subchannel: u16) -> u32 {
    (adapter as u32) << 26 | (set as u32) << 16 | subchannel as u32
}

pub const SYNC_PREFIX: u64 = 1 << 0;
pub const SYNC_GPRS: u64 = 1 << 1;

pub const MEMOP_LOGICAL_READ: u32 = 0;
pub const MEMOP_LOGICAL_WRITE: u32 = 1;
pub const MEMOP_F_INJECT_EXCEPTION: u64 = 1 << 1;

pub const IOEVENTFD_DATAMATCH: u32 = 1 << 0;
pub const IOEVENTFD_VIRTIO_CCW_NOTIFY: u32 = 1 << 3;

pub const DEV_TYPE_FLIC: u32 = 6;
pub const FLIC_ADAPTER_REGISTER: u32 = 6;
pub const FLIC_ADAPTER_MODIFY: u32 = 7;
pub const FLIC_CLEAR_IO_IRQ: u32 = 8;
pub const IO_ADAPTER_MAP: u8 = 2;
pub const ADAPTER_SUPPRESSIBLE: u8 = 1;
pub const IRQ_ROUTING_S390_ADAPTER: u32 = 3;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct UserspaceMemoryRegion {
    pub slot: u32,
    pub flags: u32,
    pub guest_phys_addr: u64,
    pub memory_size: u64,
    pub userspace_addr: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Irqfd {
    pub fd: u32,
    pub gsi: u32,
    pub flags: u32,
    pub resamplefd: u32,
    pub pad: [u8; 16],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct IoEventFd {
    pub datamatch: u64,
    pub addr: u64,
    pub len: u32,
    pub fd: i32,
    pub flags: u32,
    pub pad: [u8; 36],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Interrupt {
    pub type_: u32,
    pub parm: u32,
    pub parm64: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct EnableCap {
    pub cap: u32,
    pub flags: u32,
    pub args: [u64; 4],
    pub pad: [u8; 64],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct MemOp {
    pub gaddr: u64,
    pub flags: u64,
    pub size: u32,
    pub op: u32,
    pub buf: u64,
    pub ar: u8,
    pub key: u8,
    pub reserved: [u8; 30],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CreateDevice {
    pub type_: u32,
    pub fd: u32,
    pub flags: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct DeviceAttr {
    pub flags: u32,
    pub group: u32,
    pub attr: u64,
    pub addr: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct IoAdapter {
    pub id: u32,
    pub isc: u8,
    pub maskable: u8,
    pub swap: u8,
    pub flags: u8,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct IoAdapterReq {
    pub id: u32,
    pub type_: u8,
    pub mask: u8,
    pub pad0: u16,
    pub addr: u64,
}

/// `kvm_irq_routing_entry` with an adapter in its union.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct AdapterRoutingEntry {
    pub gsi: u32,
    pub type_: u32,
    pub flags: u32,
    pub pad: u32,
    pub ind_addr: u64,
    pub summary_addr: u64,
    pub ind_offset: u64,
    pub summary_offset: u32,
    pub adapter_id: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Sieic {
    pub icptcode: u8,
    pub ipa: u16,
    pub ipb: u32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Tsch {
    pub subchannel_id: u16,
    pub subchannel_nr: u16,
    pub io_int_parm: u32,
    pub io_int_word: u32,
    pub ipb: u32,
    pub dequeued: u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub union ExitData {
    pub sieic: Sieic,
    pub tsch: Tsch,
    pub hardware_entry_failure_reason: u64,
    pub suberror: u32,
    pub padding: [u8; 256],
}

/// The head of `kvm_sync_regs`: what is used of it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct SyncRegs {
    pub prefix: u64,
    pub gprs: [u64; 16],
    pub acrs: [u32; 16],
    pub crs: [u64; 16],
}

/// The head of `kvm_run`: what is used of it.
#[repr(C)]
pub struct Run {
    pub request_interrupt_window: u8,
    pub immediate_exit: u8,
    pub padding1: [u8; 6],
    pub exit_reason: u32,
    pub ready_for_interrupt_injection: u8,
    pub if_flag: u8,
    pub flags: u16,
    pub cr8: u64,
    pub apic_base: u64,
    pub psw_mask: u64,
    pub psw_addr: u64,
    pub exit: ExitData,
    pub kvm_valid_regs: u64,
    pub kvm_dirty_regs: u64,
    pub regs: SyncRegs,
}

// What the kernel's headers give for s390x, where integers are aligned as on every other 64-bit host.
const _: () = {
    assert!(size_of::<UserspaceMemoryRegion>() == 32);
    assert!(size_of::<Irqfd>() == 32);
    assert!(size_of::<IoEventFd>() == 64);
    assert!(size_of::<Interrupt>() == 16);
    assert!(size_of::<EnableCap>() == 104);
    assert!(size_of::<MemOp>() == 64);
    assert!(size_of::<CreateDevice>() == 12);
    assert!(size_of::<DeviceAttr>() == 24);
    assert!(size_of::<IoAdapter>() == 8);
    assert!(size_of::<IoAdapterReq>() == 16);
    assert!(size_of::<AdapterRoutingEntry>() == 48);
    assert!(std::mem::offset_of!(AdapterRoutingEntry, ind_addr) == 16);
    assert!(std::mem::offset_of!(Sieic, ipa) == 2);
    assert!(std::mem::offset_of!(Sieic, ipb) == 4);
    assert!(std::mem::offset_of!(Tsch, io_int_parm) == 4);
    assert!(std::mem::offset_of!(Tsch, ipb) == 12);
    assert!(std::mem::offset_of!(Tsch, dequeued) == 16);
    assert!(std::mem::offset_of!(Run, immediate_exit) == 1);
    assert!(std::mem::offset_of!(Run, exit_reason) == 8);
    assert!(std::mem::offset_of!(Run, psw_mask) == 32);
    assert!(std::mem::offset_of!(Run, psw_addr) == 40);
    assert!(std::mem::offset_of!(Run, exit) == 48);
    assert!(std::mem::offset_of!(Run, kvm_valid_regs) == 304);
    assert!(std::mem::offset_of!(Run, kvm_dirty_regs) == 312);
    assert!(std::mem::offset_of!(Run, regs) == 320);
    assert!(std::mem::offset_of!(SyncRegs, gprs) == 8);
    assert!(std::mem::offset_of!(SyncRegs, acrs) == 136);
    assert!(std::mem::offset_of!(SyncRegs, crs) == 200);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_kernels_headers() {
        // As a C compiler for s390x computes them from the headers.
        for (number, expected) in [
            (CREATE_VM, 0xae01),
            (RUN, 0xae80),
            (CREATE_IRQCHIP, 0xae60),
            (S390_INITIAL_RESET, 0xae97),
            (SET_USER_MEMORY_REGION, 0x4020_ae46),
            (SET_GSI_ROUTING, 0x4008_ae6a),
            (IRQFD, 0x4020_ae76),
            (IOEVENTFD, 0x4040_ae79),
            (S390_INTERRUPT, 0x4010_ae94),
            (ENABLE_CAP, 0x4068_aea3),
            (S390_MEM_OP, 0x4040_aeb1),
            (CREATE_DEVICE, 0xc00c_aee0),
            (SET_DEVICE_ATTR, 0x4018_aee1),
        ] {
            assert_eq!(number, expected, "{expected:#x}");
        }
        assert_eq!(int_io(true, 0, 0), 0x0400_0000);
        assert_eq!(int_io(false, 2, 7), 0x0002_0007);
    }
}
