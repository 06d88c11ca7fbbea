use clap::{CommandFactory, Parser};
use proptest::prelude::*;

use super::args::{Cli, RunArgs};
use super::*;

fn args(options: &[&str]) -> RunArgs {
    let all = std::iter::once("pollux").chain(options.iter().copied());
    Cli::try_parse_from(all).unwrap().run
}

fn config(options: &[&str]) -> Result<Config, String> {
    Config::from_args(&args(options)).map_err(|error| error.to_string())
}

/// The one line that a wrong command line gets.
fn refusal(options: &[&str]) -> String {
    let line = config(options).expect_err(&format!("{options:?} was accepted"));
    assert!(!line.contains('\n'), "{line:?}");
    line
}

#[test]
fn clap_finds_no_fault_with_its_definition() {
    Cli::command().debug_assert();
}

#[test]
fn the_design_pages_example_is_understood() {
    let config = config(&[
        "--kernel",
        "vmlinux",
        "--initrd",
        "initrd",
        "--cmdline",
        "console=ttyS0 root=/dev/vda ro",
        "--memory",
        "1G",
        "--cpus",
        "2",
        "--iothread",
        "id=io0,poll-max-ns=32768,poll-grow=2,poll-shrink=2,poll-weight=3,poll-alpha=0.3,poll-policy=weighted,monitor=auto,poll-completions=on,aio-max-batch=0,cpus=2-3",
        "--disk",
        "path=root.img,readonly=on",
        "--disk",
        "path=/dev/nvme0n1,iothread=io0,queues=4",
    ])
    .unwrap();
    assert_eq!(config.memory.size, Size(1 << 30));
    assert_eq!(config.cpus, 2);
    assert_eq!(config.iothread[0].cpus, "2-3".parse().unwrap());
    assert!(config.disk[0].readonly);
    assert_eq!(config.disk[1].queues, Some(4));
    assert_eq!(check::disk_ids(&config.disk), ["disk0", "disk1"]);
}

#[test]
fn given_ids_are_not_given_again() {
    let config = config(&["--disk", "a", "--disk", "b,id=disk0", "--disk", "c"]).unwrap();
    assert_eq!(check::disk_ids(&config.disk), ["disk1", "disk0", "disk2"]);
}

#[test]
fn defaults_are_those_of_the_options_help() {
    let config = config(&[]).unwrap();
    assert_eq!(config.memory, Memory::default());
    assert_eq!((config.cpus, config.serial), (1, Serial::Stdio));
}

#[test]
fn levels_are_written_as_logging_programs_have_them() {
    let log = |text: &str| config(&["--log", text]).unwrap().log;
    assert_eq!(log("debug").level, "debug");
    assert_eq!(
        log("warn,iothread=trace,vmm::vm=info").level,
        "warn,iothread=trace,vmm::vm=info"
    );
    let both = log("level=warn,,vmm=trace,file=x.log");
    assert_eq!(
        (both.level.as_str(), both.file),
        ("warn,vmm=trace", Some("x.log".into()))
    );
    assert_eq!(log("info,file=x.log").level, "info");
}

#[test]
fn every_mistake_names_option_value_and_remedy() {
    let io = ["--iothread", "io0", "--iothread", "io1", "--disk"];
    let with_io = |disk: &'static str| [io.as_slice(), &[disk]].concat();
    let cases: &[(&[&str], &[&str])] = &[
        (&["--cpus", "0"], &["--cpus 0", "1 to 64"]),
        (&["--cpus", "65"], &["--cpus 65", "1 to 64"]),
        (&["--cpus", "two"], &["--cpus two", "whole number"]),
        (&["--cpus", "-1"], &["--cpus -1", "whole number"]),
        (&["--memory", "0"], &["--memory 0", "64M"]),
        (
            &["--memory", "512"],
            &["--memory 512", "did you mean 512M?"],
        ),
        (&["--memory", "63M"], &["--memory 63M", "at least 64M"]),
        (
            &["--memory", "64M1"],
            &["--memory 64M1", "size=64M1", "K, M, G or T"],
        ),
        (
            &["--memory", "67108865"],
            &["--memory 67108865", "no multiple of 1M"],
        ),
        (
            &["--memory", "size=1G,hugepage=on"],
            &["no key \"hugepage\"", "did you mean \"hugepages\"?"],
        ),
        (
            &["--memory", "size=1G,prefault=maybe"],
            &["prefault=maybe", "on or off"],
        ),
        (&["--cpu", "EPYC"], &["--cpu EPYC", "host"]),
        (&["--cpu", "host,avx"], &["--cpu host,avx", "-avx"]),
        (
            &["--serial", "tty"],
            &["--serial tty", "stdio, pty, none or file=PATH"],
        ),
        (&["--log", "loud"], &["--log loud", "debug"]),
        (
            &["--iothread", "poll-max-ns=1"],
            &["--iothread poll-max-ns=1", "id= is missing"],
        ),
        (
            &["--iothread", "io0,poll-weight=64"],
            &["--iothread id=io0", "poll-weight=64", "[0, 63]"],
        ),
        (
            &["--iothread", "io0,poll-policy=auto,poll-alpha=10.1"],
            &["--iothread", "poll-alpha", "[0, 10]", "not 10.1"],
        ),
        (
            &["--iothread", "io0,poll-max-ns=-1"],
            &["poll-max-ns=-1", "range [0, 9223372036854775807]"],
        ),
        (
            &["--iothread", "io0,poll-grow=x"],
            &["poll-grow=x", "whole number"],
        ),
        (
            &["--iothread", "io0,poll-policy=weigthed"],
            &["did you mean \"weighted\"?"],
        ),
        (
            &["--iothread", "io0,monitor=kqueue"],
            &["monitor=kqueue", "auto, io_uring, epoll, ppoll"],
        ),
        (
            &["--iothread", "io0", "--iothread", "io0"],
            &["--iothread id=io0", "two iothreads"],
        ),
        (
            &["--iothread", "0io"],
            &["--iothread id=0io", "begin with a letter"],
        ),
        (&["--iothread", "io0,cpus=3-1"], &["cpus=3-1", "backwards"]),
        (
            &["--disk", "queues=1"],
            &["--disk queues=1", "path= is missing"],
        ),
        (
            &["--disk", "a,quues=2"],
            &["--disk a,quues=2", "did you mean \"queues\"?"],
        ),
        (
            &["--disk", "a,netdev=2"],
            &["no key \"netdev\"", "the keys are path, id"],
        ),
        (&["--disk", "a,readonly"], &["readonly=VALUE"]),
        (&["--disk", "a,queues=0"], &["queues=0", "[1, 256]"]),
        (
            &["--disk", "a,queues=70000"],
            &["queues=70000", "0 to 65535"],
        ),
        (
            &["--disk", "a,queue-size=100"],
            &["queue-size=100", "power of two"],
        ),
        (
            &["--disk", "a,serial=123456789012345678901"],
            &["21 bytes", "20"],
        ),
        (&["--disk", "a,serial=ü"], &["ASCII"]),
        (
            &["--disk", "a,logical-block-size=513"],
            &["logical-block-size=513", "512, 1024"],
        ),
        (
            &[
                "--disk",
                "a,logical-block-size=4096,physical-block-size=512",
            ],
            &["physical-block-size=512", "4096"],
        ),
        (&["--disk", "path="], &["path= is empty"]),
        (
            &["--disk", "a,id=x", "--disk", "b,id=x"],
            &["--disk id=x", "two disks"],
        ),
        (
            &["--disk", "a,iothread=io9"],
            &["iothread=io9", "--iothread id=io9"],
        ),
        (
            &["--disk", "a,transport=ccw"],
            &["transport=ccw", "use pci or mmio"],
        ),
        (&["--disk", "a,werror=stop"], &["werror", "add --qmp"]),
        (
            &with_io("a,iothread=io0,iothreads=io1"),
            &["given together"],
        ),
        (
            &with_io("a,iothreads=io0:io2"),
            &["iothreads=io0:io2", "io2 does not exist"],
        ),
        (&with_io("a,iothreads=io0:io0"), &["io0 is named twice"]),
        (&with_io("a,vqs=0:1"), &["vqs=: no iothreads="]),
        (
            &with_io("a,queues=2,iothreads=io0:io1,vqs=0"),
            &["1 lists for 2 iothreads"],
        ),
        (
            &with_io("a,queues=2,iothreads=io0:io1,vqs=0+1:"),
            &["io1 has no vqs="],
        ),
        (
            &with_io("a,queues=2,iothreads=io0:io1,vqs=0:2"),
            &["vqs=2 of iothread io1", "0 to 1"],
        ),
        (
            &with_io("a,queues=2,iothreads=io0:io1,vqs=0+1:1"),
            &["queue 1 is assigned to iothreads io0 and io1"],
        ),
        (
            &with_io("a,queues=3,iothreads=io0:io1,vqs=0:1"),
            &["queue 2 is assigned to no iothread"],
        ),
        (&["--qmp", "/run/x"], &["--qmp /run/x", "unix:/run/x"]),
        (&["--qmp", "unix:"], &["unix:PATH"]),
        (
            &["--metrics", "a,interval=0"],
            &["interval=0", "1 to 86400"],
        ),
        (&["--metrics", "/"], &["file=/", "file=FILE"]),
        (&["--metrics", "interval=5"], &["file= is missing"]),
        (
            &["--trace", "t,events=poll_*:pol_grow"],
            &["--trace events=pol_grow", "did you mean poll_grow?"],
        ),
        (
            &["--trace", "t,events=x*"],
            &["events=x*", "run_poll_handlers_begin"],
        ),
        (
            &["--trace", "t,max-size=1M"],
            &["--trace max-size=1M", "at least 4M"],
        ),
        (
            &["--iothread", "main"],
            &[
                "--iothread id=main",
                "loop of the main thread",
                "another id",
            ],
        ),
        (&["--trace", "t,files=0"], &["files=0", "1 to 1000"]),
        (
            &["--trace", "t,maxsize=1G"],
            &["maxsize", "did you mean \"max-size\""],
        ),
        (
            &["--config", "/nowhere.json"],
            &["--config /nowhere.json", "readable"],
        ),
    ];
    for (options, parts) in cases {
        let line = refusal(options);
        for part in *parts {
            assert!(
                line.contains(part),
                "{options:?}: {line:?} does not say {part:?}"
            );
        }
    }
}

#[test]
fn a_line_break_in_a_value_does_not_break_the_message() {
    let line = refusal(&["--disk", "a\nb,nonsense=1"]);
    assert!(line.contains("a\\nb"), "{line}");
}

#[test]
fn queues_follow_the_vcpus_where_interrupts_are_plenty() {
    let queues = |disk: &str| {
        let config = config(&["--cpus", "3", "--disk", disk]).unwrap();
        check::queues(&config.disk[0], config.cpus)
    };
    assert_eq!(queues("a"), 3);
    assert_eq!(queues("a,transport=pci"), 3);
    assert_eq!(queues("a,transport=mmio"), 1);
    assert_eq!(queues("a,queues=2"), 2);
}

#[test]
fn queues_are_placed_in_turn_or_as_pinned() {
    let placed = |options: &[&str]| {
        let base = ["--iothread", "io0", "--iothread", "io1", "--disk"];
        let config = config(&[base.as_slice(), options].concat()).unwrap();
        let disk = &config.disk[0];
        placement::place(disk, check::queues(disk, config.cpus), &config.iothread).unwrap()
    };
    assert_eq!(placed(&["a"]), [None]);
    assert_eq!(placed(&["a,queues=2,iothread=io1"]), [Some(1), Some(1)]);
    assert_eq!(
        placed(&["a,queues=3,iothreads=io1:io0"]),
        [Some(1), Some(0), Some(1)]
    );
    assert_eq!(
        placed(&["a,queues=3,iothreads=io1:io0,vqs=2:0-1"]),
        [Some(0), Some(0), Some(1)]
    );
}

#[test]
fn options_are_laid_over_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vm.json");
    let text = r#"{"cpus": 4, "memory": {"size": "1G", "prefault": true}, "cmdline": "a",
                   "iothread": [{"id": "io0", "cpus": "0-1"}],
                   "disk": [{"path": "a", "iothreads": ["io0"], "vqs": ["0"], "direct": false}]}"#;
    std::fs::write(&file, text).unwrap();
    let file = file.to_str().unwrap();
    let config = config(&[
        "--config", file, "--memory", "2G", "--cpus", "1", "--disk", "b",
    ])
    .unwrap();
    assert_eq!((config.cpus, config.memory.size.0), (1, 2 << 30));
    assert!(config.memory.prefault);
    assert_eq!(config.cmdline, "a");
    assert_eq!(config.disk.len(), 2);
    assert_eq!(config.disk[0].direct, Some(false));
}

#[test]
fn mistakes_in_the_file_are_named_by_file_and_path() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("vm.json");
    for (text, parts) in [
        ("", ["not valid JSON", "vm.json"].as_slice()),
        ("[]", &["object"]),
        (
            "{\"cpus\": 1, \"cpus\": 2}",
            &["\"cpus\" is given twice", "line 1"],
        ),
        (
            "{\"kernal\": \"x\"}",
            &["vm.json: no key \"kernal\"; did you mean \"kernel\"?"],
        ),
        (
            "{\"disk\": [{\"path\": \"a\"}, {\"path\": \"b\", \"queues\": \"x\"}]}",
            &["vm.json: disk[1].queues=x: "],
        ),
        (
            "{\"disk\": [{\"path\": \"b\", \"vqs\": [\"0\", \"a\"]}]}",
            &["disk[0].vqs[1]=a: "],
        ),
        ("{\"disk\": {}}", &["disk: ", "list"]),
        ("{\"memory\": \"1G\"}", &["memory=1G", "object"]),
        ("{\"cpus\": 1.5}", &["cpus=1.5", "whole number"]),
    ] {
        std::fs::write(&file, text).unwrap();
        let line = refusal(&["--config", file.to_str().unwrap()]);
        for part in parts {
            assert!(
                line.contains(part),
                "{text}: {line:?} does not say {part:?}"
            );
        }
    }
}

fn name() -> impl Strategy<Value = String> {
    "[a-z][a-z0-9._-]{0,8}"
}

fn size() -> impl Strategy<Value = Size> {
    prop_oneof![any::<u64>(), (0u64..1 << 24).prop_map(|n| n << 20)].prop_map(Size)
}

fn text() -> impl Strategy<Value = String> {
    "[ -~é,\"=:]{0,16}"
}

prop_compose! {
    fn indices()(set in prop::collection::btree_set(0u32..12, 1..6)) -> IndexSet {
        IndexSet(set)
    }
}

prop_compose! {
    fn iothread()(
        id in name(), numbers in prop::array::uniform5(any::<i64>()), alpha in 0..=10_000i64, poll_completions in any::<bool>(),
        poll_policy in prop::sample::select(vec![PollPolicy::Weighted, PollPolicy::PerHandler,
            PollPolicy::Context, PollPolicy::Off, PollPolicy::Always, PollPolicy::Auto]),
        monitor in prop::sample::select(vec![Monitor::Auto, Monitor::IoUring, Monitor::Epoll, Monitor::Ppoll]),
        cpus in indices()
    ) -> IoThread {
        let [poll_max_ns, poll_grow, poll_shrink, poll_weight, aio_max_batch] = numbers;
        IoThread { id, poll_max_ns, poll_grow, poll_shrink, poll_weight, poll_alpha: Alpha(alpha), poll_policy, monitor,
                   poll_completions, aio_max_batch, cpus }
    }
}

prop_compose! {
    fn disk()(
        path in text(), id in prop::option::of(name()), iothread in prop::option::of(name()),
        iothreads in prop::collection::vec(name(), 0..4), vqs in prop::collection::vec(indices(), 0..4),
        queues in any::<Option<u16>>(), queue_size in any::<u16>(), switches in any::<(bool, bool, bool)>(), direct in any::<Option<bool>>(),
        engine in prop::option::of(prop::sample::select(vec![Engine::IoUring, Engine::Native, Engine::Threads])),
        cache in prop::sample::select(vec![Cache::Writeback, Cache::Writethrough, Cache::Unsafe])
    )(
        serial in prop::option::of(text()), block_sizes in any::<(Option<u32>, Option<u32>)>(),
        fixedbufs in any::<Option<bool>>(), errors in prop::array::uniform2(prop::sample::select(vec![ErrorPolicy::Report, ErrorPolicy::Ignore,
            ErrorPolicy::Stop, ErrorPolicy::Enospc])),
        transport in prop::option::of(prop::sample::select(vec![Transport::Mmio, Transport::Pci, Transport::Ccw])),
        path in Just(path), id in Just(id), iothread in Just(iothread), iothreads in Just(iothreads),
        vqs in Just(vqs), queues in Just(queues), queue_size in Just(queue_size),
        switches in Just(switches), direct in Just(direct), engine in Just(engine), cache in Just(cache)
    ) -> Disk {
        let (readonly, discard, locking) = switches;
        let (logical_block_size, physical_block_size) = block_sizes;
        let [rerror, werror] = errors;
        Disk { path: path.into(), id, iothread, iothreads, vqs, queues, queue_size, readonly, direct, engine,
               fixedbufs, cache, serial, logical_block_size, physical_block_size, discard, rerror, werror, transport, locking }
    }
}

prop_compose! {
    fn trace()(file in text(), events in prop::collection::vec("[a-z_*?]{1,9}", 0..4), max_size in size(), files in any::<u32>())
        -> Trace
    {
        Trace { file: file.into(), events, max_size, files }
    }
}

prop_compose! {
    fn whole()(
        kernel in prop::option::of(text()), initrd in prop::option::of(text()), cmdline in text(),
        size in size(), page in size(), prefault in any::<bool>(), shared in any::<bool>(), cpus in any::<u32>(), stats in any::<bool>(),
        cpu in prop::sample::select(vec!["host", "host,-avx", "host,-avx2,+x2apic"]),
        iothread in prop::collection::vec(iothread(), 0..3), disk in prop::collection::vec(disk(), 0..3),
        console in prop_oneof![Just(Serial::Stdio), Just(Serial::Pty), Just(Serial::None),
            "[ -~]{1,9}".prop_map(|path| Serial::File(path.into()))],
        level in text(), file in prop::option::of(text()), socket in prop::option::of("[ -~]{1,9}"),
        metrics in prop::option::of((text(), any::<u32>())),
        seccomp in prop::sample::select(vec![seccomp::Mode::On, seccomp::Mode::Log, seccomp::Mode::Off]),
        sandbox in any::<bool>(), user in prop::option::of(text()), chroot in prop::option::of(text()),
        trace in prop::option::of(trace())
    ) -> Config {
        let hugepages = match page.0 {
            bytes if bytes.is_power_of_two() && bytes >= 65536 => HugePages::Size(page),
            bytes if bytes % 2 == 0 => HugePages::On,
            _ => HugePages::Off,
        };
        Config {
            kernel: kernel.map(Into::into), initrd: initrd.map(Into::into), cmdline,
            memory: Memory { size, hugepages, prefault, shared },
            cpus, cpu: cpu.parse().unwrap(), iothread, disk, serial: console,
            log: Log { level, file: file.map(Into::into) }, stats,
            qmp: socket.map(|path| QmpSocket(path.into())),
            metrics: metrics.map(|(file, interval)| Metrics { file: file.into(), interval }),
            seccomp, sandbox, chroot: chroot.map(Into::into),
            user: user.map(|user| user.parse().unwrap()),
            trace,
        }
    }
}

fn as_option<T: Serialize>(section: &T) -> String {
    match serde_json::to_value(section).unwrap() {
        Value::Object(map) => keyval::print(&map),
        _ => panic!("a section is an object"),
    }
}

fn from_option<T: DeserializeOwned>(text: &str) -> T {
    de::from_value(section::<T>(text, None).unwrap()).unwrap()
}

proptest! {
    #[test]
    fn a_printed_configuration_is_read_back(config in whole()) {
        prop_assert_eq!(Config::from_json(&config.print(), "printed").unwrap(), config);
    }

    #[test]
    fn a_printed_section_is_read_back(
        disk in disk(), iothread in iothread(), size in size(), file in text(), trace in trace(),
    ) {
        // An empty list is left out, and means all of them then.
        if !trace.events.is_empty() {
            prop_assert_eq!(from_option::<Trace>(&as_option(&trace)), trace);
        }
        prop_assert_eq!(from_option::<Disk>(&as_option(&disk)), disk);
        prop_assert_eq!(from_option::<IoThread>(&as_option(&iothread)), iothread);
        let memory = Memory { size, ..Memory::default() };
        prop_assert_eq!(from_option::<Memory>(&as_option(&memory)), memory);
        let log = Log { level: file.clone(), file: Some(file.into()) };
        prop_assert_eq!(from_option::<Log>(&as_option(&log)), log);
    }

    #[test]
    fn no_option_text_panics(text in "[a-z0-9=,:+\"-]{0,40}") {
        for key in ["memory", "iothread", "disk", "log", "trace", "cpus", "cpu", "serial"] {
            if let Err(error) = option_value(key, args::Given::Text(&text)) {
                prop_assert!(!error.to_string().contains('\n'));
            }
        }
    }
}
