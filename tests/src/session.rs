//! The test program's two sides: one reports results, the other runs scenarios.

use std::any::Any;
use std::env;
use std::io::{self, BufRead, Write};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use libtest_mimic::{Arguments, Completion, Failed, Trial};

use crate::bed::{self, Bed};
use crate::lab::{self, Answer, Lab};
use crate::machine::Vmm;
use crate::scenario::{self, Environment, Scenario};

/// The environment variable that puts QEMU's microvm in Pollux's place (`qemu`), by which the lab
/// and the scenarios themselves are checked.
pub const VMM_VARIABLE: &str = "POLLUX_LAB_VMM";

/// The side that reports: the test program as cargo runs it.
pub fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // There is one machine, and the host's processors are not to be shared by scenarios either.
    arguments.test_threads = Some(1);
    let session = Arc::new(Mutex::new(Session::default()));
    let bed = Bed::choose();
    let trials = scenario::ALL.iter().map(|scenario| {
        let session = Arc::clone(&session);
        let bed = bed.clone();
        Trial::ignorable_test(scenario.name, move || {
            let bed = match bed {
                Ok(bed) => bed,
                Err(why) => return Ok(Completion::ignored_with(why)),
            };
            let mut session = session.lock().unwrap_or_else(PoisonError::into_inner);
            match session.run(bed, scenario)? {
                Answer::Passed => Ok(Completion::Completed),
                Answer::Skipped(why) => Ok(Completion::ignored_with(why)),
                Answer::Failed(why) => Err(why.lines().next().unwrap_or_default().into()),
            }
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

/// What the scenarios of one run of the test program share.
#[derive(Default)]
struct Session {
    prepared: bool,
    pollux: Option<PathBuf>,
    lab: Option<Lab>,
}

impl Session {
    fn run(&mut self, bed: Bed, scenario: &'static Scenario) -> Result<Answer, Failed> {
        if !self.prepared {
            lab::prepare()?;
            self.prepared = true;
        }
        if self.pollux.is_none() && vmm() == Vmm::Pollux {
            self.pollux = Some(build_pollux()?);
        }
        eprintln!();
        let started = Instant::now();
        let answer = match bed {
            Bed::Host => run_here(scenario, self.pollux.as_deref()),
            Bed::Nested => self.run_in_lab(scenario)?,
        };
        if let Answer::Failed(why) = &answer {
            // Now, not at the end: the others may take minutes.
            say(&format!("failed: {why}"));
        }
        say(&format!(
            "{} took {:.0} s",
            scenario.name,
            started.elapsed().as_secs_f64()
        ));
        Ok(answer)
    }

    fn run_in_lab(&mut self, scenario: &Scenario) -> Result<Answer, Failed> {
        let mut lab = match self.lab.take() {
            Some(lab) => lab,
            None => {
                let itself = env::current_exe()?;
                let name = itself.file_name().unwrap_or_default().to_string_lossy();
                let mut command = vec!["env".to_owned()];
                if let Ok(vmm) = env::var(VMM_VARIABLE) {
                    command.push(format!("{VMM_VARIABLE}={vmm}"));
                }
                command.extend([name.into_owned(), "--serve".to_owned()]);
                let mut programs = vec![itself.as_path()];
                programs.extend(self.pollux.as_deref());
                Lab::start(&programs, &command)?
            }
        };
        let answer = lab.run(scenario.name, say)?;
        // Kept only if it has answered: otherwise the next scenario starts another.
        self.lab = Some(lab);
        Ok(answer)
    }
}

/// The side that runs scenarios: it reads their names, one a line, see [`crate::lab`].
pub fn serve() -> ExitCode {
    // A failed scenario's message goes back in its answer, not to standard error.
    panic::set_hook(Box::new(|_| ()));
    println!("{}", lab::READY);
    for name in io::stdin().lock().lines().map_while(Result::ok) {
        let answer = match scenario::ALL.iter().find(|scenario| scenario.name == name) {
            Some(scenario) => run_here(scenario, None),
            None => Answer::Failed(format!("no scenario {name}")),
        };
        let answer = serde_json::to_string(&answer).expect("it is plain data");
        println!("{}{answer}", lab::ANSWER);
        let _ = io::stdout().flush();
    }
    ExitCode::SUCCESS
}

fn run_here(scenario: &Scenario, pollux: Option<&Path>) -> Answer {
    let result = panic::catch_unwind(AssertUnwindSafe(|| {
        let environment = Environment::new(vmm(), pollux);
        (scenario.run)(&environment)
    }));
    match result {
        Ok(scenario::Outcome::Held) => Answer::Passed,
        Ok(scenario::Outcome::Skipped(why)) => Answer::Skipped(why),
        Err(panic) => Answer::Failed(message(&*panic)),
    }
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a panic without a message")
        .to_owned()
}

fn vmm() -> Vmm {
    match env::var(VMM_VARIABLE).unwrap_or_default().as_str() {
        "" | "pollux" => Vmm::Pollux,
        "qemu" => Vmm::Qemu,
        other => panic!("{VMM_VARIABLE}={other}: no such VMM; give pollux or qemu"),
    }
}

fn say(line: &str) {
    eprintln!("    {line}");
}

/// The `pollux` to test: `POLLUX_BIN`, else built now, in the profile of this program.
pub(crate) fn build_pollux() -> Result<PathBuf, String> {
    if let Some(program) = env::var_os("POLLUX_BIN") {
        return Ok(program.into());
    }
    // This program is TARGET/PROFILE/deps/vm-HASH.
    let itself = env::current_exe().map_err(|error| error.to_string())?;
    let dir = itself
        .ancestors()
        .nth(2)
        .ok_or("this program is in no target directory")?;
    let profile = match dir.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args([
            "build",
            "--quiet",
            "-p",
            "vmm",
            "--bin",
            "pollux",
            "--profile",
            profile,
        ])
        .current_dir(bed::repository())
        .stdin(Stdio::null())
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    let program = dir.join("pollux");
    if !built.success() || !program.is_file() {
        return Err(format!("{} was not built: {built}", program.display()));
    }
    Ok(program)
}
