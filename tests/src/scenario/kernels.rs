//! Other kernels of the distribution find their root disk on virtio-pci, and what they write comes
//! back.

use super::storage::check_sums;
use super::{Environment, Outcome, two_iothreads};
use crate::guest::Kernel;
use crate::machine::{Machine, Vmm};

const SCRIPT: &str = r#"
report release "$(uname -r)"
report root "$(awk '$2 == "/" { print $1, $3, $4 }' /proc/mounts)"
report root_device "$(readlink -f /sys/block/vda/device)"
for serial in data0 data1; do
    device=$(disk $serial) || exit
    fio --name=$serial --filename="$device" --ioengine=libaio --direct=1 --rw=randwrite --bs=4k \
        --iodepth=8 --size=1m --verify=crc32c --verify_fatal=1 --fsync=64 --thread --minimal \
        >/tmp/fio 2>&1 || fail "fio on $serial: $(cat /tmp/fio)"
    report "sum.$serial" "$(dd if="$device" bs=64k iflag=direct status=none | sha256sum)"
    report "queues.$serial" $(ls /sys/block/${device##*/}/mq)
done
"#;

/// The generic flavour, in which also ext4 is a module.
pub fn generic(environment: &Environment) -> Outcome {
    boot(environment, Kernel::Generic)
}

/// A newer kernel.
pub fn backports(environment: &Environment) -> Outcome {
    if !environment.has_kernel(Kernel::Backports) {
        return Outcome::Skipped("apt offers no kernel of Debian's backports here".to_owned());
    }
    boot(environment, Kernel::Backports)
}

fn boot(environment: &Environment, kernel: Kernel) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("about Pollux's PCI bus".to_owned());
    }
    let mut machine = Machine::new(SCRIPT);
    machine.kernel = kernel;
    machine.iothreads = two_iothreads();
    machine.disks = vec![
        environment.disk("data0", 1 << 20).on("io0"),
        environment.disk("data1", 2 << 20).on("io1").with_queues(2),
    ];
    let ended = environment.start(&machine).finish();
    ended.assert_success();

    let release = ended.value("release");
    environment.note(&format!("the guest's kernel is {release}"));
    let generic = !release.contains("cloud");
    assert_eq!(generic, kernel == Kernel::Generic, "flavour of {release}");
    let root = ended.value("root");
    assert!(root.starts_with("/dev/vda ext4 ro"), "root: {root}");
    let device = ended.value("root_device");
    assert!(
        device.contains("/pci0000:00/"),
        "the root disk is no PCI device: {device}"
    );
    for (disk, queues) in machine.disks.iter().zip(["0", "0 1"]) {
        let serial = &disk.serial;
        assert_eq!(ended.value(&format!("queues.{serial}")), queues);
    }
    check_sums(&ended, &machine.disks);
    Outcome::Held
}
