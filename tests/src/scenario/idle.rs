//! Threads have the names that users of `top -H` look for, and an idle guest costs nothing, polling
//! or not.

use std::collections::HashMap;
use std::thread;
use std::time::{Duration, Instant};

use super::{Environment, Outcome, six_disks, two_iothreads};
use crate::machine::{Machine, Running, Vmm};

/// Makes the iothreads poll, then does nothing until a line comes from the console.
const SCRIPT: &str = r#"
for serial in data0 data1 data2 data3 pair plain; do
    dd if="$(disk $serial)" of=/dev/null bs=4k count=100 iflag=direct status=none || fail "dd $serial"
done
report idle
read -r line
report heard "$line"
"#;

/// The largest share of a processor that a thread may use.
const LIMIT: f64 = 0.02;

pub fn idle(environment: &Environment) -> Outcome {
    if environment.vmm() != Vmm::Pollux {
        return Outcome::Skipped("about Pollux's own threads".to_owned());
    }
    let mut machine = Machine::new(SCRIPT);
    machine.iothreads = two_iothreads();
    machine.disks = six_disks(environment, 1 << 20);
    let mut running = environment.start(&machine);
    running.wait_for("idle");
    // What the kernel puts off until after it has started is not idleness yet.
    thread::sleep(Duration::from_secs(5));

    // On a busy host the emulated processor does not always get its share, and what it does not get
    // looks like use; a thread that spins does so every time.
    let mut busy = Vec::new();
    for _attempt in 0..3 {
        busy = busy_threads(environment, &running);
        if busy.is_empty() {
            break;
        }
    }
    assert!(
        busy.is_empty(),
        "threads of an idle guest use more than {LIMIT} of a CPU: {busy:?}"
    );

    running.send("hello guest");
    let ended = running.finish();
    ended.assert_success();
    assert_eq!(
        ended.value("heard"),
        "hello guest",
        "what came in by the console"
    );
    Outcome::Held
}

/// Measures for 20 seconds, and names the threads that used more than [`LIMIT`].
fn busy_threads(environment: &Environment, running: &Running) -> Vec<String> {
    let before = running.threads();
    let started = Instant::now();
    thread::sleep(Duration::from_secs(20));
    let after = running.threads();
    let elapsed_s = started.elapsed().as_secs_f64();

    for name in ["pollux", "vcpu0", "vcpu1", "IO io0", "IO io1"] {
        assert!(
            after.iter().any(|thread| thread.name == name),
            "no thread {name}: {after:?}"
        );
    }
    let used: HashMap<u32, f64> = before
        .iter()
        .map(|thread| (thread.id, thread.cpu_s))
        .collect();
    let mut busy = Vec::new();
    for thread in &after {
        let share = (thread.cpu_s - used.get(&thread.id).unwrap_or(&0.0)) / elapsed_s;
        environment.note(&format!("{:<16}{:>6.2} % CPU", thread.name, share * 100.0));
        if share > LIMIT {
            busy.push(thread.name.clone());
        }
    }
    busy
}
