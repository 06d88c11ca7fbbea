//! `pollux-bench policy`.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Args, Subcommand};
use iothread::{PolicyKind, PollSettings};
use serde::Serialize;

use super::Error;
use crate::policy::Rule;
use crate::policy::replay::{self, Replay};
use crate::policy::sim::{self, Host, Load, Outcome};
use crate::policy::{calibrate, rule};
use crate::report::text::{lines, plain_table};
use crate::trace::files::find;
use crate::trace::read::read;

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Feed what a loop recorded to other rules
    Replay(ReplayArgs),
    /// Compare rules in a closed loop of simulated requests
    Sim(SimArgs),
}

#[derive(Debug, Args)]
pub(super) struct ReplayArgs {
    /// Written by pollux --trace with poll_observe; older parts (FILE.1, …) are found by themselves
    #[arg(value_name = "TRACE", required = true)]
    files: Vec<PathBuf>,

    /// A rule to replay, such as weighted,poll-weight=2; the settings not given are the recorded
    /// ones [default: every rule]
    #[arg(long, value_name = "RULE", value_parser = rule_of)]
    rule: Vec<Rule>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct SimArgs {
    /// A rule to compare, such as weighted,poll-weight=2 [default: every rule]
    #[arg(long, value_name = "RULE", value_parser = rule_of)]
    rule: Vec<Rule>,

    /// Exchange rates of the rule auto, such as 0.1,0.3, instead of the usual ones
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = alpha_of)]
    alpha: Vec<i64>,

    /// The rule that the others are compared with
    #[arg(long, value_name = "RULE", value_parser = rule_of, default_value = "per-handler")]
    baseline: Rule,

    /// SPREAD:MEAN:DEPTH, with a spread of exp, gamma, fixed, bimodal or slow, such as gamma:75us:4,
    /// and perhaps :think=50us, :every=100us (a fixed rate) or :burst=20000us/80000us
    /// [default: ten loads]
    #[arg(long, value_name = "LOAD", value_parser = load_of)]
    load: Vec<Load>,

    /// metal, virt, here (measured), or a host's costs in nanoseconds as
    /// SLEEP-CPU:WAKE-LATENCY:KICK [default: metal and virt]
    #[arg(long, value_name = "HOST")]
    host: Vec<String>,

    /// Longest window
    #[arg(long, value_name = "NS", default_value = "32768", value_parser = clap::value_parser!(i64).range(0..))]
    poll_max_ns: i64,

    /// Requests that count; slow loads take an eighth as many
    #[arg(long, value_name = "N", default_value = "60000", value_parser = clap::value_parser!(u32).range(100..=100_000_000))]
    requests: u32,

    /// Of the random numbers
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u32,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

fn rule_of(text: &str) -> Result<Rule, String> {
    text.parse().map_err(|error: rule::Error| error.to_string())
}

fn alpha_of(text: &str) -> Result<i64, String> {
    iothread::alpha_milli(text).map_err(|error| error.to_string())
}

fn load_of(text: &str) -> Result<Load, String> {
    text.parse()
        .map_err(|error: sim::UnknownLoad| error.to_string())
}

pub(super) fn run(command: &Command) -> Result<(), Error> {
    match command {
        Command::Replay(args) => run_replay(args),
        Command::Sim(args) => run_sim(args),
    }
}

fn print(text: &str) {
    // A reader that closes its end has read enough.
    let _ = writeln!(io::stdout(), "{}", text.trim_end());
}

fn json(value: &impl Serialize) -> Result<String, Error> {
    serde_json::to_string_pretty(value).map_err(|error| Error::Failed(error.to_string()))
}

fn run_replay(args: &ReplayArgs) -> Result<(), Error> {
    let parts = find(&args.files)?;
    let rules = match args.rule.is_empty() {
        true => Rule::usual(),
        false => args.rule.clone(),
    };
    let mut replay = Replay::new(&rules);
    let outcome = read(&parts, &mut replay);
    let rows = replay.rows(&outcome);
    match args.json {
        true => print(&json(&rows)?),
        false => {
            print(&replay::text(&rows));
            for note in &outcome.notes {
                print(&format!("note: {note}"));
            }
        }
    }
    match outcome.problem {
        Some(problem) => Err(Error::Failed(problem.to_string())),
        None if rows.is_empty() => Err(Error::Failed(
            "the trace has no iterations to replay; record poll_observe (events=poll_*)".into(),
        )),
        None => Ok(()),
    }
}

/// A host by its name, or by its costs.
fn host(text: &str) -> Result<Host, Error> {
    if let Some(host) = Host::usual().into_iter().find(|host| host.name == text) {
        return Ok(host);
    }
    if text == "here" {
        return calibrate::measure()
            .map_err(|error| Error::Failed(format!("--host here: {error}")));
    }
    let costs: Vec<f64> = text
        .split(':')
        .filter_map(|part| part.parse().ok())
        .filter(|cost| (0.0..1e9).contains(cost))
        .collect();
    let [sleep_cpu_ns, wake_late_ns, kick_ns] = costs[..] else {
        return Err(Error::Usage(format!(
            "--host {text}: no host; give metal, virt, here, or SLEEP-CPU:WAKE-LATENCY:KICK in nanoseconds such as 3000:5000:2500"
        )));
    };
    Ok(Host {
        name: text.to_owned(),
        sleep_cpu_ns,
        wake_late_ns,
        kick_ns,
    })
}

/// One rule under one load on one host.
#[derive(Debug, Serialize)]
struct Row {
    host: String,
    load: String,
    rule: String,
    iops: f64,
    cpu_ns: f64,
    window_ns: f64,
    latency_ns: f64,
    kicks: f64,
    /// Against the baseline, as a factor.
    iops_ratio: f64,
    cpu_ratio: f64,
}

fn run_sim(args: &SimArgs) -> Result<(), Error> {
    let mut rules = match args.rule.is_empty() {
        true => Rule::usual(),
        false => args.rule.clone(),
    };
    if !args.alpha.is_empty() {
        rules.retain(|rule| rule.kind != PolicyKind::Auto);
        rules.extend(Rule::autos(&args.alpha));
    }
    let loads = match args.load.is_empty() {
        true => Load::usual(),
        false => args.load.clone(),
    };
    let hosts = match args.host.is_empty() {
        true => Host::usual().to_vec(),
        false => args
            .host
            .iter()
            .map(|text| host(text))
            .collect::<Result<_, _>>()?,
    };
    let mut rows = Vec::new();
    for host in &hosts {
        let from = rows.len();
        for load in &loads {
            let base = one(args, &args.baseline, load, host);
            for rule in &rules {
                rows.push(row(host, load, rule, &one(args, rule, load, host), &base));
            }
        }
        if !args.json {
            print(&format!("{host}"));
            print(&table(&rows[from..], &rules, &loads));
            print("");
        }
    }
    match args.json {
        true => print(&json(&rows)?),
        false => print(&format!(
            "change of IOPS / of CPU a request against {}, in percent; the last line has geometric means",
            args.baseline
        )),
    }
    Ok(())
}

fn one(args: &SimArgs, rule: &Rule, load: &Load, host: &Host) -> Outcome {
    let base = PollSettings {
        poll_max_ns: args.poll_max_ns,
        ..PollSettings::default()
    };
    let requests = match load.mean_ns < 1e6 {
        true => args.requests,
        false => args.requests * 2 / 15,
    };
    sim::run(rule, &base, load, host, requests, args.seed)
}

fn row(host: &Host, load: &Load, rule: &Rule, outcome: &Outcome, base: &Outcome) -> Row {
    Row {
        host: host.name.clone(),
        load: load.to_string(),
        rule: rule.to_string(),
        iops: outcome.iops,
        cpu_ns: outcome.cpu_ns,
        window_ns: outcome.window_ns,
        latency_ns: outcome.latency_ns,
        kicks: outcome.kicks,
        iops_ratio: outcome.iops / base.iops,
        cpu_ratio: outcome.cpu_ns / base.cpu_ns,
    }
}

fn table(rows: &[Row], rules: &[Rule], loads: &[Load]) -> String {
    let mut header = vec!["load".to_owned()];
    header.extend(rules.iter().map(ToString::to_string));
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    let mut table = plain_table(&header, 1);
    let percent = |ratio: f64| 100.0 * (ratio - 1.0);
    let cell = |iops: f64, cpu: f64| format!("{:+.1} / {:+.1}", percent(iops), percent(cpu));
    for (load, rows) in loads.iter().zip(rows.chunks(rules.len())) {
        let mut cells = vec![load.to_string()];
        cells.extend(rows.iter().map(|row| cell(row.iops_ratio, row.cpu_ratio)));
        table.add_row(cells);
    }
    let mut cells = vec!["mean".to_owned()];
    for place in 0..rules.len() {
        let of_rule = || rows.iter().skip(place).step_by(rules.len());
        cells.push(cell(
            geometric_mean(of_rule().map(|row| row.iops_ratio)),
            geometric_mean(of_rule().map(|row| row.cpu_ratio)),
        ));
    }
    table.add_row(cells);
    lines(&table)
}

fn geometric_mean(ratios: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = ratios.fold((0.0, 0.0), |(sum, count), ratio| {
        (sum + ratio.ln(), count + 1.0)
    });
    f64::exp(sum / count)
}
