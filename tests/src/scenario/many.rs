//! Many disks at once, on PCI and on MMIO: each is there, with its own serial number, size and data.

use std::fs;

use super::{Environment, Outcome, two_iothreads};
use crate::machine::{Disk, Machine, Vmm};

/// Disks on each transport, beside the root disk.
const DISKS: u64 = 32;

/// For every disk: how it is attached and its size; sectors that tell disk and number are written to
/// all, then read again from all. One process does it: starting some for each disk would take longer.
const SCRIPT: &str = r#"
cat >/tmp/disks <<'END'
use strict;
use IO::Handle;
my %disks;
for my $entry (glob "/sys/block/vd*") {
    my ($serial, $sectors) = map { open my $file, "<", "$entry/$_" or die "$entry: $!"; scalar <$file> }
        "serial", "size";
    chomp($serial, $sectors);
    next if $serial eq "root";
    my $bus = readlink($entry) =~ m{/(pci)0000:00/|/LNRO0005:} ? $1 // "mmio" : "unknown";
    print "\@disk.$serial $bus $sectors\n";
    my $width = 510 - length $serial;
    my $content = join "", map { sprintf "%s.%0*d\n", $serial, $width, $_ } 0 .. $sectors - 1;
    $disks{"/dev/" . $entry =~ s{.*/}{}r} = $content;
}
for my $path (keys %disks) {
    open my $disk, "+<", $path or die "$path: $!";
    print $disk $disks{$path} or die "$path: $!";
    $disk->flush && $disk->sync or die "$path: $!";
}
open my $caches, ">", "/proc/sys/vm/drop_caches" or die $!;
print $caches 3;
close $caches or die $!;
for my $path (keys %disks) {
    open my $disk, "<", $path or die "$path: $!";
    local $/;
    <$disk> eq $disks{$path} or die "$path: what was read is not what was written";
}
END
perl /tmp/disks 2>/tmp/error || fail "$(cat /tmp/error)"
"#;

pub fn many(environment: &Environment) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("about both of Pollux's transports at once".to_owned());
    }
    let mut machine = Machine::new(SCRIPT);
    machine.iothreads = two_iothreads();
    let disk = |number: u64| -> Disk {
        let bus = if number < DISKS { "pci" } else { "mmio" };
        let size_bytes = (64 + number) * 512;
        environment
            .disk(&format!("{bus}{number:02}"), size_bytes)
            .with_options(format!("transport={bus}"))
    };
    machine.disks = (0..2 * DISKS)
        .map(|number| match number % 3 {
            0 => disk(number).on("io0"),
            1 => disk(number).on("io1"),
            _ => disk(number),
        })
        .collect();
    let ended = environment.start(&machine).finish();
    ended.assert_success();

    for (number, disk) in (0..).zip(&machine.disks) {
        let serial = &disk.serial;
        let bus = if number < DISKS { "pci" } else { "mmio" };
        assert_eq!(
            ended.value(&format!("disk.{serial}")),
            format!("{bus} {}", 64 + number),
            "transport and sectors of {serial}"
        );
        let image = fs::read(&disk.path).expect("it can be read");
        for (sector, found) in image.chunks_exact(512).enumerate() {
            let expected = format!("{serial}.{sector:0width$}\n", width = 510 - serial.len());
            assert!(
                found == expected.as_bytes(),
                "{serial}, sector {sector}: {:?}",
                String::from_utf8_lossy(found)
            );
        }
    }
    Outcome::Held
}
