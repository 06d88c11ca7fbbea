use super::*;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Instant;
use tempfile::{NamedTempFile, TempDir};
use vmm_sys_util::eventfd::EventFd;

fn config(path: impl Into<PathBuf>) -> DiskConfig {
    DiskConfig::new("d0", path)
}

fn file(bytes: u64) -> NamedTempFile {
    let file = NamedTempFile::new().unwrap();
    file.as_file().set_len(bytes).unwrap();
    file
}

/// Opens an image that nobody uses any more. A child process that another test has just forked may
/// keep descriptors of this one open until it executes its program: on a busy machine longer than
/// opening waits.
fn opens(config: &DiskConfig) -> Image {
    for _ in 0..100 {
        match Image::open(config) {
            Err(ImageError::Locked { .. }) => (),
            result => return result.unwrap(),
        }
    }
    panic!("{config:?} stays locked");
}

fn refused(config: &DiskConfig) -> String {
    match Image::open(config) {
        Ok(_) => panic!("{config:?} was opened"),
        Err(error) => error.to_string(),
    }
}

/// With the flag io_uring gives EAGAIN to the caller where a file cannot do without waiting; seen
/// from Linux by the lab's scenario `disk_read_errors`.
#[test]
fn an_image_is_not_left_non_blocking() {
    let file = file(1 << 20);
    for direct in [Some(false), None] {
        for readonly in [false, true] {
            let image = opens(&DiskConfig {
                direct,
                readonly,
                ..config(file.path())
            });
            // SAFETY: the image keeps the descriptor open.
            let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(image.fd()) };
            let flags = rustix::fs::fcntl_getfl(fd).unwrap();
            assert!(!flags.contains(OFlags::NONBLOCK), "{flags:?}");
        }
    }
}

#[test]
fn each_unusable_path_is_named_with_its_remedy() {
    let dir = TempDir::new().unwrap();
    let missing = dir.path().join("none.img");
    let text = refused(&config(&missing));
    assert!(text.contains("no such file") && text.contains("truncate -s 1G"));
    assert!(text.starts_with(&format!("path={}", missing.display())));
    assert!(refused(&config(dir.path())).contains("is a directory"));
    assert!(refused(&config("/dev/null")).contains("is a character device"));
    let fifo = dir.path().join("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    assert!(refused(&config(&fifo)).contains("is a pipe"));
    assert!(refused(&config(file(0).path())).contains("is empty"));
    let text = refused(&config(file(511).path()));
    assert!(
        text.contains("511 bytes are less than one block of 512"),
        "{text}"
    );
    let mut large_blocks = config("");
    let small = file(2048);
    large_blocks.path = small.path().into();
    large_blocks.logical_block_size = 4096;
    assert!(refused(&large_blocks).contains("one block of 4096"));
}

#[test]
fn a_file_that_may_not_be_written_is_a_disk_that_may_not_either() {
    let file = file(4096);
    std::fs::set_permissions(file.path(), PermissionsExt::from_mode(0o444)).unwrap();
    if File::options().write(true).open(file.path()).is_ok() {
        println!("skipped: this user may write to read-only files (CAP_DAC_OVERRIDE)");
    } else {
        let text = refused(&config(file.path()));
        assert!(text.contains("readonly=on"), "{text}");
    }
    let mut readonly = config(file.path());
    readonly.readonly = true;
    assert!(Image::open(&readonly).unwrap().readonly());
}

#[test]
fn other_formats_are_recognised_and_converted() {
    let heads: [(&[u8], usize, &str, &str); 12] = [
        (
            b"QFI\xfb\0\0\0\x03",
            0,
            "qcow2",
            "qemu-img convert -f qcow2 -O raw ",
        ),
        (b"QED\0", 0, "QED", "-f qed "),
        (b"KDMV", 0, "VMDK", "-f vmdk "),
        (b"# Disk DescriptorFile\n", 0, "VMDK", "-f vmdk "),
        (b"vhdxfile", 0, "VHDX", "-f vhdx "),
        (b"conectix", 0, "VHD", "-f vpc "),
        (b"\x7f\x10\xda\xbe", 0x40, "VDI", "-f vdi "),
        (b"\x1f\x8b\x08", 0, "gzip", "gzip -dc "),
        (b"\xfd7zXZ\0", 0, "xz", "xz -dc "),
        (b"\x28\xb5\x2f\xfd", 0, "zstd", "zstd -dc "),
        (b"BZh91AY&SY", 0, "bzip2", "bzip2 -dc "),
        (b"conectix", (1 << 20) - 512, "VHD", "-f vpc "),
    ];
    for (magic, at, name, command) in heads {
        let image = file(1 << 20);
        std::os::unix::fs::FileExt::write_all_at(image.as_file(), magic, at as u64).unwrap();
        let text = refused(&config(image.path()));
        assert!(text.contains(&format!("is a {name} image")), "{text}");
        assert!(text.contains(command), "{text}");
        let mut raw = config(image.path());
        raw.check_format = false;
        assert!(Image::open(&raw).is_ok());
    }
    // What a guest puts on a raw disk is not another format.
    for magic in [&b"LUKS\xba\xbe"[..], b"BZhello", b"\xeb\x63\x90"] {
        let mut image = file(4096);
        image.write_all(magic).unwrap();
        assert!(Image::open(&config(image.path())).is_ok());
    }
}

#[test]
fn case_6_the_tail_of_an_odd_sized_image_is_not_exposed() {
    let image = file(300_000_000);
    let opened = Image::open(&config(image.path())).unwrap();
    assert_eq!(opened.capacity_sectors(), 300_000_000 / 512);
    drop(opened);
    let mut large_blocks = config(image.path());
    large_blocks.logical_block_size = 4096;
    let opened = opens(&large_blocks);
    assert_eq!(opened.capacity_sectors(), 300_000_000 / 4096 * 8);
}

#[test]
fn case_17_a_filesystem_with_large_blocks_does_not_change_the_logical_block() {
    let image = file(1 << 20);
    let opened = Image::open(&config(image.path())).unwrap();
    assert_eq!(opened.logical_block_size, 512);
}

#[test]
fn an_image_in_use_is_refused_and_its_user_named() {
    let image = file(4096);
    let first = Image::open(&config(image.path())).unwrap();
    let text = refused(&config(image.path()));
    let pid = std::process::id();
    assert!(
        text.contains(&format!("is in use by process {pid}")),
        "{text}"
    );
    assert!(text.contains("locking=off"));
    let mut readonly = config(image.path());
    readonly.readonly = true;
    assert!(refused(&readonly).contains("is in use"));
    let mut unlocked = config(image.path());
    unlocked.locking = false;
    assert!(Image::open(&unlocked).is_ok());
    drop(first);
    // Readers share.
    let reader = opens(&readonly);
    opens(&readonly);
    assert!(refused(&config(image.path())).contains("is in use"));
    drop(reader);
    opens(&config(image.path()));
}

#[test]
fn an_image_locked_by_another_process_is_refused_with_its_name() {
    // A child that inherits a lock keeps it when this process has closed its descriptor.
    let image = file(4096);
    let holder = File::options()
        .read(true)
        .write(true)
        .open(image.path())
        .unwrap();
    assert!(lock::lock(&holder, false).unwrap().is_ok());
    let mut child = Command::new("sleep")
        .arg("600")
        .stdin(holder)
        .spawn()
        .unwrap();
    // Another test's child may hold the image too, until it executes its program.
    let named = format!("process {} (sleep)", child.id());
    let text = (0..100)
        .map(|_| refused(&config(image.path())))
        .find(|text| text.contains(&named));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(text.is_some(), "never {named}");
    opens(&config(image.path()));
}

#[test]
fn a_holder_that_may_be_about_to_go_is_waited_for() {
    let image = file(4096);
    let _first = Image::open(&config(image.path())).unwrap();
    let start = Instant::now();
    refused(&config(image.path()));
    assert!(start.elapsed() >= lock::HELD);
}

/// The part of the child in the test below: holds `path` in a ring with requests under way.
fn hold_in_a_ring(path: &OsStr) -> ! {
    use io_uring::{IoUring, opcode, types};
    let image = Image::open(&config(path)).unwrap();
    let Ok(mut ring) = IoUring::new(64) else {
        println!("no io_uring");
        std::process::exit(0);
    };
    ring.submitter().register_files(&[image.fd()]).unwrap();
    let never = EventFd::new(0).unwrap();
    let mut buffers = vec![vec![0u8; 1 << 20]; 32];
    let polled = opcode::PollAdd::new(types::Fd(never.as_raw_fd()), libc::POLLIN as u32);
    let mut entries = vec![polled.build()];
    for (i, buffer) in buffers.iter_mut().enumerate() {
        let read = opcode::Read::new(types::Fixed(0), buffer.as_mut_ptr(), 1 << 20)
            .offset((i as u64) << 20)
            .build();
        entries.push(read.flags(io_uring::squeue::Flags::ASYNC));
    }
    // SAFETY: the buffers live as long as the process, which never leaves this function.
    unsafe { ring.submission().push_multiple(&entries) }.unwrap();
    ring.submit().unwrap();
    println!("holding");
    loop {
        std::thread::park();
    }
}

#[test]
fn an_image_of_a_killed_process_can_be_used_at_once() {
    const HOLD: &str = "POLLUX_TEST_HOLD";
    if let Some(path) = std::env::var_os(HOLD) {
        hold_in_a_ring(&path);
    }
    // The kernel frees a ring some time after its process has gone.
    for _ in 0..10 {
        let image = file(32 << 20);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg("virtio::block::image::tests::an_image_of_a_killed_process_can_be_used_at_once")
            .env(HOLD, image.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map_while(Result::ok)
            .find(|line| line.contains("holding") || line.contains("no io_uring"));
        child.kill().unwrap();
        child.wait().unwrap();
        match said.as_deref() {
            Some("no io_uring") => {
                println!("skipped: a killed process's ring, since there is no io_uring here");
                return;
            }
            Some(_) => drop(Image::open(&config(image.path())).unwrap()),
            None => panic!("the child ended without holding the image"),
        }
    }
}

#[test]
fn direct_io_is_taken_where_it_works_and_demanded_where_it_is_asked_for() {
    let image = file(1 << 20);
    let mut asked = config(image.path());
    asked.direct = Some(false);
    let buffered = Image::open(&asked).unwrap();
    assert!(!buffered.direct());
    assert_eq!(buffered.alignment(), Alignment::NONE);
    drop(buffered);
    drop(opens(&asked));
    asked.direct = Some(true);
    match Image::open(&asked) {
        Ok(image) => {
            assert!(image.direct());
            assert!(image.alignment().offset >= 512);
        }
        Err(error) => assert!(error.to_string().contains("direct=off"), "{error}"),
    }
    // procfs files know no O_DIRECT: by default that is no error.
    let Err(error) = Image::open(&DiskConfig {
        direct: Some(true),
        readonly: true,
        ..config("/proc/kcore")
    }) else {
        panic!("O_DIRECT on procfs");
    };
    assert!(!error.to_string().is_empty());
}

#[test]
fn resizing_changes_files_within_reason() {
    let image = file(1 << 20);
    let opened = Image::open(&config(image.path())).unwrap();
    assert_eq!(opened.resize(2 << 20).unwrap(), 4096);
    assert_eq!(image.as_file().metadata().unwrap().len(), 2 << 20);
    assert_eq!(opened.resize(512).unwrap(), 1);
    for bytes in [0, 100, 513, u64::MAX, u64::MAX - 511] {
        let text = opened.resize(bytes).unwrap_err().to_string();
        assert!(text.starts_with(&format!("size={bytes}:")), "{text}");
    }
    drop(opened);
    let readonly = opens(&DiskConfig {
        readonly: true,
        ..config(image.path())
    });
    assert!(readonly.resize(1024).is_err(), "more than it has");
}
