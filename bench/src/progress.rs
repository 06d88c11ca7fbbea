//! Tells how far a measurement is: a bar with the time left on a terminal, lines elsewhere.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::matrix::Run;
use crate::record::Measurement;
use crate::runner::{Progress, Round};

/// What suits standard error.
pub fn choose() -> Box<dyn Progress> {
    if std::io::stderr().is_terminal() {
        Box::new(Bar::new())
    } else {
        Box::new(Lines::default())
    }
}

fn round_text(round: Round) -> String {
    match round {
        Round::WarmUp => "warm-up".into(),
        Round::Measured(number) => format!("round {}", number + 1),
    }
}

fn measured_text(measurement: &Measurement) -> String {
    format!(
        "{:.0} IOPS, {:.1}% CPU",
        measurement.iops,
        measurement.cpu_percent()
    )
}

/// A line for each measurement.
#[derive(Default)]
struct Lines {
    round: String,
    done: usize,
    all: usize,
}

impl Lines {
    fn line(&mut self, run: &Run, text: &str) {
        self.done += 1;
        eprintln!(
            "[{}/{}] {}, {}: {text}",
            self.done,
            self.all,
            self.round,
            run.words()
        );
    }
}

impl Progress for Lines {
    fn begin(&mut self, round: Round, _: &Run, done: usize, all: usize) {
        self.round = round_text(round);
        self.done = done;
        self.all = all;
    }

    fn measured(&mut self, run: &Run, measurement: &Measurement) {
        self.line(run, &measured_text(measurement));
    }

    fn failed(&mut self, run: &Run, message: &str) {
        self.line(run, &format!("failed: {message}"));
    }

    fn end(&mut self) {}
}

/// A bar with the time left.
struct Bar(ProgressBar);

impl Bar {
    fn new() -> Bar {
        let bar = ProgressBar::with_draw_target(Some(0), ProgressDrawTarget::stderr());
        let style = "{bar:30} {pos}/{len}  {elapsed} gone, {eta} left  {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Bar(bar)
    }
}

impl Progress for Bar {
    fn begin(&mut self, round: Round, run: &Run, done: usize, all: usize) {
        if self.0.length() != Some(all as u64) {
            self.0.set_length(all as u64);
            self.0.enable_steady_tick(Duration::from_millis(500));
        }
        self.0.set_position(done as u64);
        self.0
            .set_message(format!("{}, {}", round_text(round), run.words()));
    }

    fn measured(&mut self, _: &Run, _: &Measurement) {
        self.0.inc(1);
    }

    fn failed(&mut self, run: &Run, message: &str) {
        self.0.inc(1);
        self.0
            .println(format!("{}: failed: {message}", run.words()));
    }

    fn end(&mut self) {
        self.0.finish_and_clear();
    }
}
