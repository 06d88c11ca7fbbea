//! From the boot protocol's entry to CPL 3, for the first CPU and the others.
//!
//! Some machines interpret guest code at CPL 0, at some 300 ns an instruction, and know only the
//! commoner instructions there. So CPL 0 does what nothing else can, in as few instructions as
//! possible, and all the rest, the building of descriptor tables included, is done at CPL 3.
//!
//! Interrupts are on only while the `wait` service halts (see [`crate::cpu::wait`]). An interrupt
//! therefore never breaks into a computation, needs to save no register, and its handler leads
//! straight back to the caller of `wait` at CPL 3.

use core::arch::global_asm;

/// GDT selectors.
pub const KERNEL_CODE: u16 = 0x08;
/// Stack segment at CPL 0.
pub const KERNEL_DATA: u16 = 0x10;
/// Stack segment at CPL 3.
pub const USER_DATA: u16 = 0x18 | 3;
/// 64-bit code at CPL 3.
pub const USER_CODE: u16 = 0x20 | 3;
/// The first CPU's TSS; the others follow, 16 bytes each.
pub const FIRST_TSS: u16 = 0x28;

/// Most CPUs that the guest starts.
pub const MAX_CPUS: usize = 64;
/// Stack of a CPU at CPL 3.
pub const STACK_BYTES: usize = 32 << 10;
/// Exceptions have vectors below this one, interrupts from this one up.
pub const FIRST_INTERRUPT: usize = 32;
/// TSS: 104 bytes, the I/O bitmap for ports below 0x1000, and the byte that must follow it.
pub const TSS_BYTES: usize = 104 + 512 + 8;
/// Where the other CPUs begin, in real mode: RAM on every machine, used by no boot protocol after
/// its data was read.
pub const TRAMPOLINE: u64 = 0x1_0000;

/// Protocol numbers that the entries hand to `guest_main`.
pub const PROTOCOL_PVH: u32 = 0;
/// Linux' 64-bit protocol.
pub const PROTOCOL_LINUX64: u32 = 1;

/// CR4: PAE, and SSE with its exceptions.
const CR4: u32 = 1 << 5 | 1 << 9 | 1 << 10;
/// CR0: paging, protection, and the FPU as 64-bit code expects it (MP, ET, NE).
const CR0: u32 = 1 << 31 | 1 << 5 | 1 << 4 | 1 << 1 | 1;
/// EFER: long mode.
const EFER: u32 = 1 << 8;

global_asm!(
    r#"
    .section .note.pvh, "a", @note
    .balign 4
    .long 4                 // length of the name
    .long 8                 // length of the descriptor
    .long 18                // XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .quad entry_pvh

    .section .text.entry, "ax"
// Linux' 64-bit protocol: paging on, all memory mapped one to one, boot_params in RSI.
    .skip 0x200
    .globl entry_linux64
entry_linux64:
    cli
    mov ebx, esi
    mov r12d, {PROTOCOL_LINUX64}
    mov esp, offset {STACKS} + {STACK_BYTES}
    mov dword ptr [pml4], offset pdpt + 7
    mov dword ptr [pdpt], offset pd + 7
    mov dword ptr [pd], 0x000087
    mov dword ptr [pd + 8], 0x200087
    mov dword ptr [pd + 16], 0x400087
    mov eax, offset pml4
    mov cr3, rax
    mov eax, {CR4}
    mov cr4, rax
    mov eax, {CR0}
    mov cr0, rax
    lgdt [gdt_pointer]
    push {KERNEL_CODE}
    push offset first_cpu
    retfq

// PVH: 32-bit protected mode, paging off, hvm_start_info in EBX.
    .code32
    .globl entry_pvh
entry_pvh:
    mov dword ptr [pml4], offset pdpt + 7
    mov dword ptr [pdpt], offset pd + 7
    mov dword ptr [pd], 0x000087
    mov dword ptr [pd + 8], 0x200087
    mov dword ptr [pd + 16], 0x400087
    mov eax, offset pml4
    mov cr3, eax
    mov eax, {CR4}
    mov cr4, eax
    mov ecx, 0xc0000080
    mov eax, {EFER}
    xor edx, edx
    wrmsr
    mov eax, {CR0}
    mov cr0, eax
    lgdt [gdt_pointer]
    ljmp {KERNEL_CODE}, offset pvh_long_mode
    .code64
pvh_long_mode:
    mov r12d, {PROTOCOL_PVH}
    // Falls through.

first_cpu:
    xor ebp, ebp
    mov esp, offset {STACKS} + {STACK_BYTES}
    mov dword ptr [{TSSES} + 4], offset kernel_stack_top
    mov dword ptr [{TSSES} + 100], 104 << 16
    mov eax, offset {TSSES}
    mov word ptr [gdt + {FIRST_TSS} + 2], ax
    shr eax, 16
    mov byte ptr [gdt + {FIRST_TSS} + 4], al
    // Falls through; EBP = index of this CPU.

// To CPL 3 on any CPU: segments, TSS, IDT, local APIC in x2APIC mode.
every_cpu:
    xor eax, eax
    mov ds, eax
    mov es, eax
    mov fs, eax
    mov gs, eax
    mov eax, {KERNEL_DATA}
    mov ss, eax
    mov eax, ebp
    shl eax, 4
    add eax, {FIRST_TSS}
    ltr ax
    lidt [idt_pointer]
    mov ecx, 0x1b           // IA32_APIC_BASE: enabled, x2APIC
    rdmsr
    or eax, 0xc00
    wrmsr
    mov ecx, 0x80f          // spurious interrupt vector register: APIC enabled
    mov eax, 0x1ff
    xor edx, edx
    wrmsr
    push {USER_DATA}
    push 0
    push 2
    push {USER_CODE}
    push offset user_entry
    iretq

// CPL 3: EBP = index of this CPU, EBX and R12D from the protocol.
user_entry:
    lea eax, [rbp + 1]
    imul eax, eax, {STACK_BYTES}
    lea rsp, [rax + {STACKS}]
    test ebp, ebp
    jnz 1f
    mov edi, ebx
    mov esi, r12d
    call {guest_main}
1:  mov edi, ebp
    call {other_cpu_main}
    ud2

// Real mode, copied to TRAMPOLINE: straight to long mode.
    .code16
    .balign 8
    .globl trampoline_start
trampoline_start:
    jmp 1f
    .balign 8
    .word {GDT_LIMIT}       // the GDT's pointer, 8 bytes after the start
    .long gdt
1:  cli
    mov ax, cs
    mov ds, ax
    lgdt [8]
    mov eax, offset pml4
    mov cr3, eax
    mov eax, {CR4}
    mov cr4, eax
    mov ecx, 0xc0000080
    mov eax, {EFER}
    xor edx, edx
    wrmsr
    mov eax, {CR0}
    mov cr0, eax
    .byte 0x66, 0xea        // far jump with a 32-bit offset
    .long trampoline_long_mode
    .word {KERNEL_CODE}
    .globl trampoline_end
trampoline_end:
    .code64
trampoline_long_mode:
    mov ebp, 1
    lock xadd dword ptr [{NEXT_CPU}], ebp
    imul esp, ebp, {STACK_BYTES}
    add esp, offset {STACKS} + {STACK_BYTES}
    jmp every_cpu

// What CPL 3 asks of CPL 0: the handler of INT3, which of all ways to CPL 0 is the one that works
// everywhere and costs least on machines that interpret CPL 0. EAX is the service.
// EAX = 0, EDX = 0: halt until an interrupt (see the interrupt stubs).
    .balign 16
    .globl service
service:
    test eax, eax
    jnz 2f
    sti
    hlt
    iretq                           // woken without an interrupt: the caller looks again
2:  dec eax
    jnz 2f
    mov dword ptr [rdi], esi        // 1: store 32 bits (a notification)
    iretq
2:  dec eax
    jnz 2f
    mov word ptr [rdi], si          // 2: store 16 bits (a notification)
    iretq
2:  dec eax
    jnz 2f
    mov ecx, edi                    // 3: write MSR EDI from ESI (low) and EDX (high)
    mov eax, esi
    wrmsr
    iretq
2:  dec eax
    jnz 2f
    mov ecx, edi                    // 4: read MSR EDI into EDX:EAX
    rdmsr
    iretq
2:  dec eax
    jnz 2f
    mov ecx, r8d                    // 5: write R8D bytes at RSI to port DX
    cld
    rep outsb
    iretq
2:  dec eax
    jnz 2f
    mov eax, edi                    // 6: CPUID leaf EDI, subleaf ESI
    mov ecx, esi
    mov r8, rbx
    cpuid
    mov r9d, ebx
    mov r10d, ecx
    mov rbx, r8
    iretq
2:  dec eax
    jnz 2f
    lidt [no_idt]                   // 7: end by a triple fault
    ud2
2:  cli                             // 8: halt for good
    hlt
    jmp 2b

// Exceptions: noted in EXCEPTION, then reported at CPL 3.
    .macro exception vector, has_code
    .balign 16
exception_\vector:
    .if \has_code == 0
    push 0
    .endif
    push \vector
    jmp exception_common
    .endm
    .balign 16
exception_common:
    pop qword ptr [{EXCEPTION}]
    pop qword ptr [{EXCEPTION} + 8]
    pop qword ptr [{EXCEPTION} + 16]
    pop qword ptr [{EXCEPTION} + 24]
    pop qword ptr [{EXCEPTION} + 32]
    pop qword ptr [{EXCEPTION} + 40]
    mov rax, cr2
    mov qword ptr [{EXCEPTION} + 48], rax
    push {USER_DATA}
    push offset exception_stack_top - 8     // as after a call
    push 2
    push {USER_CODE}
    push offset {exception_main}
    iretq
    .balign 16
    .globl exception_stubs
exception_stubs:
    .irp vector, 0,1,2,3,4,5,6,7
    exception \vector, 0
    .endr
    exception 8, 1
    exception 9, 0
    .irp vector, 10,11,12,13,14
    exception \vector, 1
    .endr
    exception 15, 0
    exception 16, 0
    exception 17, 1
    .irp vector, 18,19,20
    exception \vector, 0
    .endr
    exception 21, 1
    .irp vector, 22,23,24,25,26,27,28
    exception \vector, 0
    .endr
    exception 29, 1
    exception 30, 1
    exception 31, 0

// Interrupts: they arrive in `service` at HLT. Count, end of interrupt, and back to CPL 3: the stack
// pointer before the interrupt points to the frame of the caller of `wait`, and EAX and EDX are its
// zeroes.
    .balign 32
    .globl interrupt_stubs
interrupt_stubs:
    .set vector, {FIRST_INTERRUPT}
    .rept 256 - {FIRST_INTERRUPT}
    .balign 32
    inc qword ptr [{INTERRUPTS} + 8 * vector]
    mov ecx, 0x80b
    wrmsr
    mov rsp, [rsp + 24]
    iretq
    .set vector, vector + 1
    .endr

    .section .data
    .balign 16
    .globl gdt
gdt:
    .quad 0
    .quad 0x00af9b000000ffff    // KERNEL_CODE
    .quad 0x00cf93000000ffff    // KERNEL_DATA
    .quad 0x00cff3000000ffff    // USER_DATA
    .quad 0x00affb000000ffff    // USER_CODE
    .quad 0x0000890000000000 + {TSS_BYTES} - 1
    .skip 8 + 16 * ({MAX_CPUS} - 1)
gdt_pointer:
    .word {GDT_LIMIT}
    .quad gdt
idt_pointer:
    .word 4095
    .quad idt
no_idt:
    .quad 0, 0

    .section .bss
    .balign 4096
    .globl pml4
pml4:
    .skip 4096
pdpt:
    .skip 4096
pd:
    .skip 4096
    .globl idt
idt:
    .skip 4096
    .skip 2048
kernel_stack_top:
    .skip 8192
exception_stack_top:
    "#,
    CR0 = const CR0,
    CR4 = const CR4,
    EFER = const EFER,
    KERNEL_CODE = const KERNEL_CODE,
    KERNEL_DATA = const KERNEL_DATA,
    USER_CODE = const USER_CODE,
    USER_DATA = const USER_DATA,
    FIRST_TSS = const FIRST_TSS,
    GDT_LIMIT = const FIRST_TSS as usize + 16 * MAX_CPUS - 1,
    MAX_CPUS = const MAX_CPUS,
    TSS_BYTES = const TSS_BYTES,
    STACK_BYTES = const STACK_BYTES,
    FIRST_INTERRUPT = const FIRST_INTERRUPT,
    PROTOCOL_PVH = const PROTOCOL_PVH,
    PROTOCOL_LINUX64 = const PROTOCOL_LINUX64,
    STACKS = sym crate::cpu::STACKS,
    TSSES = sym crate::cpu::TSSES,
    NEXT_CPU = sym crate::cpu::NEXT_CPU,
    INTERRUPTS = sym crate::cpu::INTERRUPTS,
    EXCEPTION = sym crate::cpu::EXCEPTION,
    guest_main = sym crate::guest_main,
    other_cpu_main = sym crate::cpu::other_cpu_main,
    exception_main = sym crate::cpu::exception_main,
);
