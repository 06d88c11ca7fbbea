//! The command line of `pollux`.

use super::{Machine, iothread_settings, iothreads_of_disk, quoted};
use crate::matrix::{Engine, Run};

pub(super) fn arguments(machine: &Machine, run: &Run) -> Vec<String> {
    let mut list: Vec<String> = vec!["--kernel".into(), machine.kernel.display().to_string()];
    if let Some(initrd) = &machine.initrd {
        list.extend(["--initrd".into(), initrd.display().to_string()]);
    }
    list.extend(["--cmdline".into(), machine.cmdline.clone()]);
    list.extend(["--memory".into(), machine.memory_bytes.to_string()]);
    list.extend(["--cpus".into(), run.vcpus.to_string()]);
    list.extend(["--serial".into(), "stdio".into(), "--stats".into()]);
    for index in 0..run.iothreads {
        let mut text = format!("id=io{index}");
        for (name, value) in iothread_settings(run) {
            text += &format!(",{name}={value}");
        }
        list.extend(["--iothread".into(), text]);
    }
    let mut loaded = 0;
    for disk in &machine.disks {
        let mut text = format!(
            "path={},serial={},readonly={}",
            quoted(&disk.path.display().to_string()),
            quoted(&disk.serial),
            if disk.readonly { "on" } else { "off" }
        );
        if disk.loaded {
            let names: Vec<String> = iothreads_of_disk(run, loaded)
                .iter()
                .map(|i| format!("io{i}"))
                .collect();
            match names.as_slice() {
                [] => {}
                [one] => text += &format!(",iothread={one}"),
                many => text += &format!(",iothreads={}", many.join(":")),
            }
            let engine = match run.engine {
                Engine::IoUring => "io_uring",
                Engine::Native => "native",
                Engine::Threads => "threads",
            };
            let direct = if run.is_direct(loaded) { "on" } else { "off" };
            text += &format!(",queues={},engine={engine},direct={direct}", run.queues);
            if let Some(fixedbufs) = run.fixedbufs {
                text += if fixedbufs {
                    ",fixedbufs=on"
                } else {
                    ",fixedbufs=off"
                };
            }
            loaded += 1;
        } else {
            text += ",direct=off";
            if let Some(transport) = disk.idle {
                text += &format!(",iothread=io0,transport={transport}");
            }
        }
        list.extend(["--disk".into(), text]);
    }
    list
}
