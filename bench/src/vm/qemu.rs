//! The command line of QEMU's microvm machine, the peer in comparisons.

use serde_json::json;

use super::{Machine, Programs, iothread_settings, iothreads_of_disk};
use crate::matrix::{Engine, Run};

pub(super) fn arguments(programs: &Programs, machine: &Machine, run: &Run) -> Vec<String> {
    // Linux distributions' kernels find virtio-mmio devices by ACPI only; the embedded guest
    // takes them from the command line, and needs no firmware.
    let acpi = if machine.linux { "on" } else { "off" };
    // One I/O APIC has room for 8 devices, two for 24.
    let more = if machine.disks.len() > 8 {
        ",ioapic2=on"
    } else {
        ",ioapic2=off"
    };
    let mut list: Vec<String> = Vec::new();
    if let Some(directory) = &programs.qemu_firmware {
        list.extend(["-L".into(), directory.display().to_string()]);
    }
    let cpu = if programs.qemu_accel.starts_with("kvm") && !machine.linux {
        // Its processor hardly matters; some KVMs refuse MSRs that go with all of the host's.
        "host,arch-capabilities=off"
    } else if programs.qemu_accel.starts_with("kvm") {
        "host"
    } else {
        "max"
    };
    let fixed = [
        "-nodefaults",
        "-no-user-config",
        "-no-reboot",
        "-display",
        "none",
        "-name",
        "pollux-bench,debug-threads=on",
        "-global",
        "virtio-mmio.force-legacy=false",
        "-chardev",
        "stdio,id=console,signal=off",
        "-serial",
        "chardev:console",
        "-cpu",
        cpu,
    ];
    list.extend(fixed.map(String::from));
    list.extend([
        "-M".into(),
        format!("microvm,acpi={acpi},pic=off,pit=off,rtc=off{more}"),
        "-accel".into(),
        programs.qemu_accel.clone(),
    ]);
    list.extend(["-m".into(), format!("{}K", machine.memory_bytes >> 10)]);
    list.extend(["-smp".into(), run.vcpus.to_string()]);
    list.extend(["-kernel".into(), machine.kernel.display().to_string()]);
    if let Some(initrd) = &machine.initrd {
        list.extend(["-initrd".into(), initrd.display().to_string()]);
    }
    list.extend(["-append".into(), machine.cmdline.clone()]);
    for index in 0..run.iothreads {
        let mut object = json!({ "qom-type": "iothread", "id": format!("io{index}") });
        for (name, value) in iothread_settings(run) {
            // All settings that QEMU's iothreads have are numbers.
            object[name] = json!(value.parse::<u64>().unwrap_or(0));
        }
        list.extend(["-object".into(), object.to_string()]);
    }
    let mut loaded = 0;
    for (index, disk) in machine.disks.iter().enumerate() {
        let node = format!("disk{index}");
        let is_device = std::fs::metadata(&disk.path)
            .is_ok_and(|m| std::os::unix::fs::FileTypeExt::is_block_device(&m.file_type()));
        let is_direct = run.is_direct(loaded);
        let (direct, engine) = match (disk.loaded, run.engine) {
            (false, _) => (false, "threads"),
            (true, Engine::IoUring) => (is_direct, "io_uring"),
            (true, Engine::Native) => (is_direct, "native"),
            (true, Engine::Threads) => (is_direct, "threads"),
        };
        let blockdev = json!({
            "driver": if is_device { "host_device" } else { "file" },
            "node-name": node,
            "filename": disk.path.display().to_string(),
            "aio": engine,
            "cache": { "direct": direct },
            "read-only": disk.readonly,
        });
        list.extend(["-blockdev".into(), blockdev.to_string()]);
        let mut device = json!({
            "driver": "virtio-blk-device",
            // The machine announces its buses from the last to the first.
            "bus": format!("virtio-mmio-bus.{}", machine.disks.len() - 1 - index),
            "drive": node,
            "serial": disk.serial,
        });
        if disk.loaded {
            let names: Vec<String> = iothreads_of_disk(run, loaded)
                .iter()
                .map(|i| format!("io{i}"))
                .collect();
            match names.as_slice() {
                [] => {}
                [one] => device["iothread"] = json!(one),
                many => {
                    let mapping = many.iter().map(|name| json!({ "iothread": name }));
                    device["iothread-vq-mapping"] = mapping.collect();
                }
            }
            device["num-queues"] = json!(run.queues);
            loaded += 1;
        }
        list.extend(["-device".into(), device.to_string()]);
    }
    list
}
