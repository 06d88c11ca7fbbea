use super::*;

fn parse(text: &str) -> Result<Options<'_>, Error<'_>> {
    let mut options = Options::EMPTY;
    options.parse(text.as_bytes())?;
    Ok(options)
}

#[test]
fn defaults_come_first_and_jobs_follow() {
    let text = "bs=8k iodepth=32 job=a rw=randread job=b rw=write bs=64k and=c disk=0,2-3 job=d";
    let options = parse(text).unwrap();
    let jobs = options.jobs();
    assert_eq!(jobs.len(), 4);
    assert_eq!(
        jobs.iter()
            .map(|j| (j.step, j.block_bytes, j.depth))
            .collect::<Vec<_>>(),
        [(0, 8192, 32), (1, 65536, 32), (1, 8192, 32), (2, 8192, 32)]
    );
    let disks: Vec<_> = (0..MAX_DISKS)
        .filter(|&d| jobs[2].disks.contains(d))
        .collect();
    assert_eq!(disks, [0, 2, 3]);
    assert!(jobs[3].disks.contains(255));
}

#[test]
fn sizes_times_and_ways_to_verify() {
    let options = parse("job=x ios=0x10 size=1m runtime=250ms thinktime=7 verify=gen:3 ").unwrap();
    let job = options.jobs()[0];
    assert_eq!((job.ios, job.size), (16, 1 << 20));
    assert_eq!((job.runtime_ns, job.think_ns), (250_000_000, 7000));
    assert_eq!(job.verify, Verify::Generation(3));
}

#[test]
fn devices_of_the_command_line() {
    let options =
        parse("virtio_mmio.device=512@0xfeb00e00:12 virtio_mmio.device=4K@0xd0000000:5").unwrap();
    assert_eq!(
        options.mmio[..options.mmio_count],
        [
            MmioDevice {
                base: 0xfeb0_0e00,
                irq: 12
            },
            MmioDevice {
                base: 0xd000_0000,
                irq: 5
            }
        ]
    );
}

#[test]
fn words_meant_for_linux_are_ignored_and_others_refused() {
    assert!(parse("console=ttyS0 root=/dev/vda rw quiet i8042.noaux=1 job=a").is_ok());
    for (text, token) in [
        ("job=a iodepht=3", "iodepht=3"),
        ("bs=0", "bs=0"),
        ("runtime=3h", "runtime=3h"),
        ("disk=3-1", "disk=3-1"),
        ("disk=256", "disk=256"),
        ("ios=18446744073709551616", "ios=18446744073709551616"),
        ("size=17179869185g", "size=17179869185g"),
        ("exit=bang", "exit=bang"),
        ("virtio_mmio.device=1", "virtio_mmio.device=1"),
    ] {
        let error = parse(text).err().unwrap();
        assert_eq!(error.token, token.as_bytes(), "{text}");
    }
    assert!(parse(&"job=a ".repeat(MAX_JOBS)).is_ok());
    assert!(parse(&"job=a ".repeat(MAX_JOBS + 1)).is_err());
}
