//! An unmodified kernel starts, sees its disks as they are, and the machine powers off.

use super::{Environment, Outcome, six_disks, two_iothreads};
use crate::guest::Kernel;
use crate::machine::{Machine, Vmm};

/// Says of the system and of every disk what sysfs says.
const SCRIPT: &str = r#"
. /etc/os-release
report system "$ID" "$(uname -r)" "$(nproc)"
report root "$(awk '$2 == "/" { print $1, $3, $4 }' /proc/mounts)"
report memory_kib "$(awk '/^MemTotal/ { print $2 }' /proc/meminfo)"
report disks $(ls /sys/block)
for device in $(ls /sys/block); do
    cd /sys/block/$device
    report "$device.serial" "$(cat serial)"
    report "$device.sectors" "$(cat size)"
    report "$device.readonly" "$(cat ro)"
    report "$device.queues" $(ls mq)
    report "$device.cache" "$(cat queue/write_cache)"
    report "$device.limits" $(cat queue/logical_block_size queue/physical_block_size \
        queue/max_segments queue/minimum_io_size)
done
"#;

pub fn bzimage(environment: &Environment) -> Outcome {
    boot(environment, Kernel::BzImage)
}

pub fn vmlinux(environment: &Environment) -> Outcome {
    boot(environment, Kernel::Vmlinux)
}

fn boot(environment: &Environment, kernel: Kernel) -> Outcome {
    let mut machine = Machine::new(SCRIPT);
    machine.kernel = kernel;
    machine.iothreads = two_iothreads();
    machine.disks = six_disks(environment, 8 << 20);
    let ended = environment.start(&machine).finish();
    ended.assert_success();

    let system = ended.value("system");
    environment.note(&format!("the guest is {system}"));
    let words: Vec<&str> = system.split(' ').collect();
    assert_eq!(
        (words[0], words[2]),
        ("debian", "2"),
        "distribution and number of processors"
    );
    let root = ended.value("root");
    assert!(
        root.starts_with("/dev/vda ext4 ro"),
        "root file system: {root}"
    );
    let memory_kib: u64 = ended.value("memory_kib").parse().expect("a number");
    assert!(
        (180_000..=262_144).contains(&memory_kib),
        "{memory_kib} KiB of 256 MiB"
    );
    assert_eq!(ended.value("disks"), "vda vdb vdc vdd vde vdf vdg");

    // QEMU's microvm gives its disks names in another order: the scripts look for serial numbers.
    let device = |index: usize, serial: &str| match environment.vmm() {
        Vmm::Pollux => format!("vd{}", char::from(b'a' + u8::try_from(index).expect("few"))),
        Vmm::Qemu => ["vda", "vdb", "vdc", "vdd", "vde", "vdf", "vdg"]
            .into_iter()
            .find(|device| ended.value(&format!("{device}.serial")) == serial)
            .unwrap_or_else(|| ended.fail(&format!("no disk {serial}")))
            .to_owned(),
    };
    let check = |device: &str, key: &str, expected: &str| {
        assert_eq!(
            ended.value(&format!("{device}.{key}")),
            expected,
            "{device}: {key}"
        );
    };
    let root = device(0, "root");
    check(&root, "serial", "root");
    check(&root, "readonly", "1");
    for (index, disk) in machine.disks.iter().enumerate() {
        let device = device(index + 1, &disk.serial);
        let bytes = disk.path.metadata().expect("it exists").len();
        check(&device, "serial", &disk.serial);
        check(&device, "sectors", &(bytes / 512).to_string());
        check(&device, "readonly", "0");
        check(
            &device,
            "queues",
            if disk.queues == 2 { "0 1" } else { "0" },
        );
        check(&device, "cache", "write back");
        // 254 segments: a queue of 256 less the two descriptors of header and status.
        check(&device, "limits", "512 512 254 512");
    }
    Outcome::Held
}
