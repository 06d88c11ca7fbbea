//! Hand-made kernels of a few instructions, run under KVM. They use what works at privilege level 0
//! even where KVM interprets it.

use std::sync::mpsc;
use std::time::Duration;

use arch::acpi::{self, AcpiConfig, PowerRegisters};
use arch::exit::{ExitReport, FatalExit, describe_exit, hardware_virtualization};
use arch::kernel::load_images;
use arch::layout::memory_regions;
use arch::{Boot, BootConfig, CpuModel, Cpuid, GuestMemory, Protocol, configure_vcpu, msr, vm};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::testing::{Load, elf, pvh_note};

pub const TESTS: &[(&str, fn())] = &[
    ("pvh_kernel_starts_with_its_start_info", pvh_start),
    ("linux_64_bit_entry_starts_with_the_zero_page", linux_start),
    ("guest_reads_the_cpuid_it_was_given", guest_cpuid),
    ("second_cpu_starts_on_its_ipi", second_cpu),
    ("reset_vector_writes_the_reset_register", reset_vector),
    ("triple_fault_is_described", triple_fault),
    ("uninterpretable_instruction_is_described", breakpoint),
    ("start_msrs_are_set", start_msrs),
    ("memory_above_the_hole_is_reached", high_memory),
];

const MIB: u64 = 1 << 20;
const PORT: u16 = 0x3f8;
const RESET_PORT: u16 = 0x602;
const RESET_VALUE: u8 = 0xa5;

pub fn is_there() -> bool {
    Kvm::new().is_ok()
}

/// A VM with a kernel loaded; vCPUs stay with the test.
struct Machine {
    // Dropped in this order: the VM before the memory that it uses.
    vcpus: Vec<VcpuFd>,
    _vm: VmFd,
    mem: GuestMemory,
    boot: Boot,
}

fn machine(memory_bytes: u64, cpus: u8, model: &str, kernel: &[u8]) -> Machine {
    let kvm = Kvm::new().unwrap();
    vm::check_capabilities(&kvm).unwrap();
    assert_eq!(vm::check_cpu_count(&kvm, cpus.into()).unwrap(), cpus);
    let fd = kvm.create_vm().unwrap();
    vm::setup_vm(&fd).unwrap();
    let mem = GuestMemory::from_ranges(&memory_regions(memory_bytes)).unwrap();
    for (slot, region) in mem.iter().enumerate() {
        let region = kvm_userspace_memory_region {
            slot: slot as u32,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the region is mapped for as long as `mem` lives, which the machine keeps longer
        // than the VM.
        unsafe { fd.set_user_memory_region(region) }.unwrap();
    }
    let acpi = AcpiConfig {
        cpus,
        serial: Vec::new(),
        virtio_mmio: Vec::new(),
        power: PowerRegisters {
            sleep_control: 0x600,
            sleep_status: 0x601,
            reset: RESET_PORT,
            reset_value: RESET_VALUE,
        },
        power_button_gsi: None,
        pci: None,
        i8042: false,
    };
    let config = BootConfig {
        rsdp: Some(acpi::write_tables(&mem, &acpi).unwrap()),
        reserved: Vec::new(),
    };
    let boot = load_images(&mem, kernel, None::<&[u8]>, b"hello", &config).unwrap();
    let model: CpuModel = model.parse().unwrap();
    let cpuid = Cpuid::new(&kvm, &model, cpus).unwrap();
    let vcpus = (0..cpus)
        .map(|index| {
            let vcpu = fd.create_vcpu(index.into()).unwrap();
            configure_vcpu(&vcpu, index, &cpuid, &mem, &boot).unwrap();
            vcpu
        })
        .collect();
    Machine {
        vcpus,
        _vm: fd,
        mem,
        boot,
    }
}

fn pvh(code: &[u8]) -> Vec<u8> {
    let load = Load {
        address: MIB,
        bytes: code,
        memory_bytes: 0x2000,
    };
    elf(0, &[load], &pvh_note(MIB as u32))
}

/// Runs until the guest writes to [`PORT`] or [`RESET_PORT`]; returns what it wrote.
fn run_to_port(vcpu: &mut VcpuFd) -> Vec<u8> {
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(PORT | RESET_PORT, data)) => return data.to_vec(),
            Ok(other) => panic!("{other:?}"),
            // EAGAIN: a processor that waited has got its INIT, and waits for the start-up IPI.
            Err(e) if matches!(e.errno(), libc::EINTR | libc::EAGAIN) => {}
            Err(e) => panic!("{e}"),
        }
    }
}

fn word(data: &[u8]) -> u32 {
    u32::from_le_bytes(data.try_into().unwrap())
}

fn pvh_start() {
    let code = [
        0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
        0x8b, 0x03, // mov eax, [ebx]         magic
        0xef, // out dx, eax
        0x8b, 0x4b, 0x18, // mov ecx, [ebx + 24]   cmdline_paddr
        0x8b, 0x01, // mov eax, [ecx]
        0xef, // out dx, eax
        0xf4, // hlt
    ];
    let mut machine = machine(8 * MIB, 1, "host", &pvh(&code));
    assert_eq!(machine.boot.protocol, Protocol::Pvh);
    let vcpu = &mut machine.vcpus[0];
    assert_eq!(word(&run_to_port(vcpu)), 0x336e_c578);
    assert_eq!(run_to_port(vcpu), b"hell");
}

fn linux_start() {
    let code = [
        0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
        0x8b, 0x86, 0x02, 0x02, 0x00, 0x00, // mov eax, [rsi + 0x202]  "HdrS"
        0xef, // out dx, eax
        0x48, 0xc7, 0xc0, 0xff, 0xff, 0xff, 0xff, // mov rax, -1
        0x48, 0xc1, 0xe8, 0x20, // shr rax, 32: 32 ones only in long mode
        0xef, // out dx, eax
        0x50, // push rax
        0x58, // pop rax
        0xef, // out dx, eax
        0xf4, // hlt
    ];
    let load = Load {
        address: MIB,
        bytes: &code,
        memory_bytes: 0x1000,
    };
    let mut machine = machine(8 * MIB, 1, "host", &elf(MIB, &[load], &[]));
    assert_eq!(machine.boot.protocol, Protocol::LinuxBoot64);
    let vcpu = &mut machine.vcpus[0];
    assert_eq!(run_to_port(vcpu), b"HdrS");
    assert_eq!(word(&run_to_port(vcpu)), u32::MAX);
    assert_eq!(word(&run_to_port(vcpu)), u32::MAX);
}

fn guest_cpuid() {
    let code = [
        0xb8, 0x00, 0x00, 0x00, 0x40, // mov eax, 0x40000000
        0x0f, 0xa2, // cpuid
        0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
        0x89, 0xd8, // mov eax, ebx
        0xef, // out dx, eax
        0xb8, 0x01, 0x00, 0x00, 0x00, // mov eax, 1
        0x0f, 0xa2, // cpuid
        0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
        0x89, 0xc8, // mov eax, ecx
        0xef, // out dx, eax
        0x89, 0xd8, // mov eax, ebx
        0xef, // out dx, eax
        0xf4, // hlt
    ];
    for model in ["host", "host,-movbe,-popcnt"] {
        let mut machine = machine(8 * MIB, 7, model, &pvh(&code));
        let vcpu = &mut machine.vcpus[0];
        assert_eq!(run_to_port(vcpu), b"KVMK");
        let ecx = word(&run_to_port(vcpu));
        assert_ne!(ecx & 1 << 31, 0, "hypervisor");
        let ebx = word(&run_to_port(vcpu));
        assert_eq!(ebx >> 16, 8, "APIC id 0, 8 numbers for 7 processors");
        // A KVM without hardware virtualization shows features of the host whatever it is told.
        if model != "host" && hardware_virtualization() {
            assert_eq!(ecx & (1 << 22 | 1 << 23), 0, "{ecx:#x}");
        }
    }
}

/// Starts the second processor in real mode with `code`, and returns what it writes to [`PORT`] or
/// the reset register.
fn run_second(code: &[u8]) -> Vec<u8> {
    // The boot processor sends INIT and two start-up IPIs through its local APIC; the other starts
    // at the vector's page.
    let boot_code = [
        0xbb, 0x00, 0x00, 0xe0, 0xfe, // mov ebx, 0xfee00000
        0xc7, 0x83, 0xf0, 0x00, 0x00, 0x00, 0xff, 0x01, 0x00,
        0x00, // [ebx + 0xf0] = 0x1ff: on
        0xc7, 0x83, 0x10, 0x03, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, // [ebx + 0x310] = 1 << 24
        0xc7, 0x83, 0x00, 0x03, 0x00, 0x00, 0x00, 0x45, 0x00, 0x00, // [ebx + 0x300] = INIT
        0xc7, 0x83, 0x00, 0x03, 0x00, 0x00, 0x10, 0x46, 0x00, 0x00, // = start-up, page 0x10
        0xc7, 0x83, 0x00, 0x03, 0x00, 0x00, 0x10, 0x46, 0x00, 0x00, // once more
        0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
        0xb0, 0x42, // mov al, 0x42
        0xee, // out dx, al
        0xf4, // hlt
    ];
    let mut machine = machine(8 * MIB, 2, "host", &pvh(&boot_code));
    machine
        .mem
        .write_slice(code, GuestAddress(0x1_0000))
        .unwrap();
    let mut second = machine.vcpus.pop().unwrap();
    let (send, receive) = mpsc::channel();
    // Not joined when the test fails: the vCPU would wait for its IPI for ever.
    let thread = std::thread::spawn(move || send.send(run_to_port(&mut second)));
    assert_eq!(run_to_port(&mut machine.vcpus[0]), [0x42]);
    let written = receive
        .recv_timeout(Duration::from_secs(60))
        .expect("the second processor starts");
    thread.join().unwrap().unwrap();
    written
}

fn second_cpu() {
    let code = [
        0x66, 0xb8, 0x01, 0x00, 0x00, 0x00, // mov eax, 1
        0x0f, 0xa2, // cpuid
        0x66, 0xc1, 0xeb, 0x18, // shr ebx, 24
        0x88, 0xd8, // mov al, bl
        0xba, 0xf8, 0x03, // mov dx, 0x3f8
        0xee, // out dx, al
        0xf4, // hlt
    ];
    assert_eq!(run_second(&code), [1], "its APIC id");
}

fn reset_vector() {
    let code = [0xea, 0xf0, 0xff, 0x00, 0xf0]; // jmp f000:fff0
    assert_eq!(run_second(&code), [RESET_VALUE]);
}

/// On AMD, KVM resets the processor before it reports a triple fault; then the report must say so
/// and claim no place.
fn lost_by_reset(report: &ExitReport) -> bool {
    let lost = report.exit == FatalExit::Shutdown && report.rip.is_none();
    if lost {
        assert!(hardware_virtualization());
        assert!(report.code.is_empty());
        assert!(report.to_string().contains("KVM has reset the processor"));
    }
    lost
}

fn triple_fault() {
    let code = [0x0f, 0x0b, 0xeb, 0xfe]; // ud2; jmp $
    let mut machine = machine(8 * MIB, 1, "host", &pvh(&code));
    let vcpu = &mut machine.vcpus[0];
    assert!(matches!(vcpu.run(), Ok(VcpuExit::Shutdown)));
    let report = describe_exit(vcpu, &machine.mem, FatalExit::Shutdown);
    let text = report.to_string();
    if lost_by_reset(&report) {
        return;
    }
    assert_eq!(report.rip, Some(MIB), "{report}");
    assert_eq!(report.code[..4], code);
    assert!(
        text.starts_with("the guest ended by a triple fault at RIP 0x100000, CPL 0"),
        "{text}"
    );
}

fn breakpoint() {
    // In long mode, so that the bytes are found through the guest's page tables.
    let code = [0x90, 0xcc, 0x90, 0xf4]; // nop; int3; nop; hlt
    let load = Load {
        address: MIB,
        bytes: &code,
        memory_bytes: 0x1000,
    };
    let mut machine = machine(8 * MIB, 1, "host", &elf(MIB, &[load], &[]));
    let vcpu = &mut machine.vcpus[0];
    let exit = match vcpu.run() {
        Ok(VcpuExit::InternalError) => FatalExit::InternalError,
        // With hardware virtualization the instruction works, and finds no handler.
        Ok(VcpuExit::Shutdown) => FatalExit::Shutdown,
        other => panic!("{other:?}"),
    };
    let report = describe_exit(vcpu, &machine.mem, exit);
    if lost_by_reset(&report) {
        return;
    }
    assert_eq!(report.rip, Some(MIB + 1), "{report}");
    assert_eq!(report.code[0], 0xcc, "{report}");
    let text = report.to_string();
    assert!(text.contains("(int3)"), "{text}");
    if !hardware_virtualization() {
        assert_eq!(exit, FatalExit::InternalError);
        assert!(
            text.contains("this host has no hardware virtualization"),
            "{text}"
        );
    }
}

fn start_msrs() {
    let machine = machine(8 * MIB, 1, "host", &pvh(&[0xf4]));
    let refused = msr::set_boot_msrs(&machine.vcpus[0]).unwrap();
    // Every KVM knows the system call MSRs.
    assert!(!refused.contains(&0xc000_0081), "{refused:x?}");
    let mut lapic = machine.vcpus[0].get_lapic().unwrap().regs[0x350..0x358].to_vec();
    lapic.truncate(2);
    assert_eq!(
        lapic[1] & 7,
        7,
        "LINT0 takes interrupts of the legacy controller"
    );
}

fn high_memory() {
    // The boot page tables end at 4 GiB: the fifth entry of the page directory pointer table is set
    // to a directory at 2 MiB, whose first entry maps 4 GiB.
    let code = [
        0x48, 0xc7, 0xc0, 0x03, 0x00, 0x20, 0x00, // mov rax, 2 MiB | present | writable
        0x48, 0x89, 0x04, 0x25, 0x20, 0xa0, 0x00, 0x00, // mov [0xa020], rax
        0x48, 0xb9, 0x00, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00, // mov rcx, 4 GiB
        0x8b, 0x01, // mov eax, [rcx]
        0xba, 0xf8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
        0xef, // out dx, eax
        0xf4, // hlt
    ];
    assert_eq!(arch::layout::BOOT_PDPT + 8 * 4, 0xa020);
    let load = Load {
        address: MIB,
        bytes: &code,
        memory_bytes: 0x1000,
    };
    let directory = [0x83, 0, 0, 0, 1, 0, 0, 0];
    let load_directory = Load {
        address: 2 * MIB,
        bytes: &directory,
        memory_bytes: 0x1000,
    };
    let kernel = elf(MIB, &[load, load_directory], &[]);
    let mut machine = machine(arch::layout::HOLE_START + 2 * MIB, 1, "host", &kernel);
    machine
        .mem
        .write_slice(b"high", GuestAddress(arch::layout::HOLE_END))
        .unwrap();
    assert_eq!(run_to_port(&mut machine.vcpus[0]), b"high");
}
