use super::*;
use crate::matrix::{Tool, parse};

fn run(words: &str) -> Run {
    parse(&[words], Tool::Vhost).expect("a matrix").remove(0)
}

fn programs() -> Programs {
    Programs {
        pollux: "pollux".into(),
        qemu: "qemu-storage-daemon".into(),
        qemu_accel: String::new(),
        qemu_firmware: None,
        pollux_has_qmp: false,
    }
}

fn line(words: &str, disks: usize) -> String {
    let path =
        |name: &str| -> Vec<PathBuf> { (0..disks).map(|i| format!("/{name}{i}").into()).collect() };
    let command = backend::command(&programs(), &run(words), &path("d"), &path("s"));
    let words = command.get_args().map(|word| word.to_string_lossy());
    words.collect::<Vec<_>>().join(" ")
}

#[test]
fn both_back_ends_are_told_the_same() {
    assert_eq!(
        line("queues=2 poll-max-ns=5 direct=on iothreads=2 disks=2", 2),
        "vhost-user-blk --iothread id=io0,poll-max-ns=5 --iothread id=io1,poll-max-ns=5 \
         --disk path=/d0,queues=2,engine=io_uring,direct=on,iothread=io0 --socket /s0 \
         --disk path=/d1,queues=2,engine=io_uring,direct=on,iothread=io1 --socket /s1"
    );
    let daemon = line(
        "vmm=qemu queues=2 poll-max-ns=5 engine=native iothreads=0",
        1,
    );
    assert!(!daemon.contains("iothread"), "{daemon}");
    let daemon = line("vmm=qemu rw=randrw queues=2 poll-max-ns=5 engine=native", 1);
    for word in [
        "--object iothread,id=io0,poll-max-ns=5 ",
        "filename=/d0,cache.direct=off,aio=native,read-only=off ",
        "node-name=disk0,addr.type=unix,addr.path=/s0,writable=on,num-queues=2,iothread=io0",
    ] {
        assert!(daemon.contains(word), "{word} in {daemon}");
    }
}

#[test]
fn system_calls_are_counted_where_that_may_be() {
    // This thread is among those counted; the calls below are its own.
    let Some(counter) = syscalls::Counter::of(std::process::id().cast_signed()) else {
        eprintln!("skipped: no right to count system calls here");
        return;
    };
    for _ in 0..100 {
        // SAFETY: getppid has no preconditions.
        unsafe { libc::getppid() };
    }
    assert!(counter.read().expect("a count") >= 100);
}
