//! A running VM under its monitor: the embedded guest drives a disk while clients of all kinds change the VM under it.
//!
//! A test that needs what this machine lacks says so and counts as ignored.

#![allow(clippy::unwrap_used)] // A test that cannot go on fails.

mod common;
#[path = "qmp/events.rs"]
mod events;
#[path = "qmp/foreign.rs"]
mod foreign;
#[path = "qmp/live.rs"]
mod live;
#[path = "qmp/socket.rs"]
mod socket;
#[path = "qmp/vm.rs"]
mod vm;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

/// What a test returns: nothing, or why it cannot be made here.
type Held = Result<(), Skipped>;

/// A test: its name, and what it does.
type Test = (&'static str, fn() -> Held);

/// What the machine lacks.
struct Skipped(String);

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let tests: [Test; 16] = [
        (
            "the_socket_is_private_and_never_left_behind",
            socket::is_private_and_never_left_behind,
        ),
        (
            "a_stale_socket_is_replaced_and_a_live_one_refused",
            socket::stale_is_replaced_and_live_refused,
        ),
        (
            "quit_finishes_what_is_under_way",
            socket::quit_finishes_what_is_under_way,
        ),
        (
            "clients_of_all_kinds_do_not_disturb_the_guest",
            socket::clients_of_all_kinds,
        ),
        ("settings_change_while_the_guest_reads", live::settings),
        (
            "a_disk_moves_a_thousand_times_under_a_verifying_job",
            live::moves,
        ),
        (
            "the_guest_stops_and_continues_a_thousand_times_under_load",
            live::stops,
        ),
        (
            // Their rings are made when the filters of system calls are on.
            "case_23_iothreads_come_and_go_under_load",
            live::iothreads,
        ),
        (
            "a_full_disk_stops_the_guest_until_there_is_room",
            events::full_disk,
        ),
        ("a_panic_is_told_before_the_end", events::panic),
        (
            "trace_events_are_switched_while_the_guest_reads",
            live::traces,
        ),
        ("the_tools_show_a_running_vm", foreign::tools),
        ("the_qemu_qmp_package_is_served", foreign::qemu_qmp),
        ("the_qmp_shell_is_served", foreign::qmp_shell),
        ("prometheus_reads_the_metrics", foreign::prometheus),
        ("json_schema_accepts_the_examples", foreign::json_schema),
    ];
    let trials = tests.map(|(name, test)| {
        Trial::ignorable_test(name, move || match test() {
            Ok(()) => Ok(Completion::Completed),
            Err(Skipped(why)) => Ok(Completion::ignored_with(why)),
        })
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}
