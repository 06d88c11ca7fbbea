//! A device that panics on a guest's access takes its vCPU's thread with it: the run must end with a word, not hang.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;

use std::fs::File;
use std::sync::Arc;

use common::guest::Program;
use common::{Image, has_kvm, wait_for};
use devices::bus::BusDevice;
use vmm::config::{Memory, Size};
use vmm::vm::gate::RunGate;
use vmm::vm::hypervisor::Vcpu;
use vmm::vm::lifecycle::Lifecycle;
use vmm::vm::memory;
use vmm::vm::platform::vcpu::KvmVcpu;
use vmm::vm::platform::{Buses, kvm};
use vmm::vm::vcpu::{Machine, Vcpus};

struct Faulty;

impl BusDevice for Faulty {
    fn read(&self, _offset: u64, _data: &mut [u8]) {}
    fn write(&self, offset: u64, _data: &[u8]) {
        panic!("a fault for the test at offset {offset}");
    }
}

#[test]
fn a_panic_in_a_vcpu_thread_ends_the_run_with_a_message() {
    if !has_kvm("a_panic_in_a_vcpu_thread_ends_the_run_with_a_message") {
        return;
    }
    let image = Image::new(&Program::new().print("x").hang());
    let size = Size(64 << 20);
    let settings = Memory {
        size,
        ..Memory::default()
    };
    let memory = memory::map(&settings, &arch::memory_regions(size.0)).unwrap();
    let kvm = kvm::open().unwrap();
    let vm = kvm::create_vm(&kvm).unwrap();
    arch::vm::setup_vm(&vm).unwrap();
    kvm::register(&vm, &memory).unwrap();
    let cpuid = arch::Cpuid::new(&kvm, &arch::CpuModel::default(), 2).unwrap();
    let kernel = File::open(&image.path).unwrap();
    let boot = arch::load_kernel(&memory, &kernel, None, "", &arch::BootConfig::default()).unwrap();
    // The second vCPU waits for ever for its start-up; it must be stopped all the same.
    let mut buses = Buses::default();
    buses.pio.insert(0x3f8, 8, Arc::new(Faulty)).unwrap();
    let buses = Arc::new(buses);
    let vcpus = [0, 1].map(|index| -> Box<dyn Vcpu> {
        let fd = vm.create_vcpu(index).unwrap();
        let index = u8::try_from(index).unwrap();
        arch::configure_vcpu(&fd, index, &cpuid, &memory, &boot).unwrap();
        Box::new(KvmVcpu {
            fd,
            index,
            buses: buses.clone(),
            memory: memory.clone(),
        })
    });
    let lifecycle = Arc::new(Lifecycle::new().unwrap());
    let machine = Arc::new(Machine {
        lifecycle: lifecycle.clone(),
        gate: RunGate::default(),
        filters: None,
    });
    let mut vcpus = Vcpus::start(machine, vcpus.into()).unwrap();
    vcpus.control().release();
    wait_for("the end of the run", || lifecycle.has_ended());
    vcpus.stop(|| ()).unwrap();
    let outcome = lifecycle.outcome().unwrap();
    assert!(!outcome.is_good());
    assert_eq!(
        outcome.to_string(),
        "internal error: thread vcpu0 panicked: a fault for the test at offset 0"
    );
}
