//! Whole-VM tests with the embedded guest, on this host's /dev/kvm. They need no Linux and no network,
//! run wherever a /dev/kvm opens (with or without hardware virtualization), and are done in a minute or
//! two.
//!
//! ```text
//! vm.rs        a VM with the embedded guest, its console read as JSON, its messages, its end
//! disk.rs      images to give it, and their contents as the guest wrote them
//! boot.rs      boot protocols, console, every way to end, several CPUs
//! data.rs      what was written is read again, whatever the engine, the layout and the size
//! devices.rs   interrupts, notifications, features, what the configuration space tells
//! stop.rs      signals and sudden death during I/O
//! settings.rs  settings changed while I/O runs
//! soak.rs      everything at once for as long as one likes, and many VMs at once
//! syscalls.rs  the system calls that a request costs
//! hostile.rs   drivers that break the rules
//! ```

mod boot;
mod data;
mod devices;
mod disk;
mod hostile;
mod settings;
mod soak;
mod stop;
mod syscalls;
mod vm;

use std::fs::File;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::session;

/// What all tests share: where things are.
struct Bench {
    /// For images: on a disk's filesystem, as tmpfs refuses O_DIRECT.
    scratch: PathBuf,
    pollux: OnceLock<Result<PathBuf, String>>,
    /// Whether options that a version may lack are there.
    pci: OnceLock<Result<(), String>>,
    qmp: OnceLock<Result<(), String>>,
    strace: OnceLock<Result<(), String>>,
}

impl Bench {
    /// A directory for one test's files, removed at its end.
    pub fn directory(&self) -> tempfile::TempDir {
        tempfile::tempdir_in(&self.scratch).expect("a temporary directory")
    }

    /// The program to test.
    pub fn pollux(&self) -> PathBuf {
        let built = self.pollux.get_or_init(session::build_pollux);
        built.clone().unwrap_or_else(|why| panic!("{why}"))
    }

    /// Whether the program to test can do what a test needs; otherwise what it says.
    fn has(&self, needs: Needs) -> Result<(), String> {
        let directory = self.directory();
        let image = disk::Image::new(&directory, "disk", 1 << 20);
        let vm = vm::Vm::new(self, "job=a rw=none");
        let try_it = |vm: vm::Vm| {
            let end = vm.start().end();
            match end.status.success() {
                true => Ok(()),
                false if end.messages.contains("not available") => {
                    Err(end.messages.trim().to_owned())
                }
                false => end.fail("an option of this program"),
            }
        };
        match needs {
            Needs::Nothing => Ok(()),
            Needs::Pci => self
                .pci
                .get_or_init(|| try_it(vm.disk(&image, "transport=pci")))
                .clone(),
            Needs::Strace => self.strace.get_or_init(|| syscalls::usable(self)).clone(),
            Needs::Qmp => {
                let socket = format!("unix:{}", directory.path().join("qmp").display());
                self.qmp
                    .get_or_init(|| try_it(vm.arguments(&["--qmp", &socket])))
                    .clone()
            }
        }
    }
}

/// What a test needs of the program or the host besides /dev/kvm.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needs {
    Nothing,
    Pci,
    Qmp,
    Strace,
}

/// A test.
struct Test {
    name: &'static str,
    needs: Needs,
    run: fn(&Bench),
}

impl Test {
    const fn new(name: &'static str, run: fn(&Bench)) -> Test {
        Test {
            name,
            needs: Needs::Nothing,
            run,
        }
    }

    const fn needs_pci(mut self) -> Test {
        self.needs = Needs::Pci;
        self
    }

    const fn needs_strace(mut self) -> Test {
        self.needs = Needs::Strace;
        self
    }

    const fn needs_qmp(mut self) -> Test {
        self.needs = Needs::Qmp;
        self
    }
}

/// Runs all tests that the arguments select. `scratch` is a directory for images.
pub fn main(scratch: &str) -> ExitCode {
    let arguments = Arguments::from_args();
    let bench = Arc::new(Bench {
        scratch: scratch.into(),
        pollux: OnceLock::new(),
        pci: OnceLock::new(),
        qmp: OnceLock::new(),
        strace: OnceLock::new(),
    });
    let kvm = usable_kvm();
    let tests = [
        boot::TESTS,
        data::TESTS,
        devices::TESTS,
        settings::TESTS,
        soak::TESTS,
        stop::TESTS,
        syscalls::TESTS,
        hostile::TESTS,
    ];
    let trials = tests.into_iter().flatten().map(|test| {
        let (bench, kvm) = (Arc::clone(&bench), kvm.clone());
        Trial::ignorable_test(test.name, move || run(test, &bench, kvm))
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

fn run(test: &Test, bench: &Bench, kvm: Result<(), String>) -> Result<Completion, Failed> {
    if let Err(why) = kvm {
        return Ok(Completion::ignored_with(why));
    }
    if let Err(why) = bench.has(test.needs) {
        return Ok(Completion::ignored_with(why));
    }
    (test.run)(bench);
    Ok(Completion::Completed)
}

/// Whether the embedded guest can be booted here.
fn usable_kvm() -> Result<(), String> {
    if !cfg!(target_arch = "x86_64") {
        return Err("the embedded guest is written for x86_64 only".to_owned());
    }
    let opened = File::options().read(true).write(true).open("/dev/kvm");
    opened
        .map(drop)
        .map_err(|error| format!("/dev/kvm: {error}"))
}
